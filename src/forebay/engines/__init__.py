"""Inference engines and the rollout controller in front of them."""

from typing import TYPE_CHECKING

from forebay.engines.base import Completion as Completion
from forebay.engines.base import Engine as Engine
from forebay.engines.base import EngineHealth as EngineHealth
from forebay.engines.base import EngineLost as EngineLost
from forebay.engines.base import EngineSurroundings as EngineSurroundings
from forebay.engines.base import GenerateRequest as GenerateRequest
from forebay.engines.build import build_engines as build_engines
from forebay.engines.controller import RolloutController as RolloutController
from forebay.engines.scripted import ScriptedEngine as ScriptedEngine
from forebay.lazy import lazy_names

if TYPE_CHECKING:
    from forebay.engines.local.transformers import TransformersEngine as TransformersEngine
    from forebay.engines.servers.engine import HTTPEngine as HTTPEngine


# The first loads torch and transformers, which the other names do without.
__getattr__ = lazy_names(__name__, __file__)
