"""Where the ranks of a trainer live, and how to call all of them at once.

::

    Ranks.call(method, [arguments by rank]) -> [results by rank]

    LocalRanks   caller                                     process of rank r
                 frames.send(method, arguments) --pipe-->   RankWorker.method(*arguments)
                 waits for: a reply of every rank   <--     frames.send(result | error with traceback)
                 woken by: a reply, or the end of a process

`LocalRanks` starts processes on this machine. `Ranks` is all that the trainer needs of them, so that they
can live elsewhere.
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection as pipes
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

import torch

from forebay.config import ConfigError
from forebay.train import frames

GRACE_S = 10.0
"""How long the other ranks may take to fail as well, or to end, once one has failed; then they are killed."""

EXPECTED: dict[str, type[Exception]] = {
    error.__name__: error for error in (ConfigError, FloatingPointError, ValueError)
}
"""Errors that speak of what the caller gave, and are raised as what they are if all ranks agree."""


class RankError(RuntimeError):
    """A rank failed or died; the message has its number, and its traceback or exit code."""


class Ranks(Protocol):
    """The ranks of one trainer, each with a `RankWorker`."""

    @property
    def num_ranks(self) -> int:
        """How many there are."""
        ...

    def call(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Call `method` of every rank with its own arguments, all at once; the results, by rank.

        Raises:
            RankError: a rank failed alone, or died; no rank can be called again.
            ValueError, FloatingPointError: every rank raised it; they can go on.
        """
        ...

    def close(self) -> None:
        """End all ranks."""
        ...


@dataclass(frozen=True)
class _Rank:
    process: BaseProcess
    connection: Connection


class LocalRanks:
    """Ranks as processes of this machine, which end with this one.

    Invariants: one call at a time; when a rank dies, or fails alone, the call ends at once with a
    `RankError` and no process is left. `device` is ``cpu`` or ``cuda`` (each rank then has the GPU of its
    number). `threads` are those of each rank; left out, the ranks share what this process has.

    Processes are spawned: a script that makes one needs ``if __name__ == "__main__":`` around what it does.
    Several trainers may use them one after the other.

    >>> ranks = LocalRanks(2)                                                      # doctest: +SKIP
    >>> trainer = TrainController(model, TrainConfig(), pad_token_id=0, ranks=ranks)  # doctest: +SKIP
    >>> trainer.fit(groups)                                                        # doctest: +SKIP
    >>> ranks.close()                                                              # doctest: +SKIP
    """

    def __init__(
        self, num_ranks: int, *, device: str = "cpu", timeout_s: float = 600.0, threads: int | None = None
    ) -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
        self._num_ranks = num_ranks
        self._folder = tempfile.TemporaryDirectory(prefix="forebay-ranks-")
        init_method = f"file://{Path(self._folder.name) / 'rendezvous'}"
        threads = threads or max(1, torch.get_num_threads() // num_ranks)
        self._ranks: list[_Rank] = []
        for rank in range(num_ranks):
            self._ranks.append(_start(rank, num_ranks, init_method, device, timeout_s, threads))
        self._collect("start")

    @property
    def num_ranks(self) -> int:
        """How many there are."""
        return self._num_ranks

    @property
    def pids(self) -> list[int | None]:
        """The process ids by rank; empty after `close`."""
        return [rank.process.pid for rank in self._ranks]

    def call(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Call `method` of every rank with its own arguments, all at once; the results, by rank.

        Raises:
            RankError: a rank failed alone, or died; all are ended.
            ValueError, FloatingPointError: every rank raised it; they can go on.
        """
        if not self._ranks:
            raise RankError(f"{method} was called, but the ranks have ended")
        assert len(arguments) == self._num_ranks
        try:
            for rank, own in zip(self._ranks, arguments, strict=True):
                frames.send(rank.connection, [method, list(own)])
        except OSError:
            # A rank that is gone is found, and named, by the wait for its reply.
            pass
        except BaseException:
            self._kill()
            raise
        return self._collect(method)

    def close(self) -> None:
        """End all ranks."""
        if not self._ranks:
            return
        for rank in self._ranks:
            rank.connection.close()
        for rank in self._ranks:
            rank.process.join(GRACE_S)
        self._kill()

    # Replies

    def _collect(self, method: str) -> list[Any]:
        """The result of every rank, or the error that they add up to."""
        replies: dict[int, dict[str, Any]] = {}
        deadline_s: float | None = None
        try:
            while len(replies) < self._num_ranks:
                if not self._wait(method, replies, deadline_s):
                    break
                if deadline_s is None and any(reply["error"] for reply in replies.values()):
                    deadline_s = time.monotonic() + GRACE_S
        except BaseException:
            # Whatever ended the wait: a reply that comes later would be taken for the next call's.
            self._kill()
            raise
        failed = {rank: reply for rank, reply in replies.items() if reply["error"]}
        if not failed:
            return [replies[rank]["result"] for rank in range(self._num_ranks)]
        raise self._error(method, failed, [r for r in range(self._num_ranks) if r not in replies])

    def _wait(self, method: str, replies: dict[int, dict[str, Any]], deadline_s: float | None) -> bool:
        """Add the replies that have come to `replies`; False if none came in time."""
        awaited = {i: rank for i, rank in enumerate(self._ranks) if i not in replies}
        ends = {rank.process.sentinel: i for i, rank in awaited.items()}
        timeout_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        ready = pipes.wait([*(rank.connection for rank in awaited.values()), *ends], timeout_s)
        for number, rank in awaited.items():
            if rank.connection in ready:
                try:
                    replies[number] = frames.receive(rank.connection)
                except (EOFError, OSError):
                    raise self._death(method, number) from None
        for sentinel, number in ends.items():
            if sentinel in ready and number not in replies:
                raise self._death(method, number)
        return bool(ready)

    def _death(self, method: str, number: int) -> RankError:
        process = self._ranks[number].process
        process.join(GRACE_S)
        return RankError(f"rank {number} died in {method}: {_describe_exit(process.exitcode)}")

    def _error(self, method: str, failed: dict[int, dict[str, Any]], silent: list[int]) -> Exception:
        """What to raise; the ranks live on only if all of them say the same."""
        first = min(failed)
        error = failed[first]["error"]
        report = RankError(
            f"{_numbers(failed)} of {self._num_ranks} failed in {method}: "
            f"{error['type']}: {error['message']}"
            f"{f' (no answer from {_numbers(silent)})' if silent else ''}\n{error['traceback']}"
        )
        kinds = {reply["error"]["type"] for reply in failed.values()}
        agreed = len(failed) == self._num_ranks and len(kinds) == 1 and error["type"] in EXPECTED
        if not agreed or method == "start":
            self._kill()
        if not agreed:
            return report
        expected = EXPECTED[error["type"]](error["message"])
        expected.__cause__ = report
        return expected

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.connection.close()
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.process.close()
        self._ranks.clear()
        self._folder.cleanup()


def _numbers(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "it closed its pipe and does not end"
    if code < 0:
        return f"exit code {code} ({signal.Signals(-code).name})"
    return (
        f"exit code {code}; its output says why (a script that starts ranks must do its work under "
        f'`if __name__ == "__main__":`, because each rank imports it again)'
    )


def _start(rank: int, num_ranks: int, init_method: str, device: str, timeout_s: float, threads: int) -> _Rank:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_serve,
        args=(theirs, rank, num_ranks, init_method, device, timeout_s, threads),
        name=f"forebay-rank-{rank}",
        daemon=True,
    )
    process.start()
    theirs.close()
    return _Rank(process, ours)


def _serve(
    connection: Connection,
    rank: int,
    num_ranks: int,
    init_method: str,
    device: str,
    timeout_s: float,
    threads: int,
) -> None:
    """The main function of a rank's process: one reply for being there, then one for each call.

    consumes: calls   waits for: a message   woken by: the caller, or its end   produces: a reply each
    """
    # Ctrl-C reaches every process of the terminal; the caller decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _stay_on_this_machine()
    torch.set_num_threads(threads)

    def start() -> Any:
        from forebay.train.rank_worker import RankWorker

        return RankWorker(rank, num_ranks, init_method, device=device, timeout_s=timeout_s)

    worker, reply = _attempt(start)
    try:
        frames.send(connection, {**reply, "result": None})
        while worker is not None:
            method, arguments = frames.receive(connection)
            _, reply = _attempt(partial(getattr(worker, method), *arguments))
            frames.send(connection, reply)
    except (EOFError, OSError):
        # The caller closed its end, or is gone.
        if worker is not None:
            worker.close()


def _stay_on_this_machine() -> None:
    """Let gloo meet over the loopback interface: it would take the one that the host's name stands for."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def _attempt(function: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """The result, or None, and the reply that says how it went."""
    try:
        result = function()
    # Whatever it is, the caller has to learn of it.
    except Exception as error:
        described = {"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
        return None, {"error": described, "result": None}
    return result, {"error": None, "result": result}
