"""Workers as processes of their own, each with an interpreter and a core to itself.

::

    run --starts--> python -m forebay.environments.workers.processes ADDRESS SPEC --socket--> hub
     '---- waits for its end; what it wrote last is in the error if that came too early

A worker whose trainer is gone, however it went, ends by itself: its connection is closed by the kernel, or
silent. One that is frozen is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

from forebay.aio.cancellation import outlast
from forebay.environments.workers.messages import Answering, WorkerDied, WorkerSpec
from forebay.environments.workers.sockets import SocketLink
from forebay.environments.workers.worker import work_alone

NUM_LAST_BYTES = 8192
"""Of its output: a traceback is in it."""

ENVIRONMENT = {
    # One thread a process: with more, small matrix products wait for each other.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Environments that draw with pygame need no screen, and its greeting is no one's news.
    "SDL_VIDEODRIVER": "dummy",
    "PYGAME_HIDE_SUPPORT_PROMPT": "1",
}
"""Of the processes, beside the trainer's own."""


class ProcessWorkers:
    """See `WorkerMode`.

    >>> await ProcessWorkers().run(spec, hub)
    """

    async def run(self, spec: WorkerSpec, hub: Answering) -> None:
        """See `WorkerMode`."""
        await hub.while_heard(spec.worker_uuid, self._run(spec, hub.address))

    async def _run(self, spec: WorkerSpec, address: str) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __name__, address, spec.model_dump_json()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=ENVIRONMENT | os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
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


def main() -> None:
    """The worker's side: its address and its spec are the arguments."""
    address, encoded = sys.argv[1:]
    spec = WorkerSpec.model_validate_json(encoded)
    with SocketLink(address, spec.worker_uuid, limit_s=spec.limit_s) as link:
        work_alone(spec, link)


if __name__ == "__main__":
    main()
