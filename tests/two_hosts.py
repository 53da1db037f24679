"""Two hosts on one machine: network namespaces, and a link that loses packets, is slow or is cut.

::

    host a: eth0 ======= a pair that the kernel makes ======= eth0 :host b
    host a: eth0 = packets --> Line: a rate, a queue, a delay --> packets = eth0 :host b    (Hosts(line))
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import itertools
import os
import select
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator

import pytest

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_numbers = itertools.count()


def run(*command: str, text: str | None = None) -> str:
    """The output of a command, which has to succeed."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


class Line(threading.Thread):
    """A link whose packets are sent at a rate, from a queue that is full some time, and arrive later.

    Not every kernel has a queue that delays, so the packets of both ends go through this thread.
    """

    def __init__(self, *, delay_s: float, bits_per_s: float, queue_s: float = 0.2) -> None:
        super().__init__(daemon=True)
        self.delay_s, self.bits_per_s, self.queue_s = delay_s, bits_per_s, queue_s
        self.num_bytes = 0
        """That have gone in at either end."""
        self._ends: list[int] = []
        self._told, self._tell = os.pipe()

    def end(self) -> None:
        """Make one of the two ends, ``eth0`` of the host that this thread is in."""
        self._ends.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
        fcntl.ioctl(self._ends[-1], _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TUN | _IFF_NO_PI))

    def run(self) -> None:
        """Carry packets until it is closed."""
        here, there = self._ends
        ways = {here: there, there: here}
        under_way: dict[int, deque[tuple[float, bytes]]] = {end: deque() for end in ways}
        sent_s = dict.fromkeys(ways, 0.0)
        while True:
            due_s = [late[0][0] for late in under_way.values() if late]
            wait_s = max(0.0, min(due_s) - time.monotonic()) if due_s else None
            ready, _, _ = select.select([self._told, *ways], [], [], wait_s)
            if self._told in ready:
                return
            now_s = time.monotonic()
            for end in ways.keys() & set(ready):
                # An interface that is down has nothing, and takes nothing.
                with contextlib.suppress(OSError):
                    packet = os.read(end, 2**16)
                    self.num_bytes += len(packet)
                    at_s = max(now_s, sent_s[end]) + 8 * len(packet) / self.bits_per_s
                    if at_s < now_s + self.queue_s:
                        sent_s[end] = at_s
                        under_way[end].append((at_s + self.delay_s, packet))
            for end, late in under_way.items():
                while late and late[0][0] <= now_s:
                    with contextlib.suppress(OSError):
                        os.write(ways[end], late.popleft()[1])

    def close(self) -> None:
        """Carry nothing more."""
        os.write(self._tell, b".")
        self.join()
        for number in (*self._ends, self._told, self._tell):
            os.close(number)


class Hosts:
    """Hosts ``a`` and ``b``, each with an address of its own and its own loopback; `line`: what is between them."""

    def __init__(self, line: Line | None = None) -> None:
        name = f"fb{os.getpid()}x{next(_numbers)}"
        self.spaces = {"a": f"{name}a", "b": f"{name}b"}
        self.addresses = {"a": "10.77.0.1", "b": "10.77.0.2"}
        for space in self.spaces.values():
            run("ip", "netns", "add", space)
            self._ip(space, "link", "set", "lo", "up")
        here, there = self.spaces.values()
        self._line = line
        if line is not None:
            for host in self.spaces:
                with self.inside(host):
                    line.end()
            line.start()
        else:
            self._ip(here, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", there)
        for host, space in self.spaces.items():
            self._ip(space, "addr", "add", f"{self.addresses[host]}/24", "dev", "eth0")
            self._ip(space, "link", "set", "eth0", "up")
            # A host finds out by it which address is its own.
            self._ip(space, "route", "add", "default", "dev", "eth0")

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

    def end(self, host: str) -> None:
        """Kill what runs there."""
        while pids := run("ip", "netns", "pids", self.spaces[host]).split():
            for pid in map(int, pids):
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill what runs on them, and remove both, and the link."""
        for host, space in self.spaces.items():
            self.end(host)
            subprocess.run(["ip", "netns", "del", space], capture_output=True, timeout=300, check=False)
        if self._line is not None:
            self._line.close()


def make_hosts(line: Line | None = None) -> Hosts:
    """Two hosts; the test is skipped where none can be made."""
    missing = [name for name in ("ip", "nft") if shutil.which(name) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"network namespaces need root and ip and nft; missing: {missing or 'root'}")
    try:
        return Hosts(line)
    except (AssertionError, OSError) as error:
        pytest.skip(f"no network namespaces here: {error}")


@pytest.fixture(name="hosts")
def two_hosts() -> Iterator[Hosts]:
    """Those of `make_hosts`."""
    made = make_hosts()
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
