"""A process that sends buckets to the workers of one server, wherever they are.

::

    place() --starts--> process: listens        the server is told the place by HTTP, and its workers join
    sending(bucket) --path--> process: broadcast          the server is told by HTTP what comes
                    <---------'                           lost: kill()

It reads the memory that ranks fill, as servers of this machine do. In a process of its own a broadcast that
hangs can be ended, whatever library it hangs in. `forebay_vllm/forebay_group.py` is the program.
"""

import asyncio
import contextlib
import json
import logging
import secrets
import sys
from asyncio.subprocess import PIPE, create_subprocess_exec
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from forebay.aio.time_limits import timeout
from forebay.engines.base import EngineLost
from forebay.engines.servers.link import CONTROL_LIMIT_S, ServerLink

if TYPE_CHECKING:
    from forebay.engines.weights.buckets import Bucket

logger = logging.getLogger(__name__)

PROGRAM = Path(__file__).parents[3] / "forebay_vllm" / "forebay_group.py"


class Sender:
    """The sender of one server; without a device it does nothing, for one that maps the memory itself.

    Invariants: at most one process at a time, which is the same from one hand-over to the next until the server is
    lost.

    ::

        sender = Sender(link, "cpu")
        await link.do(link.dialect.begin(await sender.place()))
        async with sender.sending(bucket):
            await link.do([link.dialect.bucket(bucket)])
    """

    def __init__(self, link: ServerLink, device: str | None) -> None:
        """`device`: ``cpu`` sends by gloo, ``cuda:0`` and the like by NCCL to a server on such a device, or by gloo
        after that has failed."""
        self.link, self.device = link, device
        self.is_joined = False
        """Whether the server's workers have joined the process; kept by who uses it, and False once it is killed."""
        self.turn = asyncio.Lock()
        """For who uses it for one transfer after the other."""
        self._process: Any = None
        self._place: dict[str, Any] = {}
        self._has_sent = False

    async def place(self) -> dict[str, Any]:
        """The place of the process, which is started if there is none: the server must be told it.

        Raises:
            EngineLost: it does not start, or the server does not say how many workers it has.
        """
        link = self.link
        if self.device is not None and not self._place:
            if self._process is not None and not self._has_sent and self.device != "cpu":
                logger.warning("no weights got to %s by NCCL: they are sent by gloo from now on", link)
                self.device = "cpu"
            elif self.device != "cpu" and not self.device.startswith(await link.device()):
                self.device = "cpu"
            await self.close()
            workers = (await link.do([link.dialect.workers]))["world_size"]
            host, token = urlsplit(str(link)).hostname, secrets.token_hex(16)
            command = map(str, (sys.executable, PROGRAM, host, workers, self.device, token, CONTROL_LIMIT_S))
            self._process = await create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, start_new_session=True)
            self._place = await self._answer()
        return self._place

    @contextlib.asynccontextmanager
    async def sending(self, bucket: "Bucket") -> AsyncIterator[None]:
        """Send it while the server is told to take it; when this ends, the workers have it.

        Raises:
            EngineLost: they did not take it in time, or the process has ended.
        """
        if self._place:
            self._process.stdin.write(json.dumps([bucket.handle["path"], bucket.layout[-1][-1]]).encode() + b"\n")
        yield
        if self._place:
            await self._answer()
            self._has_sent = True

    async def _answer(self) -> dict[str, Any]:
        name = f"{self.link}: the process that sends it weights"
        async with timeout(CONTROL_LIMIT_S, lambda: EngineLost(f"{name} gave no answer within {CONTROL_LIMIT_S:g} s")):
            answer: dict[str, Any] = json.loads(await self._process.stdout.readline() or '{"error": "it has ended"}')
        if "error" in answer:
            raise EngineLost(f"{name}: {answer['error']}")
        return answer

    def kill(self) -> None:
        """End the process, whatever it does: the server is lost, and its workers' group with it."""
        self._place, self.is_joined = {}, False
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def close(self) -> None:
        """End the process, and wait for that."""
        self.kill()
        if self._process is not None:
            await self._process.wait()
