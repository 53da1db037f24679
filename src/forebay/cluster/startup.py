"""Parts that are started at the same time: what each says once it is built, or the first that cannot be."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from forebay.cluster.library import cause_of, import_ray, why
from forebay.cluster.supervisor import START_LIMIT_S
from forebay.config import ConfigError


def all_started(starting: Mapping[str, Any]) -> dict[str, Any]:
    """What every part says once it is built, by name; `starting` has Ray's references.

    Raises:
        ConfigError: one of them cannot be built, at once; or some take too long.
    """
    ray = import_ray()
    names = {ref: name for name, ref in starting.items()}
    waiting, facts = list(names), {}
    deadline_s = time.monotonic() + START_LIMIT_S
    while waiting:
        ready, waiting = ray.wait(waiting, timeout=max(0.0, deadline_s - time.monotonic()))
        if not ready:
            late = ", ".join(names[ref] for ref in waiting)
            raise ConfigError(f"cluster: {late} not there after {START_LIMIT_S:g} s")
        for ref in ready:
            facts[names[ref]] = _said(names[ref], ref)
    return facts


def _said(name: str, ref: Any) -> Any:
    ray = import_ray()
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        cause = cause_of(error)
        if isinstance(cause, ConfigError):
            raise cause from None
        raise ConfigError(f"cluster: {name} cannot be built: {why(error)}") from error
    except ray.exceptions.RayError as error:
        raise ConfigError(f"cluster: {name} ended as it was started: {why(error)}") from error
