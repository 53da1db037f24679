"""The names vLLM and SGLang have for things: all their differences are in this file.

::

    GenerateRequest --body--> POST generate_path --server-sent events--> read --> Piece, Piece, ...
    pause, hold, release, load(folder), load_adapters(folder), version, begin .. bucket .. end   weights
    sleep, wake(part)                                                memory     --> Call, Call, ...

A dialect is a table of paths and two conversions; it sends nothing and keeps nothing.

Both servers are asked for the tokens as they are made: so an aborted request costs no tokens that were
delivered, and a server that dies costs the few since the last piece.
"""

import base64
import io
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forebay.engines.base import GenerateRequest, request_seed
from forebay.engines.servers.stream import BadAnswer, ErrorEvent, Piece
from forebay.models.images import as_url, one_for_each
from forebay.types import SampleParams

if TYPE_CHECKING:
    from forebay.engines.weights.buckets import Bucket

MODEL_NAME = "policy"
"""Model name of the servers that a run starts itself."""

ADAPTER_NAME = "policy-adapter"
"""vLLM's name of the one adapter that it has: always the same, so that it counts as one in its memory."""

WEIGHTS, CACHE = "weights", "kv_cache"
"""The parts of a server's memory, as both servers call them: what sleeps, and wakes up one by one."""

RETURN_EXPERTS = "--enable-return-routed-experts"
"""vLLM's option for a mixture of experts; among ``options`` it also says so of servers that others run."""


class Call(NamedTuple):
    """One control request of a dialect: method, path, body."""

    method: str
    path: str
    body: Mapping[str, Any] | None = None
    params: Mapping[str, str] = {}
    tries: int = 1
    """How often to ask while the answer is that it could not be done just now."""
    may_refuse: bool = False
    """Whether a refusal by the server is harmless."""


class Dialect:
    """One kind of server: vLLM, but for what another kind, as `SGLang`, has in place of it.

    Tokens come from vLLM's completions endpoint, control goes to its development endpoints. With `keeps`,
    requests are held while weights change and go on with what was cached of them; each then says which
    weights made which token. New requests never meet the cache of older weights. With the option
    `RETURN_EXPERTS` requests of a mixture of experts say where it sent their tokens. Only vLLM's endpoint for
    tokens says either.
    """

    generate_path = "/v1/completions"
    tokens_path = "/inference/v1/generate"
    """Where requests go that are to say which weights made them, or where they were sent, or have images."""
    health = Call("GET", "/health")
    """Whether there is a server; answered while it is paused, too. vLLM's knows of its own process only: it
    is fine while the model's hangs."""
    ready = health
    """Whether a server that was just started has come to its end of starting."""
    alive = Call("GET", "/is_paused")
    """Answered by the process that runs the model, between two steps: not by one that stands still."""
    models = Call("GET", "/v1/models")
    """The models that it serves, and how many tokens of each."""
    version = Call("GET", "/weight_info")
    """Answered with the ``weight_version`` that the server was last told."""
    info = Call("GET", "/server_info", params={"config_format": "json"}, may_refuse=True)
    """Answered with all settings of the server, for `capacity`."""
    pause: tuple[Call, ...] = (Call("POST", "/pause", params={"mode": "abort"}),)
    """End all requests as aborted, and run none until `release`."""
    hold: tuple[Call, ...] = (Call("POST", "/pause", params={"mode": "keep"}),)
    """Stop between two tokens and keep the requests, with what is cached of them, until `release`."""
    release: tuple[Call, ...] = (Call("POST", "/resume"),)
    workers = Call("GET", "/get_world_size")
    """Answered with its number of processes that have a part of the model, as ``world_size``."""
    abandon: tuple[Call, ...] = (Call("POST", "/finish_weight_update", may_refuse=True),)
    """End an update of which not all buckets came, so that another can begin."""
    tokens_options = "--enable-scale-out"
    """Arguments of a server whose requests go to `tokens_path`."""
    sleep_options = "--enable-sleep-mode"
    """Arguments of a server that is to `sleep`."""
    transfer_options: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "cuda": ("--weight-transfer-config", '{"backend": "ipc"}'),
        "cpu": ("--weight-transfer-config", '{"backend": "forebay"}'),
    }
    """Arguments of a server that is to take weights in buckets, by the device that these are on."""
    memory_option = "--gpu-memory-utilization"
    """Name of the argument for the share of the device's memory that the server may take."""
    # Not top-k of 1: of tokens that are equally likely it would keep all.
    probe = SampleParams(max_tokens=1, top_p=1e-6)
    """How to draw one token to see whether the server answers as it should."""
    probe_is_certain = True
    """Whether that token has probability 1 if the server reports the distribution that it draws from."""
    command_line = (
        "-m vllm.entrypoints.openai.api_server --model {folder} --served-model-name {name} --host 127.0.0.1 "
        "--port {port} --max-model-len {context} --dtype {dtype} --logprobs-mode processed_logprobs"
    )
    """Arguments of a Python interpreter that start a server of this kind on the loopback interface."""
    lora_options = "--enable-lora --max-loras 1 --max-lora-rank {rank}"
    """Further ones for a server that is to take adapters."""
    environment: ClassVar[Mapping[str, str | None]] = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        # Of some other server; this one is on the loopback interface.
        "VLLM_API_KEY": None,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # Its name for handles of GPU memory that come by HTTP; only this machine's processes can send any.
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    """Variables for a server that is started here; None: not to be inherited."""
    lora_ranks: tuple[int, ...] = (1, 8, 16, 32, 64, 128, 256, 320, 512)
    """The ranks that it may be started with, in ascending order; (): any."""
    help = (
        "vLLM must be started with --logprobs-mode processed_logprobs and the environment variable "
        "VLLM_SERVER_DEV_MODE=1"
    )
    """How a server must be started, for errors."""
    lora_help = (
        "for adapters vLLM must be started with --enable-lora --max-loras 1 --max-lora-rank RANK and the "
        "environment variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and know LoRA for all layers that have "
        "one; else set takes_adapters = false among the engine's arguments"
    )
    """How it must be started to take adapters, for errors."""

    placeholder: int | None = None
    """The token id that stands for images in the prompts of the model; it is set with the engine."""

    def __init__(self, *, keeps: bool = False, options: Sequence[str] = ()) -> None:
        """`options` are those that the server is started with."""
        self.keeps = keeps
        self.by_token = keeps or RETURN_EXPERTS in options
        """Whether all requests go to vLLM's endpoint for tokens, and not those with images only."""

    def check(self, request: GenerateRequest) -> None:
        """Raise ValueError where the server cannot report the distribution that `request` is drawn from."""

    def path(self, body: Mapping[str, Any]) -> str:
        """Where this request goes."""
        return self.tokens_path if "token_ids" in body else self.generate_path

    def body(
        self, request: GenerateRequest, model: str, max_tokens: int, *, adapters: str | None, version: str
    ) -> dict[str, Any]:
        """The request as JSON; its answer is a stream. `adapters`: the version of those to use.

        `version` is that of all weights of now, where requests are kept over several.
        """
        params, ids = request.params, request.input_ids.tolist()
        sampling = {
            **_sampling(params, self.placeholder),
            "max_tokens": max_tokens,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "seed": request_seed(request.seed, request.num_earlier),
            # Of the token that was drawn, and of no alternatives.
            "logprobs": 0,
        }
        name = {"model": model if adapters is None else ADAPTER_NAME, "stream": True}
        if self.by_token or request.images:
            # With a salt for each version, no request finds what older weights have cached.
            further: dict[str, Any] = {"cache_salt": version or "start"} if self.keeps else {}
            if request.images:
                # The server expands each placeholder to as many as its image takes, and says what it has.
                ids = one_for_each(request.input_ids, request.images, self.placeholder)
                # With names for each version, it finds no image as an older tower saw it.
                names = [f"{blake2b(image, digest_size=8).hexdigest()}-{version}" for image in request.images]
                parts = [{"type": "image_url", "uuid": name} for name in names]
                further |= {"content_parts": parts, "return_token_ids": True}
            return {**name, "token_ids": ids, "sampling_params": sampling, **further}
        return {**name, **sampling, "prompt": ids, "return_token_ids": True}

    def read(self, event: dict[str, Any], num_made: int) -> Piece:
        """New tokens, or none, of one event of a stream of which `num_made` tokens are known.

        Raises:
            BadAnswer: the event tells of an error, or is not what this server sends.
        """
        if "error" in event:
            raise ErrorEvent(f"the server failed: {event['error']}")
        try:
            piece, num_new = self._piece(event, num_made)
        except (KeyError, TypeError) as error:
            raise BadAnswer(f"no token ids and log probabilities in {event}: {error!r}") from error
        if num_new != len(piece.logprobs):
            raise BadAnswer(f"{num_new} new tokens but {len(piece.logprobs)} log probabilities in {event}")
        return piece

    def _piece(self, event: dict[str, Any], num_made: int) -> tuple[Piece, int]:
        """The new tokens of an event, and how many it says there are."""
        if not event["choices"]:
            return Piece(), 0
        choice = event["choices"][0]
        ids, experts = choice["token_ids"] or [], choice.get("routed_experts")
        logprobs: list[float] = []
        # The endpoint for tokens has one form, and that for completions another.
        if ids and "content" in choice["logprobs"]:
            logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        elif ids:
            logprobs = choice["logprobs"]["token_logprobs"]
        piece = Piece(
            ids=ids,
            logprobs=logprobs,
            prompt_ids=event.get("prompt_token_ids"),
            finish_reason=choice["finish_reason"],
            versions=_versions(choice),
            routed_experts=None if experts is None else _routed_experts(experts),
        )
        return piece, len(ids)

    def capacity(self, info: Mapping[str, Any]) -> tuple[int, int, int]:
        """The requests it runs at once, the tokens its cache holds, those of a block; LookupError: unknown."""
        config = info["vllm_config"]
        cache, num_ranks = config["cache_config"], config["parallel_config"]["data_parallel_size"]
        # The blocks are those of all ranks, the requests those of one.
        num_requests = config["scheduler_config"]["max_num_seqs"] * num_ranks
        return num_requests, (cache["num_gpu_blocks"] or 0) * cache["block_size"], cache["block_size"]

    def load(self, folder: str, version: str) -> tuple[Call, ...]:
        """Take over the weights in `folder` while paused, and forget what the old ones computed."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        return (Call("POST", "/collective_rpc", body), *self._loaded(version))

    def load_adapters(self, folder: str, version: str) -> tuple[Call, ...]:
        """Take over the adapters in `folder` while paused, and forget what the old ones computed.

        The first call is the one that loads them; a server that refuses it is as it was. vLLM's one adapter
        is replaced in place, so that there is nothing to drop afterwards.
        """
        body = {"lora_name": ADAPTER_NAME, "lora_path": folder, "load_inplace": True}
        return (Call("POST", "/v1/load_lora_adapter", body, may_refuse=True), *self._loaded(version))

    def drop_adapters(self, version: str) -> tuple[Call, ...]:
        """Free what adapters occupy that no request uses any more."""
        return ()

    def begin(self, place: Mapping[str, Any]) -> tuple[Call, ...]:
        """Be ready for weights that come in buckets (`bucket`), until `end`; from the sender at `place`, if any."""
        init = {"init_info": {"packed": True, **place}}
        return Call("POST", "/init_weight_transfer_engine", init), Call("POST", "/start_weight_update")

    def bucket(self, bucket: "Bucket") -> Call:
        """Take over these weights between `begin` and `end`; they may change once it is answered.

        By a handle of the memory that they lie in, one after another, which is not used where there is a sender.
        """
        names, dtypes, shapes, starts, stops = zip(*bucket.layout, strict=True)
        info = {
            "names": names,
            "dtype_names": dtypes,
            "shapes": shapes,
            "tensor_sizes": [stop - start for start, stop in zip(starts, stops, strict=True)],
            **bucket.handle,
        }
        return Call("POST", "/update_weights", {"update_info": info})

    def end(self, version: str) -> tuple[Call, ...]:
        """All buckets have come: call the weights `version`, and forget what the old ones computed."""
        return (Call("POST", "/finish_weight_update"), *self._loaded(version))

    def sleep(self, *, keep_weights: bool) -> tuple[Call, ...]:
        """Give the memory of weights and cache back while paused; the weights are lost if not kept."""
        # Level 1 copies them to the CPU, level 2 drops them.
        return (Call("POST", "/sleep", params={"level": "1" if keep_weights else "2"}),)

    def wake(self, part: str) -> Call:
        """Take the memory of `WEIGHTS` or `CACHE` again; the cache last, which also takes requests again."""
        return Call("POST", "/wake_up", params={"tags": part})

    def _loaded(self, version: str) -> tuple[Call, ...]:
        # It fails while blocks are held, and those of aborted requests may be for a moment. Those of kept
        # requests are, and no request of newer weights asks for them.
        reset = () if self.keeps else (Call("POST", "/reset_prefix_cache", tries=5),)
        return (*reset, Call("POST", "/update_weight_version", {"new_version": version}))

    def command(self, folder: str, port: int, context: int, dtype: str, lora_rank: int = 0) -> list[str]:
        """`command_line` for the model in `folder`; `lora_rank`: of the adapters it is to take, 0: none.

        Raises:
            ValueError: servers of this kind take none of that rank.
        """
        values = {"folder": folder, "name": MODEL_NAME, "port": port, "context": context, "dtype": dtype}
        line = self.command_line.split()
        if lora_rank:
            line += self.lora_options.split()
            fitting = [rank for rank in self.lora_ranks or (lora_rank,) if rank >= lora_rank]
            if not fitting:
                raise ValueError(
                    f"a server takes adapters of rank {self.lora_ranks[-1]} at most, got {lora_rank}; lower "
                    f"train.lora_rank, or set takes_adapters = false among the engine's arguments"
                )
            values["rank"] = fitting[0]
        # Split first: a folder's name may have spaces.
        return [part.format(**values) for part in line]


SGLANG_SEED_BITS = 31
"""SGLang keeps seeds in 32-bit integers."""


class SGLang(Dialect):
    """SGLang's own generate endpoint.

    Its log probabilities are those after the temperature but before top-k and top-p, so requests with these
    are refused. Seeds have an effect only with ``--enable-deterministic-inference``.
    """

    generate_path = "/generate"
    # "/health" makes a token, unless it is told not to, and so fails while the server is paused.
    health = version = Call("GET", "/get_model_info")
    info = Call("GET", "/get_server_info", may_refuse=True)
    ready = Call("GET", "/health")
    alive = Call("GET", "/get_server_info")
    pause = (Call("POST", "/pause_generation", {"mode": "abort"}),)
    hold = (Call("POST", "/pause_generation", {"mode": "in_place"}),)
    release = (Call("POST", "/continue_generation", {}),)
    abandon = ()
    transfer_options: ClassVar[Mapping[str, tuple[str, ...]]] = {"cuda": ()}
    tokens_options = ""
    sleep_options = "--enable-memory-saver --enable-weights-cpu-backup"
    memory_option = "--mem-fraction-static"
    probe = SampleParams(max_tokens=1)
    probe_is_certain = False
    command_line = (
        "-m sglang.launch_server --model-path {folder} --served-model-name {name} --host 127.0.0.1 "
        "--port {port} --context-length {context} --dtype {dtype}"
    )
    # All layers, because nothing says yet which will have an adapter.
    lora_options = "--enable-lora --max-lora-rank {rank} --lora-target-modules all"
    environment: ClassVar[Mapping[str, str | None]] = {
        "HF_HUB_OFFLINE": "1",
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        # What its tower made of an image would outlast the weights that made it.
        "SGLANG_VLM_CACHE_SIZE_MB": "0",
    }
    help = (
        "SGLang must be 0.5.6 or newer; start it with the environment variable "
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=false, or what else asks for its health takes it for dead "
        "while it is paused"
    )
    lora_ranks = ()
    lora_help = (
        "for adapters SGLang must be started with --enable-lora --max-lora-rank RANK --lora-target-modules "
        "all; else set takes_adapters = false among the engine's arguments"
    )

    def check(self, request: GenerateRequest) -> None:
        """Refuse top-k and top-p."""
        if request.params.top_k or request.params.top_p < 1:
            raise ValueError(
                f"request {request.request_id!r} has top_k {request.params.top_k} and top_p "
                f"{request.params.top_p}: SGLang reports log probabilities before both, so the trainer would "
                f"compare with another distribution; use top_k = 0 and top_p = 1"
            )

    def body(
        self, request: GenerateRequest, model: str, max_tokens: int, *, adapters: str | None, version: str
    ) -> dict[str, Any]:
        """The generation from token ids; each event may repeat all log probabilities, so there are few."""
        seed = request_seed(request.seed, request.num_earlier) & ((1 << SGLANG_SEED_BITS) - 1)
        further: dict[str, Any] = {"input_ids": request.input_ids.tolist()}
        if request.images:
            # Placeholders as vLLM takes them; a name for a file that it has had before it does not know.
            further["input_ids"] = one_for_each(request.input_ids, request.images, self.placeholder)
            further |= {"image_data": [*map(as_url, request.images)], "return_prompt_token_ids": True}
        return {
            **({} if adapters is None else {"lora_path": adapters}),
            **({"extra_key": version} if self.keeps else {}),
            **further,
            "sampling_params": {
                **_sampling(request.params, self.placeholder),
                "max_new_tokens": max_tokens,
                "top_p": 1.0,
                "top_k": -1,
                "sampling_seed": seed,
                "no_stop_trim": True,
            },
            "return_logprob": True,
            # None of the prompt's own.
            "logprob_start_len": -1,
            "stream": True,
        }

    def _piece(self, event: dict[str, Any], num_made: int) -> tuple[Piece, int]:
        """An event holds all tokens so far, or the new ones only: an option of the server."""
        meta = event["meta_info"]
        num_new, ended = meta["completion_tokens"] - num_made, meta["finish_reason"]
        made = meta["output_token_logprobs"][-num_new:] if num_new else []
        piece = Piece(
            ids=[token_id for _, token_id, *_ in made],
            logprobs=[logprob for logprob, *_ in made],
            finish_reason=ended["type"] if isinstance(ended, dict) else ended,
            versions=_versions(meta) if ended else (),
            prompt_ids=event.get("prompt_token_ids"),
        )
        return piece, num_new

    def capacity(self, info: Mapping[str, Any]) -> tuple[int, int, int]:
        """Summed over its ranks, each of which tells its state."""
        ranks = info["internal_states"]
        num_requests = sum(rank["effective_max_running_requests_per_dp"] for rank in ranks)
        num_tokens = sum(rank["memory_usage"]["token_capacity"] for rank in ranks)
        return num_requests, num_tokens, info.get("page_size") or 1

    def load(self, folder: str, version: str) -> tuple[Call, ...]:
        """Read the weights in `folder`, and flush the cache."""
        body = {"model_path": folder, "weight_version": version, "flush_cache": not self.keeps}
        return (Call("POST", "/update_weights_from_disk", body),)

    def load_adapters(self, folder: str, version: str) -> tuple[Call, ...]:
        """Load the adapters under a name of their own; cached keys and values belong to that name."""
        return (
            Call("POST", "/load_lora_adapter", {"lora_name": version, "lora_path": folder}, may_refuse=True),
            self._name(version),
        )

    def _name(self, version: str) -> Call:
        # Its default is to abort all requests.
        return Call("POST", "/update_weight_version", {"new_version": version, "abort_all_requests": False})

    def drop_adapters(self, version: str) -> tuple[Call, ...]:
        """Unload these; refused where the server has none of that name."""
        return (Call("POST", "/unload_lora_adapter", {"lora_name": version}, may_refuse=True),)

    def begin(self, place: Mapping[str, Any]) -> tuple[Call, ...]:
        """It needs no word before."""
        return ()

    def bucket(self, bucket: "Bucket") -> Call:
        """As tensors that torch shares between processes, for a server on one GPU."""
        body = {"serialized_named_tensors": [bucket.shared_tensors()], "flush_cache": False}
        return Call("POST", "/update_weights_from_tensor", body)

    def end(self, version: str) -> tuple[Call, ...]:
        """Forget what the old weights computed."""
        reset = () if self.keeps else (Call("POST", "/flush_cache", tries=5),)
        return (*reset, self._name(version))

    def sleep(self, *, keep_weights: bool) -> tuple[Call, ...]:
        """Its options say whether weights are kept: they are."""
        return (Call("POST", "/release_memory_occupation", {"tags": [CACHE, WEIGHTS]}),)

    def wake(self, part: str) -> Call:
        """One part after the other."""
        return Call("POST", "/resume_memory_occupation", {"tags": [part]})


def _routed_experts(text: str) -> NDArray[Any]:
    """vLLM's: an array as numpy writes it to files, in base64; here in the fewest bytes that hold all ids."""
    try:
        experts = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    except ValueError as error:
        raise BadAnswer(f"routed_experts is no array: {error}") from error
    return np.asarray(experts, np.int8 if experts.max(initial=0) < 128 else np.int16)


def _versions(answer: Mapping[str, Any]) -> tuple[tuple[str, int, int], ...]:
    spans = answer.get("weight_versions") or ()
    return tuple((span["version"], span["start"], span["end"]) for span in spans)


TOKENS_PER_PIECE = 16
"""Asked of servers that take it. One event per token costs both sides more than it tells."""


def _sampling(params: SampleParams, placeholder: int | None) -> dict[str, Any]:
    """Settings with the same names at both servers.

    A model's generation config may set penalties and more: all are overridden, because what is drawn from
    must be what the trainer recomputes.
    """
    return {
        "temperature": params.temperature,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": list(params.stop),
        # A placeholder that the model writes is none, and ends the answer.
        "stop_token_ids": [*params.stop_token_ids, *([] if placeholder is None else [placeholder])],
        "skip_special_tokens": False,
        "stream_interval": TOKENS_PER_PIECE,
    }
