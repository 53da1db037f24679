"""An engine in a process of its own, on this machine: its Python work does not hold up the trainer's.

::

    ProcessEngine                     channel over a socket pair                  HostSession, in the child
      generate, abort, pause, ...  --(method, arguments)----------------------->  the real engine
                                   <-(result or error)--------------------------
      num_made                     <-(progress of what runs), twice a second----
      load_weights,    hand-over ------(load_weights: where they are)--------->  WeightInbox --> engine
      load_adapters -->

      woken by: an answer, or the end of the child, which ends every call with `EngineLost`

The child runs on the interpreter of this process, inherits nothing but the socket, and ends when the socket
closes: also when this process is killed. Its output goes to a log file.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from forebay.aio.time_limits import timeout
from forebay.engines.base import Completion, EngineHealth, EngineLost, GenerateRequest
from forebay.engines.process.host import MAX_HEADER_BYTES, PARENT_LIMIT_S, EngineRecipe, as_plain, from_plain
from forebay.engines.servers.launch import log_tail
from forebay.engines.weights.between_processes import SharedMemoryHandOver
from forebay.io.channel import BlockingChannel, Channel
from forebay.io.link import Link
from forebay.io.messages import Message, Note
from forebay.models.live_weights import LiveWeights
from forebay.models.starting_weights import AdapterConfig, AdaptersRefusedError, BaseDiffersError, Weights

CLOSE_LIMIT_S = 10.0
"""The time that an engine gets to end its work; then its process is killed."""

START_LIMIT_S = 600.0
"""The time to load a model: minutes are usual where it is large."""

CATCH_UP_LIMIT_S = 600.0
"""The time that a living child gets to take over weights once more; then it is taken for one that hangs."""

SILENCE_LIMIT_S = 120.0
"""Without a sign of life: longer than elsewhere, for single operations that hold the child's interpreter."""


class ProcessEngine:
    """Drives an engine in a child process; see `forebay.engines.base` for the contract.

    Invariants: the child's engine keeps the contract and so does this one; a child that ends fails what it
    had with ``lost`` at once, and `bring_up` starts another one, which gets the weights of the last hand-over
    (the adapters of the last one, on the starting weights) before it gets requests.

    ::

        recipe = EngineRecipe(model_folder=folder, model=ModelConfig(source=str(folder)),
                              engine=Component(name="transformers"))
        engine = ProcessEngine(recipe, SharedMemoryHandOver(), log=Path("engine.log"))

    Args:
        recipe: of the engine.
        hand_over: how weights get there; engines that share one share the work.
        log: the child's output is appended here.
    """

    takes_live_weights = True
    """Live weights go from the trainer, or its ranks, into the memory that engines map."""

    def __init__(self, recipe: EngineRecipe, hand_over: SharedMemoryHandOver, *, log: Path) -> None:
        self.model_step = 0
        """The step of the weights that make the next token."""
        self.max_context_tokens = 0
        """The most tokens, prompt and response together, one request may reach."""
        self.max_running: int | None = None
        """The requests that the child's engine runs at once; None: it does not say."""
        self.takes_adapters = False
        """Whether the child's engine does."""
        self._recipe, self._hand_over, self._log = recipe, hand_over, log
        self.is_closed = False
        """Whether it was closed, and uses no GPU any more."""
        self._is_behind = False
        """Whether the child may lack the weights of the last hand-over."""
        self._child = _Child(recipe, log)
        hand_over.join()

    def wait_until_ready(self) -> None:
        """Block until the child has loaded its model; several engines can be started before the first wait.

        Raises:
            EngineLost: it ended, or took longer than its limit; the message ends with its last output.
        """
        facts = self._child.wait_until_ready(START_LIMIT_S)
        self.max_context_tokens, self.model_step = facts["max_context_tokens"], facts["model_step"]
        self.max_running, self.takes_adapters = facts["max_running"], facts["takes_adapters"]

    @property
    def pid(self) -> int:
        """The child's process id, or that of the last one while there is none."""
        return self._child.process.pid

    async def generate(self, request: GenerateRequest) -> Completion:
        """Continue ``request.input_ids``; a lost child gives an error completion that says ``lost``.

        Raises:
            ValueError: the request can never run.
        """
        if self.is_closed:
            return Completion(finish_reason="error", error_msg="the engine is closed")
        try:
            return from_plain(*await self._call("generate", *as_plain(request)), Completion)
        except EngineLost as error:
            return Completion(finish_reason="error", error_msg=str(error), lost=True)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests with ``"abort"``; unknown ids are ignored."""
        await self._ask("abort", list(request_ids))

    async def pause(self) -> None:
        """End every request with ``"abort"`` and take no new one until `resume`."""
        await self._ask("pause_generation")

    async def resume(self) -> None:
        """Take requests again."""
        await self._ask("continue_generation")

    def num_made(self, request_id: str) -> int:
        """How many tokens a running request had half a second ago at the latest; else 0."""
        return 0 if self._child.link is None else self._child.link.made.get(request_id, 0)

    async def load_weights(self, weights: Weights, model_step: int, *, config: "AdapterConfig | None" = None) -> None:
        """Take over these parameters; engines that were given the same list share one hand-over.

        With a `config` they are adapters on the starting weights: see `forebay.engines.base`.
        """
        # The object names the hand-over, so a list must stay itself.
        given = weights if isinstance(weights, list | LiveWeights) else list(weights)
        try:
            await self._hand_over.load(self._send_weights, given, model_step, adapters=config)
        except ValueError:
            # Refused, which changes nothing.
            raise
        except BaseException:
            # Given up, say: a child that lives goes on with the old ones, or gets the new ones any time.
            self._is_behind = True
            raise
        self._is_behind = False

    load_adapters = load_weights

    async def _send_weights(self, message: dict[str, Any]) -> bool:
        is_in_use: bool = await self._ask("load_weights", message)
        self.model_step = message["model_step"]
        return is_in_use

    async def health(self) -> EngineHealth:
        """The answer of the child's engine.

        Raises:
            EngineLost: there is no child.
        """
        return EngineHealth(**await self._ask("health"))

    async def bring_up(self) -> None:
        """Return once the child serves, with the weights that it was given last; start another if it ended.

        One that hangs is ended, if weights are to be taken over.

        Raises:
            EngineLost: it does not start, or does not take them over.
        """
        if self.is_closed:
            raise EngineLost("the engine is closed")
        if not self._child.serves:
            await self._start()
        # A child that lives lacks weights only where a hand-over was given up, over which it may hang.
        elif self._is_behind:
            try:
                async with timeout(CATCH_UP_LIMIT_S):
                    await self._hand_over.again(self._send_weights)
                self._is_behind = False
            except TimeoutError:
                await self._start()
        # It may have been lost for its silence, so it has to answer before it gets requests.
        await self._ask("health")

    async def _start(self) -> None:
        # The first child of an engine that joins a run is loading its model already.
        if self._child.was_waited_for:
            await self._child.close()
            self._hand_over.forget(self._send_weights)
            self._child = _Child(self._recipe, self._log)
        try:
            await asyncio.to_thread(self.wait_until_ready)
            await self._hand_over.again(self._send_weights)
            self._is_behind = False
        except BaseException:
            # Cancelled, or without the weights of now: it must not be taken for one that serves.
            await self._child.close()
            raise

    async def close(self) -> None:
        """End the child, also one that does not answer; `generate` afterwards returns an error completion."""
        if self.is_closed:
            return
        self.is_closed = True
        try:
            with contextlib.suppress(EngineLost, TimeoutError):
                async with timeout(CLOSE_LIMIT_S):
                    await self._ask("close")
        finally:
            await self._child.close()
            self._hand_over.leave(self._send_weights)

    def kill(self) -> None:
        """End the child at once; for where no event loop runs."""
        self._child.end()

    async def _ask(self, method: str, argument: Any = None) -> Any:
        return msgspec.msgpack.decode((await self._call(method, argument))[0])

    async def _call(self, method: str, argument: Any, buffers: Sequence[bytes] = ()) -> tuple[Any, list[Any]]:
        child = self._child
        if not child.serves:
            raise EngineLost("its process has ended and was not started again, or not yet")
        try:
            return await child.connect().call(method, argument, buffers)
        except EngineLost as error:
            raise EngineLost(await asyncio.to_thread(child.cause_of_end, str(error), _HANG_LIMIT_S)) from None


_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (ValueError, AdaptersRefusedError, BaseDiffersError)
}
"""Errors of the child that a call raises here with their own type."""


class _Link(Link):
    """The connection to a child; keeps what the child says of its progress."""

    made: Mapping[str, int] = {}
    """Tokens of running requests, by id."""

    def note(self, message: Message, buffers: list[Any]) -> None:
        assert isinstance(message, Note)
        self.made = msgspec.msgpack.decode(message.value)


_END_LIMIT_S = 10.0
"""The time that a child gets to be gone after its connection has ended: its interpreter unloads libraries."""

_HANG_LIMIT_S = 2.0
"""The same for one that served, which then ends at once unless it hangs or is stopped."""

_CHILD_CODE = "from forebay.engines.process.child import main; main()"


class _Child:
    """The process and this end of its socket."""

    def __init__(self, recipe: EngineRecipe, log: Path) -> None:
        self.link: _Link | None = None
        self._is_ready = self.was_waited_for = False
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._socket, theirs = socket.socketpair()
        threads = str(recipe.threads)
        arguments = (str(theirs.fileno()), str(SILENCE_LIMIT_S), recipe.model_dump_json())
        with theirs, log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _CHILD_CODE, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                # Ctrl-C at the terminal is for the run, which ends its engines itself.
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": threads},
            )

    @property
    def serves(self) -> bool:
        """Whether it can be called: it has loaded its model, and its connection is up."""
        return self._is_ready and (self.link is None or self.link.lost is None)

    def wait_until_ready(self, limit_s: float) -> dict[str, Any]:
        """The facts that the child states of its engine once it has loaded its model."""
        self.was_waited_for = True
        try:
            note, _ = BlockingChannel(self._socket, limit_s=limit_s).receive()
        except TimeoutError:
            reason = f"the engine process was not ready after {limit_s:g} s; {self._last_words()}"
        except (EOFError, OSError):
            # Its end, or ours: `end` was called meanwhile.
            reason = self.cause_of_end(f"engine process {self.process.pid} closed its connection")
        else:
            assert isinstance(note, Note)
            self._is_ready = True
            facts: dict[str, Any] = msgspec.msgpack.decode(note.value)
            return facts
        self.end()
        raise EngineLost(reason)

    def connect(self) -> _Link:
        """The connection, which needs the event loop of now."""
        if self.link is None:
            self.link = _Link(
                Channel(self._socket, max_header_bytes=MAX_HEADER_BYTES),
                f"engine process {self.process.pid}",
                limit_s=SILENCE_LIMIT_S,
                other_limit_s=PARENT_LIMIT_S,
                errors=_ERRORS,
                loss=EngineLost,
            )
        return self.link

    def cause_of_end(self, reason: str, limit_s: float = _END_LIMIT_S) -> str:
        """How the process has ended; `reason` if it lives on for `limit_s`."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return reason
        return f"engine process {self.process.pid} ended with code {code}; {self._last_words()}"

    def _last_words(self) -> str:
        return f"its log, {str(self._log)!r}, ends with: {log_tail(self._log).strip() or '(nothing)'}"

    async def close(self) -> None:
        """End the connection and the process."""
        if self.link is not None:
            await self.link.close()
        self.end()

    def end(self) -> None:
        """End the process and wait for it."""
        # Also one that was never waited for: `_start` has to make another in its place.
        self._is_ready, self.was_waited_for = False, True
        # Wakes a thread that reads; closing alone would leave it with a number that others get.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
