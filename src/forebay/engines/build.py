"""From a run file's ``[engine]`` table to engines; importing it loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.config import Component, ConfigError, check_arguments, look_up
from forebay.engines.base import Engine

DEFAULT_MAX_BATCH = 256
"""Requests that decode together in a `TransformersEngine`, if its arguments do not say."""


@dataclass(frozen=True, kw_only=True)
class EngineSurroundings:
    """What a run gives to whatever makes its engines."""

    model_folder: Path
    """Hugging Face folder of the weights the run starts from."""
    load_model: Callable[[], Any]
    """The model in it, as ``[model]`` says."""
    tokenizer: Any
    max_context_tokens: int | None
    """None: the model's own limit."""
    scratch: Path
    """A folder for logs and weight files; it may not exist yet."""


def _transformers(surroundings: EngineSurroundings, **arguments: Any) -> list[Engine]:
    from forebay.engines.transformers import TransformersEngine

    given = ("model", "tokenizer", "max_context_tokens", "model_step")
    check_arguments("engine", "transformers", TransformersEngine, arguments, *given)
    return [
        TransformersEngine(
            surroundings.load_model(),
            surroundings.tokenizer,
            max_context_tokens=surroundings.max_context_tokens,
            **arguments,
        )
    ]


ENGINES: dict[str, Callable[..., list[Engine]]] = {"transformers": _transformers}
"""What ``engine.name`` may be; besides, ``package.module:function`` of the same signature."""


def build_engines(config: Component, surroundings: EngineSurroundings) -> list[Engine]:
    """The engines that `config` describes.

    Raises:
        ConfigError: the name is unknown, an argument does not fit, or the engine cannot run the model.
    """
    factory = look_up("engine", config.name, ENGINES)
    try:
        return list(factory(surroundings, **config.arguments))
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"engine {config.name!r}: {error}") from error
