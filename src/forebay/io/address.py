"""Where a server listens, and which clients may connect.

::

    run/buffer.sock, unix:run/buffer.sock   a Unix socket: for the user who started the server, and root
    tcp://127.0.0.1:7077, localhost:7077    loopback: for everybody on the machine, unless there is a token
    tcp://0.0.0.0:7077                      elsewhere: refused without a token

The token itself is never sent: the client proves that it has it by a keyed hash of what the server drew at
random for this connection. The messages after it are not encrypted; between machines, tunnel it.
"""

import asyncio
import errno
import fcntl
import hashlib
import hmac
import ipaddress
import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from forebay.io.messages import SILENCE_LIMIT_S

MIN_TOKEN_LENGTH = 16
"""Characters; as many as keep a random one from being guessed."""

BACKLOG = 4096
"""Connections that wait to be accepted; the system lowers it to its own limit (``net.core.somaxconn``)."""

RETRY_S = 0.05
"""The pause between attempts at a Unix socket whose queue is full: no event tells of room in it."""

_TCP_LIMITS = {
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 4,
    "TCP_USER_TIMEOUT": int(1000 * SILENCE_LIMIT_S),
}
"""By name, because not every system has them all: a peer that acknowledges nothing for 30 s is gone."""

_HOST_AND_PORT = re.compile(r"(\[[^\]/]+\]|[^/:]+):(\d{1,5})")


@dataclass(frozen=True)
class Address:
    """A Unix socket's path, or a host and a port.

    >>> str(Address.parse("localhost:7077"))
    'tcp://localhost:7077'
    """

    path: Path | None = None
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str | os.PathLike[str]) -> "Address":
        """The address that `text` names; ValueError if it names none."""
        given = os.fspath(text)
        is_tcp = given.startswith("tcp://")
        found = _HOST_AND_PORT.fullmatch(given.removeprefix("tcp://"))
        if found and not given.startswith("unix:") and int(found[2]) < 2**16:
            return cls(host=found[1].strip("[]"), port=int(found[2]))
        # Anything else is a path, even one with a colon in it, unless it begins with tcp://.
        path = given.removeprefix("unix:")
        if is_tcp or not path or "://" in path:
            raise ValueError(f"an address is a path, for a Unix socket, or tcp://HOST:PORT, got {given!r}")
        return cls(path=Path(path))

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


def hide_password(url: str) -> str:
    """`url` as it may be shown."""
    scheme, found, rest = url.partition("://")
    if not found:
        return url
    rest = re.sub(r"([?&](?:ssl)?password=)[^&]*", r"\1***", rest)
    # At the last @: a password may have one in it.
    user, at, host = rest.rpartition("@")
    return f"{scheme}://{user.partition(':')[0]}@{host}" if at else f"{scheme}://{rest}"


def is_loopback(host: str) -> bool:
    """Whether `host`, an IP address or a name, is this machine's own, which no other can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def listen(address: Address, token: str | None = None) -> tuple[socket.socket, Address]:
    """A listening socket, and the address with the port that was given for port 0.

    Raises:
        ValueError: the address is not loopback and there is no token, or the token is too short.
        OSError: another server listens there, or the place cannot be used.
    """
    if token is not None and len(token) < MIN_TOKEN_LENGTH:
        raise ValueError(f"a token has at least {MIN_TOKEN_LENGTH} characters, this one has {len(token)}")
    try:
        if address.path is not None:
            with ExitStack() as held:
                await _lock(address.path.parent, held)
                return _listen_on_path(address.path, held), address
        family, place = (await _resolve(address))[0]
        # The resolved address is checked: the name may stand for any machine.
        if token is None and not ipaddress.ip_address(place[0]).is_loopback:
            raise ValueError(f"{address} can be reached from other machines: give a token, or listen on 127.0.0.1")
        sock = socket.create_server(place, family=family, backlog=BACKLOG)
    except OSError as error:
        raise OSError(f"cannot listen at {address}: {error}") from None
    sock.setblocking(False)
    return sock, Address(host=address.host, port=sock.getsockname()[1])


async def dial(address: Address) -> socket.socket:
    """A socket connected to `address`, as soon as there is room; OSError if no process listens there."""
    if address.path is not None:
        with _closed_on_error(socket.AF_UNIX) as sock:
            sock.setblocking(False)
            # Not `sock_connect`: it waits for a full queue as for a connection that is being made, which it is
            # not, and fails with EINVAL.
            while True:
                try:
                    sock.connect(str(address.path))
                    return sock
                except BlockingIOError:
                    await asyncio.sleep(RETRY_S)
    failed = OSError(f"the host of {address} has no address")
    for family, place in await _resolve(address):
        try:
            with _closed_on_error(family) as sock:
                sock.setblocking(False)
                await asyncio.get_running_loop().sock_connect(sock, place)
                tune(sock)
            return sock
        # The server may listen at the next one: localhost is ::1 and 127.0.0.1.
        except OSError as error:
            failed = error
    raise failed


def tune(sock: socket.socket) -> None:
    """Small messages at once; notice a machine that is gone."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _TCP_LIMITS.items():
            if (option := getattr(socket, name, None)) is not None:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)


def prove(token: str | None, nonce: bytes) -> bytes:
    """The proof that the caller knows the token; empty without one."""
    return b"" if token is None else hmac.digest(token.encode(), b"forebay-client" + nonce, hashlib.sha256)


def is_proof(proof: bytes, token: str, nonce: bytes) -> bool:
    """Whether `proof` is that of the token, in a time that says nothing of either."""
    return hmac.compare_digest(proof, prove(token, nonce))


@contextmanager
def _closed_on_error(family: int) -> Iterator[socket.socket]:
    """A new socket, which stays open when the block ends, and is closed if it fails or is cancelled."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        yield sock
    except BaseException:
        sock.close()
        raise


async def _resolve(address: Address) -> list[tuple[int, tuple[str, int]]]:
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise OSError(f"the host of {address} is not known: {error.strerror}") from None
    return [(family, (str(place[0]), int(place[1]))) for family, _, _, _, place in found]


async def _lock(folder: Path, held: ExitStack) -> None:
    """Lock `folder`, or go on without where it cannot be read, or be locked, as on NFS."""
    os.makedirs(folder, exist_ok=True)
    with suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        held.callback(os.close, opened)
        # Three seconds: a server holds it for milliseconds, and another program, maybe, for good.
        for _ in range(60):
            with suppress(BlockingIOError):
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            await asyncio.sleep(RETRY_S)


def _listen_on_path(path: Path, held: ExitStack) -> socket.socket:
    # In a locked folder: of two servers that start at once, the second is to find the first one listening.
    # The mode of the socket decides which users may connect, and it must be right from the first moment.
    held.callback(os.umask, os.umask(0o177))
    if path.exists():
        if not path.is_socket():
            raise FileExistsError(f"{str(path)!r} is there and is no socket; name another path")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            # One that hangs lets its queue fill, where a blocking connect would wait.
            probe.setblocking(False)
            if probe.connect_ex(str(path)) in (0, errno.EAGAIN):
                raise FileExistsError(f"{str(path)!r} is in use: another server listens there")
        # Left over by a server that was killed.
        path.unlink()
    with _closed_on_error(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        sock.listen(BACKLOG)
        sock.setblocking(False)
    return sock
