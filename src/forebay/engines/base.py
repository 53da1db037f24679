"""The contract between an inference engine and the rollout controller.

An engine takes token ids and returns token ids: it never sees chat messages and nothing is re-tokenized.

::

    generate(request) --> queued --> running --> Completion(finish_reason)
                              |          |
                          abort()/pause(): finish_reason "abort", with the tokens made so far

Contract:

* An engine that lives elsewhere (a server) can be lost. Its requests then end with ``"error"`` and ``lost``,
  with the tokens known so far, and its other calls raise `EngineLost`. Its ``async bring_up()`` starts it:
  one try, since `forebay.engines.pool` sees to the next.
* `generate` may be called concurrently without bound; the engine decides how many run together and the rest
  wait. It returns a `Completion` for everything that happens to a request, also for an engine error
  (``finish_reason="error"``); it raises `ValueError` only for a request that can never run (too long, say).
  Cancelling the awaiting task frees the request's place.
* ``logprobs`` are those of the distribution that was sampled from: after temperature, top-k and top-p.
* Every token carries the model step of the weights that made it.
* `pause` ends all running and queued requests with ``"abort"`` and returns once none runs. While paused, new
  requests return ``"abort"`` at once with no tokens. `resume` lifts it.
* A request with a time limit ends with ``"abort"`` and its tokens so far that long after it began to run;
  ``error_msg`` says so. Time in the queue does not count: a busy engine is no reason to start over.
* `load_weights` replaces the weights between two forward passes; tokens made after it carry `model_step`.
  Requests may be running: they go on over the new weights, with the keys and values that the old weights
  made of the earlier tokens. So a rollout may hold tokens of several model steps, each with the log
  probability that it was drawn with. (An aborted request that is continued later is computed anew, all of it
  by the weights of then.)
* An engine that knows how many requests it runs at once says so as ``max_running``, how many tokens its cache
  holds as ``cache_tokens``, and how many of them a block of it holds as ``cache_block``: then it is sent no more
  than that, and the rest waits for any engine.
* An engine that ``takes_adapters`` has ``load_adapters``: see `EnginePool.update_adapters`.
* The same request (ids, parameters, seed) over the same weights draws the same random numbers, whatever runs
  beside it. The numbers are counted over the whole rollout: a continuation goes on where the earlier calls
  stopped, so that an interrupted rollout draws what an uninterrupted one would have. An engine that can only
  be given a seed must mix ``num_earlier`` into it, or a continuation repeats the first numbers.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, cast

import numpy as np
from numpy.typing import NDArray

from forebay.models import AttentionKey, ModelConfig, Precision
from forebay.models.images import Images
from forebay.models.starting_weights import Weights
from forebay.types import FloatArray, IntArray, SampleParams

DEFAULT_MAX_BATCH = 256
"""Requests that decode together: more gain nothing on a CPU, and caches of as many fit a GPU."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GenerateRequest:
    """One continuation asked of an engine."""

    request_id: str
    input_ids: IntArray
    """int32, P: prompt and response so far; at least one token."""
    params: SampleParams
    max_tokens: int
    """Tokens this call may add: what is left of ``params.max_tokens``."""
    images: Images = ()
    """The files' bytes, in the order of their placeholders in `input_ids`."""
    seed: int
    """The rollout's: all calls for one try of it have the same."""
    session_id: str | None = None
    time_limit_s: float | None = None
    """Seconds it may run before the engine aborts it; None: no limit."""

    @property
    def num_earlier(self) -> int:
        """Tokens that earlier calls of the same rollout made."""
        return self.params.max_tokens - self.max_tokens

    def after(self, new_ids: Sequence[int] | IntArray) -> Self:
        """The same request once `new_ids` were made: they join the input, and less of the budget is left."""
        # Nearly every request: its long input is not copied for nothing.
        if not len(new_ids):
            return self
        return replace(
            self,
            input_ids=np.concatenate([self.input_ids, np.asarray(new_ids, np.int32)]),
            max_tokens=self.max_tokens - len(new_ids),
        )

    def check(self, max_context_tokens: int) -> None:
        """Check that an engine with this context can make at least one token.

        Raises:
            ValueError: the input is empty or fills the context, or the budget is used up.
        """
        length, name = len(self.input_ids), f"request {self.request_id!r}"
        if length == 0:
            raise ValueError(f"{name} has no input tokens")
        if length >= max_context_tokens:
            raise ValueError(
                f"{name} has {length} input tokens, which leaves no room in the context of "
                f"{max_context_tokens}; shorten the prompt or raise the context"
            )
        if self.max_tokens < 1:
            raise ValueError(f"{name} may add {self.max_tokens} tokens; at least 1")


def request_seed(*parts: str | int) -> int:
    """A seed of 63 bits that depends on all of `parts` and is the same in every process and version.

    Rollouts' seeds end in a 0, which recorded runs have; without it they could not be repeated.
    """
    # Their `repr`, not the parts joined: ("a", "1") and ("a1",) are to have different seeds.
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    # Without the top bit: seeds are signed 64-bit integers in servers.
    return int.from_bytes(digest, "little") >> 1


class EngineLost(RuntimeError):
    """An engine cannot be reached, or has ended; it may come back, and others can do its work."""


class WeightsGone(RuntimeError):
    """The trainer whose weights an engine was to read has ended; another one will give it others."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
    """The answer of an engine to one request."""

    response_ids: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    """int32, R: new tokens only; an end-of-sequence token is included."""
    logprobs: FloatArray = field(default_factory=lambda: np.empty(0, np.float32))
    """float32, R: log probability of each new token under the distribution it was drawn from."""
    model_steps: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    """int32, R: step of the weights that made each new token."""
    routed_experts: NDArray[Any] | None = None
    """int8 or int16, T x layers x k: of a mixture of experts, those that each token was sent to, from the
    first token of the input on. T is one less than input and new tokens together, since the last one has
    not been computed with, or less where the engine does not know more; None: it knows of none."""
    finish_reason: str
    """``stop``, ``length``, ``tool_calls``, ``abort`` or ``error``."""
    error_msg: str | None = None
    lost: bool = False
    """With ``error``: the engine failed, not the request, so another may go on from `response_ids`."""


@dataclass(frozen=True, kw_only=True)
class EngineHealth:
    """A snapshot for schedulers and for people."""

    ok: bool
    num_running: int
    num_waiting: int
    model_step: int
    detail: str = ""


class Seat(NamedTuple):
    """The GPUs of one engine."""

    gpus: tuple[int, ...] = ()
    """By their numbers, as this process counts them; (): those that it sees itself."""
    is_shared: bool = False
    """Whether a rank of the trainer has one of them, too, so that a server sleeps while it trains."""


@dataclass(frozen=True, kw_only=True)
class EngineSurroundings:
    """A run's own part of its engines: what the function that builds them is given besides arguments."""

    model_folder: Path
    """Hugging Face folder of the weights the run starts from."""
    model: ModelConfig
    dtype: Precision = "float32"
    """The precision in which engines hold the weights and compute."""
    attention: AttentionKey = "auto"
    """The kernel of attention of engines that load the model through transformers."""
    device: str = "cpu"
    """The run's own, where an argument does not say otherwise: `find_device` knows it."""
    seat: Callable[[int], Seat] = lambda number: Seat()
    """The GPUs of an engine process or server, by its number; ValueError: there are none for another."""
    shared_gpu: int | None = None
    """The GPU on which all servers are with the trainer, and read its weights."""
    tokenizer: Any
    scratch: Path
    """A folder for logs and weight files; it may not exist yet."""
    lora_rank: int = 0
    """The rank of the adapters that engines may be given in place of all weights; 0: none are given."""


class Engine(Protocol):
    """An inference engine, as the rollout controller drives it; its contract is the module docstring."""

    @property
    def model_step(self) -> int:
        """The step of the weights that make the next token."""

    @property
    def max_context_tokens(self) -> int:
        """The most tokens, prompt and response together, one request may reach."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Continue ``request.input_ids``."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests with ``"abort"``; unknown ids are ignored."""

    async def pause(self) -> None:
        """End every request with ``"abort"`` and take no new one until `resume`."""

    async def resume(self) -> None:
        """Take requests again."""

    def num_made(self, request_id: str) -> int:
        """How many tokens a running request has by now, for reports: it may be a step behind; else 0.

        Below 0 where it waits for room in the engine's process, which others use, too.
        """

    async def load_weights(self, weights: Weights, model_step: int) -> None:
        """Take over these parameters, by name; they are those after train step `model_step`."""

    async def health(self) -> EngineHealth:
        """Whether it can serve, and how busy it is."""

    async def close(self) -> None:
        """End everything and free the weights; `generate` afterwards returns an error completion."""


def scalable(engines: Sequence[Engine], another: Callable[[str], Engine]) -> list[Engine]:
    """`engines`, of which the first says how a running pool gets one more: at an address, or at ``""``.

    `another` may block; it raises ValueError or ConfigError where it cannot.
    """
    # On an engine, because what makes engines returns a plain list, in which nothing else has a place.
    cast("Any", engines[0]).another = another
    return list(engines)


def numbered(count: int, make: Callable[[int], Any]) -> list[Engine]:
    """So many engines, made by their numbers, on which their GPUs depend; and as `scalable`, others that join.

    One that joins takes the number of the first that is closed, or else the next.
    """
    made = [make(number) for number in range(count)]

    def another(url: str) -> Engine:
        if url:
            raise ValueError(f"this run starts its engines itself, and {url} is none of them")
        number = next((number for number, engine in enumerate(made) if engine.is_closed), len(made))
        made[number : number + 1] = [make(number)]
        return cast("Engine", made[number])

    return scalable(made, another)


def joined_experts(
    known: NDArray[Any] | None, later: NDArray[Any] | None, num_tokens: int | None = None
) -> NDArray[Any] | None:
    """`known`, with what `later` has besides: both count from a rollout's first token; at most `num_tokens`.

    Those known stand: a token's log probability came from a pass with these. A later pass over the same
    tokens, by newer weights perhaps, may have chosen others.
    """
    if later is not None and known is not None:
        later = np.concatenate([known, later[len(known) :]])
    joined = known if later is None else later
    return None if joined is None else joined[:num_tokens]
