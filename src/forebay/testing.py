"""What tests of programs that use Forebay need: engines without models."""

from forebay.engines.scripted import ScriptedEngine

__all__ = ["ScriptedEngine"]
