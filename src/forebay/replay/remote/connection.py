"""One client of a buffer server, from its first words to its last.

::

    accepted -> greeting -> proof -> reading --Call--> a task each --> Part ..., Answer | Failure
                              |         |-- Piece ---> checked, and kept for its call
                              |         |-- Cancel --> that task is cancelled
                              |         |-- Done ----> the take is settled
                              v         v
                           refused    ended: tasks cancelled, what was taken and not kept is live again

A client that is silent for too long (`forebay.io.heartbeat`) is given up as one that broke. What it had taken
and not confirmed is live again: should it come back, its confirmation is refused and it takes once more.

Reading consumes messages, waits for the next one, is woken by the socket, produces tasks. A call that waits
(for room, for a change) holds up no other call. Groups go out one call after another, and the next call that
takes begins when those of the last one are sent: a client that does not read has one batch on its way, and
no more. Nothing here waits for another connection.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import msgspec

from forebay.aio.cancellation import finish
from forebay.io.address import is_proof
from forebay.io.heartbeat import SILENCE_LIMIT_S, beat
from forebay.replay.format.encode import PackedGroup
from forebay.replay.remote import messages
from forebay.replay.remote.calls import ARGUMENTS, Incoming, Served
from forebay.replay.remote.channel import STALL_S, Channel, Received
from forebay.replay.remote.groups import hold_group
from forebay.replay.remote.handover import Handover
from forebay.replay.remote.messages import Answer, Call, FrameError, Goodbye, ServerClosed, ServerFull

HELLO_S = 10.0
"""For a client's first words; any client needs milliseconds."""

MIN_LIMIT_S = 0.01
"""What a client may ask for: signs of life more often would be all that the server does."""

HELLO_BYTES = 4096
"""A client that has not shown its token makes the server read no more than this."""

PART_BYTES = 1 << 20
"""Groups that go in one message; small answers of other calls come between two."""

SLACK = 2
"""A client counts what it has under way by its own clock, and the server by the work that is left."""

PUTS = ("put", "put_groups")

LASTING = (*PUTS, "keep", "release")
"""Methods that come to their end once they have begun."""

NOT_HAPPENED = "the server is closing; the call has not happened"

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pieces:
    """What has come of a put whose call has not."""

    groups: list[Incoming] = field(default_factory=list)
    num_bytes: int = 0
    is_refused: bool = False
    """Whether there was no room for some of it: the call is answered so when it comes."""


class Connection:
    """Serves one client until it leaves, breaks the rules, or the server closes.

    >>> await Connection(sock, served, token=None).run()
    """

    def __init__(self, sock: socket.socket, served: Served, *, token: str | None) -> None:
        self._served = served
        self._token = token
        self._channel = Channel(
            sock, decode=messages.decode_from_client, max_frame_bytes=served.max_frame_bytes
        )
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._waiting: set[asyncio.Task[None]] = set()
        """Of the calls, those that the server ends when it closes."""
        self._cancelled: set[int] = set()
        """Calls of which the client has said so."""
        self._handovers: dict[bytes, tuple[Handover, asyncio.TimerHandle]] = {}
        self._output = asyncio.Lock()
        self._lasting: set[int] = set()
        """Of the calls, those to methods that are `LASTING`."""
        self._pieces: dict[int, _Pieces] = {}
        self._put_bytes = 0
        """Of puts without an answer, and of the message that is coming."""
        self._arriving = 0
        """Of `_put_bytes`, those of the message that is coming."""
        self._evictions_sent = -1
        self._client_waits_s = SILENCE_LIMIT_S
        self._is_closing = False
        self._settled = asyncio.Event()

    async def run(self) -> None:
        """Serve; returns when the connection is over and nothing of it is left."""
        try:
            try:
                if await self._admit():
                    await self._read()
            finally:
                self._channel.end()
                await self._clean_up()
                # Those of calls are counted off as the calls end.
                self._count(-self._arriving - sum(pieces.num_bytes for pieces in self._pieces.values()))
        except (OSError, FrameError) as error:
            _log.info("a buffer client's connection ended: %s", error)
        except Exception:  # a fault in serving one client must not reach the others
            _log.exception("serving a buffer client failed")
        finally:
            self._channel.close()

    async def close(self) -> None:
        """End what waits, let what runs come to its end, and say goodbye."""
        self._is_closing = True
        for task in self._waiting:
            task.cancel()
        while self._calls or not all(handover.is_kept for handover, _ in self._handovers.values()):
            self._settled.clear()
            await self._settled.wait()
        await self._channel.send(Goodbye("the server is closing"))
        self._channel.end()

    def abort(self) -> None:
        """End the connection as it is."""
        self._channel.end()

    async def _admit(self) -> bool:
        nonce = secrets.token_bytes(32)
        token = self._token
        await self._channel.send(
            messages.Greeting(
                messages.PROTOCOL,
                self._served.instance,
                nonce,
                token is not None,
                self._channel.max_frame_bytes,
                self._served.client_limit_s,
            )
        )
        header_bytes, frame_bytes = self._channel.max_header_bytes, self._channel.max_frame_bytes
        self._channel.max_header_bytes, self._channel.max_frame_bytes = HELLO_BYTES, 0
        async with asyncio.timeout(HELLO_S):
            received = await self._receive()
        if received is None:
            return False
        hello, _ = received
        if not isinstance(hello, messages.Hello) or hello.protocol != messages.PROTOCOL:
            await self._refuse(f"the first message is a hello of protocol {messages.PROTOCOL}")
        elif token is not None and not is_proof(hello.proof, token, nonce):
            await self._refuse("the token is missing or wrong")
        else:
            self._channel.max_header_bytes, self._channel.max_frame_bytes = header_bytes, frame_bytes
            self._client_waits_s = hello.limit_s if hello.limit_s > MIN_LIMIT_S else MIN_LIMIT_S
            await self._served.census.measure()
            await self._answer(0, None)
            return True
        return False

    async def _refuse(self, reason: str) -> None:
        await self._channel.send(Goodbye(f"refused: {reason}"))

    async def _receive(self) -> tuple[messages.FromClient, list[Received] | None] | None:
        try:
            return await self._channel.receive(self._reserve)
        except FrameError as error:
            await self._refuse(str(error))
            raise

    async def _read(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                beating = tasks.create_task(self._beat(tasks))
                while (received := await self._receive()) is not None:
                    try:
                        self._dispatch(*received, tasks)
                    except FrameError as error:
                        await self._refuse(str(error))
                        raise
                for task in (beating, *self._calls.values()):
                    task.cancel()
        except BaseExceptionGroup as errors:
            # The others are of the same broken connection.
            raise errors.exceptions[0] from None

    async def _beat(self, tasks: asyncio.TaskGroup) -> None:
        def say() -> None:
            # What is on its way out is a sign of life already; a client that does not read it is found by it.
            if not self._channel.is_sending:
                tasks.create_task(self._channel.send(messages.Alive()))

        silent_s = await beat(
            say,
            lambda: self._channel.num_received,
            limit_s=self._served.client_limit_s,
            other_limit_s=self._client_waits_s,
        )
        # Else what is being sent to it would hold up the end of the connection.
        self._channel.end()
        raise TimeoutError(f"it was silent for {silent_s:g} s")

    def _count(self, num_bytes: int) -> None:
        self._put_bytes += num_bytes
        self._served.put_bytes += num_bytes

    def _reserve(self, message: messages.FromClient, num_bytes: int) -> bool:
        """Whether there is room for the next bytes of groups of this message; if so, they are counted.

        One client alone may have what the limits of a connection allow it.
        """
        number = getattr(message, "number", 0)
        pieces = self._pieces.get(number)
        served = self._served
        is_alone = served.put_bytes == self._put_bytes
        if (pieces is not None and pieces.is_refused) or (
            not is_alone and served.put_bytes + num_bytes > served.max_put_bytes
        ):
            return False
        self._arriving += num_bytes
        self._count(num_bytes)
        return True

    def _dispatch(
        self, message: messages.FromClient, groups: list[Received] | None, tasks: asyncio.TaskGroup
    ) -> None:
        self._count(-self._arriving)
        self._arriving = 0
        match message:
            case Call():
                self._begin(message, groups, tasks)
            case messages.Piece():
                self._gather(message, groups)
            case messages.Alive():
                pass
            case messages.Cancel(number=number):
                self._cancel(number)
            case messages.Done(key=key):
                self._settle(key)
            case _:
                raise FrameError("there is one hello only")

    def _gather(self, piece: messages.Piece, received: list[Received] | None) -> None:
        """Keep the groups until their call comes; checked, so that it has less to do then."""
        if not piece.sizes:
            raise FrameError("a piece has no groups")
        pieces = self._pieces.setdefault(piece.number, _Pieces())
        if received is None:
            self._refuse_put(piece.number, pieces)
            return
        self._occupy(piece.number, pieces, sum(map(sum, piece.sizes)))
        pieces.groups += [hold_group(*group) for group in received]

    def _occupy(self, number: int, pieces: _Pieces, num_bytes: int) -> None:
        """Count the bytes of a call that brings groups, as long as it may bring them."""
        if number in self._calls or number == 0:
            raise FrameError(f"there is a call {number} already")
        others = self._put_bytes - pieces.num_bytes
        pieces.num_bytes += num_bytes
        if pieces.num_bytes > self._channel.max_frame_bytes:
            raise FrameError(f"a put has at most {self._channel.max_frame_bytes} bytes")
        if others and others + pieces.num_bytes > SLACK * messages.PUT_WINDOW_BYTES:
            raise FrameError(f"puts of {others} bytes wait for their answers already")
        self._count(num_bytes)

    def _refuse_put(self, number: int, pieces: _Pieces) -> None:
        """Forget what has come of the put; the rest of it is forgotten as it comes."""
        if number in self._calls or number == 0:
            raise FrameError(f"there is a call {number} already")
        if len(self._pieces) > SLACK * messages.MAX_PUTS:
            raise FrameError(f"{len(self._pieces)} puts have begun and not come already")
        self._count(-pieces.num_bytes)
        pieces.groups, pieces.num_bytes, pieces.is_refused = [], 0, True

    def _begin(self, call: Call, groups: list[Received] | None, tasks: asyncio.TaskGroup) -> None:
        if len(self._calls) >= SLACK * (messages.MAX_CALLS + messages.MAX_PUTS):
            raise FrameError(f"{len(self._calls)} calls wait for their answers already")
        pieces = self._pieces.pop(call.number, _Pieces())
        if groups is None:
            self._refuse_put(call.number, pieces)
        else:
            self._occupy(call.number, pieces, sum(map(sum, call.sizes)))
        if pieces.groups and call.method not in PUTS:
            raise FrameError(f"{call.method} brings no groups")
        num_bytes = pieces.num_bytes
        task = tasks.create_task(self._serve(call, pieces.groups, groups))
        self._calls[call.number] = task
        if call.method in LASTING:
            self._lasting.add(call.number)
        task.add_done_callback(lambda _: self._note_end(call.number, num_bytes))

    def _cancel(self, number: int) -> None:
        """End a call if it can be undone; its client waits for the answer in any case.

        Of a call that has not come, forget the pieces; there will be no answer.
        """
        if (pieces := self._pieces.pop(number, None)) is not None:
            self._count(-pieces.num_bytes)
        task = self._calls.get(number)
        if task is not None and (task in self._waiting or number not in self._lasting):
            self._cancelled.add(number)
            task.cancel()

    def _note_end(self, number: int, num_bytes: int) -> None:
        self._count(-num_bytes)
        del self._calls[number]
        self._lasting.discard(number)
        self._cancelled.discard(number)
        self._settled.set()

    async def _serve(self, call: Call, groups: list[Incoming], last: list[Received] | None) -> None:
        try:
            if last is None:
                raise ServerFull(
                    f"puts of {self._served.put_bytes} bytes wait to be stored, and the server takes "
                    f"{self._served.max_put_bytes} (max_put_bytes of serve)"
                )
            groups += [hold_group(*group) for group in last]
            await self._run_call(call, groups)
        except asyncio.CancelledError as error:
            if call.number in self._cancelled:
                await self._fail(call.number, error)
            elif self._is_closing:
                await self._fail(call.number, ServerClosed(NOT_HAPPENED))
            else:
                raise
        except FrameError as error:
            await self._refuse(str(error))
            raise
        except Exception as error:  # whatever it is, it belongs to the caller
            await self._fail(call.number, error)

    async def _fail(self, number: int, error: BaseException) -> None:
        await self._channel.send(messages.failure_of(number, error))

    async def _run_call(self, call: Call, groups: list[Incoming]) -> None:
        if (kind := ARGUMENTS.get(call.method)) is None:
            raise ValueError(f"the server has no method {call.method!r}; is it of another version?")
        try:
            arguments = msgspec.msgpack.decode(call.arguments, type=kind)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ValueError(f"{call.method}: {error}") from None
        if self._is_closing and call.method not in ("keep", "release"):
            raise ServerClosed(NOT_HAPPENED)
        match call.method:
            case "put" | "put_groups":
                await self._put(call, arguments, groups)
            case "get" | "take_batch":
                await self._hand_over(call, arguments)
            case "keep":
                await self._keep(call.number, arguments.key)
            case "release":
                await self._release(arguments.key)
                await self._answer(call.number, None)
            case _:
                async with self._waits(call.method == "wait_for_change"):
                    result = await self._served.call(call.method, arguments)
                await self._answer(call.number, result.value)

    async def _put(self, call: Call, arguments: messages.PutArguments, groups: list[Incoming]) -> None:
        if not groups or (call.method == "put" and len(groups) > 1):
            raise FrameError(f"{call.method} does not bring {len(groups)} groups")
        async with self._waits(True):
            result = await self._served.look_back(arguments, groups)
            if result is None:
                await self._served.admit(arguments.key, len(groups))
        if result is None:
            result = await self._served.put(arguments, groups)
        await self._answer(call.number, result.value)

    async def _hand_over(self, call: Call, arguments: messages.GetArguments | messages.TakeArguments) -> None:
        """Take and send, when all groups of earlier calls are sent."""
        async with self._waits(True):
            await self._output.acquire()
        try:
            if isinstance(arguments, messages.GetArguments):
                result = await self._served.get(arguments)
            else:
                result = await self._served.take_batch(arguments)
            assert result.handover is not None
            try:
                await self._send_groups(call.number, result.groups)
            except BaseException:
                await finish(self._served.release(arguments.key, result.handover))
                raise
            if result.groups:
                self._expect_settling(arguments.key, result.handover)
            await self._answer(call.number, result.value)
        finally:
            self._output.release()

    def _expect_settling(self, key: bytes, handover: Handover) -> None:
        # A client that does not confirm is stuck; others should have the groups.
        timer = asyncio.get_running_loop().call_later(STALL_S, self._channel.end)
        self._handovers[key] = (handover, timer)

    async def _send_groups(self, number: int, groups: list[PackedGroup]) -> None:
        part: list[PackedGroup] = []
        num_bytes = 0
        for place, packed in enumerate(groups, start=1):
            part.append(packed)
            num_bytes += sum(packed.size)
            if num_bytes >= PART_BYTES or place == len(groups):
                await self._channel.send(messages.Part(number, [one.size for one in part]), part)
                part, num_bytes = [], 0

    async def _keep(self, number: int, key: bytes) -> None:
        handover, timer = self._handovers.get(key, (None, None))
        if timer is not None:
            timer.cancel()
        await self._served.keep(key, handover)
        self._settled.set()
        await self._answer(number, None)

    async def _release(self, key: bytes) -> None:
        handover = self._settle(key)
        await self._served.release(key, handover)

    def _settle(self, key: bytes) -> Handover | None:
        handover, timer = self._handovers.pop(key, (None, None))
        if timer is not None:
            timer.cancel()
        self._settled.set()
        return handover

    async def _answer(self, number: int, value: object) -> None:
        served = self._served
        news = None
        if self._evictions_sent != served.evictions:
            news, self._evictions_sent = dict(served.num_evicted), served.evictions
        await self._channel.send(Answer(number, value, served.census.num_live, served.buffer.version, news))

    @asynccontextmanager
    async def _waits(self, may_be_ended: bool) -> AsyncIterator[None]:
        """The time in which a call may be ended by the server's closing."""
        task = asyncio.current_task()
        assert task is not None
        if may_be_ended:
            self._waiting.add(task)
        try:
            yield
        finally:
            self._waiting.discard(task)

    async def _clean_up(self) -> None:
        """Make live again what was taken and not kept."""
        for key in list(self._handovers):
            handover = self._settle(key)
            if handover is not None and not handover.is_kept:
                await self._served.release(key, handover)


async def turn_away(sock: socket.socket, reason: str) -> None:
    """Say why, and close a connection that has just been made; its client has said nothing yet."""
    channel = Channel(sock, decode=messages.decode_from_client, max_frame_bytes=0)
    with suppress(OSError):
        # It does not wait: so little fits into any socket's buffer.
        await channel.send(Goodbye(reason))
    channel.end()
    channel.close()
