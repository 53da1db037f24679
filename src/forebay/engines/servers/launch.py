"""Inference servers that a run starts on this machine, and ends with itself.

::

    start() --> guard --> server --> log file
        ready: its health endpoint answers      ended before: EngineLost with the end of its log
    stop() --> guard's input closes --> the server's whole process tree ends

It does not talk to the server beyond its health: that is the engine's.
"""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from forebay.aio.tasks import beside
from forebay.aio.time_limits import timeout
from forebay.engines.base import EngineLost
from forebay.engines.servers import guard as server_guard

START_LIMIT_S = 900.0
"""Large models take minutes to load and compile."""

_ASK_EVERY_S = 0.5
"""Seconds between two questions whether a starting server is ready: another's process has no event for it."""

_TAIL_LINES = 15
_TAIL_BYTES = 8192
"""How much of the end of a log an error quotes."""

_STOP_LIMIT_S = server_guard.GRACE_S + 5


@dataclass(eq=False, repr=False)
class LocalServer:
    """A server process on this machine.

    Invariants: at most one process at a time; when this object's process dies, however it dies, so does the
    server with all its children; a restart gets a port of its own.

    ::

        server = LocalServer(lambda port: ["python", "-m", "http.server", str(port)],
                             log=Path("server.log"))
        await server.start(is_ready)
        server.url  # 'http://127.0.0.1:41723'
    """

    command: Callable[[int], Sequence[str]]
    """Makes the command line for a port."""
    _: KW_ONLY
    log: Path
    """Its output; appended to by every start."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Variables that are added to this process's own, less what is None here."""
    start_limit_s: float = START_LIMIT_S
    """Seconds that it gets to be ready."""
    _process: asyncio.subprocess.Process | None = field(default=None, init=False)
    _port: int = field(default=0, init=False)

    @property
    def url(self) -> str:
        """The address at which it answers, from `start` on."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def is_running(self) -> bool:
        """Whether there is a process."""
        return self._process is not None and self._process.returncode is None

    async def start(self, is_ready: Callable[[], Awaitable[bool]]) -> None:
        """Start the process and wait until `is_ready`, which is asked again and again.

        Raises:
            EngineLost: it ended before, or took too long (then it is stopped).
        """
        await self.stop()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **self.environment}
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, server_guard.__file__, *self.command(self._port)),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={name: value for name, value in environment.items() if value is not None},
                # Ctrl-C in a terminal is for the run, which still needs its servers to finish.
                start_new_session=True,
            )
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            async with beside(self._process.wait()) as ended:
                while not await is_ready():
                    elapsed_s = loop.time() - began_s
                    if ended.done():
                        why = f"ended with exit code {ended.result()} after {elapsed_s:.0f} s"
                    elif elapsed_s > self.start_limit_s:
                        why = f"was not ready after {self.start_limit_s:.0f} s"
                    else:
                        await asyncio.wait([ended], timeout=_ASK_EVERY_S)
                        continue
                    raise EngineLost(f"the server {why}; the end of {self.log}:\n{log_tail(self.log)}")
        except BaseException:
            await self.stop()
            raise

    async def wait(self) -> int:
        """Wait for the process to end; its exit code."""
        assert self._process is not None, "wait before start"
        return await self._process.wait()

    async def stop(self) -> None:
        """End the process with all its children, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            # Processes that were forked from this one may hold the pipe open, too.
            process.terminate()
        try:
            async with timeout(_STOP_LIMIT_S):
                await process.wait()
        except TimeoutError:
            # The guard itself hangs.
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        finally:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                await process.stdin.wait_closed()


def log_tail(path: Path) -> str:
    """The last lines of a log."""
    with path.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = log.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-_TAIL_LINES:])
