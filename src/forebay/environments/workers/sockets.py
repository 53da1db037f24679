"""A worker's end of the hub's Unix socket.

::

    work     --report---------------> hub       waits for: orders, or a sign of life every `limit_s`
    a thread --sign of life---------> hub       every `limit_s` / 4
"""

from __future__ import annotations

import socket
import struct
import threading
import time

import msgspec

from forebay.environments.workers.messages import Orders, Report
from forebay.io.framing import LENGTH, framed
from forebay.io.heartbeat import BEATS, SILENCE_LIMIT_S

WORK_LIMIT_S = 900.0
"""Without a report for so long an environment hangs: none takes a quarter of an hour for a few steps."""


class SocketLink:
    """A worker's connection to the hub, without an event loop.

    >>> with SocketLink(address, "worker-0") as link:
    ...     orders = link.report(Report("worker-0", version=-1))
    """

    def __init__(self, address: str, worker_uuid: str = "", *, limit_s: float = SILENCE_LIMIT_S) -> None:
        self._limit_s = limit_s
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # For connecting alone: with a timeout of Python's, a full queue would be an error at once.
        seconds, rest = divmod(limit_s, 1)
        self._socket.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(rest * 1e6))
        )
        self._socket.connect(address)
        self._socket.settimeout(limit_s)
        self._file = self._socket.makefile("rb")
        self._sending = threading.Lock()
        self._ended = threading.Event()
        self._working_since: float | None = time.monotonic()
        self._send(worker_uuid.encode())
        threading.Thread(target=self._beat, name="signs of life", daemon=True).start()

    def __enter__(self) -> SocketLink:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._file.close()
        self._socket.close()

    def report(self, report: Report) -> Orders:
        """See `Link`."""
        self._working_since = None
        try:
            self._send(msgspec.msgpack.encode(report))
            while not (message := self._receive()):
                pass
            return msgspec.msgpack.decode(message, type=Orders)
        except TimeoutError:
            raise EOFError(f"the trainer is gone: it has been silent for {self._limit_s:g} s") from None
        except ConnectionError as error:
            raise EOFError(f"the trainer is gone: {error}") from error
        finally:
            self._working_since = time.monotonic()

    def _beat(self) -> None:
        while not self._ended.wait(self._limit_s / BEATS):
            since = self._working_since
            if since is None or time.monotonic() - since < WORK_LIMIT_S:
                try:
                    self._send(b"")
                except OSError:
                    # Whoever reports is told.
                    return

    def _send(self, message: bytes) -> None:
        with self._sending:
            self._socket.sendall(framed(message))

    def _receive(self) -> bytes:
        (length,) = LENGTH.unpack(self._read(LENGTH.size))
        return self._read(length)

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise EOFError("the trainer is gone: it closed the connection")
        return data
