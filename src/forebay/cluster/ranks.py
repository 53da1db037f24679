"""The ranks of a trainer as actors, so that they can be on several machines.

::

    TrainController --call(method, arguments by rank)--> RankActor 0, 1, ... --> RankWorker
                                                             '--- gloo or NCCL among themselves ---'

They meet at an address of rank 0's machine. One that ends takes the others with it: the collectives they are
in cannot be finished, and the trainer's state is in its last checkpoint.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from forebay.cluster.library import import_ray, why
from forebay.config import ConfigError
from forebay.train.ranks import EXPECTED, RankError


class RankActor:
    """One `RankWorker`; what runs in the process of a rank."""

    def __init__(self) -> None:
        self._worker: Any = None

    def address(self) -> str:
        """Where ranks can meet, if this is the first: a free port of this machine."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        return f"tcp://{import_ray().util.get_node_ip_address()}:{port}"

    def join(
        self, rank: int, num_ranks: int, init_method: str, device: str, timeout_s: float, threads: int
    ) -> None:
        """Meet the other ranks."""
        import torch

        from forebay.train.rank_worker import RankWorker

        torch.set_num_threads(threads)
        self._worker = RankWorker(rank, num_ranks, init_method, device=device, timeout_s=timeout_s)

    def call(self, method: str, arguments: Sequence[Any]) -> tuple[Any, tuple[str, str] | None]:
        """(result, None), or (None, (kind, message)) of an error that speaks of the arguments."""
        try:
            return getattr(self._worker, method)(*arguments), None
        except tuple(EXPECTED.values()) as error:
            return None, (type(error).__name__, str(error))


class RayRanks:
    """The ranks of one trainer, each in an actor; see `forebay.train.ranks.Ranks`.

    Invariants: one call at a time; when a rank is lost, or fails alone, all are ended and the call raises
    `RankError`.

    >>> ranks = RayRanks([{"num_gpus": 1}] * 8, device="cuda")                       # doctest: +SKIP
    >>> trainer = TrainController(model, config, pad_token_id=0, ranks=ranks)       # doctest: +SKIP

    Args:
        options: what Ray's ``actor.options`` takes, for each rank: its CPUs, GPUs and place.
        device: ``cpu`` or ``cuda``.
        timeout_s: a collective that a rank does not come to ends with an error after this.
        threads: of torch, in each rank.
    """

    def __init__(
        self,
        options: Sequence[dict[str, Any]],
        *,
        device: str = "cpu",
        timeout_s: float = 600.0,
        threads: int = 1,
    ) -> None:
        if not options:
            raise ValueError("a trainer needs at least one rank, got none")
        self._ray = import_ray()
        actor = self._ray.remote(RankActor)
        self._actors = [actor.options(max_restarts=0, **own).remote() for own in options]
        address = self._gather([self._actors[0].address.remote()], "start")[0]
        self._gather(
            [
                one.join.remote(rank, len(options), address, device, timeout_s, threads)
                for rank, one in enumerate(self._actors)
            ],
            "start",
        )

    @property
    def num_ranks(self) -> int:
        """How many there are."""
        return len(self._actors)

    def call(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Call `method` of every rank with its own arguments, all at once; the results, by rank.

        Raises:
            RankError: a rank failed alone, or was lost; all are ended.
            ValueError, FloatingPointError: every rank raised it; they can go on.
        """
        if not self._actors:
            raise RankError(f"{method} was called, but the ranks have ended")
        refs = [
            actor.call.remote(method, list(own)) for actor, own in zip(self._actors, arguments, strict=True)
        ]
        answers = self._gather(refs, method)
        errors = [error for _, error in answers]
        if not any(errors):
            return [result for result, _ in answers]
        rank, (kind, message) = next((i, error) for i, error in enumerate(errors) if error)
        if all(errors):
            raise EXPECTED[kind](message)
        self.close()
        raise RankError(f"rank {rank} failed alone in {method}: {kind}: {message}")

    def _gather(self, refs: list[Any], method: str) -> list[Any]:
        """The results of all; the first loss ends all, because the others wait for the lost one."""
        waiting = dict(zip(refs, range(len(refs)), strict=True))
        while waiting:
            (ready, *_), _ = self._ray.wait(list(waiting), num_returns=1)
            try:
                self._ray.get(ready)
            except self._ray.exceptions.RayActorError as error:
                self.close()
                raise RankError(f"rank {waiting[ready]} was lost in {method}: {why(error)}") from error
            except self._ray.exceptions.RayTaskError as error:
                self.close()
                cause = error.cause
                if isinstance(cause, ConfigError):
                    raise cause from error
                raise RankError(f"rank {waiting[ready]} failed in {method}: {error}") from error
            del waiting[ready]
        results: list[Any] = self._ray.get(refs)
        return results

    def close(self) -> None:
        """End all ranks."""
        actors, self._actors = self._actors, []
        for actor in actors:
            self._ray.kill(actor)
