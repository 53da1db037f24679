"""The ranks of a trainer as actors, where every rank has a place of its own (`forebay.train.parallel.ranks`).

::

    trainer's process: RayRanks --> RankActor 0, 1, ...: RankWorker.method
                          | one rank fails, ends or hangs: all are ended
                          v
                      RankError --> the run goes back to its last checkpoint, with new ranks
"""

import asyncio
import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from forebay.cluster.calls import beside, result_of, signs_of_life
from forebay.cluster.library import cause_of, find_modules_in, import_ray, why
from forebay.cluster.supervisor import BEAT_EVERY_S, SILENCE_LIMIT_S, START_LIMIT_S
from forebay.train.parallel import ranks
from forebay.train.parallel.worker import RankWorker
from forebay.watching.stalls import StallError


class RayRanks(ranks.Ranks):
    """Rank actors, which meet as it is made; for the process of the trainer.

    ::

        ranks = RayRanks(actors, "cpu", threads=1, search_path=())
        trainer = TrainController(model, config, pad_token_id=0, ranks=ranks)

    Raises:
        RankError: one of them ended.
    """

    def __init__(self, actors: Sequence[Any], device: str, *, threads: int, search_path: tuple[str, ...]) -> None:
        super().__init__(len(actors))
        places = import_ray().get([actor.place.remote() for actor in actors])
        here = import_ray().get_runtime_context().get_node_id()
        # Neighbors by number are those that say most to each other (`tensor`, `context`): on one machine; and the
        # first on this one, where weights are put.
        order = sorted(range(len(actors)), key=lambda number: (places[number][0] != here, places[number][0]))
        self.are_apart = any(node != here for node, *_ in places)
        self._actors, meeting = [actors[number] for number in order], places[order[0]][1]
        if device != "cpu" and (gpus := places[order[0]][2]) is not None:
            # This process has no GPU: it sends weights from the first rank's. Nothing here has looked for any yet.
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus
        arguments = (len(actors), meeting, device, threads, search_path)
        self.pids: list[int] = self._ask(ranks.START, [(rank, *arguments) for rank in range(len(actors))])
        """The process id of each rank's actor."""

    def call(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Call `method` on every rank; an argument that several share, such as a batch, travels once."""
        times = Counter(id(part) for own in arguments for part in own)
        shared = {id(part): part for own in arguments for part in own if times[id(part)] > 1}
        stored = {key: import_ray().put(part) for key, part in shared.items()}
        return super().call(method, [[stored.get(id(part), part) for part in own] for own in arguments])

    def _answer(self, number: int, method: str, arguments: Sequence[Any]) -> Any:
        actor, exceptions = self._actors[number], import_ray().exceptions
        if method == ranks.START:
            # Its process may only be on its way there.
            call, limit_s = actor.start.remote(*arguments), START_LIMIT_S
        else:
            caller = beside(actor.call) if method in ranks.BESIDE else actor.call
            call, limit_s = caller.remote(method, *arguments), SILENCE_LIMIT_S
        try:
            return asyncio.run(result_of(call, signs_of_life(actor), method, every_s=BEAT_EVERY_S, limit_s=limit_s))
        except StallError:
            raise ranks.RankError(ranks.silence(number, limit_s, method)) from None
        except exceptions.RayTaskError as error:
            cause = cause_of(error)
            # The text has the rank's own trace, which Ray colors.
            raise ranks.FailedCall(type(cause).__name__, str(cause), re.sub(r"\x1b\[\d+m", "", str(error))) from None
        except exceptions.RayError as error:
            raise ranks.RankError(f"rank {number} died in {method}: {why(error)}") from None

    def _end(self) -> None:
        for actor in self._actors:
            import_ray().kill(actor)


class RankActor:
    """A `RankWorker`; what runs in its process, one call at a time."""

    def __init__(self, lender: tuple[Any, int] | None = None) -> None:
        borrow_gpu(lender)
        self._worker: RankWorker

    def place(self) -> tuple[str, str, str | None]:
        """The id of its machine, the address there where ranks may meet, as torch reads it, and its GPUs there."""
        ray, gpus = import_ray(), os.environ.get("CUDA_VISIBLE_DEVICES")
        return ray.get_runtime_context().get_node_id(), ranks.free_meeting(ray.util.get_node_ip_address()), gpus

    def start(
        self, rank: int, num_ranks: int, meeting: str, device: str, threads: int, search_path: tuple[str, ...]
    ) -> int:
        """Meet the other ranks; the process id."""
        find_modules_in(search_path)
        # A machine's own name may lead to its loopback, where other machines' ranks find no peer.
        ranks.set_interface(import_ray().util.get_node_ip_address())
        torch.set_num_threads(threads)
        self._worker = RankWorker(rank, num_ranks, meeting, device=device)
        return os.getpid()

    def call(self, method: str, *arguments: Any) -> Any:
        """As `RankWorker.call`."""
        return self._worker.call(method, *arguments)


def borrow_gpu(lender: tuple[Any, int] | None) -> None:
    """Have this process see the GPU that an engine's actor has by Ray's count: the actor, and which of its GPUs."""
    if lender is not None:
        engine, number = lender
        # It may just be starting again, on another machine perhaps: where it is, this process is.
        gpus = import_ray().get(engine.gpus.options(max_task_retries=-1).remote())
        # In one order, whichever Ray gave them in.
        os.environ["CUDA_VISIBLE_DEVICES"] = sorted(gpus.split(","))[number]
