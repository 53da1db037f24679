"""Inference engines and the rollout controller in front of them."""

from typing import TYPE_CHECKING

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
from forebay.lazy import lazy_names

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


# The first loads torch and transformers, which the other names do without.
__getattr__ = lazy_names(
    __name__,
    {"local.transformers": ["TransformersEngine"], "servers.engine": ["HTTPEngine"]},
)
