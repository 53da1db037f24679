"""A process that sends buckets to the workers of one server, wherever they are.

::

    start() --> process --its place--> the server is told it by HTTP, and its workers join
    send(bucket) --path--> process: broadcast     the server is told what comes
    sent()       <---------'                                                      kill(), close()

It reads the memory that ranks fill, as servers of this machine do. In a process of its own a broadcast that
hangs can be ended, whatever library it hangs in. `vllm_plugin.forebay_group` is the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from forebay.aio.time_limits import timeout
from forebay.engines.base import EngineLost
from forebay.engines.servers.link import CONTROL_LIMIT_S

if TYPE_CHECKING:
    from forebay.engines.weights.buckets import Bucket

PROGRAM = Path(__file__).with_name("vllm_plugin") / "forebay_group.py"


class Sender:
    """The sender of one server; one that failed or was killed is of no more use.

    ::

        sender = Sender("http://gpu7:8000", num_workers=2, device="cpu")
        await sender.start()
        sender.send(bucket)
        await sender.sent()
    """

    def __init__(self, url: str, *, num_workers: int, device: str) -> None:
        """`device`: ``cuda`` or one of these sends by NCCL, ``cpu`` by gloo."""
        self._url = url
        host, token = str(urlsplit(url).hostname), secrets.token_hex(16)
        self._command = [sys.executable, str(PROGRAM), host, str(num_workers), device, token, str(CONTROL_LIMIT_S)]
        self._process: Process | None = None
        self.place: dict[str, Any] = {}
        """What the server must be told to join."""
        self.is_usable, self.has_sent = True, False

    async def start(self) -> None:
        """Start the process; raises as `sent`."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, start_new_session=True
        )
        self.place = await self._answer()

    def send(self, bucket: Bucket) -> None:
        """Begin to send; the server must be told, too."""
        assert self._process is not None
        assert self._process.stdin is not None
        line = json.dumps([bucket.handle["path"], bucket.layout[-1][-1]])
        self._process.stdin.write(line.encode() + b"\n")

    async def sent(self) -> None:
        """Return once the workers have all of it.

        Raises:
            EngineLost: they did not take it in time, or the process has ended.
        """
        await self._answer()
        self.has_sent = True

    async def _answer(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = b""
        with contextlib.suppress(TimeoutError):
            async with timeout(CONTROL_LIMIT_S):
                line = await self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "it ended, or gave no answer in time"}
        if "error" in answer:
            raise EngineLost(f"{self._url}: the process that sends it weights: {answer['error']}")
        return dict(answer)

    def kill(self) -> None:
        """End it, whatever it does."""
        self.is_usable = False
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def close(self) -> None:
        """End it, and wait for that."""
        self.kill()
        if self._process is not None:
            await self._process.wait()
