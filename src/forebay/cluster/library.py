"""Ray itself: imported where it is used, joined or started, and left as it was found.

::

    connect(given) --> joined: somebody else's cluster, or this process is on one already --> left alone
                   '-> started: one of this machine's own, on the loopback interface ---close--> ended
"""

import logging
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from forebay.config import ConfigError, errors_about
from forebay.extras import needed_by
from forebay.runs.config import RunConfig

NAMESPACE = "forebay"
"""The namespace of named actors. Without one, a program finds no other program's actors by name."""

MAX_CALLS = 10_000
"""Calls under way at one actor at a time: each group, request, waiting fetch and held-back writer."""

LOOK_LIMIT_S = 5.0
"""The time that a cluster's head gets to take a connection; Ray itself tries for minutes."""


@cache
def import_ray() -> Any:
    """The module `ray`.

    Raises:
        ConfigError: it is not installed.
    """
    with needed_by("cluster 'ray'"):
        return import_module("ray")


@dataclass(frozen=True)
class Given:
    """The address of a running cluster.

    >>> Given.find("10.0.0.1:6379")
    Given(address='10.0.0.1:6379', name='cluster.arguments.address')
    """

    address: str
    name: str
    """The setting that the address comes from, for messages."""

    @classmethod
    def find(cls, address: str | None) -> Self | None:
        """`address`, else that of ``RAY_ADDRESS``; None: there is none, and a cluster is to be started.

        Raises:
            ConfigError: it cannot be one.
        """
        name = "cluster.arguments.address" if address else "RAY_ADDRESS"
        value = address or os.environ.get("RAY_ADDRESS")
        # Ray itself starts a cluster for "local".
        if not value or value == "local":
            return None
        host, _, port = str(value).rpartition(":")
        if value != "auto" and ("://" in str(value) or not host or not port.isdigit()):
            raise ConfigError(
                f"{name} must be 'auto' or host:port of a running cluster's head, as '10.0.0.1:6379', got "
                f"{value!r} (a client's ray:// will not do: the run is to be on the cluster itself)"
            )
        return cls(value, name)

    def check(self) -> None:
        """Find out whether a cluster listens there; "auto" is Ray's to find.

        Raises:
            ConfigError: none does.
        """
        if self.address == "auto":
            return
        host, _, port = self.address.rpartition(":")
        with errors_about(f"{self.name} = {self.address!r}: no Ray cluster answers there", OSError, OverflowError):
            socket.create_connection((host.strip("[]"), int(port)), LOOK_LIMIT_S).close()


def connect(given: Given | None, *, num_cpus: int) -> bool:
    """Join the cluster that is `given`; else start one with `num_cpus` logical CPUs.

    False: this process is on a cluster already, which is used. True: ``ray.shutdown`` leaves or ends it.

    Raises:
        ConfigError: Ray is missing, or nothing answers at the address.
    """
    ray = import_ray()
    if ray.is_initialized():
        return False
    # Ray would print a page about every process that ends, which the run says in a line of its own. There is
    # no public setting: ``log_to_driver`` leaves these out.
    vars(import_module("ray._private.worker"))["_worker_logs_enabled"] = False
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if given is not None:
        given.check()
        what = f"{given.name} = {given.address!r}: cannot join this cluster (with tokens: set RAY_AUTH_MODE=token)"
        with errors_about(what, ConnectionError, ValueError, RuntimeError):
            ray.init(address=given.address, **quiet)
        return True
    # On the loopback interface: any program that reaches Ray can have it run anything.
    ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, _node_ip_address="127.0.0.1", **quiet)
    return True


@dataclass(frozen=True, kw_only=True)
class PartSpec:
    """All that the process of one part is told when it is started."""

    name: str
    config: RunConfig
    model_folder: Path
    search_path: tuple[str, ...]
    """The folders in which the run's own process finds its modules."""


@dataclass(frozen=True, eq=False)
class Published:
    """Weights after train step `model_step`, in the object store; or Ray's handle of the trainer that gives them.

    The object is a result of a call that the run's own process made, and so is that process's: it stays when
    the trainer ends, and an engine that starts again gets it.
    """

    ref: Any
    model_step: int
    adapters: Mapping[str, Any] | None = None
    """The config of adapters, which these are then."""


def find_modules_in(paths: Sequence[str]) -> None:
    """Let this process import what another one can, as far as the files are here too.

    Agents and judges that a run file names by ``package.module:Name`` are often beside it, not installed.
    """
    # At the end: what is installed here comes before what lies beside the run file.
    sys.path += [path for path in paths if path not in sys.path]


def on_node(node: str) -> Any:
    """The ``scheduling_strategy`` of an actor or a task: on the node with this id and no other."""
    return import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy(node_id=node, soft=False)


def cause_of(error: BaseException) -> BaseException:
    """The error of the other process, where `error` is Ray's carrier of it; else `error` itself."""
    carrier = import_ray().exceptions.RayTaskError
    while isinstance(error, carrier) and isinstance(error.cause, BaseException):
        error = error.cause
    return error


def why(error: BaseException) -> str:
    """The reason in a few words; most of Ray's own text is advice and addresses."""
    cause = cause_of(error)
    if cause is not error:
        return f"{type(cause).__name__}: {cause}"
    text = str(error).strip() or type(error).__name__
    if type(error).__name__ == "ActorUnavailableError":
        return "its process has ended, or cannot be reached"
    if (found := _EXIT.search(text)) is not None:
        return f"its process has ended: {found[1]}"
    if (found := _NODE.search(text)) is not None:
        return f"its machine, {found[1]}, has ended or cannot be reached"
    return text.splitlines()[0].rstrip(".")[:300]


_EXIT = re.compile(r"Worker exit detail: (.*?)\.(?: Some common causes|\s|$)")
"""The part of Ray's text that says how an actor's process ended."""
_NODE = re.compile(r"\bip: (\S+)\n(?:.*\n)*?.*its node has died")
"""The same where its machine is lost."""
