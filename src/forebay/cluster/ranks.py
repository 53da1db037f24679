"""The ranks of a trainer as actors, where every rank has a place of its own (`forebay.train.parallel.ranks`).

::

    trainer's process: RayRanks.call --> rank actor 0, 1, ...: RankWorker.method
                            | one fails or ends: the others, which wait for it in a collective, get 10 s,
                            v then all are ended
                        RankError --> the run goes back to its last checkpoint, with new ranks
"""

from __future__ import annotations

import fcntl
import math
import os
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from forebay.cluster.library import cause_of, find_modules_in, import_ray, trace_of, why
from forebay.cluster.supervisor import START_LIMIT_S
from forebay.train.parallel.ranks import EXPECTED, GRACE_S, RankError
from forebay.train.parallel.worker import RankWorker


class RayRanks:
    """Rank actors that have joined; for the process of the trainer.

    >>> ranks = RayRanks(actors)
    >>> trainer = TrainController(model, config, pad_token_id=0, ranks=ranks)
    """

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = list(actors)
        self.pids: tuple[int, ...] = ()
        """Their processes, once they have joined."""

    @classmethod
    def join(
        cls, actors: Sequence[Any], device: str, *, threads: int, search_path: tuple[str, ...]
    ) -> RayRanks:
        """Have new actors meet.

        Raises:
            RankError: one of them ended.
        """
        ranks, ray = cls(actors), import_ray()
        meeting = ray.get(actors[0].meeting.remote())
        joining = [
            actor.join.remote(rank, len(actors), meeting, device, threads=threads, search_path=search_path)
            for rank, actor in enumerate(actors)
        ]
        ranks.pids = tuple(ranks._collect("join", joining, limit_s=START_LIMIT_S))
        return ranks

    @property
    def num_ranks(self) -> int:
        """How many there are."""
        return len(self._actors)

    def call(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Call `method` of every rank with its own arguments, all at once; the results, by rank.

        Raises:
            RankError: a rank failed alone, or died; no rank can be called again.
            ValueError, FloatingPointError: every rank raised it; they can go on.
        """
        ray = import_ray()
        # An argument for all of them, such as a model, is in the object store once.
        shared = [ray.put(part) for part in arguments[0]] if _are_same(arguments) else None
        return self._collect(
            method,
            [
                actor.call.remote(method, *(shared if shared is not None else own))
                for actor, own in zip(self._actors, arguments, strict=True)
            ],
        )

    def close(self) -> None:
        """End all ranks."""
        for actor in self._actors:
            import_ray().kill(actor)

    def _collect(self, method: str, refs: list[Any], *, limit_s: float = math.inf) -> list[Any]:
        """Every rank's result, due within `limit_s`, and within `GRACE_S` of another's failure."""
        ray = import_ray()
        results: dict[int, Any] = {}
        failed: dict[int, Exception] = {}
        waiting, deadline_s = list(refs), time.monotonic() + limit_s
        while waiting:
            left_s = max(0.0, deadline_s - time.monotonic())
            ready, waiting = ray.wait(waiting, timeout=None if math.isinf(left_s) else left_s)
            if not ready:
                break
            rank = refs.index(ready[0])
            try:
                results[rank] = ray.get(ready[0])
            except ray.exceptions.RayError as error:
                if not failed:
                    deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
                failed[rank] = error
        if len(results) == len(refs):
            return [results[rank] for rank in range(len(refs))]
        causes = [cause_of(error) for error in failed.values()]
        agreed = len(failed) == len(refs) and len({type(cause) for cause in causes}) == 1
        if agreed and type(causes[0]).__name__ in EXPECTED:
            raise causes[0]
        self.close()
        if not failed:
            silent = [rank for rank in range(len(refs)) if rank not in results]
            raise RankError(f"ranks {silent} of {len(refs)} gave no answer to {method} within {limit_s:g} s")
        first = min(failed)
        said = f"{why(failed[first])}\n{trace_of(failed[first])}".rstrip()
        raise RankError(f"rank {first} of {len(refs)} failed in {method}: {said}")


class RankActor:
    """A `RankWorker`; what runs in its process.

    >>> actor = ray.remote(RankActor).remote()
    >>> meeting = ray.get(actor.meeting.remote())
    >>> actor.join.remote(rank, num_ranks, meeting, "cpu", threads=1, search_path=())
    """

    def __init__(self) -> None:
        self._worker: RankWorker

    def meeting(self) -> str:
        """Where the ranks may meet on this machine, as ``torch.distributed`` reads it."""
        address = import_ray().util.get_node_ip_address()
        with socket.socket() as free:
            free.bind((address, 0))
            return f"tcp://{address}:{free.getsockname()[1]}"

    def join(
        self,
        rank: int,
        num_ranks: int,
        meeting: str,
        device: str,
        *,
        threads: int,
        search_path: tuple[str, ...],
    ) -> int:
        """Meet the other ranks; the process id."""
        import torch

        find_modules_in(search_path)
        # A machine's own name may lead to its loopback, where other machines' ranks find no peer.
        if (name := _interface_of(import_ray().util.get_node_ip_address())) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        torch.set_num_threads(threads)
        self._worker = RankWorker(rank, num_ranks, meeting, device=device)
        return os.getpid()

    def call(self, method: str, *arguments: Any) -> Any:
        """A method of the `RankWorker`."""
        return getattr(self._worker, method)(*arguments)


def _interface_of(address: str) -> str | None:
    """The name of this machine's network interface that has this IPv4 address; None: not found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                packed = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                # It has no such address.
                continue
            if socket.inet_ntoa(packed[20:24]) == address:
                return name
    return None


_SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface, which is in bytes 20 to 24 of the answer."""


def _are_same(arguments: Sequence[Sequence[Any]]) -> bool:
    return all(own is arguments[0] for own in arguments)
