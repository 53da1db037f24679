"""Where the ranks of a trainer live, and how to call all of them at once.

::

    Ranks.call(method, [arguments by rank]) -> [results by rank]
        a thread for each rank asks it; the first failure gives the others `GRACE_S`, then all are ended

    LocalRanks   caller                                     process of rank r
                 send(method, arguments) --socket--> RankWorker.method(*arguments)
                 waits for: a reply of every rank   <--     send(result | error with traceback)
                 woken by: a reply, or the end of a process; a thread of the process gives a sign of life
                 every `limit_s` / 4
                 a second socket and thread of each process: calls `BESIDE` all others

`LocalRanks` starts processes on this machine, or takes those that were started beside its own
(`forebay.train.parallel.launched`); others may live elsewhere (`forebay.cluster.trainer`).
"""

import contextlib
import logging
import os
import signal
import socket
import tempfile
import threading
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from logging.handlers import BufferingHandler
from multiprocessing import spawn
from multiprocessing.process import BaseProcess
from typing import Any
from unittest.mock import patch

import psutil
import torch

from forebay.config import ConfigError
from forebay.io.channel import BlockingChannel
from forebay.io.forked import PROCESSES, start_loading
from forebay.io.messages import BEATS, Alive, check_limit
from forebay.io.safe_files import DiskError, disk_errors_named
from forebay.io.shared import Layout, MemoryFile
from forebay.train.parallel.array_messages import connect, receive, send
from forebay.train.parallel.worker import RankWorker

SILENCE_LIMIT_S = 120.0
"""Without a sign of life: longer than elsewhere, for single operations that hold the interpreter."""

LOOPBACK = "127.0.0.1"
"""The address of a machine whose ranks are all on it."""


class Ranks:
    """The ranks of one trainer, each with a `RankWorker`; a subclass says how one is asked and all are ended.

    Invariants: one call at a time, and one of `BESIDE`; when a rank dies, fails alone or gives no sign of
    life, the call ends with a `RankError` and no rank is left.
    """

    def __init__(self, num_ranks: int) -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
        self.num_ranks = num_ranks
        """Processes that train together."""
        self.are_apart = False
        """Whether they are on several machines."""
        self._have_ended = False
        self._closing = threading.Lock()
        self._turns = threading.Lock(), threading.Lock()
        self._lost: BaseException | None = None
        # One thread waits for each rank, and one for what it does beside.
        self._waiting = ThreadPoolExecutor(2 * num_ranks, "forebay-rank")

    def call(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Call `method` of every rank with its own arguments, all at once; the results, by rank.

        Raises:
            RankError: a rank failed alone, or died; all are ended.
            ValueError, FloatingPointError: every rank raised it; they can go on.
        """
        assert len(arguments) == self.num_ranks
        # A server that comes back reads weights while the trainer makes its passes.
        with self._turns[method in BESIDE]:
            if self._have_ended:
                why = "" if self._lost is None else f": {self._lost}"
                raise RankError(f"{method} was called, but the ranks have ended{why}")
            return self._ask(method, arguments)

    def close(self) -> None:
        """End all ranks."""
        with self._closing:
            self._have_ended = True
            self._end()
            self._waiting.shutdown(wait=False)

    def copy_weights(self, layout: Layout, memory: MemoryFile, *, merged: bool, again: bool = False) -> None:
        """Put the weights, adapters `merged` or left out, into memory of the first rank's machine.

        Ranks of that machine alone all write there at the same time; else the first one writes all, made whole one
        after the other. Memory that is used `again` may stay mapped where that saves time.
        """
        arguments = layout, merged, again, self.are_apart, memory.path, memory.inode, memory.num_bytes
        self.call("copy_weights", [arguments] * self.num_ranks)

    def _answer(self, number: int, method: str, arguments: Sequence[Any]) -> Any:
        """One rank's result; `FailedCall` for an error of the method, `RankError` for that of a lost rank."""
        raise NotImplementedError

    def _end(self) -> None:
        """End every rank at once; what waits for one learns of it."""
        raise NotImplementedError

    def _ask(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """The result of every rank, or the error that they add up to."""
        answers = [self._waiting.submit(self._answer, number, method, own) for number, own in enumerate(arguments)]
        try:
            done, left = wait(answers, return_when=FIRST_EXCEPTION)
            # Where one fails, the others fail a little later, in the collective that it does not come to.
            if not any(isinstance(answer.exception(), RankError) for answer in done):
                _, left = wait(left, GRACE_S)
        except BaseException:
            # Whatever ended the wait: a reply that comes later would be taken for the next call's.
            Ranks.close(self)
            raise
        errors = {n: error for n, a in enumerate(answers) if a not in left and (error := a.exception())}
        for error in errors.values():
            if not isinstance(error, FailedCall):
                # The end of the others, too, which a call beside this one may see first.
                self._lost = self._lost or error
                Ranks.close(self)
                raise self._lost
        if errors:
            silent = [number for number, answer in enumerate(answers) if answer in left]
            raise self._error(method, {number: error.args for number, error in errors.items()}, silent)
        return [answer.result() for answer in answers]

    def _error(self, method: str, failed: Mapping[int, tuple[str, ...]], silent: list[int]) -> Exception:
        """The error to raise; the ranks live on only if all of them say the same."""
        kind, message, trace = failed[min(failed)]
        report = RankError(
            f"{numbers(failed)} of {self.num_ranks} failed in {method}: {kind}: {message}"
            f"{f' (no answer from {numbers(silent)})' if silent else ''}\n{trace}"
        )
        agreed = len(failed) == self.num_ranks and {error[0] for error in failed.values()} == {kind}
        report.is_lost = self.num_ranks > 1 or method == START or kind in _OF_THE_DEVICE
        if not (agreed and kind in EXPECTED) or method == START:
            # A call beside this one sees ranks that ended, and is to tell the cause.
            self._lost = self._lost or report
            Ranks.close(self)
        if disk := [error[1] for error in failed.values() if error[0] == DiskError.__name__]:
            # Often of one rank alone. New ranks would find the disk as it is.
            expected: Exception = DiskError(disk[0])
        elif agreed and kind in EXPECTED:
            expected = EXPECTED[kind](message)
        else:
            return report
        expected.__cause__ = report
        return expected


class LocalRanks(Ranks):
    """Ranks as processes of this machine, which end with this one.

    Without a sign of life for `limit_s` a rank is lost. `device` is ``cpu``, ``cuda`` (each rank then has the
    GPU of its number) or ``cuda:2`` (from that one on). `threads` are those of each rank; left out, the ranks
    share what this process has. Warnings of the first one are logged here.

    With `imports_main` they know the classes of models in a script, which then needs ``if __name__ ==
    "__main__":`` around what it does. Several trainers may use them one after the other. `joined` are the last
    ranks, which are there already, maybe on other machines than this one, whose address is `home`.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        device: str = "cpu",
        threads: int | None = None,
        limit_s: float = SILENCE_LIMIT_S,
        joined: "Sequence[Rank]" = (),
        home: str = LOOPBACK,
        imports_main: bool = True,
    ) -> None:
        super().__init__(num_ranks)
        check_limit("limit_s", limit_s)
        self._limit_s, self.are_apart = START_LIMIT_S, home != LOOPBACK
        self._folder = tempfile.TemporaryDirectory(prefix="forebay-ranks-")
        meeting = f"file://{self._folder.name}/rendezvous" if home == LOOPBACK else free_meeting(home)
        threads = threads or max(1, torch.get_num_threads() // num_ranks)
        self._ranks: list[Rank] = []
        start_loading()
        with contextlib.ExitStack() as begun:
            # If one cannot be started, those that were would wait for it.
            begun.callback(Ranks.close, self)
            for rank in range(num_ranks - len(joined)):
                ours, theirs = zip(socket.socketpair(), socket.socketpair(), strict=True)
                for sock in (*ours, *theirs):
                    begun.callback(sock.close)
                name = f"forebay-rank-{rank}"
                process = PROCESSES.Process(target=_serve, args=[theirs, dict(os.environ)], name=name, daemon=True)
                _begin(process, imports_main=imports_main)
                for sock in theirs:
                    sock.close()
                channels = [connect(sock, START_LIMIT_S) for sock in ours]
                self._ranks.append(Rank(channels, rank + (torch.device(device).index or 0), home, process))
            begun.pop_all()
        self._ranks += joined
        told = (num_ranks, meeting, device, threads, limit_s)
        self._ask(START, [(n, rank.gpu, rank.address, *told) for n, rank in enumerate(self._ranks)])
        self._limit_s = limit_s
        for channel in [channel for rank in self._ranks for channel in rank.channels]:
            channel.sock.settimeout(limit_s)

    @property
    def pids(self) -> list[int | None]:
        """The process ids by rank of those started here; empty after `close`."""
        return [rank.process.pid for rank in self._ranks if rank.process is not None]

    def close(self) -> None:
        """End all ranks."""
        for rank in self._ranks:
            # The end of its messages, at which it leaves.
            rank.close()
        for rank in self._ranks:
            if rank.process is not None:
                rank.process.join(GRACE_S)
        super().close()

    def _answer(self, number: int, method: str, arguments: Sequence[Any]) -> Any:
        rank = self._ranks[number]
        channel = rank.channels[method in BESIDE]
        try:
            send(channel, [method, list(arguments)])
            reply = receive(channel)
        except TimeoutError:
            raise RankError(silence(number, self._limit_s, method)) from None
        except (EOFError, OSError):
            raise RankError(f"rank {number} died in {method}: {rank.describe_end()}") from None
        for warning in reply["warnings"] if number == 0 else ():
            logging.getLogger(__name__).warning("%s", warning)
        if reply["error"] is not None:
            raise FailedCall(*reply["error"])
        return reply["result"]

    def _end(self) -> None:
        for rank in self._ranks:
            if rank.process is not None:
                rank.process.kill()
            rank.close()
        # Each thread that waits for a rank learns of its end, and leaves.
        self._waiting.shutdown()
        for rank in self._ranks:
            if rank.process is not None:
                rank.process.join()
                rank.process.close()
        self._ranks.clear()
        self._folder.cleanup()


class RankError(RuntimeError):
    """A rank failed or died; the message has its number, and its traceback or exit code."""

    is_lost = True
    """False: the only rank made an error, which a new one would make as well."""


_OF_THE_DEVICE = {"AcceleratorError", "OutOfMemoryError"}
"""Errors of torch that a new process may not have."""

GRACE_S = 10.0
"""How long the other ranks may take to fail as well, or to end, once one has failed; then they are killed."""


START = "start"
"""The name of the call by which ranks meet: no later call can be made of those of which one failed in it."""

BESIDE = ("finish_save",)
"""Calls that wait for threads of the ranks, and hold up no other call."""


START_LIMIT_S = 300.0
"""The same while it starts: many that start together load torch for minutes."""


EXPECTED: dict[str, type[Exception]] = {
    error.__name__: error for error in (ConfigError, FloatingPointError, ValueError)
}
"""Errors that speak of what the caller gave, and are raised as what they are if all ranks agree."""


@dataclass(frozen=True)
class Rank:
    """A process that holds a rank, as its caller sees it."""

    channels: list[BlockingChannel]
    """One channel for calls, and one for those `BESIDE` them."""
    gpu: int
    """Its number on its machine."""
    address: str
    """Where the ranks of other machines reach it."""
    process: BaseProcess | None = None
    """None: it was not started here, and ends when its channels do."""

    def close(self) -> None:
        """The end of its messages."""
        for channel in self.channels:
            channel.close()

    def describe_end(self) -> str:
        """Why it has ended, as far as that is known here."""
        if self.process is None:
            return "its connection ended; its own output may say why"
        self.process.join(GRACE_S)
        if (code := self.process.exitcode) is None:
            return "it closed its connection and does not end"
        if code < 0:
            return f"exit code {code} ({signal.Signals(-code).name})"
        return f'exit code {code}; its output says why (a script with ranks needs `if __name__ == "__main__":`)'


class FailedCall(Exception):
    """A rank raised an error: its type, message and traceback."""


def silence(number: int, limit_s: float, method: str) -> str:
    """The message for a rank that is there and does nothing."""
    return f"rank {number} gave no sign of life for {limit_s:g} s in {method}: it hangs or was stopped"


def numbers(ranks: Collection[int]) -> str:
    """The name of one rank, or of several."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def free_meeting(address: str) -> str:
    """Where ranks may meet on the machine with this address, which is this one, as torch reads it."""
    with socket.socket() as free:
        free.bind((address, 0))
        return f"tcp://{address}:{free.getsockname()[1]}"


def set_interface(address: str) -> None:
    """Have gloo use the interface of this machine that has this IPv4 address, if that is found.

    It would take that of the machine's own name, which may be reached from outside, or not at all.
    """
    for name, own in psutil.net_if_addrs().items():
        if address in [each.address for each in own]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


_BEGINNING = threading.Lock()


def _begin(process: Any, *, imports_main: bool) -> None:
    # multiprocessing itself has no word for a process that needs nothing of the script. Two threads that replace its
    # function at once would leave one's in place.
    with _BEGINNING:
        told = {k: v for k, v in spawn.get_preparation_data(process.name).items() if imports_main or "main" not in k}
        with patch.object(spawn, "get_preparation_data", return_value=told):
            process.start()


def _serve(socks: Sequence[socket.socket], environment: Mapping[str, str]) -> None:
    """The main function of a rank's process that was started for it."""
    # Ctrl-C and torchrun's SIGTERM reach every process of a group; the caller decides what they mean.
    os.setpgrp()
    # That of a process which is forked is as old as the first rank.
    os.environ.clear()
    os.environ.update(environment)
    serve([connect(sock) for sock in socks])


def serve(channels: Sequence[BlockingChannel]) -> None:
    """Answer the calls for one rank until its caller ends the channels, or is gone.

    consumes: calls   waits for: a message   woken by: the caller, or its end   produces: a reply each
    """
    worker: Any = None
    logging.getLogger("forebay").addHandler(logged := BufferingHandler(capacity=100))

    def start(
        rank: int, gpu: int, address: str, num_ranks: int, meeting: str, device: str, threads: int, limit_s: float
    ) -> None:
        nonlocal worker
        for channel in channels:
            channel.beat(Alive(), limit_s / BEATS)
        set_interface(address)
        torch.set_num_threads(threads)
        worker = RankWorker(rank, num_ranks, meeting, device=device, gpu=gpu)

    def answer(channel: BlockingChannel) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                method, arguments = receive(channel)
                call = start if method == START else partial(worker.call, method)
                reply = _attempt(partial(call, *arguments))
                records, logged.buffer = logged.buffer, []
                send(channel, reply | {"warnings": [record.getMessage() for record in records]})

    def answer_beside() -> None:
        answer(channels[1])
        last.start()

    # The main thread may be in a collective, which waits minutes for a rank that was stopped.
    last = threading.Timer(GRACE_S, os._exit, [1])
    beside = threading.Thread(target=answer_beside)
    beside.start()
    answer(channels[0])
    beside.join()
    if worker is not None:
        worker.close()
    # A thread that wakes up in the interpreter's last moments would abort the process.
    last.cancel()
    last.join()


def _attempt(call: Callable[[], Any]) -> dict[str, Any]:
    """The reply that says how `call` went."""
    try:
        with disk_errors_named("a rank's files"):
            return {"error": None, "result": call()}
    # Whatever it is, also `sys.exit` in a loss of one's own, the caller has to learn of it.
    except BaseException as error:
        return {"error": [type(error).__name__, str(error), traceback.format_exc()], "result": None}
