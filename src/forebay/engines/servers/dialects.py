"""What vLLM and SGLang call things: all their differences are in this file.

::

    GenerateRequest --body--> POST generate_path --server-sent events--> read --> Piece, Piece, ...
    pause, release, load(folder), load_adapters(folder), version     --> Call, Call, ...

A dialect is a table of paths and two conversions; it sends nothing and keeps nothing.

Both servers are asked for the tokens as they are made: so an aborted request costs no tokens that were
delivered, and a server that dies costs the few since the last piece.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from forebay.engines.base import GenerateRequest
from forebay.engines.seeds import request_seed
from forebay.types import SampleParams

MODEL_NAME = "policy"
"""What servers that a run starts itself call the model."""

ADAPTER_NAME = "policy-adapter"
"""What vLLM servers call the one adapter that they have."""

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What ``--max-lora-rank`` may be."""

SGLANG_SEED_BITS = 31
"""SGLang keeps seeds in 32-bit integers."""


class Call(NamedTuple):
    """One control request."""

    method: str
    path: str
    body: Mapping[str, Any] | None = None
    params: Mapping[str, str] = {}
    tries: int = 1
    """How often to ask while the answer is that it could not be done just now."""
    may_refuse: bool = False
    """Whether a server that does not do it is none the worse."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one event of a stream adds."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


class BadAnswer(ValueError):
    """A server sent something else than its interface says."""


class ErrorEvent(BadAnswer):
    """A server sent an error in the middle of a stream."""


class Dialect(ABC):
    """What differs between servers."""

    name: str
    generate_path: str
    health: Call
    """Whether there is a server; answered while it is paused, too."""
    ready: Call
    """Whether a server that was just started has come to its end of starting."""
    alive: Call
    """Answered by the process that runs the model, between two steps: not by one that stands still."""
    models = Call("GET", "/v1/models")
    """What it serves, and how many tokens of it."""
    version: Call
    pause: tuple[Call, ...]
    """End all requests as aborted, and run none until `release`."""
    release: tuple[Call, ...]
    probe: SampleParams
    """How to draw one token to see whether the server answers as it should."""
    probe_is_certain: bool
    """Whether that token has probability 1 if the server reports the distribution that it draws from."""
    environment: ClassVar[Mapping[str, str | None]]
    """Variables for a server that is started here; None: not to be inherited."""
    lora_environment: ClassVar[Mapping[str, str | None]] = {}
    """Besides, for a server that is to take adapters."""
    help: str
    """What a server needs to be started with, for errors."""
    lora_help: str
    """What it needs to be started with to take adapters, for errors."""

    @abstractmethod
    def check(self, request: GenerateRequest) -> None:
        """Raise ValueError where the server cannot report the distribution that `request` is drawn from."""

    @abstractmethod
    def body(
        self,
        request: GenerateRequest,
        model: str,
        max_tokens: int,
        tokens_per_piece: int,
        *,
        adapters: str | None = None,
    ) -> dict[str, Any]:
        """The request as JSON; its answer is a stream. `adapters`: the version of those to use."""

    @abstractmethod
    def read(self, event: dict[str, Any], num_made: int) -> Piece:
        """One event of a stream of which `num_made` tokens are known.

        Raises:
            BadAnswer: the event tells of an error, or is not what this server sends.
        """

    @abstractmethod
    def load(self, folder: str, version: str) -> tuple[Call, ...]:
        """Take over the weights in `folder` while paused, and forget what the old ones computed."""

    @abstractmethod
    def load_adapters(self, folder: str, version: str) -> tuple[Call, ...]:
        """Take over the adapters in `folder` while paused, and forget what the old ones computed.

        The first call is the one that loads them; a server that refuses it is as it was.
        """

    @abstractmethod
    def drop_adapters(self, version: str) -> tuple[Call, ...]:
        """Free what adapters occupy that no request uses any more."""

    def version_of(self, answer: dict[str, Any]) -> str | None:
        """What `version` was answered."""
        return answer.get("weight_version")

    @abstractmethod
    def command(
        self, model_folder: str, port: int, max_context_tokens: int, dtype: str, lora_rank: int = 0
    ) -> list[str]:
        """What to run with a Python interpreter to get a server of this kind, on the loopback interface.

        `lora_rank` is the rank of the adapters that it is to take; 0: none.

        Raises:
            ValueError: servers of this kind take none of that rank.
        """


class VLLM(Dialect):
    """vLLM's completions endpoint, with its development endpoints for control.

    Its own defaults (a model's generation config may set penalties, top-k and more) are all overridden: what
    is drawn from must be what the trainer recomputes.
    """

    name = "vllm"
    generate_path = "/v1/completions"
    # Of its own process only: it is fine while the model's hangs.
    health = ready = Call("GET", "/health")
    alive = Call("GET", "/is_paused")
    version = Call("GET", "/weight_info")
    pause = (Call("POST", "/pause", params={"mode": "abort"}),)
    release = (Call("POST", "/resume"),)
    # Not top-k of 1: of tokens that are equally likely it would keep all.
    probe = SampleParams(max_tokens=1, top_p=1e-6)
    probe_is_certain = True
    environment: ClassVar[Mapping[str, str | None]] = {
        "VLLM_SERVER_DEV_MODE": "1",
        # Of some other server; this one is on the loopback interface.
        "VLLM_API_KEY": None,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    lora_environment: ClassVar[Mapping[str, str | None]] = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    help = (
        "vLLM must be started with --logprobs-mode processed_logprobs and the environment variable "
        "VLLM_SERVER_DEV_MODE=1"
    )
    lora_help = (
        "for adapters vLLM must be started with --enable-lora --max-loras 1 --max-lora-rank RANK and the "
        "environment variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and know LoRA for all layers that have "
        "one; else set takes_adapters = false among the engine's arguments"
    )

    def check(self, request: GenerateRequest) -> None:
        """All requests fit."""

    def body(
        self,
        request: GenerateRequest,
        model: str,
        max_tokens: int,
        tokens_per_piece: int,
        *,
        adapters: str | None = None,
    ) -> dict[str, Any]:
        """See `Dialect`."""
        params = request.params
        return {
            "model": model if adapters is None else ADAPTER_NAME,
            "prompt": request.input_ids.tolist(),
            "max_tokens": max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": request_seed(request.seed, request.num_earlier),
            "stop": list(params.stop),
            "stop_token_ids": list(params.stop_token_ids),
            "skip_special_tokens": False,
            "logprobs": 0,
            "return_token_ids": True,
            "stream": True,
            "stream_interval": tokens_per_piece,
        }

    def read(self, event: dict[str, Any], num_made: int) -> Piece:
        """See `Dialect`."""
        if "error" in event:
            raise ErrorEvent(f"the server failed: {event['error']}")
        try:
            if not event["choices"]:
                return Piece()
            choice = event["choices"][0]
            ids, reason = choice["token_ids"] or [], choice["finish_reason"]
            logprobs = choice["logprobs"]["token_logprobs"] if ids else []
        except (KeyError, TypeError) as error:
            raise BadAnswer(f"no token ids and log probabilities in {event}: {error!r}") from error
        if len(ids) != len(logprobs):
            raise BadAnswer(f"{len(ids)} token ids but {len(logprobs)} log probabilities in {event}")
        return Piece(ids=ids, logprobs=logprobs, finish_reason=reason)

    def load(self, folder: str, version: str) -> tuple[Call, ...]:
        """See `Dialect`."""
        return (
            Call("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}}),
            *self._loaded(version),
        )

    def load_adapters(self, folder: str, version: str) -> tuple[Call, ...]:
        """See `Dialect`. In place: one name for all, which so counts as one in the server's memory."""
        body = {"lora_name": ADAPTER_NAME, "lora_path": folder, "load_inplace": True}
        return (Call("POST", "/v1/load_lora_adapter", body, may_refuse=True), *self._loaded(version))

    def _loaded(self, version: str) -> tuple[Call, ...]:
        return (
            # It fails while blocks are held, and those of aborted requests may be for a moment.
            Call("POST", "/reset_prefix_cache", tries=5),
            Call("POST", "/update_weight_version", {"new_version": version}),
        )

    def drop_adapters(self, version: str) -> tuple[Call, ...]:
        """Nothing: the next ones take their place."""
        return ()

    def command(
        self, model_folder: str, port: int, max_context_tokens: int, dtype: str, lora_rank: int = 0
    ) -> list[str]:
        """See `Dialect`."""
        return [
            *("-m", "vllm.entrypoints.openai.api_server"),
            *("--model", model_folder, "--served-model-name", MODEL_NAME),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--max-model-len", str(max_context_tokens), "--dtype", dtype),
            *("--logprobs-mode", "processed_logprobs"),
            *(self._lora_options(lora_rank) if lora_rank else ()),
        ]

    def _lora_options(self, rank: int) -> tuple[str, ...]:
        enough = next((known for known in VLLM_RANKS if known >= rank), None)
        if enough is None:
            raise ValueError(
                f"vLLM takes adapters of rank {VLLM_RANKS[-1]} at most, got {rank}; lower train.lora_rank, "
                f"or set takes_adapters = false among the engine's arguments"
            )
        return ("--enable-lora", "--max-loras", "1", "--max-lora-rank", str(enough))


class SGLang(Dialect):
    """SGLang's own generate endpoint.

    Its log probabilities are those after the temperature but before top-k and top-p, so requests with these
    are refused. Seeds have an effect only with ``--enable-deterministic-inference``.
    """

    name = "sglang"
    generate_path = "/generate"
    # "/health" makes a token, unless it is told not to, and so fails while the server is paused.
    health = version = Call("GET", "/get_model_info")
    ready = Call("GET", "/health")
    alive = Call("GET", "/get_server_info")
    pause = (Call("POST", "/pause_generation", {"mode": "abort"}),)
    release = (Call("POST", "/continue_generation", {}),)
    probe = SampleParams(max_tokens=1)
    probe_is_certain = False
    environment: ClassVar[Mapping[str, str | None]] = {
        "HF_HUB_OFFLINE": "1",
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    }
    help = (
        "SGLang must be 0.5.6 or newer; start it with the environment variable "
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=false, or what else asks for its health takes it for dead "
        "while it is paused"
    )
    lora_help = (
        "for adapters SGLang must be started with --enable-lora --max-lora-rank RANK --lora-target-modules "
        "all; else set takes_adapters = false among the engine's arguments"
    )

    def check(self, request: GenerateRequest) -> None:
        """See `Dialect`."""
        if request.params.top_k or request.params.top_p < 1:
            raise ValueError(
                f"request {request.request_id!r} has top_k {request.params.top_k} and top_p "
                f"{request.params.top_p}: SGLang reports log probabilities before both, so the trainer would "
                f"compare with another distribution; use top_k = 0 and top_p = 1"
            )

    def body(
        self,
        request: GenerateRequest,
        model: str,
        max_tokens: int,
        tokens_per_piece: int,
        *,
        adapters: str | None = None,
    ) -> dict[str, Any]:
        """See `Dialect`. Each event may repeat all log probabilities so far, so few events cost less."""
        params = request.params
        seed = request_seed(request.seed, request.num_earlier) & ((1 << SGLANG_SEED_BITS) - 1)
        return {
            **({} if adapters is None else {"lora_path": adapters}),
            "input_ids": request.input_ids.tolist(),
            "sampling_params": {
                "max_new_tokens": max_tokens,
                "temperature": params.temperature,
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "sampling_seed": seed,
                "stop": list(params.stop),
                "stop_token_ids": list(params.stop_token_ids),
                "skip_special_tokens": False,
                "no_stop_trim": True,
                "stream_interval": tokens_per_piece,
            },
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": True,
        }

    def read(self, event: dict[str, Any], num_made: int) -> Piece:
        """See `Dialect`. Events hold all tokens so far, or the new ones only: an option of the server."""
        if "error" in event:
            raise ErrorEvent(f"the server failed: {event['error']}")
        try:
            meta = event["meta_info"]
            num_new = meta["completion_tokens"] - num_made
            made = meta["output_token_logprobs"][-num_new:] if num_new else []
            ended = meta["finish_reason"]
        except (KeyError, TypeError) as error:
            raise BadAnswer(f"no log probabilities of output tokens in {event}: {error!r}") from error
        if len(made) != num_new:
            raise BadAnswer(f"{num_new} new tokens but {len(made)} log probabilities in {event}")
        reason = ended["type"] if isinstance(ended, dict) else ended
        return Piece(
            ids=[token_id for _, token_id, *_ in made],
            logprobs=[logprob for logprob, *_ in made],
            finish_reason=reason,
        )

    def load(self, folder: str, version: str) -> tuple[Call, ...]:
        """See `Dialect`."""
        return (
            Call(
                "POST",
                "/update_weights_from_disk",
                {"model_path": folder, "weight_version": version, "flush_cache": True},
            ),
        )

    def load_adapters(self, folder: str, version: str) -> tuple[Call, ...]:
        """See `Dialect`. Each has a name of its own, and what is cached belongs to that name."""
        name = {"new_version": version, "abort_all_requests": False}
        return (
            Call("POST", "/load_lora_adapter", {"lora_name": version, "lora_path": folder}, may_refuse=True),
            Call("POST", "/update_weight_version", name),
        )

    def drop_adapters(self, version: str) -> tuple[Call, ...]:
        """See `Dialect`."""
        return (Call("POST", "/unload_lora_adapter", {"lora_name": version}, may_refuse=True),)

    def command(
        self, model_folder: str, port: int, max_context_tokens: int, dtype: str, lora_rank: int = 0
    ) -> list[str]:
        """See `Dialect`."""
        return [
            *("-m", "sglang.launch_server"),
            *("--model-path", model_folder, "--served-model-name", MODEL_NAME),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--context-length", str(max_context_tokens), "--dtype", dtype),
            *(self._lora_options(lora_rank) if lora_rank else ()),
        ]

    def _lora_options(self, rank: int) -> tuple[str, ...]:
        # Nothing says yet which layers will have one.
        return ("--enable-lora", "--max-lora-rank", str(rank), "--lora-target-modules", "all")
