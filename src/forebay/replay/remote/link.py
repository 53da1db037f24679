"""One connection of a client to a buffer server: calls and puts, as much at a time as the server allows.

::

    put --labeled, packed--> Call and its groups --> server
    ask -------------------> Call -----------------> server
    groups <--unpacked as they come-- Part, Part, Answer <--'

Calls that wait for answers are bounded: puts by their bytes, others by their number. Further calls wait here,
in order, before anything of them is sent.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Self, TypeVar

import msgspec

from forebay.aio.gate import Gate
from forebay.aio.time_limits import timeout
from forebay.io.address import Address, dial, prove
from forebay.io.channel import Channel
from forebay.io.link import Link
from forebay.io.messages import SILENCE_LIMIT_S, Answer, FrameError, Goodbye, Note, encode_value
from forebay.replay.arrival import label_group
from forebay.replay.format.encode import PackedGroup, pack_group
from forebay.replay.format.packed import unpack_group
from forebay.replay.remote import messages
from forebay.replay.remote.messages import ConnectionLost, Greeting, Hello, Reply
from forebay.replay.stores.slices import map_in_turns
from forebay.types import ROLLOUT_FIELDS, RolloutState

PACK_AT_ONCE = 8
"""Groups labeled and packed between two turns of the event loop; it takes one or two milliseconds."""

Kind = TypeVar("Kind", Greeting, Reply)


class BufferLink(Link):
    """A connection to a buffer server that is up until it is lost or closed; it does not come back."""

    def __init__(self, channel: Channel, greeting: Greeting, address: Address, limit_s: float) -> None:
        super().__init__(
            channel,
            f"the buffer server at {address}",
            limit_s=limit_s,
            other_limit_s=greeting.limit_s,
            errors=messages.ERRORS,
            loss=ConnectionLost,
        )
        self.address = str(address)
        self.instance = greeting.instance
        self.num_live = 0
        self.version = 0
        self.num_evicted: dict[str, int] = {}
        self._puts = Gate(messages.PUT_WINDOW_BYTES)
        self._put_turn = asyncio.Lock()
        self._calls = asyncio.Semaphore(messages.MAX_CALLS)

    @classmethod
    async def open(cls, address: Address, token: str | None, *, limit_s: float = SILENCE_LIMIT_S) -> Self:
        """Connect and be admitted, within `limit_s`; later a server that is silent for so long is given up.

        Raises:
            ConnectionLost: no process listens or answers there, it is no buffer server of this version, or it
                refuses.
        """
        channel: Channel | None = None
        try:
            async with timeout(limit_s):
                channel = Channel(await dial(address), max_frame_bytes=messages.MAX_FRAME_BYTES)
                greeting = await _expect(channel, Greeting)
                if greeting.protocol != messages.PROTOCOL or greeting.fields != ROLLOUT_FIELDS:
                    raise FrameError("it speaks for another version of forebay")
                if greeting.needs_token and token is None:
                    raise FrameError("it asks for a token")
                hello = Hello(messages.PROTOCOL, prove(token, greeting.nonce), limit_s)
                channel.post(Note(encode_value(hello)))
                # From here on the server's limit counts; `put` checks it as well.
                channel.max_frame_bytes = greeting.max_frame_bytes
                welcome = await _expect(channel, Reply)
        except BaseException as error:
            if channel is not None:
                channel.close()
            if not isinstance(error, OSError | FrameError):
                raise
            lost = f"the server at {address} did not let us in: {error}"
            # An errno is the network's own time-out, in connecting: its words say more than ours.
            if isinstance(error, TimeoutError) and error.errno is None:
                lost = f"the buffer server at {address} did not answer within {limit_s:g} s"
            elif channel is None:
                lost = f"no buffer server answers at {address}: {error}"
            raise ConnectionLost(lost) from None
        link = cls(channel, greeting, address, limit_s)
        link._note_reply(welcome)
        return link

    @property
    def may_be_replaced(self) -> bool:
        """Whether the connection is over by the other side's doing: another one may have more luck."""
        # Only a fault on this side is given a cause (`Link._lose`).
        return self.lost is not None and self.lost.__cause__ is None

    async def ask(self, method: str, arguments: Any) -> tuple[Any, list[list[RolloutState]]]:
        """The result of the method: a plain value, and groups.

        Raises:
            ConnectionLost: the connection broke before the answer came.
            ValueError, RuntimeError, ...: an error of the method.
        """
        async with self._calls:
            return await self.call(method, arguments)

    async def put(self, arguments: messages.PutArguments, groups: Sequence[Sequence[RolloutState]]) -> Any:
        """Put groups, which are labeled and packed here; the result.

        Raises:
            ConnectionLost: the connection broke before the answer came.
            ValueError, RuntimeError, ...: an error of the method, or of packing; or the groups are too large.
        """

        def pack(group: Sequence[RolloutState]) -> PackedGroup:
            return pack_group(label_group(group, arguments.arrival.model_step))

        # One put at a time: groups that are packed and wait for room are those of one.
        async with self._put_turn:
            packed = await map_in_turns(pack, groups, PACK_AT_ONCE)
            sizes = [num_bytes for group in packed for num_bytes in group.size]
            limit, num_bytes = self.channel.max_frame_bytes, sum(sizes)
            if num_bytes > limit:
                raise ValueError(
                    f"the groups have {num_bytes} bytes, and the server takes at most {limit} in one call; "
                    f"put fewer at once, or serve the buffer with larger max_frame_bytes"
                )
            # A window full of the smallest puts has as many as a client may have under way.
            amount = max(num_bytes, messages.PUT_WINDOW_BYTES // messages.MAX_PUTS)
            await self._puts.enter(amount)
        try:
            buffers = [buffer for group in packed for buffer in (group.head, *group.buffers)]
            return (await self.call("put_groups", arguments, buffers, sizes=sizes))[0]
        finally:
            self._puts.leave(amount)

    def read(self, answer: Answer) -> Any:
        """The result in an answer; how the buffer stands is noted."""
        try:
            reply = msgspec.msgpack.decode(answer.value, type=Reply)
        except msgspec.MsgspecError as error:
            raise FrameError(f"this is not an answer of a buffer server: {error}") from None
        self._note_reply(reply)
        return reply.result

    def take_in(self, buffers: list[Any]) -> list[Any]:
        """The groups of these buffers; ValueError if they cannot be read here."""
        # Not a FrameError, after which a take is repeated: the same group would come again, without end.
        return [unpack_group(*pair) for pair in zip(buffers[::2], buffers[1::2], strict=True)]

    def _note_reply(self, reply: Reply) -> None:
        self.num_live, self.version, self.num_evicted = reply.num_live, reply.version, reply.num_evicted


async def _expect(channel: Channel, kind: type[Kind]) -> Kind:
    received = await channel.receive()
    if received is None:
        raise FrameError("it ended the connection")
    message, _ = received
    if isinstance(message, Goodbye):
        raise FrameError(message.message)
    value = messages.read_note(message) if isinstance(message, Note) else message
    if not isinstance(value, kind):
        raise FrameError(f"it said {type(value).__name__} instead of {kind.__name__}")
    return value
