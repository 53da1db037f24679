"""Two hosts on one machine: network namespaces, and a link that loses packets, is slow or is cut."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator

import pytest

_CLONE_NEWNET = 0x40000000
_numbers = itertools.count()


def run(*command: str, text: str | None = None) -> str:
    """The output of a command, which has to succeed."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


class Hosts:
    """Hosts ``a`` and ``b``, each with an address of its own and its own loopback."""

    def __init__(self) -> None:
        name = f"fb{os.getpid()}x{next(_numbers)}"
        self.spaces = {"a": f"{name}a", "b": f"{name}b"}
        self.addresses = {"a": "10.77.0.1", "b": "10.77.0.2"}
        for space in self.spaces.values():
            run("ip", "netns", "add", space)
            self._ip(space, "link", "set", "lo", "up")
        here, there = self.spaces.values()
        # The names of the two ends are at most 15 characters long.
        self._ip(here, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", there)
        for host, space in self.spaces.items():
            self._ip(space, "addr", "add", f"{self.addresses[host]}/24", "dev", "eth0")
            self._ip(space, "link", "set", "eth0", "up")

    @staticmethod
    def _ip(space: str, *words: str) -> None:
        run("ip", "-n", space, *words)

    def command(self, host: str, *words: str) -> list[str]:
        """The command line that runs there."""
        return ["ip", "netns", "exec", self.spaces[host], *words]

    def lose(self, percent: int) -> None:
        """Drop so many of 100 packets that arrive at either host; 0: none, 100: it falls silent."""
        table = "add table inet link\ndelete table inet link\nadd table inet link\n"
        chain = "add chain inet link in { type filter hook input priority 0; }\n"
        share = f"numgen random mod 100 < {percent}" if percent < 100 else ""
        rule = f"add rule inet link in iifname eth0 {share} drop\n" * (percent > 0)
        for host in self.spaces:
            run(*self.command(host, "nft", "-f", "-"), text=table + chain + rule)

    def cut(self) -> None:
        """Take the cable out of host ``a``."""
        self._ip(self.spaces["a"], "link", "set", "eth0", "down")

    def heal(self) -> None:
        """Put it back."""
        self._ip(self.spaces["a"], "link", "set", "eth0", "up")

    @contextlib.contextmanager
    def inside(self, host: str) -> Iterator[None]:
        """Sockets that this thread makes in the block are those of `host`."""
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        other = os.open(f"/run/netns/{self.spaces[host]}", os.O_RDONLY)
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            assert libc.setns(other, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
            yield
        finally:
            assert libc.setns(own, _CLONE_NEWNET) == 0
            os.close(other)
            os.close(own)

    def close(self) -> None:
        """Remove both, and the link."""
        for space in self.spaces.values():
            subprocess.run(["ip", "netns", "del", space], capture_output=True, timeout=300, check=False)


@pytest.fixture(name="hosts")
def two_hosts() -> Iterator[Hosts]:
    """Two hosts; the test is skipped where none can be made."""
    missing = [name for name in ("ip", "nft") if shutil.which(name) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"network namespaces need root and ip and nft; missing: {missing or 'root'}")
    try:
        made = Hosts()
    except AssertionError as error:
        pytest.skip(f"no network namespaces here: {error}")
    yield made
    made.close()


@contextlib.asynccontextmanager
async def delayed(host: str, port: int, delay_s: float) -> AsyncIterator[int]:
    """A port of this host's loopback whose bytes arrive at `host`, and come back, so much later."""

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop, late = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes]]()

        async def write() -> None:
            while True:
                due_s, data = await late.get()
                await asyncio.sleep(due_s - loop.time())
                if not data:
                    break
                writer.write(data)
                await writer.drain()
            writer.close()

        writing = asyncio.create_task(write())
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(2**16):
                late.put_nowait((loop.time() + delay_s, data))
        late.put_nowait((loop.time() + delay_s, b""))
        with contextlib.suppress(ConnectionError):
            await writing

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(host, port)
        await asyncio.gather(pass_on(reader, there[1]), pass_on(there[0], writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
