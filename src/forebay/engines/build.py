"""From a run file's ``[engine]`` table to engines; importing it loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from forebay.config import Component, ConfigError, check_arguments, look_up
from forebay.engines.arguments import HTTPArguments, check_engine
from forebay.engines.base import Engine, EngineLost, EngineSurroundings
from forebay.models import Precision, load_model


class EngineConfig(Component):
    """The run file's ``[engine]`` table.

    >>> EngineConfig.model_validate("vllm").dtype
    'float32'
    """

    name: str = "transformers"
    dtype: Precision = "float32"
    """In which engines hold the weights and compute; on a CPU bfloat16 halves the memory and is several
    times slower. The trainer's weights stay float32 and are cast once (``train.dtype`` is for its passes)."""


def _transformers(surroundings: EngineSurroundings, **arguments: Any) -> list[Engine]:
    from forebay.engines.local.transformers import TransformersEngine

    return [
        TransformersEngine(
            load_model(surroundings.model_folder, surroundings.model, dtype=surroundings.dtype),
            surroundings.tokenizer,
            max_context_tokens=surroundings.model.max_context,
            **arguments,
        )
    ]


def _processes(
    surroundings: EngineSurroundings,
    *,
    engines: int = 1,
    engine: str = "transformers",
    threads: int = 1,
    **arguments: Any,
) -> list[Engine]:
    """`engines` processes on this machine, as `ProcessArguments`; their engines take the rest."""
    from forebay.engines.process.engine import ProcessEngine
    from forebay.engines.process.host import EngineRecipe
    from forebay.engines.weights.shared_memory import SharedMemoryHandOver

    recipe = EngineRecipe(
        model_folder=surroundings.model_folder,
        model=surroundings.model,
        dtype=surroundings.dtype,
        engine=Component(name=engine, arguments=arguments),
        threads=threads,
    )
    hand_over = SharedMemoryHandOver()
    logs = surroundings.scratch
    started = [
        ProcessEngine(recipe, hand_over, log=logs / f"engine_{number}.log") for number in range(engines)
    ]
    try:
        for process in started:
            process.wait_until_ready()
    except EngineLost as error:
        for process in started:
            process.kill()
        raise ConfigError(f"engine 'process': {error}") from None
    return list(started)


def _http(kind: str, surroundings: EngineSurroundings, **arguments: Any) -> list[Engine]:
    """Engines of running servers (`urls`), or of servers to start (`servers`): `HTTPArguments`."""
    from forebay.engines.servers.build import http_engines

    return http_engines(kind, HTTPArguments(**arguments), surroundings)


ENGINES: dict[str, Callable[..., list[Engine]]] = {
    "process": _processes,
    "sglang": partial(_http, "sglang"),
    "transformers": _transformers,
    "vllm": partial(_http, "vllm"),
}
"""Values of ``engine.name``; besides, ``package.module:function`` of the same signature."""


def find_engine(config: Component) -> Callable[..., list[Engine]]:
    """The function that makes the engines of `config`; nothing is made.

    Raises:
        ConfigError: the name is unknown, or an argument does not fit.
    """
    factory: Callable[..., list[Engine]] = look_up("engine", config.name, ENGINES)
    if config.name in ENGINES:
        check_engine(config.name, config.arguments)
    else:
        # It is called with the surroundings first, by whatever name it has for them.
        check_arguments("engine", config.name, partial(factory, None), config.arguments)
    return factory


def build_engines(config: Component, surroundings: EngineSurroundings) -> list[Engine]:
    """The engines that `config` describes.

    Raises:
        ConfigError: the name is unknown, an argument does not fit, or the engine cannot run the model.
    """
    factory = find_engine(config)
    try:
        return list(factory(surroundings, **config.arguments))
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"engine {config.name!r}: {error}") from error
