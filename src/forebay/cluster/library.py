"""Ray itself: imported where it is used, joined or started, and left as it was found.

::

    connect(address) --> joined: somebody else's cluster, or this process is on one already --> left alone
                     '-> started: one of this machine's own, on the loopback interface ---close--> ended
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from forebay.config import ConfigError


def import_ray() -> Any:
    """The module `ray`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return import_module("ray")
    except ImportError as error:
        raise ConfigError('cluster "ray" needs Ray; run: pip install "forebay[ray]"') from error


@dataclass(frozen=True)
class Connection:
    """A Ray cluster that this process is on.

    >>> connection = connect(None, num_cpus=4)
    >>> connection.close()
    """

    ray: Any
    is_ours: bool
    """Started here, so ended here."""

    def close(self) -> None:
        """End the cluster if it was started here."""
        if self.is_ours:
            self.ray.shutdown()


def connect(address: str | None, *, num_cpus: int) -> Connection:
    """Join the cluster at `address`, or at ``RAY_ADDRESS``; else start one with `num_cpus` logical CPUs.

    In a process that is on a cluster already, that one is used.

    Raises:
        ConfigError: Ray is missing, or nothing answers at the address.
    """
    ray = import_ray()
    if ray.is_initialized():
        return Connection(ray, is_ours=False)
    _hush()
    address = address or os.environ.get("RAY_ADDRESS")
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is not None:
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"cluster.arguments.address = {address!r}: cannot join this Ray cluster: {error}"
            ) from error
        return Connection(ray, is_ours=True)
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        **quiet,
    )
    return Connection(ray, is_ours=True)


def _hush() -> None:
    """Have Ray not print a page about every process that ends: the run says it in a line of its own.

    There is no public setting: ``log_to_driver`` leaves these out.
    """
    vars(import_module("ray._private.worker"))["_worker_logs_enabled"] = False


def find_modules_in(paths: Sequence[str]) -> None:
    """Let this process import what another one can, as far as the files are here too.

    Agents and judgers that a run file names by ``package.module:Name`` are often beside it, not installed.
    """
    sys.path += [path for path in paths if path not in sys.path]


def why(error: BaseException) -> str:
    """What Ray says in a few words: most of it is advice and addresses."""
    text = str(error).strip() or type(error).__name__
    if type(error).__name__ == "ActorUnavailableError":
        return "its process has ended, or cannot be reached"
    if (found := _EXIT.search(text)) is not None:
        return f"its process has ended: {found[1]}"
    return text.splitlines()[0].rstrip(".")[:300]


_EXIT = re.compile(r"Worker exit detail: (.*?)\.(?: Some common causes|\s|$)")
"""What Ray knows of the end of an actor's process."""
