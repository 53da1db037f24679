"""An inference engine inside the process: any transformers decoder, many requests to one forward pass.

Not a server and not a paged cache: for models that one device holds.

::

    generate() -> waiting -> [settle] -> admit -> step, step, ... -> Completion
           ^         event loop         |      one worker thread      | event loop
           '--------- given up for want of memory, with its tokens

    _drive    consumes: waiting requests and aborts    waits for: the worker thread
              woken by: `generate` on an idle engine   produces: completions, in the order they end

The worker thread alone touches the model and the batch. It goes on stepping until something ends or the event
loop has news for it (a request that fits, an abort, new weights), so that neither waits long for the other.
Transformers' own continuous batching was measured first and does not serve: one seed for all requests,
nothing back from a cancelled one, no weight version, and slower than `generate`
(benchmarks/engine_batching.py).
"""

import asyncio
import logging
import threading
from collections.abc import Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch

from forebay.aio.tasks import settle
from forebay.engines.base import DEFAULT_MAX_BATCH, Completion, EngineHealth, GenerateRequest
from forebay.engines.local.batch import DecodeBatch
from forebay.engines.local.cache_budget import CacheBudget, CacheTokens
from forebay.engines.local.compatibility import check_config, probe
from forebay.engines.local.rows import Ended, Row
from forebay.engines.local.step_graphs import cuda_recorder
from forebay.engines.weights.takeover import AdaptedWeights, take_weights
from forebay.models.starting_weights import AdapterConfig, AdaptersRefusedError, Weights

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Call(Row):
    """A request on its way through the engine."""

    ended: asyncio.Future[Completion]
    timer: asyncio.TimerHandle | None = None
    overdue: str | None = None
    """Why it was aborted, where its time limit did so."""


class TransformersEngine:
    """Generates with a transformers model on this machine; see `forebay.engines.base` for the contract.

    The same request draws the same random numbers whatever runs beside it, and on CPU in float32 the same
    tokens to the bit. One event loop at a time may use it.

    ::

        engine = TransformersEngine(model, tokenizer)
        request = GenerateRequest(request_id="a", input_ids=np.array([1, 5], np.int32),
                                  params=SampleParams(), max_tokens=8, seed=0)
        completion = await engine.generate(request)
    """

    casts_weights = True

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        max_batch: int = DEFAULT_MAX_BATCH,
        prefill_tokens: int = 8192,
        cache_tokens: CacheTokens = "auto",
        cuda_graphs: bool = True,
        takes_adapters: bool = True,
        max_context_tokens: int | None = None,
        model_step: int = 0,
        device: str | None = None,
    ) -> None:
        """Take over `model` (it is put into evaluation mode, and on `device` if one is named).

        Without a `tokenizer` requests cannot have stop texts. `max_context_tokens` left out is the model's
        own limit. `max_batch` requests decode together, the rest wait; `prefill_tokens`, padding included, is
        what one prefill pass may hold, and a longer prompt goes alone. `cache_tokens`, rows times columns,
        bounds the key/value cache: see `CacheBudget`. On a CUDA device `cuda_graphs` records forward passes
        and repeats them. With LoRA, an engine that
        `takes_adapters` keeps a second copy of the adapted weights; one that does not is given merged ones.

        Raises:
            ValueError: the model is not a decoder with plain attention, the context is over its limit, or
                `max_batch` or `prefill_tokens` is below 1.
        """
        if max_batch < 1 or prefill_tokens < 1:
            raise ValueError(f"max_batch and prefill_tokens must be at least 1, got {max_batch} and {prefill_tokens}")
        self.max_running = max_batch
        """The requests that decode together."""
        place = torch.device(device or next(model.parameters()).device)
        self._model = model.eval().to(place)
        self._tensors = model.state_dict(keep_vars=True)
        self._are_lent = False
        """Whether these lie in memory that was lent."""
        self._has_tokenizer = tokenizer is not None
        self._vocabulary = len(model.get_input_embeddings().weight)
        self.max_context_tokens = check_config(model, max_context_tokens)
        """The most tokens, prompt and response together, one request may reach."""
        self._stream, recorder = None, None
        if place.type == "cuda":
            # High in priority: the few kernels of a token would wait for the many of a trainer.
            self._stream, own = map(torch.cuda.Stream, [place] * 2, [-1] * 2)
            recorder = partial(cuda_recorder, own) if cuda_graphs else None
        self._batch = DecodeBatch(
            self._model,
            max_context_tokens=self.max_context_tokens,
            prefill_tokens=prefill_tokens,
            eos_token_ids=end_token_ids(model, tokenizer),
            tokenizer=tokenizer,
            budget=CacheBudget(cache_tokens),
            recorder=recorder,
        )
        probe(self._batch)
        self._batch.release()
        self._adapted = AdaptedWeights(self._model) if takes_adapters else None
        self.model_step = model_step
        """The step of the weights that make the next token."""
        # Dicts are the ordered sets of Python: first in, first out.
        self._waiting: dict[_Call, None] = {}
        self._running: dict[_Call, None] = {}
        self._aborting: set[_Call] = set()
        self._paused = False
        self._closed = False
        self._num_arrivals = 0
        self._driver: asyncio.Task[None] | None = None
        self._news = threading.Event()
        # A trainer of this process queues work for the device far ahead, and in its stream each token would wait
        # for all of that.
        enter = partial(torch.cuda.set_stream, self._stream) if self._stream else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forebay-engine", initializer=enter)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Continue ``request.input_ids``.

        Raises:
            ValueError: the request can never run: empty, at or over the context, no budget, tokens that the
                model has not, or stop texts without a tokenizer.
        """
        request.check(self.max_context_tokens)
        # On a GPU a read beyond the table of tokens ends all work of the process there, the trainer's too.
        if len(wrong := request.input_ids[(request.input_ids < 0) | (request.input_ids >= self._vocabulary)]):
            raise ValueError(f"request {request.request_id!r}: a model of {self._vocabulary} tokens has no {wrong[0]}")
        if request.params.stop and not self._has_tokenizer:
            raise ValueError(
                f"request {request.request_id!r} has stop texts {request.params.stop!r}, but the engine was "
                f"built without a tokenizer; use stop_token_ids"
            )
        if self._closed:
            return Completion(finish_reason="error", error_msg="the engine is closed")
        if self._paused:
            return Completion(finish_reason="abort")
        call = _Call(request, asyncio.get_running_loop().create_future())
        self._waiting[call] = None
        self._num_arrivals += 1
        if self._driver is None:
            self._driver = asyncio.create_task(self._drive())
        # A full batch has no place for it, so the worker need not stop stepping.
        elif len(self._running) < self.max_running:
            self._news.set()
        try:
            # Shielded: the row leaves the batch before its future is done, also when the caller is cancelled.
            return await asyncio.shield(call.ended)
        except asyncio.CancelledError:
            self._end([call])
            raise

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests with ``"abort"``; unknown ids are ignored."""
        wanted = set(request_ids)
        calls = (*self._waiting, *self._running)
        await self._end_and_wait([call for call in calls if call.request.request_id in wanted])

    async def pause(self) -> None:
        """End every request with ``"abort"`` and take no new one until `resume`; free the cache."""
        self._paused = True
        await self._end_and_wait([*self._waiting, *self._running])
        if not self._closed:
            await self._in_thread(self._release)

    async def resume(self) -> None:
        """Take requests again."""
        self._paused = False

    def num_made(self, request_id: str) -> int:
        """How many tokens a running request has by now, for reports: it may be a step behind; else 0."""
        return 0 if self._closed else self._batch.num_made(request_id)

    async def load_weights(self, weights: Weights, model_step: int, *, config: "AdapterConfig | None" = None) -> None:
        """Copy these parameters between two forward passes; running requests keep their caches.

        Tied parameters may come under any of their names. Persistent buffers are optional. `LentTensors`
        are used where they lie if they are of its dtype and device. With a `config` they are LoRA adapters, which are
        merged into the starting weights.

        Raises:
            ValueError: a parameter is missing, unknown or of another shape; then nothing has changed.
            BaseDiffersError, AdaptersRefusedError: see `forebay.engines.base`.
            RuntimeError: the engine is closed.
        """
        if self._closed:
            raise RuntimeError(f"the engine is closed and takes no weights (those of step {model_step})")
        if config is not None and self._adapted is None:
            raise AdaptersRefusedError("the engine was built to take no adapters")
        await self._in_thread(self._load, weights, model_step, config)

    load_adapters = load_weights

    @property
    def cache_tokens(self) -> int:
        """Tokens that its key/value cache may hold now."""
        return self._batch.budget.tokens

    @property
    def takes_adapters(self) -> bool:
        """Whether `load_adapters` may be called."""
        return self._adapted is not None

    async def health(self) -> EngineHealth:
        """Whether it can serve, and how busy it is."""
        return EngineHealth(
            ok=not self._closed,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            model_step=self.model_step,
        )

    async def close(self) -> None:
        """End everything and free the weights; `generate` afterwards returns an error completion."""
        if self._closed:
            return
        self._closed = True
        await self._end_and_wait([*self._waiting, *self._running])
        await self._in_thread(self._release)
        self._thread.shutdown()
        del self._batch, self._model, self._tensors
        self._adapted = None

    # The event loop's side

    def _end(self, calls: Iterable[_Call], time_limit_s: float | None = None) -> None:
        """Abort calls: those that wait at once, those that run before their next token."""
        for call in calls:
            if time_limit_s is not None:
                call.overdue = f"aborted after its time limit of {time_limit_s} s"
            if call in self._running:
                self._aborting.add(call)
                self._news.set()
            elif call in self._waiting:
                del self._waiting[call]
                self._deliver([(call, call.completion("abort"))])

    async def _end_and_wait(self, calls: Sequence[_Call]) -> None:
        self._end(calls)
        if running := [call.ended for call in calls if not call.ended.done()]:
            await asyncio.wait(running)

    async def _in_thread(self, function: Any, *arguments: Any) -> None:
        """Run between two forward passes: the worker returns at the news and takes calls in turn."""
        self._news.set()
        await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def _drive(self) -> None:
        """Run while there is work; see the module docstring."""
        loop = asyncio.get_running_loop()
        try:
            # A driver that was cancelled has left rows behind, whose callers have their answer.
            await self._in_thread(self._batch.clear)
            while self._waiting or self._running:
                if len(self._running) < self.max_running:
                    # All callers that are about to submit do so: then batches do not depend on timing.
                    await settle(lambda: self._num_arrivals, at_most=_MAX_TURNS)
                admitted = self._admit()
                aborting, self._aborting = self._aborting, set()
                self._news.clear()
                work = loop.run_in_executor(self._thread, self._work, admitted, aborting)
                ended = await work
                self._deliver(ended)
                self._wait_again({row for row, completion in ended if completion is None})
        # Whatever went wrong, no caller may be left waiting; the error itself goes to each of them.
        except Exception as error:
            logger.exception("the engine's driver failed")
            self._fail_all(error)
        except asyncio.CancelledError:
            self._fail_all(RuntimeError("the event loop ended"))
            raise
        finally:
            # The worker may be stepping still if this task was cancelled.
            self._news.set()
            self._driver = None

    def _admit(self) -> list[_Call]:
        """Take from those that wait as many as there is room for; those that can never run end here."""
        waiting = list(islice(self._waiting, max(0, self.max_running - len(self._running))))
        admitted, impossible = self._batch.select(waiting)
        most = self._batch.budget.most_tokens
        for call in impossible:
            del self._waiting[call]
            need, name = self._batch.cache_need(call), call.request.request_id
            message = (
                f"request {name!r} may need a key/value cache of {need} tokens, and it takes "
                f"{most} at most; raise engine.arguments.cache_tokens, or let responses be shorter"
            )
            self._deliver([(call, call.completion("error", message))])
        for call in admitted:
            del self._waiting[call]
            self._running[call] = None
            limit_s = call.request.time_limit_s
            if limit_s is not None and call.timer is None:
                call.timer = asyncio.get_running_loop().call_later(limit_s, self._end, [call], limit_s)
        return admitted

    def _wait_again(self, given_up: Set[Row]) -> None:
        """Put back those that were given up: they are older than all that wait."""
        calls = [call for call in self._running if call in given_up]
        self._running = {call: None for call in self._running if call not in given_up}
        self._waiting = dict.fromkeys(sorted(calls, key=lambda call: call.turn)) | self._waiting
        self._end(self._aborting.intersection(calls))
        self._aborting.difference_update(calls)

    def _deliver(self, ended: Iterable[Ended]) -> None:
        for call, completion in ended:
            assert isinstance(call, _Call)
            if completion is None:
                continue
            if call.timer is not None:
                call.timer.cancel()
            if call.overdue and completion.finish_reason == "abort":
                completion = replace(completion, error_msg=call.overdue)
            self._running.pop(call, None)
            call.ended.set_result(completion)

    def _fail_all(self, error: Exception) -> None:
        completion = Completion(finish_reason="error", error_msg=_describe(error))
        self._deliver([(call, completion) for call in (*self._waiting, *self._running)])
        self._waiting.clear()
        self._aborting.clear()

    # The worker thread's side

    def _work(self, admitted: Sequence[Row], aborting: Iterable[Row]) -> list[Ended]:
        """Admit, then step until something ends or is given up, or the event loop has news."""
        ended = self._batch.abort(aborting)
        if admitted:
            try:
                ended += self._batch.admit(admitted)
            # A model may raise anything: it fails these requests, not the engine.
            except Exception as error:
                failed = Completion(finish_reason="error", error_msg=self._failed_pass(error))
                ended += [(row, failed) for row in admitted]
        while self._batch.size and not (ended or self._news.is_set()):
            try:
                ended = self._batch.step(self.model_step)
            except Exception as error:
                ended = self._batch.fail(self._failed_pass(error))
        return ended

    def _failed_pass(self, error: Exception) -> str:
        logger.error("a forward pass failed", exc_info=error)
        return f"forward pass failed: {_describe(error)}"

    def _load(self, weights: Weights, model_step: int, adapters: "AdapterConfig | None") -> None:
        if self._stream:
            # There a trainer of this process has made them, perhaps not yet.
            self._stream.wait_stream(torch.cuda.default_stream(self._stream.device))
        if adapters is None:
            self._are_lent = take_weights(self._tensors, weights, are_lent=self._are_lent)
            if self._adapted is not None:
                self._adapted.full_load(are_lent=self._are_lent)
        else:
            assert self._adapted is not None, "refused before"
            self._adapted.load(weights, adapters)
        if self._stream:
            # Its next step changes them.
            self._stream.synchronize()
        # Here, so that no token of the new weights gets the old label.
        self.model_step = model_step

    def _release(self) -> None:
        if self._batch.size == 0:
            self._batch.release()


_MAX_TURNS = 1000
"""Of the event loop for which requests wait for others of the same moment; a large batch takes hundreds."""


def end_token_ids(model: Any, tokenizer: Any = None) -> set[int]:
    """The ids that end a response: those of the model's generation config and the tokenizer's own.

    And its placeholder of an image, which stands for one in a prompt and means nothing in an answer.
    """
    own = getattr(model.generation_config, "eos_token_id", None)
    ids = set(own if isinstance(own, list) else [own])
    ids |= {getattr(tokenizer, "eos_token_id", None), getattr(model.config, "image_token_id", None)}
    return {token_id for token_id in ids if token_id is not None}


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
