"""A worker's end of the hub's Unix socket.

::

    work     --Call: report-----> hub       waits for: its answer, or a sign of life every `limit_s`
    a thread --sign of life-----> hub       every `limit_s` / 4
"""

from __future__ import annotations

import sys
import time

import msgspec

from forebay.environments.workers.messages import Orders, Report
from forebay.io.address import dial_blocking
from forebay.io.channel import BlockingChannel
from forebay.io.heartbeat import BEATS, SILENCE_LIMIT_S
from forebay.io.messages import Alive, Answer, Call, Failure, Note, encode_value, error_of

WORK_LIMIT_S = 900.0
"""Without a report for so long an environment hangs: none takes a quarter of an hour for a few steps."""


class SocketLink:
    """A worker's connection to the hub, without an event loop.

    >>> with SocketLink(address, "worker-0") as link:
    ...     orders = link.report(Report("worker-0", version=-1))
    """

    def __init__(self, address: str, worker_uuid: str = "", *, limit_s: float = SILENCE_LIMIT_S) -> None:
        self._limit_s = limit_s
        sock = dial_blocking(address, limit_s)
        self._channel = BlockingChannel(sock, limit_s=limit_s, max_frame_bytes=sys.maxsize)
        self._working_since: float | None = time.monotonic()
        self._channel.send(Note(encode_value(worker_uuid)))
        self._channel.beat(Alive(), limit_s / BEATS, self._lives)

    def __enter__(self) -> SocketLink:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def report(self, report: Report) -> Orders:
        """See `Link`."""
        self._working_since = None
        try:
            self._channel.send(Call(0, "report", encode_value(report)))
            while isinstance((received := self._channel.receive())[0], Alive):
                pass
        except TimeoutError:
            raise EOFError(f"the trainer is gone: it has been silent for {self._limit_s:g} s") from None
        except (ConnectionError, EOFError) as error:
            raise EOFError(f"the trainer is gone: {error}") from error
        finally:
            self._working_since = time.monotonic()
        message, weights = received
        if isinstance(message, Failure):
            raise error_of(message)
        assert isinstance(message, Answer)
        orders = msgspec.msgpack.decode(message.value, type=Orders)
        if weights:
            orders.weights = weights[0].tobytes()
        return orders

    def _lives(self) -> bool:
        """False while the environment has not come back for so long that it hangs."""
        since = self._working_since
        return since is None or time.monotonic() - since < WORK_LIMIT_S
