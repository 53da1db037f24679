"""The child's side of a process engine: calls that come over a socket, for the engines in this process.

::

    ProcessEngine --call--> HostSession --> EnginePool --> engines
                                 '--> WeightInbox --'
"""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from forebay.config import Component, StrictModel
from forebay.engines.base import Completion, GenerateRequest
from forebay.engines.pool import EnginePool
from forebay.engines.weights.between_processes import WeightInbox
from forebay.io.channel import Channel
from forebay.io.link import Result, Session
from forebay.io.messages import Call, Note, encode_value
from forebay.models import AttentionKey, ModelConfig, Precision

T = TypeVar("T")

PROGRESS_EVERY_S = 0.5
"""Reports are for people and for noticing stalls, which take minutes."""

INLINE_BYTES = 4 << 10
"""Arrays up to so many bytes are copied into the message: a thousand tokens."""

MAX_HEADER_BYTES = 64 << 20
"""The places of weights take some 100 bytes for each parameter, and a model may have many thousands."""

PARENT_LIMIT_S = 7 * 86_400.0
"""A week without a sign of life: a stopped parent may go on, and the end of a parent closes the socket."""


class HostSession(Session):
    """Answers the calls of the parent, which come over a socket, one after the other or many at once.

    Beside them it says how many tokens running requests have, twice a second while something runs.

    ::

        await HostSession(EnginePool(engines), Channel(sock), silence_limit_s=120.0).run()
    """

    def __init__(self, pool: EnginePool, channel: Channel, *, silence_limit_s: float) -> None:
        """`silence_limit_s` is how long the parent waits for a sign of life."""
        super().__init__(channel, limit_s=PARENT_LIMIT_S, other_limit_s=silence_limit_s)
        self._pool = pool
        self._inbox = WeightInbox(pool)
        self._timer: asyncio.TimerHandle | None = None

    async def handle(self, call: Call, buffers: list[Any] | None) -> Result:
        """The result of a call of `ProcessEngine`."""
        if call.method == "generate":
            return await self._generate(call.arguments, buffers or [])
        taking: dict[str, Any] = {"load_weights": self._inbox.handle, "abort": self._pool.abort}
        if take := taking.get(call.method):
            return await take(msgspec.msgpack.decode(call.arguments)), ()
        assert call.method in ("pause_generation", "continue_generation", "health", "close"), call.method
        return await getattr(self._pool, call.method)(), ()

    async def _generate(self, asked: msgspec.Raw, buffers: list[Any]) -> Result:
        # Reports end with the last request, and begin again here.
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PROGRESS_EVERY_S, self._report)
        completion = await self._pool.complete(from_plain(asked, buffers, GenerateRequest))
        # For the caller the engine is this process, which is not lost, even if an engine in it is.
        return as_plain(replace(completion, lost=False))

    def _report(self) -> None:
        made = self._pool.progress()
        self.channel.post(Note(encode_value(made)))
        later = asyncio.get_running_loop().call_later
        self._timer = later(PROGRESS_EVERY_S, self._report) if made else None


def as_plain(value: GenerateRequest | Completion) -> tuple[msgspec.Raw, list[bytes]]:
    """A value for a message, and the bytes of its large arrays, each of which is its dtype and shape there.

    Small arrays stay in the message, where they cost a tenth of a buffer of their own, and so do images, which
    are files of some kilobytes to megabytes.
    """
    buffers: list[bytes] = []

    def plain(part: Any) -> Any:
        if isinstance(part, np.generic):
            return part.item()
        if part.nbytes <= INLINE_BYTES:
            return [part.dtype.str, part.shape, part.tobytes()]
        buffers.append(part.tobytes())
        return [part.dtype.str, part.shape]

    return msgspec.Raw(msgspec.msgpack.encode(value, enc_hook=plain)), buffers


def from_plain(value: msgspec.Raw, buffers: Iterable[NDArray[Any]], kind: type[T]) -> T:
    """The request or completion that `as_plain` made these of."""
    # Fields are read in the order in which they were written, so each array finds its own bytes.
    left = iter(buffers)

    def array(_: type, part: Any) -> Any:
        dtype, shape, *inline = part
        # Writable, as an array of a buffer is.
        data = np.frombuffer(bytearray(inline[0]), np.uint8) if inline else next(left)
        return data.view(dtype).reshape(shape)

    return msgspec.msgpack.decode(value, type=kind, dec_hook=array)


class EngineRecipe(StrictModel):
    """All that a process needs to make its engine, as plain data: its command line has it as JSON."""

    model_folder: Path
    model: ModelConfig
    engine: Component
    dtype: Precision = "float32"
    """Number type of the weights that the engine holds."""
    attention: AttentionKey = "auto"
    device: str = "cpu"
    threads: int = 1
    """CPU threads of torch in the process."""
