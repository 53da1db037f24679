"""Keeps the workers of a run alive.

::

    keep(number): run one life --ended by order--> done
                       ^   '--died--> hub.forget --> counted --> the next life, with a seed of its own
                       '---------------------------------------'
                       died MAX_STILLBIRTHS times in a row without a fragment: WorkerError
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import Callable

import numpy as np

from forebay.environments.workers.hub import Hub
from forebay.environments.workers.messages import WorkerDied, WorkerError, WorkerMode, WorkerSpec

logger = logging.getLogger(__name__)

MAX_STILLBIRTHS = 3
"""One may be bad luck, such as a machine without memory for a moment; three in a row have a reason."""


class Crew:
    """Runs `count` workers until the hub tells them to stop.

    Invariants: at any time each of them lives, is being started again, or has been told to stop.

    >>> crew = Crew(hub, ProcessWorkers(), make_spec=make_spec, seed=0)
    >>> async with asyncio.TaskGroup() as tasks:
    ...     tasks.create_task(crew.keep(0))
    """

    def __init__(
        self, hub: Hub, mode: WorkerMode, *, make_spec: Callable[[str, int], WorkerSpec], seed: int
    ) -> None:
        """`make_spec` takes the uuid and the seed of one life. Equal `seed`s give equal seeds of lives."""
        self.num_restarts = 0
        """Workers that died and were started again."""
        self._hub, self._mode, self._make_spec, self._seed = hub, mode, make_spec, seed

    async def keep(self, number: int) -> None:
        """Keep worker `number` alive.

        consumes: nothing / waits for: the end of a life / woken by: it / produces: the next life

        Raises:
            WorkerError: it dies again and again before its first fragment.
        """
        stillbirths = 0
        for life in itertools.count():
            worker_uuid = f"worker-{number}-{life}-{uuid.uuid4().hex[:8]}"
            seeds = np.random.SeedSequence([self._seed, number, life])
            try:
                await self._mode.run(self._make_spec(worker_uuid, int(seeds.generate_state(1)[0])), self._hub)
            except WorkerDied as died:
                reason = str(died)
            else:
                reason = "it ended by itself"
            if self._hub.stopping:
                return
            born = self._hub.num_fragments(worker_uuid) > 0
            await self._hub.forget(worker_uuid)
            stillbirths = 0 if born else stillbirths + 1
            if stillbirths == MAX_STILLBIRTHS:
                raise WorkerError(
                    f"worker {number} died {MAX_STILLBIRTHS} times without a fragment, the last time of "
                    f"{reason}"
                )
            self.num_restarts += 1
            # The first line says how it ended; the last one of a traceback says why.
            lines = reason.splitlines()
            summary = ": ".join(dict.fromkeys([lines[0], lines[-1]]))
            logger.warning("worker %d died (%s) and is started again", number, summary)

    async def keep_all(self, count: int) -> None:
        """Keep workers 0 to `count` - 1 alive."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(count):
                tasks.create_task(self.keep(number))
