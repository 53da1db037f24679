"""A worker's end of the hub's Unix socket."""

from __future__ import annotations

import socket

import msgspec

from forebay.environments.messages import Orders, Report
from forebay.framing import LENGTH, framed


class SocketLink:
    """A worker's connection to the hub, without an event loop.

    >>> with SocketLink(address) as link:
    ...     orders = link.report(Report("worker-0", version=-1))
    """

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(address)
        self._file = self._socket.makefile("rb")

    def __enter__(self) -> SocketLink:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._socket.close()

    def report(self, report: Report) -> Orders:
        """See `Link`."""
        message = msgspec.msgpack.encode(report)
        try:
            self._socket.sendall(framed(message))
            (length,) = LENGTH.unpack(self._read(LENGTH.size))
            return msgspec.msgpack.decode(self._read(length), type=Orders)
        except ConnectionError as error:
            raise EOFError(f"the trainer is gone: {error}") from error

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise EOFError("the trainer is gone: it closed the connection")
        return data
