"""The ``forebay`` command: `commands` has those that are small or start a run; others have files of their own."""

from forebay.cli.commands import app, main

__all__ = ["app", "main"]
