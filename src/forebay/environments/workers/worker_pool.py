"""Runs the workers of a run, as processes or threads, and starts those again that die.

::

    keep(number): run one life --ended by order--> done
                       ^   '--died--> hub.forget --> counted --> the next life, with a seed of its own
                       '---------------------------------------'
                       died MAX_EARLY_DEATHS times in a row without a fragment: WorkerError

A mode says how one life is started, and how it is known to have ended. In every mode the worker connects to
the hub's Unix socket, and ends by itself when its trainer is gone, however it went.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import sys
import uuid
from collections.abc import Callable
from typing import Protocol

import numpy as np

from forebay.aio.tasks import outlast
from forebay.aio.time_limits import in_thread
from forebay.environments.workers.hub import Hub
from forebay.environments.workers.messages import WorkerDied, WorkerError, WorkerSpec

logger = logging.getLogger(__name__)

MAX_EARLY_DEATHS = 3
"""One may be bad luck, such as a machine without memory for a moment; three in a row have a reason."""
NUM_LAST_BYTES = 8192
"""The end of a process's output that is kept: a traceback is in it."""
PROCESS_ENVIRONMENT = {
    # One thread a process: with more, small matrix products wait for each other.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Environments that draw with pygame need no screen, and its greeting is no news.
    "SDL_VIDEODRIVER": "dummy",
    "PYGAME_HIDE_SUPPORT_PROMPT": "1",
}
"""The environment variables of worker processes; those of the trainer's process have precedence."""


class WorkerPool:
    """Runs workers until the hub tells them to stop.

    Invariants: at any time each of them lives, is being started again, or has been told to stop.
    """

    def __init__(self, hub: Hub, mode: WorkerMode, *, make_spec: Callable[[str, int], WorkerSpec], seed: int) -> None:
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
        early_deaths = 0
        for life in itertools.count():
            worker_uuid = f"worker-{number}-{life}-{uuid.uuid4().hex[:8]}"
            seeds = np.random.SeedSequence([self._seed, number, life])
            spec = self._make_spec(worker_uuid, int(seeds.generate_state(1)[0]))
            reason = "it ended by itself"
            try:
                await self._hub.while_heard(worker_uuid, self._mode.run(spec, self._hub))
            except WorkerDied as died:
                reason = str(died)
            if self._hub.stopping:
                return
            early_deaths = 0 if self._hub.num_fragments(worker_uuid) else early_deaths + 1
            await self._hub.forget(worker_uuid)
            if early_deaths == MAX_EARLY_DEATHS:
                raise WorkerError(
                    f"worker {number} died {MAX_EARLY_DEATHS} times without a fragment, the last time of {reason}"
                )
            self.num_restarts += 1
            # The first line says how it ended; the last one of a traceback says why.
            lines = reason.splitlines()
            summary = ": ".join(dict.fromkeys([lines[0], lines[-1]]))
            logger.warning("worker %d died (%s) and is started again", number, summary)


class WorkerMode(Protocol):
    """Runs workers in a certain way."""

    async def run(self, spec: WorkerSpec, hub: Hub) -> None:
        """Run one worker, which reports to `hub.address`, until it is told to stop.

        A cancelled call ends it at once.

        Raises:
            WorkerDied: it ended in another way.
        """


class ProcessWorkers:
    """Workers as processes of their own, each with an interpreter and a core to itself."""

    async def run(self, spec: WorkerSpec, hub: Hub) -> None:
        """Start an interpreter and wait for its end; its last output is in the error."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "forebay.environments.workers.worker"),
            *(hub.address, spec.model_dump_json()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=PROCESS_ENVIRONMENT | os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            # A Ctrl-C in the terminal is for the trainer alone, which finishes its step with their help.
            start_new_session=True,
        )
        output = b""
        try:
            assert process.stdout is not None
            while part := await process.stdout.read(NUM_LAST_BYTES):
                output = (output + part)[-NUM_LAST_BYTES:]
            code = await process.wait()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await outlast(asyncio.ensure_future(process.wait()))
        if code != 0:
            what = f"signal {-code}" if code < 0 else f"exit status {code}"
            raise WorkerDied(f"{what}\n{output.decode(errors='replace').rstrip()}")


class ThreadWorkers:
    """Workers as threads of the trainer's process: quick to start, but they share one interpreter with it.

    A thread cannot be ended from outside: one whose run is cancelled ends by itself, with its next report.
    """

    async def run(self, spec: WorkerSpec, hub: Hub) -> None:
        """Start a thread and wait for its end."""
        # Here, because it loads torch.
        from forebay.environments.workers.worker import run_worker

        try:
            await in_thread(run_worker, hub.address, spec.model_dump_json())
        # Whatever the environment raises, it is this worker's end only.
        except Exception as error:
            raise WorkerDied(f"{type(error).__name__}: {error}") from error


MODES: dict[str, Callable[[], WorkerMode]] = {"processes": ProcessWorkers, "threads": ThreadWorkers}
"""The ways to run workers, by the name in a recipe."""
