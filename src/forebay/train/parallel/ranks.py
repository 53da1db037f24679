"""Where the ranks of a trainer live, and how to call all of them at once.

::

    Ranks.call(method, [arguments by rank]) -> [results by rank]

    LocalRanks   caller                                     process of rank r
                 frames.send(method, arguments) --pipe-->   RankWorker.method(*arguments)
                 waits for: a reply of every rank   <--     frames.send(result | error with traceback)
                 woken by: a reply, or the end of a process; a thread of the process sends None as a sign of
                 life every `limit_s` / 4

`LocalRanks` starts processes on this machine. `Ranks` is all that the trainer needs of them, so that they
can live elsewhere.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import struct
import tempfile
import threading
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
from forebay.io.heartbeat import BEATS, check_limit
from forebay.train.parallel import frames

GRACE_S = 10.0
"""How long the other ranks may take to fail as well, or to end, once one has failed; then they are killed."""

SILENCE_LIMIT_S = 120.0
"""Without a sign of life: longer than elsewhere, for single operations that hold the interpreter."""

START_LIMIT_S = 300.0
"""The same while it starts: many that start together load torch for minutes."""

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

    Invariants: one call at a time; when a rank dies, fails alone, or gives no sign of life for `limit_s`,
    the call ends with a `RankError` and no process is left. `device` is ``cpu`` or ``cuda`` (each rank then
    has the GPU of its number). `threads` are those of each rank; left out, the ranks share what this process
    has.

    Processes are spawned: a script that makes one needs ``if __name__ == "__main__":`` around what it does.
    Several trainers may use them one after the other.

    >>> ranks = LocalRanks(2)                                                      # doctest: +SKIP
    >>> trainer = TrainController(model, TrainConfig(), pad_token_id=0, ranks=ranks)  # doctest: +SKIP
    >>> trainer.fit(groups)                                                        # doctest: +SKIP
    >>> ranks.close()                                                              # doctest: +SKIP
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        device: str = "cpu",
        timeout_s: float = 600.0,
        threads: int | None = None,
        limit_s: float = SILENCE_LIMIT_S,
    ) -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
        check_limit("limit_s", limit_s)
        self._limit_s = limit_s
        self._num_ranks = num_ranks
        self._folder = tempfile.TemporaryDirectory(prefix="forebay-ranks-")
        init_method = f"file://{Path(self._folder.name) / 'rendezvous'}"
        threads = threads or max(1, torch.get_num_threads() // num_ranks)
        self._ranks: list[_Rank] = []
        for rank in range(num_ranks):
            join = partial(_join, rank, num_ranks, init_method, device=device, timeout_s=timeout_s)
            self._ranks.append(_start(f"forebay-rank-{rank}", join, threads, limit_s))
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
        number = 0
        try:
            for number, own in enumerate(arguments):
                frames.send(self._ranks[number].connection, [method, list(own)])
        except BlockingIOError:
            self._kill()
            raise self._silence(method, number) from None
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
        deadline_s = math.inf
        silent_at = [time.monotonic() + self._limit_of(method)] * self._num_ranks
        try:
            while len(replies) < self._num_ranks and time.monotonic() < deadline_s:
                self._wait(method, replies, silent_at, deadline_s)
                if math.isinf(deadline_s) and any(reply["error"] for reply in replies.values()):
                    deadline_s = time.monotonic() + GRACE_S
        except BaseException:
            # Whatever ended the wait: a reply that comes later would be taken for the next call's.
            self._kill()
            raise
        failed = {rank: reply for rank, reply in replies.items() if reply["error"]}
        if not failed:
            return [replies[rank]["result"] for rank in range(self._num_ranks)]
        raise self._error(method, failed, [r for r in range(self._num_ranks) if r not in replies])

    def _wait(
        self, method: str, replies: dict[int, dict[str, Any]], silent_at: list[float], deadline_s: float
    ) -> None:
        """Wait for a while, and add replies that came to `replies`; see who is `silent_at` that time."""
        awaited = {i: rank for i, rank in enumerate(self._ranks) if i not in replies}
        ends = {rank.process.sentinel: i for i, rank in awaited.items()}
        # Before the wait: if this process was stopped meanwhile, what ranks have sent is found first.
        now_s = time.monotonic()
        timeout_s = max(0.0, min(self._limit_s / BEATS, deadline_s - now_s))
        ready = pipes.wait([*(rank.connection for rank in awaited.values()), *ends], timeout_s)
        for number, rank in awaited.items():
            if rank.connection in ready:
                try:
                    reply = frames.receive(rank.connection)
                except BlockingIOError:
                    raise self._silence(method, number) from None
                except (EOFError, OSError):
                    raise self._death(method, number) from None
                silent_at[number] = time.monotonic() + self._limit_of(method)
                if reply is not None:
                    replies[number] = reply
        for sentinel, number in ends.items():
            if sentinel in ready and number not in replies:
                raise self._death(method, number)
        for number, rank in awaited.items():
            if rank.connection not in ready and now_s > silent_at[number]:
                raise self._silence(method, number)

    def _limit_of(self, method: str) -> float:
        return START_LIMIT_S if method == "start" else self._limit_s

    def _silence(self, method: str, number: int) -> RankError:
        limit_s = self._limit_of(method)
        return RankError(
            f"rank {number} gave no sign of life for {limit_s:g} s in {method}: it hangs or was stopped"
        )

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


def _join(rank: int, num_ranks: int, init_method: str, **settings: Any) -> Any:
    """The `RankWorker` of this process, which has loaded torch by now."""
    from forebay.train.parallel.worker import RankWorker

    return RankWorker(rank, num_ranks, init_method, **settings)


def _start(name: str, join: Callable[[], Any], threads: int, limit_s: float) -> _Rank:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    # Beside signs of life: a rank may be stopped in the middle of a message, which then stands still.
    with socket.socket(fileno=os.dup(ours.fileno())) as ours_as_socket:
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours_as_socket.setsockopt(
                socket.SOL_SOCKET, option, struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6))
            )
    process = context.Process(target=_serve, args=(theirs, join, threads, limit_s), name=name, daemon=True)
    process.start()
    theirs.close()
    return _Rank(process, ours)


def _serve(connection: Connection, join: Callable[[], Any], threads: int, limit_s: float) -> None:
    """The main function of a rank's process: one reply for being there, then one for each call.

    consumes: calls   waits for: a message   woken by: the caller, or its end   produces: a reply each
    """
    # Ctrl-C reaches every process of the terminal; the caller decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sending = threading.Lock()
    threading.Thread(target=_beat, args=(connection, sending, limit_s), daemon=True).start()
    _stay_on_this_machine()
    torch.set_num_threads(threads)
    worker, reply = _attempt(join)
    try:
        with sending:
            frames.send(connection, {**reply, "result": None})
        while worker is not None:
            method, arguments = frames.receive(connection)
            _, reply = _attempt(partial(getattr(worker, method), *arguments))
            with sending:
                frames.send(connection, reply)
    except (EOFError, OSError):
        # The caller closed its end, or is gone.
        if worker is not None:
            worker.close()


def _beat(connection: Connection, sending: threading.Lock, limit_s: float) -> None:
    """Send signs of life until the caller is gone; while it does not read, a full pipe ends the sending."""
    with contextlib.suppress(OSError):
        while True:
            with sending:
                frames.send(connection, None)
            time.sleep(limit_s / BEATS)


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
