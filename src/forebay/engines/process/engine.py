"""An engine in a process of its own, on this machine: its Python work does not hold up the trainer's.

::

    ProcessEngine                     socket pair: length + MessagePack           engine_host, in the child
      generate, abort, pause, ...  --(number, method, arguments)--------------->  the real engine
                                   <-(number, result or error)------------------
      num_made                     <-(progress of what runs), twice a second----
      load_weights,    hand-over ------(send_weights: where they are)--------->  WeightInbox --> engine
      load_adapters -->

      woken by: an answer, or the end of the child, which ends every call with `EngineLost`

The child runs on the interpreter of this process, inherits nothing but the socket, and ends when the socket
closes: also when this process is killed. What it prints goes to a log file.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from forebay.config import Component
from forebay.engines.base import Completion, EngineHealth, EngineLost, GenerateRequest
from forebay.io.framing import LENGTH, framed, read_frame
from forebay.io.heartbeat import beat
from forebay.models import ModelConfig, Precision
from forebay.models.starting_weights import AdaptersRefusedError, BaseDiffersError

if TYPE_CHECKING:
    import torch

    from forebay.engines.weights.shared_memory import SharedMemoryHandOver

CLOSE_LIMIT_S = 10.0
"""For an engine to end what it does; then its process is killed."""
START_LIMIT_S = 600.0
"""For loading a model: minutes are usual where it is large."""
CATCH_UP_LIMIT_S = 600.0
"""For a child that lives to take over weights once more; then it is taken for one that hangs."""
SILENCE_LIMIT_S = 120.0
"""Without a sign of life: longer than elsewhere, for single operations that hold the child's interpreter."""
_CHILD_CODE = "from forebay.engines.process.host import main; main()"
_LOG_TAIL_BYTES = 2000
_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (ValueError, AdaptersRefusedError, BaseDiffersError)
}
"""Those that a call of the child raises as what they are."""


@dataclass(frozen=True, kw_only=True)
class EngineRecipe:
    """What a child needs to make its engine, as plain data."""

    model_folder: Path
    model: ModelConfig
    engine: Component
    dtype: Precision = "float32"
    """What the engine holds the weights in."""
    threads: int = 1
    """For torch."""

    def to_json(self) -> str:
        """For the child's command line."""
        return json.dumps(
            {
                "model_folder": str(self.model_folder),
                "model": self.model.model_dump(mode="json"),
                "dtype": self.dtype,
                "engine": self.engine.model_dump(mode="json"),
                "threads": self.threads,
            }
        )


class ProcessEngine:
    """Drives an engine in a child process; see `forebay.engines.base` for the contract.

    Invariants: the child's engine keeps the contract and so does this one; a child that ends fails what it
    had with ``lost`` at once, and `bring_up` starts another one, which gets the weights of the last hand-over
    (the adapters of the last one, on the starting weights) before it gets requests.

    >>> recipe = EngineRecipe(model_folder=folder, model=ModelConfig(source=str(folder)),
    ...                       engine=Component(name="transformers"))                # doctest: +SKIP
    >>> engine = ProcessEngine(recipe, SharedMemoryHandOver(), log=Path("engine.log"))  # doctest: +SKIP

    Args:
        recipe: what to run.
        hand_over: how weights get there; engines that share one share the work.
        log: what the child prints is appended here.
        start_limit_s: how long loading the model may take.
        silence_limit_s: after that long without a sign of life the child is ended, and lost.
    """

    def __init__(
        self,
        recipe: EngineRecipe,
        hand_over: SharedMemoryHandOver,
        *,
        log: Path,
        start_limit_s: float = START_LIMIT_S,
        silence_limit_s: float = SILENCE_LIMIT_S,
    ) -> None:
        self._recipe, self._hand_over, self._log = recipe, hand_over, log
        self._start_limit_s, self._silence_limit_s = start_limit_s, silence_limit_s
        self._num_heard = 0
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._made: dict[str, int] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reader_task: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()
        self._closed = False
        self._model_step = 0
        self._max_context_tokens = 0
        self._takes_adapters = False
        self._is_behind = False
        """Whether the child may lack the weights of the last hand-over."""
        self._starting: _Child | None = _Child(recipe, log)
        self._child: _Child | None = None
        hand_over.join()

    def wait_until_ready(self) -> None:
        """Block until the child has loaded its model; several engines can be started before the first wait.

        Raises:
            EngineLost: it ended, or took longer than its limit; the message ends with what it printed last.
        """
        assert self._starting is not None
        self._note_ready(self._starting.wait_until_ready(self._start_limit_s))

    def _note_ready(self, hello: dict[str, Any]) -> None:
        self._child, self._starting = self._starting, None
        self._max_context_tokens, self._model_step = hello["max_context_tokens"], hello["model_step"]
        self._takes_adapters = hello["takes_adapters"]

    @property
    def model_step(self) -> int:
        """The step of the weights that make the next token."""
        return self._model_step

    @property
    def max_context_tokens(self) -> int:
        """The most tokens, prompt and response together, one request may reach."""
        return self._max_context_tokens

    @property
    def pid(self) -> int | None:
        """The child's process id; None while there is none."""
        child = self._child or self._starting
        return None if child is None else child.process.pid

    async def generate(self, request: GenerateRequest) -> Completion:
        """Continue ``request.input_ids``; a lost child gives an error completion that says ``lost``.

        Raises:
            ValueError: the request can never run.
        """
        if self._closed:
            return Completion(finish_reason="error", error_msg="the engine is closed")
        message = {
            **asdict(request),
            "input_ids": np.asarray(request.input_ids, np.int32).tobytes(),
        }
        try:
            answer = await self._ask("generate", message)
        except EngineLost as error:
            return Completion(finish_reason="error", error_msg=str(error), lost=True)
        except asyncio.CancelledError:
            self._post("abort", [request.request_id])
            raise
        finally:
            self._made.pop(request.request_id, None)
        return Completion(
            response_ids=np.frombuffer(answer["response_ids"], np.int32),
            logprobs=np.frombuffer(answer["logprobs"], np.float32),
            model_steps=np.frombuffer(answer["model_steps"], np.int32),
            finish_reason=answer["finish_reason"],
            error_msg=answer["error_msg"],
        )

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests with ``"abort"``; unknown ids are ignored."""
        await self._ask("abort", list(request_ids))

    async def pause(self) -> None:
        """End every request with ``"abort"`` and take no new one until `resume`."""
        await self._ask("pause")

    async def resume(self) -> None:
        """Take requests again."""
        await self._ask("resume")

    def num_made(self, request_id: str) -> int:
        """How many tokens a running request had half a second ago at the latest; else 0."""
        return self._made.get(request_id, 0)

    async def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], model_step: int) -> None:
        """Take over these parameters; engines that were given the same list share one hand-over."""
        # The object names the hand-over, so a list must stay itself.
        given = weights if isinstance(weights, list) else list(weights)
        with self._noting_failure():
            await self._hand_over.load(self._send_weights, given, model_step)

    @property
    def takes_adapters(self) -> bool:
        """Whether the child's engine does."""
        return self._takes_adapters

    async def load_adapters(
        self, adapters: Iterable[tuple[str, torch.Tensor]], model_step: int, *, config: Mapping[str, Any]
    ) -> None:
        """As `load_weights`, with adapters on the starting weights; see `TakesAdapters`."""
        given = adapters if isinstance(adapters, list) else list(adapters)
        with self._noting_failure():
            await self._hand_over.load(self._send_weights, given, model_step, adapters=config)

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except ValueError:
            # Refused, which changes nothing.
            raise
        except BaseException:
            # Given up, say: a child that lives goes on with the old ones, or gets the new ones any time.
            self._is_behind = True
            raise
        self._is_behind = False

    async def _send_weights(self, message: dict[str, Any]) -> None:
        """Tell the child where weights are; returns once it uses them."""
        await self._ask("load_weights", message)
        self._model_step = message["model_step"]

    async def health(self) -> EngineHealth:
        """What the child's engine says.

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
        if self._closed:
            raise EngineLost("the engine is closed")
        if self._child is None:
            await self._start()
        elif self._is_behind:
            await self._catch_up()
        await self._ask("health")

    async def _catch_up(self) -> None:
        try:
            async with asyncio.timeout(CATCH_UP_LIMIT_S):
                await self._hand_over.again(self._send_weights)
        except TimeoutError:
            self._lose(f"it did not take over its weights within {CATCH_UP_LIMIT_S:g} s")
            return await self._start()
        self._is_behind = False

    async def _start(self) -> None:
        if self._starting is None:
            self._starting = _Child(self._recipe, self._log)
        try:
            hello = await asyncio.to_thread(self._starting.wait_until_ready, self._start_limit_s)
            self._note_ready(hello)
            await self._hand_over.again(self._send_weights)
            self._is_behind = False
        except BaseException:
            # Cancelled, or without the weights of now: it must not be taken for one that serves.
            self._lose("it could not be started again")
            raise

    async def close(self) -> None:
        """End the child, also one that does not answer; `generate` afterwards returns an error completion."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._child is not None and self._child.process.poll() is None:
                with contextlib.suppress(EngineLost, TimeoutError):
                    async with asyncio.timeout(CLOSE_LIMIT_S):
                        await self._ask("close")
        finally:
            self._lose("the engine is closed")
            self._hand_over.leave()
            if self._reader_task is not None:
                await asyncio.gather(self._reader_task, return_exceptions=True)

    def kill(self) -> None:
        """End the child at once; for where no event loop runs."""
        for child in (self._child, self._starting):
            if child is not None:
                child.end()

    # Calls

    async def _ask(self, method: str, argument: Any = None) -> Any:
        async with self._connecting:
            await self._connect()
        number = next(self._numbers)
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(number, method, argument)
            return await future
        finally:
            self._calls.pop(number, None)

    def _post(self, method: str, argument: Any) -> None:
        """Ask without waiting for the answer."""
        if self._writer is not None:
            self._send(next(self._numbers), method, argument)

    def _send(self, number: int, method: str, argument: Any) -> None:
        assert self._writer is not None
        self._writer.write(framed(msgspec.msgpack.encode((number, method, argument))))

    async def _connect(self) -> None:
        if self._writer is not None:
            return
        if self._child is None:
            raise EngineLost("its process has ended and was not started again, or not yet")
        reader, self._writer = await asyncio.open_connection(sock=self._child.socket)
        self._reader_task = asyncio.create_task(self._listen(reader, self._child))

    async def _listen(self, reader: asyncio.StreamReader, child: _Child) -> None:
        beating = asyncio.create_task(self._beat(child))
        try:
            await self._read(reader, child)
        finally:
            beating.cancel()

    async def _beat(self, child: _Child) -> None:
        silent_s = await beat(
            lambda: self._post("health", None), lambda: self._num_heard, limit_s=self._silence_limit_s
        )
        if self._child is child:
            pid = child.process.pid
            self._lose(
                f"engine process {pid} gave no sign of life for {silent_s:g} s: it hangs or was stopped"
            )

    async def _read(self, reader: asyncio.StreamReader, child: _Child) -> None:
        """consumes: the child's frames; waits for: the next one; woken by: it, or the child's end."""
        try:
            while (frame := await read_frame(reader)) is not None:
                self._note(*msgspec.msgpack.decode(frame))
        except Exception as error:
            # Whatever it is: calls that wait for a task that is gone would wait forever.
            cause = f"what came from it could not be read: {error!r}"
        else:
            cause = await asyncio.to_thread(child.cause_of_end)
        # There may be another by now.
        if self._child is child:
            self._lose(cause)

    def _note(self, number: int | None, result: Any, error: tuple[str, str] | None) -> None:
        self._num_heard += 1
        if number is None:
            self._made = result
        elif (future := self._calls.get(number)) is not None and not future.done():
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(_ERRORS.get(error[0], RuntimeError)(error[1]))

    def _lose(self, why: str) -> None:
        """End all calls: the child is gone."""
        self.kill()
        self._child = self._starting = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._made.clear()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineLost(why))


class _Child:
    """The process and this end of its socket."""

    def __init__(self, recipe: EngineRecipe, log: Path) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self.socket, theirs = socket.socketpair()
        threads = str(recipe.threads)
        with theirs, log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _CHILD_CODE, str(theirs.fileno()), recipe.to_json()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                # Ctrl-C at the terminal is for the run, which ends its engines itself.
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": threads},
            )

    def wait_until_ready(self, limit_s: float) -> dict[str, Any]:
        """Its first frame."""
        end_s = time.monotonic() + limit_s
        try:
            (size,) = LENGTH.unpack(self._read(LENGTH.size, end_s))
            hello: dict[str, Any] = msgspec.msgpack.decode(self._read(size, end_s))
        except TimeoutError:
            self.end()
            raise EngineLost(
                f"the engine process was not ready after {limit_s:g} s; its log, {str(self.log)!r}, ends "
                f"with: {self._tail()}"
            ) from None
        except (EOFError, OSError):
            # Its end, or ours: `end` was called meanwhile.
            cause = self.cause_of_end()
            self.end()
            raise EngineLost(cause) from None
        self.socket.settimeout(None)
        return hello

    def _read(self, size: int, end_s: float) -> bytes:
        data = b""
        while len(data) < size:
            self.socket.settimeout(max(0.001, end_s - time.monotonic()))
            part = self.socket.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def cause_of_end(self) -> str:
        """Why there is nothing more to read; blocks until the process has ended."""
        try:
            code = self.process.wait(10)
        except subprocess.TimeoutExpired:
            return f"engine process {self.process.pid} closed its connection"
        return (
            f"engine process {self.process.pid} ended with code {code}; its log, {str(self.log)!r}, ends "
            f"with: {self._tail()}"
        )

    def _tail(self) -> str:
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").strip() or "(nothing)"

    def end(self) -> None:
        """End the process and wait for it."""
        # Wakes a thread that reads; closing alone would leave it with a number that others get.
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
