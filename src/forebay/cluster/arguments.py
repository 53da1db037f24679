"""What a run file may say in ``cluster.arguments``: checked before anything is started."""

from __future__ import annotations

from typing import Any

from forebay.config import ConfigError
from forebay.runs.config import RunConfig


def check_count(name: str, value: Any, least: int) -> None:
    """Raises ConfigError unless `value` is a whole number from `least` up."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"cluster.arguments.{name} must be a number from {least} up, got {value!r}")


def check_share(name: str, value: Any) -> None:
    """Raises ConfigError unless `value` is a share of a GPU, or so many whole ones."""
    if not _is_number(value) or not 0 <= value < float("inf") or (value > 1 and value != int(value)):
        raise ConfigError(
            f"cluster.arguments.{name} must be a share of a GPU or a whole number of GPUs, got {value!r}"
        )


def check_positive(name: str, value: Any) -> None:
    """Raises ConfigError unless `value` is a number above 0."""
    if not _is_number(value) or not 0 < value < float("inf"):
        raise ConfigError(f"cluster.arguments.{name} must be positive, got {value!r}")


def check_address(value: Any) -> None:
    """Raises ConfigError unless `value` is text, or None."""
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"cluster.arguments.address must be text, as '10.0.0.1:6379', got {value!r}")


def check_buffer(value: Any, config: RunConfig) -> None:
    """Raises ConfigError unless `value` names a place for the buffer that goes with the rest of the run."""
    if value not in ("actor", "driver"):
        raise ConfigError(f"cluster.arguments.buffer must be 'actor' or 'driver', got {value!r}")
    if value == "actor" and config.record:
        raise ConfigError(
            "record = true notes what the buffer does, which has to be in this process for that: set "
            "cluster.arguments.buffer to 'driver'"
        )


def check_servers(num_engines: int, config: RunConfig) -> None:
    """Raises ConfigError where several engines would each pause, load and count the same servers."""
    if num_engines > 1 and "urls" in config.engine.arguments:
        raise ConfigError(
            f"cluster.arguments.num_engines = {num_engines}, but engine.arguments.urls names servers that "
            f"run already, of which one engine drives all: set num_engines to 1"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
