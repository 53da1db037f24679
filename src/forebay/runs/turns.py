"""Whose turn it is on the GPUs that ranks of a trainer and inference servers share.

::

                  train: the servers that share sleep, then the ranks take the devices
    GENERATING ------------------------------------------------------------> TRAINING (a run begins here)
     ^                                                                         |
     | generate: they take their caches, and requests                          | leave: the ranks make room
     +-------------------------------- SYNCING <-------------------------------+
                               they take their weights, and new ones

              a shared GPU holds
    TRAINING    rank: weights, moments, gradients, activations    server: its context
    SYNCING     rank: weights (not with offload "all"), a bucket  server: weights, a bucket
    GENERATING  rank: weights (not with offload "all")            server: weights, cache

A server with no GPU of a rank never sleeps: in a separate run it goes on generating in TRAINING, and has the
requests of those that sleep; in a colocated run it rests then. Without it they wait. Which ones share:
`forebay.runs.placement.engine_seat`. While it is TRAINING none that shares is started, one that was lost neither;
the first SYNCING starts them. A part that ends ends the wait of the others: a lost server is brought up in the next
SYNCING, a lost rank is the end of the run, or on Ray of its way since the last checkpoint.
"""

import asyncio
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Literal

from forebay.engines.pool import EnginePool
from forebay.runs.placement import Trainer


@dataclass
class DeviceTurns:
    """Lets ranks and servers take turns; each method does nothing where its turn has come already.

    Invariants: the ranks train only while every server that shares has given its memory back, or has been
    ended; such a server is awake only while the part of the trainer that `offload` names is in the host's
    memory, and has requests only with the weights given last.

    ::

        turns = DeviceTurns(controller, trainer, thread, offload="moments")
        await turns.generate()
        await turns.train(keep_weights=False)
    """

    controller: EnginePool
    trainer: Trainer
    thread: Executor
    """Where the trainer is told to move its memory."""
    offload: Literal["none", "moments", "all"]
    """What the ranks move to the host's memory while it is not their turn."""
    turn: Literal["training", "syncing", "generating"] = "training"

    async def train(self, *, keep_weights: bool) -> None:
        """Give the ranks the devices; weights that the servers need not keep cost no memory of the host.

        Raises:
            EngineLost: all servers are lost for good.
        """
        if self.turn != "training":
            # The servers first: what the ranks move back needs the memory that they give free.
            await self.controller.sleep(keep_weights=keep_weights)
            self.turn = "training"
            await asyncio.get_running_loop().run_in_executor(self.thread, self.trainer.onload)

    async def leave(self) -> None:
        """Make room for the servers' weights, which a hand-over replaces, and for their caches."""
        if self.turn == "training":
            if self.offload != "none":
                offload = partial(self.trainer.offload, weights=self.offload == "all")
                await asyncio.get_running_loop().run_in_executor(self.thread, offload)
            self.turn = "syncing"

    async def generate(self) -> None:
        """Have the servers serve with the weights that they have: now, or once a pause ends.

        Raises:
            EngineLost: all servers are lost for good.
        """
        await self.leave()
        if self.turn == "syncing":
            await self.controller.wake()
            self.turn = "generating"
