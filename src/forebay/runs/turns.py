"""Whose turn it is on a GPU that a trainer and an inference server share, in a colocated run.

::

                  fit: the server sleeps, the trainer takes the device
    GENERATING ---------------------------------------------------------> TRAINING
     ^       ^                                                            |     |
     |       |  produce, evaluate: the trainer leaves, the server wakes   |     | sync: the trainer leaves
     |       +------------------------------------------------------------+     v
     +------------------------------------------------------------------- SYNCING
         produce, evaluate: the server takes its cache        the server takes its weights, and new ones

              the device holds
    TRAINING    trainer: weights, moments, gradients, activations    server: its context
    SYNCING     trainer: weights (not with offload "all"), a bucket   server: weights, a bucket
    GENERATING  trainer: weights (not with offload "all")             server: weights, cache

The run begins in TRAINING, since the trainer is built first; the server is started by the first SYNCING.
While it is TRAINING no server is started, one that was lost neither.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from functools import partial
from typing import Literal

from forebay.engines.pool import EnginePool
from forebay.train import TrainController


class DeviceTurns:
    """Lets trainer and server take turns; each method does nothing where its turn has come already.

    Invariants: the trainer trains only while the server has given its memory back, or has been ended; the
    server is awake only while the trainer's part that `offload` names is in the host's memory.

    ::

        turns = DeviceTurns(controller, trainer, thread, offload="moments")
        await turns.train(keep_weights=False)
    """

    def __init__(
        self,
        controller: EnginePool,
        trainer: TrainController,
        thread: Executor,
        *,
        offload: Literal["none", "moments", "all"],
    ) -> None:
        """`offload` is what the trainer moves to the host's memory, in `thread`, while it is not its turn."""
        self.is_training = True
        self._controller, self._trainer, self._thread = controller, trainer, thread
        self._offload = offload

    async def train(self, *, keep_weights: bool) -> None:
        """Give the trainer the device; weights that the server need not keep cost no memory of the host.

        Raises:
            EngineLost: all servers are lost for good.
        """
        if not self.is_training:
            # The server first: what the trainer moves back needs the memory that it gives free.
            await self._controller.sleep(keep_weights=keep_weights)
            self.is_training = True
            await asyncio.get_running_loop().run_in_executor(self._thread, self._trainer.onload)

    async def leave(self) -> None:
        """Make room for the server's weights, which a hand-over replaces, and for its cache."""
        # After a hand-over the trainer has left the device already.
        if self.is_training and self._offload != "none":
            offload = partial(self._trainer.offload, weights=self._offload == "all")
            await asyncio.get_running_loop().run_in_executor(self._thread, offload)
        self.is_training = False
