"""From the arguments of ``[engine] name = "vllm"`` (or ``"sglang"``) to engines.

::

    urls = [...]      servers that somebody else runs; asked once what they serve, and how they take weights
    servers = N       N servers of this machine, started with the run and ended with it

The servers of a run share one folder of weights, which all of them must see, or have none.
"""

import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal, Self
from urllib.error import HTTPError
from urllib.parse import urlencode, urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from pydantic import Field, NonNegativeInt, model_validator

from forebay.config import ConfigError, StrictModel, check_arguments
from forebay.engines.base import Engine, EngineSurroundings, numbered, scalable
from forebay.engines.servers.dialects import MODEL_NAME, Call, Dialect, SGLang
from forebay.engines.servers.engine import HTTPEngine
from forebay.engines.servers.launch import START_LIMIT_S, LocalServer
from forebay.engines.servers.sender import PROGRAM
from forebay.engines.weights.files import WeightFiles, shared_weights, write_untied
from forebay.io.address import is_loopback
from forebay.models import context_of, find_device
from forebay.models.images import placeholder_of

DIALECTS: dict[str, type[Dialect]] = {"vllm": Dialect, "sglang": SGLang}

logger = logging.getLogger(__name__)

_ASK_LIMIT_S = 60.0
"""Before vLLM says what it is set to, it looks through its environment."""

_SPLIT = re.compile(r"(?:-parallel-size|-[tpd]p(?:-size)?)[ =](\d+)")
"""An option by which a server uses several GPUs, and how many."""


class HTTPArguments(StrictModel, strict=True):
    """Arguments of the engines ``vllm`` and ``sglang``."""

    urls: Sequence[str] = ()
    """Addresses of servers that are running already."""
    servers: int = Field(default=0, ge=0)
    """How many servers to start on this machine."""
    python: str = sys.executable
    """The interpreter to start them with: of the environment that vLLM or SGLang is installed in. Left out:
    the one that the run has."""
    options: Sequence[str] = ()
    """Further options of the server's command line; ``{server}`` becomes the server's number."""
    environment: Mapping[str, str] | None = None
    """Further environment variables of the servers; ``{server}`` likewise."""
    weights_folder: str | None = None
    """Where files with weights are handed over, all weights if given; None: in the run's folder. In
    ``/dev/shm``: through memory. Servers of others that have Forebay's plug-in need none: weights are sent to them."""
    start_limit_s: float = Field(default=START_LIMIT_S, gt=0)
    """Seconds that a server may take to start, or to come back; the wait for a train step to end does not count."""
    takes_adapters: bool | None = None
    """Whether a run with LoRA hands over adapters alone; None: to servers that it starts. A server that
    others run must have been started for that."""
    gpus: Sequence[Sequence[NonNegativeInt]] | None = None
    """The GPUs of each server that is started, as ``[[0, 1], [2, 3]]``; one that has a GPU of the trainer sleeps
    while that trains. None: those that the trainer does not use first, as many each as ``options`` say."""
    offload: Literal["none", "moments", "all"] = "moments"
    """What the trainer moves to the host's memory while such servers generate; ``all``: moments and weights."""
    memory_share: float | None = Field(default=None, gt=0, le=1)
    """Share of the GPU's memory that such servers take when awake, or all if there is none; None: as planned
    beside the trainer, else the server's own default."""
    in_flight: Literal["abort", "keep"] = "abort"
    """With ``produce.in_flight_update``, requests that run while weights change: ``abort`` and ask again, all
    computed anew; ``keep`` with what older weights have cached of them."""
    api_key_env: str | None = None
    """The environment variable that holds the servers' API key; None sends none."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.urls) == (self.servers > 0):
            raise ConfigError(
                f"give either urls (of running servers) or servers (how many to start), got urls = "
                f"{list(self.urls)}, servers = {self.servers}"
            )
        each = [len(own) * (len(own) == len(set(own))) for own in self.gpus or ()]
        if self.gpus is not None and (len(each) != self.servers or 0 in each):
            raise ConfigError(f"gpus names GPUs for each of the servers = {self.servers} to start, got {self.gpus}")
        split = math.prod(map(int, _SPLIT.findall(text := " ".join(self.options))))
        # A file of the server's own options may have it.
        if max(each, default=0) > split and "--config" not in text:
            raise ConfigError(
                f"gpus gives a server {max(each)} GPUs, of which it would use {split}: options = "
                f"['--tensor-parallel-size', '{max(each)}'] splits its model over all of them"
            )
        if "CUDA_VISIBLE_DEVICES" in (self.environment or ()):
            raise ConfigError("environment sets CUDA_VISIBLE_DEVICES, which the run does: use gpus, as [[0], [1]]")
        for url in self.urls:
            parts = urlsplit(url)
            if "@" in parts.netloc:
                raise ConfigError(
                    f"urls holds a user name or password for {parts.hostname!r}, which would be in every "
                    f"log; put a key into an environment variable and name it in api_key_env"
                )
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ConfigError(f"urls holds {url!r}, which is no address; write it like 'http://127.0.0.1:8000'")
        return self


_OF_THE_TRAINER = dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
"""Settings of torch's allocator that no server inherits: one whose segments expand cannot sleep."""


def http_engines(kind: str, surroundings: EngineSurroundings, **arguments: Any) -> list[Engine]:
    """Engines for the servers that `arguments` (`HTTPArguments`) name; those to start are when first used.

    Raises:
        ConfigError: a server is not there, or serves less than the run's context.
    """
    settings = HTTPArguments(**arguments)
    scratch, model_folder = surroundings.scratch, surroundings.model_folder
    dialect = DIALECTS[kind](keeps=settings.in_flight == "keep", options=settings.options)
    dialect.placeholder = placeholder_of(model_folder)
    # Only a server that is started here is known to be set up for adapters.
    takes_adapters = settings.servers if settings.takes_adapters is None else settings.takes_adapters
    lora_rank = surroundings.lora_rank if takes_adapters else 0
    if dialect.keeps and lora_rank:
        raise ConfigError("in_flight = 'keep' is for whole weights; set takes_adapters = false, or leave it out")
    device = surroundings.shared_gpu
    transfer_options = dialect.transfer_options.get("cpu" if device is None else "cuda")
    # Adapters are small, and servers read them from files only. Those of others may be on other machines.
    by_files = not settings.servers or transfer_options is None or lora_rank or settings.weights_folder
    bucket_device = None if by_files else "cpu" if device is None else f"cuda:{device}"
    # SGLang sees one GPU, as number 0, and the handles of the trainer's memory carry the trainer's number.
    if bucket_device and kind == "sglang" and device:
        raise ConfigError(
            f"SGLang shares only the first GPU that the run sees, and device is 'cuda:{device}': choose it by "
            f"CUDA_VISIBLE_DEVICES and leave device out"
        )
    served, shared = _served(kind, model_folder, scratch if settings.servers else None)
    key = os.environ.get(settings.api_key_env or "", "").strip() or None
    if settings.api_key_env is not None and key is None:
        raise ConfigError(f"api_key_env: the environment variable {settings.api_key_env} is not set")
    folder = Path(settings.weights_folder or scratch / "weights").resolve()
    dtype = surroundings.dtype if settings.servers else None
    files = WeightFiles(folder, served, written_out=shared, starting_dtype=dtype, bucket_device=bucket_device)
    engine = partial(
        HTTPEngine,
        files=files,
        dialect=dialect,
        tokenizer=surroundings.tokenizer,
        start_limit_s=settings.start_limit_s,
        api_key=key,
        lora_rank=lora_rank,
    )
    if settings.urls:
        wanted, by_files = surroundings.model.max_context, lora_rank or settings.weights_folder
        ask = partial(_ask, dialect, wanted, key, not by_files)
        sending = partial(engine, sender_device=str(find_device(surroundings.device)))
        at = partial(_at_addresses, kind, sending, arguments, files, ask)
        return scalable(at(*settings.urls), lambda url: at(url)[0])
    context = surroundings.model.max_context or context_of(model_folder) or 0
    if not context:
        raise ConfigError(f"the model in {str(model_folder)!r} states no context; set model.max_context")
    are_shared = any(surroundings.seat(number).is_shared for number in range(settings.servers))

    def command(options: list[str], sleeps: bool, port: int) -> list[str]:
        own = dialect.command(str(served.resolve()), port, context, surroundings.dtype, lora_rank)
        own += dialect.tokens_options.split() if dialect.by_token or dialect.placeholder is not None else []
        own += dialect.sleep_options.split() if sleeps else []
        own += (transfer_options or ()) if bucket_device else ()
        if settings.memory_share is not None and sleeps is are_shared:
            own += [dialect.memory_option, f"{settings.memory_share:.3f}"]
        return [settings.python, *own, *options]

    command([], False, 0)  # A server that cannot be started is an error now.
    environment: dict[str, str | None] = {**_OF_THE_TRAINER, **dialect.environment}
    if bucket_device == "cpu":
        environment["PYTHONPATH"] = str(PROGRAM.parent)

    def make(number: int) -> HTTPEngine:
        seat, name = surroundings.seat(number), str(number)
        if seat.is_shared and number >= settings.servers:
            raise ValueError(f"engine {kind!r} of this run has no GPU for another: the trainer has the next")
        server = LocalServer(
            partial(command, [option.replace("{server}", name) for option in settings.options], seat.is_shared),
            log=scratch / f"server_{name}.log",
            environment=_environment(environment, settings, seat.gpus, name),
            start_limit_s=settings.start_limit_s,
        )
        return engine(server, model=MODEL_NAME, max_context_tokens=context, sleeps=seat.is_shared)

    return numbered(settings.servers, make)


def _served(kind: str, model_folder: Path, scratch: Path | None) -> tuple[Path, dict[str, str]]:
    """The folder that servers begin with, and the weights that they are given besides.

    `scratch` is for those that the run starts. On a CPU vLLM does not reload an output layer that is shared: see
    `shared_weights`. Whether servers of others are on one is not known, and one that shares it skips the second.
    """
    if kind == "vllm":
        import torch

        if scratch is None:
            return model_folder, shared_weights(model_folder)
        if not torch.cuda.is_available() and (shared := shared_weights(model_folder)):
            return write_untied(model_folder, scratch / "model", shared), shared
    return model_folder, {}


def _environment(
    common: Mapping[str, str | None], settings: HTTPArguments, gpus: Sequence[int], number: str
) -> dict[str, str | None]:
    """The variables of one server, which sees these GPUs alone; their numbers are those of this process."""
    own = {name: value.replace("{server}", number) for name, value in (settings.environment or {}).items()}
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(max(gpus) + 1)))
        if len(names := visible.split(",")) <= max(gpus):
            raise ConfigError(f"gpus names GPU {max(gpus)}, from 0 on, and CUDA_VISIBLE_DEVICES is {visible!r} here")
        own["CUDA_VISIBLE_DEVICES"] = ",".join(names[gpu] for gpu in gpus)
    paths = [common.get("PYTHONPATH"), own.get("PYTHONPATH", os.environ.get("PYTHONPATH"))]
    return {**common, **own, "PYTHONPATH": os.pathsep.join(filter(None, paths)) or None}


def _at_addresses(
    kind: str,
    engine: Callable[..., HTTPEngine],
    arguments: dict[str, Any],
    files: WeightFiles,
    ask: Callable[[str], tuple[str, int, bool]],
    *urls: str,
) -> list[HTTPEngine]:
    """Engines for servers that run already: weights are sent to all of them, or all get files.

    Raises:
        ValueError: there is no address, or not a usable one.
        ConfigError: weights cannot get to one.
    """
    if "" in urls:
        raise ValueError("servers that run already join and leave by their address: +http://HOST:PORT")
    check_arguments("engine", kind, HTTPArguments, {**arguments, "urls": urls})
    asked = [(url.rstrip("/"), *ask(url.rstrip("/"))) for url in urls]
    names = ", ".join(lacking := [url for url, *_, has_plugin in asked if not has_plugin])
    are_here = all(is_loopback(urlsplit(url).hostname or "") for url in urls)
    by_files = lacking or (files.num_users and not files.bucket_device)
    if by_files and arguments.get("weights_folder") is None and (files.bucket_device or not are_here):
        raise ConfigError(
            f"set weights_folder to a folder that every server sees, or start {names or 'the first ones'} with "
            f"Forebay's plug-in, by which whole weights get to another machine (docs/engines.md)"
        )
    if lacking and len(lacking) < len(urls):
        logger.warning("all servers get weights in files, since %s lacks Forebay's plug-in", names)
    if not files.num_users:
        files.bucket_device = None if lacking else "cpu"
    return [engine(url, model=name, max_context_tokens=most) for url, name, most, _ in asked]


def _get(url: str, call: Call, key: str | None) -> Any:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = Request(f"{url}{call.path}?{urlencode(call.params)}", headers=headers)
    # Without a proxy, as everything that is asked later.
    with build_opener(ProxyHandler({})).open(request, timeout=_ASK_LIMIT_S) as answer:
        return json.load(answer)


def _has_plugin(dialect: Dialect, key: str | None, url: str) -> bool:
    """Whether the vLLM server at `url` says that it has the plug-in."""
    try:
        config = _get(url, dialect.info, key).get("vllm_config") or {}
    except HTTPError as error:
        error.close()
        return False
    return bool((config.get("weight_transfer_config") or {}).get("backend") == "forebay")


def _ask(dialect: Dialect, wanted: int | None, key: str | None, sends: bool, url: str) -> tuple[str, int, bool]:
    """The name of the model that the server at `url` serves, the context to use, whether weights can be sent."""
    try:
        model = _get(url, Dialect.models, key)["data"][0]
        name, context = str(model["id"]), int(model["max_model_len"])
        can_be_sent = sends and _has_plugin(dialect, key, url)
    except HTTPError as error:
        # It holds the connection.
        error.close()
        hint = ": wrong or missing key, see api_key_env" if error.code in (401, 403) else ""
        raise ConfigError(f"the server at {url!r} answered {error.code} {error.reason}{hint}") from error
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"no server to use at {url!r}: {type(error).__name__}: {error}") from error
    if wanted is not None and wanted > context:
        raise ConfigError(
            f"the server at {url!r} takes {context} tokens, but model.max_context is {wanted}: start it "
            f"with more, or lower model.max_context"
        )
    return name, wanted or context, can_be_sent
