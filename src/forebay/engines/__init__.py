"""Inference engines and the rollout controller in front of them."""

from typing import TYPE_CHECKING, Any

from forebay.engines.base import (
    Completion,
    Engine,
    EngineHealth,
    EngineLost,
    EngineSurroundings,
    GenerateRequest,
)
from forebay.engines.build import ENGINES, EngineConfig, build_engines, find_engine
from forebay.engines.controller import RolloutController
from forebay.engines.scripted import ScriptedEngine

if TYPE_CHECKING:
    from forebay.engines.local.transformers import TransformersEngine
    from forebay.engines.servers.engine import HTTPEngine

__all__ = [
    "ENGINES",
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineHealth",
    "EngineLost",
    "EngineSurroundings",
    "GenerateRequest",
    "HTTPEngine",
    "RolloutController",
    "ScriptedEngine",
    "TransformersEngine",
    "build_engines",
    "find_engine",
]


def __getattr__(name: str) -> Any:
    if name == "TransformersEngine":
        # Loads torch and transformers, which the other names do without.
        from forebay.extras import needed_by

        with needed_by("TransformersEngine"):
            from forebay.engines.local.transformers import TransformersEngine

        return TransformersEngine
    if name == "HTTPEngine":
        from forebay.engines.servers.engine import HTTPEngine

        return HTTPEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
