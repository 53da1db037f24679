"""Inference engines and the rollout controller in front of them."""

from typing import TYPE_CHECKING, Any

from forebay.engines.base import Completion, Engine, EngineHealth, GenerateRequest
from forebay.engines.build import ENGINES, EngineSurroundings, build_engines
from forebay.engines.controller import RolloutController
from forebay.engines.scripted import ScriptedEngine

if TYPE_CHECKING:
    from forebay.engines.transformers import TransformersEngine

__all__ = [
    "ENGINES",
    "Completion",
    "Engine",
    "EngineHealth",
    "EngineSurroundings",
    "GenerateRequest",
    "RolloutController",
    "ScriptedEngine",
    "TransformersEngine",
    "build_engines",
]


def __getattr__(name: str) -> Any:
    if name == "TransformersEngine":
        # Loads torch and transformers, which the other names do without.
        from forebay.engines.transformers import TransformersEngine

        return TransformersEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
