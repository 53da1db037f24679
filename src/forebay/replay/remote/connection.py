"""One client of a buffer server, from its first words to its last.

::

    accepted -> greeting -> proof -> reading --Call--> a task each --> Part ..., Answer | Failure
                              |         |-- Cancel --> that task is cancelled, if it can be undone
                              |         |-- Note ----> the take of this key has arrived
                              v         v
                           refused    ended: tasks cancelled; groups taken and not kept are live again

A client that is silent for too long is given up as one that broke. The groups it had taken and not confirmed
are live again: should it come back, its confirmation is refused and it takes once more.

A call that waits (for room, for a change) holds up no other call. Groups go out one call after another, and
the next call that takes begins when those of the last one are sent: a client that does not read has one batch
on its way, and no more. Nothing here waits for another connection.
"""

import asyncio
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from forebay.aio.tasks import finish
from forebay.aio.time_limits import timeout
from forebay.io.address import is_proof
from forebay.io.channel import STALL_S, Buffer, Channel
from forebay.io.link import Result, Session
from forebay.io.messages import Call, FrameError, Goodbye, Message, Note, Part, encode_value
from forebay.replay.format.encode import PackedGroup
from forebay.replay.format.packed import hold_packed
from forebay.replay.remote import messages
from forebay.replay.remote.calls import Served
from forebay.replay.remote.handover import Handover
from forebay.replay.remote.messages import ServerClosed, ServerFull
from forebay.replay.stores.slices import map_in_turns

HELLO_S = 10.0
"""The time for a client's first words; any client needs milliseconds."""

MIN_LIMIT_S = 0.01
"""The least that a client may ask for: signs of life more often would be all that the server does."""

HELLO_BYTES = 4096
"""A client that has not shown its token makes the server read no more than this."""


class ClientConnection(Session):
    """Serves one client until it leaves, breaks the rules, or the server closes."""

    def __init__(self, sock: socket.socket, served: Served, *, token: str | None) -> None:
        channel = Channel(sock, max_frame_bytes=served.limits.max_frame_bytes)
        super().__init__(channel, limit_s=served.limits.client_limit_s)
        self.reserve = self._reserve
        self._served, self._token = served, token
        self._waiting: set[asyncio.Task[Any]] = set()
        """The calls that the server ends when it closes."""
        self._handovers: dict[bytes, tuple[Handover, asyncio.TimerHandle]] = {}
        self._output = asyncio.Lock()
        self._put_bytes: dict[int, int] = {}
        """The bytes of each put by the number of its call, as they come, until it is answered."""
        self._num_put_bytes = 0
        self._is_closing = False
        self._settled = asyncio.Event()

    async def run(self) -> None:
        """Serve; when it returns, the groups that the client took and did not confirm are live again."""
        try:
            await super().run()
        finally:
            for number in self._put_bytes.keys() - self.calls.keys():
                self._forget(number)
            for key in list(self._handovers):
                # Groups that were kept are not given back: the client asks about them on its next connection.
                await self._served.release(key, self._settle(key), unless_kept=True)

    async def close(self) -> None:
        """End the calls that wait, let those that run come to their end, and say goodbye."""
        self._is_closing = True
        for task in self._waiting:
            task.cancel()
        # A client that has received groups still has to confirm them on this connection.
        while self.calls or not all(handover.is_kept for handover, _ in self._handovers.values()):
            self._settled.clear()
            await self._settled.wait()
        self.refuse("the server is closing")
        self.channel.end()

    async def admit(self) -> bool:
        """Greet the client, and see its proof of the token."""
        nonce = secrets.token_bytes(32)
        limits, channel, token = self._served.limits, self.channel, self._token
        greeting = messages.Greeting(
            messages.PROTOCOL,
            self._served.instance,
            nonce,
            token is not None,
            limits.max_frame_bytes,
            limits.client_limit_s,
        )
        channel.post(Note(encode_value(greeting)))
        allowed = channel.max_header_bytes, channel.max_frame_bytes
        channel.max_header_bytes, channel.max_frame_bytes = HELLO_BYTES, 0
        async with timeout(HELLO_S):
            received = await channel.receive()
        if received is None:
            return False
        message = received[0]
        hello = messages.read_note(message) if isinstance(message, Note) else None
        if not isinstance(hello, messages.Hello) or hello.protocol != messages.PROTOCOL:
            raise FrameError(f"the first message is a hello of protocol {messages.PROTOCOL}")
        if token is not None and not is_proof(hello.proof, token, nonce):
            raise FrameError("the token is missing or wrong")
        channel.max_header_bytes, channel.max_frame_bytes = allowed
        # Not `max`, which may return a NaN that the client sent.
        self.other_limit_s = hello.limit_s if hello.limit_s > MIN_LIMIT_S else MIN_LIMIT_S
        # The welcome tells how many groups are live, and other processes may have changed that.
        await self._served.room.measure()
        channel.post(Note(encode_value(self._reply(None))))
        return True

    def refuse(self, reason: str) -> None:
        """Say why the connection ends."""
        self.channel.post(Goodbye(reason if self._is_closing else f"refused: {reason}"))

    # Messages

    def dispatch(self, message: Message, buffers: list[Any] | None) -> None:
        """Do what a message asks for; FrameError if it may not come now."""
        if isinstance(message, Note):
            value = messages.read_note(message)
            if not isinstance(value, messages.Key):
                raise FrameError("there is one hello only")
            self._settle(value.key)
            self._served.takes.pop(value.key, None)
        else:
            if isinstance(message, Call) and len(self.calls) >= SLACK * (messages.MAX_CALLS + messages.MAX_PUTS):
                raise FrameError(f"{len(self.calls)} calls wait for their answers already")
            super().dispatch(message, buffers)

    def may_end(self, number: int) -> bool:
        """Whether the call can still be undone."""
        task = self.calls[number]
        return task in self._waiting or task.get_name() not in LASTING

    def ended(self, number: int) -> None:
        """The call is answered."""
        self._forget(number)
        self._settled.set()

    # Groups that come

    def _reserve(self, message: Message, num_bytes: int) -> bool:
        """Whether there is room for the next bytes of groups of this message; if so, they are counted.

        One client alone may have as much as the limits of a connection allow it.
        """
        if not isinstance(message, Call) or message.method != "put_groups":
            raise FrameError(f"{getattr(message, 'method', type(message).__name__)} brings no groups")
        served, number = self._served, message.number
        before = self._put_bytes.get(number, 0)
        others = self._num_put_bytes - before
        if others and self._num_put_bytes + num_bytes > SLACK * messages.PUT_WINDOW_BYTES:
            raise FrameError(f"puts of {others} bytes wait for their answers already")
        # A put beyond the bound of the server has to get in while no other client's is on its way.
        is_alone = served.put_bytes == self._num_put_bytes
        if not is_alone and served.put_bytes + num_bytes > served.limits.max_put_bytes:
            self._forget(number)
            return False
        self._put_bytes[number] = before + num_bytes
        self._num_put_bytes += num_bytes
        served.put_bytes += num_bytes
        return True

    def _forget(self, number: int) -> None:
        num_bytes = self._put_bytes.pop(number, 0)
        self._num_put_bytes -= num_bytes
        self._served.put_bytes -= num_bytes

    # Calls

    async def handle(self, call: Call, buffers: list[Any] | None) -> Result:
        """The value of the answer; groups that are taken were sent in parts before it."""
        if (kind := messages.ARGUMENTS.get(call.method)) is None:
            raise ValueError(f"the server has no method {call.method!r}; is it of another version?")
        try:
            arguments = msgspec.msgpack.decode(call.arguments, type=kind)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ValueError(f"{call.method}: {error}") from None
        # `keep` and `release` finish what was begun before.
        if self._is_closing and call.method not in ("keep", "release"):
            raise ServerClosed(NOT_HAPPENED)
        value: Any = None
        try:
            match call.method:
                case "put_groups":
                    value = await self._put(arguments, buffers)
                case "take_batch":
                    value = await self._hand_over(call, arguments)
                case "keep":
                    await self._keep(arguments.key)
                case "release":
                    await self._served.release(arguments.key, self._settle(arguments.key))
                case "wait_for_change":
                    with self._waits():
                        value = await self._served.call(call.method, arguments)
                case _:
                    value = await self._served.call(call.method, arguments)
        except asyncio.CancelledError:
            if self._is_closing:
                raise ServerClosed(NOT_HAPPENED) from None
            raise
        return self._reply(value), ()

    async def _put(self, arguments: messages.PutArguments, buffers: list[Any] | None) -> Any:
        if buffers is None:
            raise ServerFull(
                f"puts of {self._served.put_bytes} bytes wait to be stored, and the server takes "
                f"{self._served.limits.max_put_bytes} (max_put_bytes of serve)"
            )
        if not buffers:
            raise FrameError("put_groups does not bring 0 groups")
        with self._waits():
            try:
                pairs = [*zip(buffers[::2], buffers[1::2], strict=True)]
                groups = await map_in_turns(lambda pair: hold_packed(*pair), pairs, CHECKED_AT_ONCE)
            except ValueError as error:
                raise FrameError(str(error)) from None
            result = await self._served.admit(arguments, groups)
        return await self._served.put(arguments, groups) if result is None else result

    async def _hand_over(self, call: Call, arguments: messages.TakeArguments) -> dict[str, int]:
        """Take and send, when all groups of earlier calls are sent; the number of groups by task."""
        with self._waits():
            await self._output.acquire()
        try:
            handover = await self._served.take(arguments)
            groups = [group for of_task in handover.groups.values() for group in of_task]
            try:
                await self._send_groups(call.number, groups)
            except BaseException:
                await finish(self._served.release(arguments.key, handover))
                raise
            if groups:
                # A client that does not confirm is stuck; others should have the groups.
                timer = asyncio.get_running_loop().call_later(STALL_S, self.channel.end)
                self._handovers[arguments.key] = (handover, timer)
                self._served.takes[arguments.key] = handover
            return {task: len(of_task) for task, of_task in handover.groups.items()}
        finally:
            self._output.release()

    async def _send_groups(self, number: int, groups: list[PackedGroup]) -> None:
        sizes: list[int] = []
        buffers: list[Buffer] = []
        num_bytes = 0
        for place, group in enumerate(groups, start=1):
            sizes += group.size
            buffers += (group.head, *group.buffers)
            num_bytes += sum(group.size)
            if num_bytes >= PART_BYTES or place == len(groups):
                await self.channel.send(Part(number, sizes), buffers)
                sizes, buffers, num_bytes = [], [], 0

    async def _keep(self, key: bytes) -> None:
        handover, timer = self._handovers.get(key, (None, None))
        if timer is not None:
            timer.cancel()
        await self._served.keep(key, handover)
        self._settled.set()

    def _settle(self, key: bytes) -> Handover | None:
        handover, timer = self._handovers.pop(key, (None, None))
        if timer is not None:
            timer.cancel()
        self._settled.set()
        return handover

    def _reply(self, value: Any) -> messages.Reply:
        served = self._served
        return messages.Reply(value, served.room.num_live, served.buffer.version, served.num_evicted)

    @contextmanager
    def _waits(self) -> Iterator[None]:
        """The time in which a call may be ended by the server's closing."""
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        try:
            yield
        finally:
            self._waiting.discard(task)


CHECKED_AT_ONCE = 64
"""Groups of a put checked between two turns of the event loop; it takes a few milliseconds."""

PART_BYTES = 1 << 20
"""Groups that go in one message; small answers of other calls come between two."""

SLACK = 2
"""A client counts its calls under way by its own clock, and the server by the work that is left."""

LASTING = ("put_groups", "keep", "release")
"""Methods that come to their end once they have begun."""

NOT_HAPPENED = "the server is closing; the call has not happened"
