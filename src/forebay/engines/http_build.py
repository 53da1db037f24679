"""From the arguments of ``[engine] name = "vllm"`` (or ``"sglang"``) to engines.

::

    urls = [...]      servers that somebody else runs; asked once what they serve
    servers = N       N servers of this machine, started with the run and ended with it

The servers of a run share one folder of weights, which all of them must see.
"""

from __future__ import annotations

import ipaddress
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

from forebay.config import ConfigError
from forebay.engines.base import Engine
from forebay.engines.http_dialects import MODEL_NAME, VLLM, Dialect, SGLang
from forebay.engines.openai_http import HTTPEngine
from forebay.engines.servers import START_LIMIT_S, LocalServer
from forebay.engines.untied import shared_weights, write_untied
from forebay.engines.weight_files import WeightFiles

DIALECTS: dict[str, type[Dialect]] = {"vllm": VLLM, "sglang": SGLang}

_ASK_LIMIT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class HTTPSettings:
    """What the ``arguments`` of an HTTP engine may be."""

    urls: Sequence[str] = ()
    """Addresses of servers that are running already."""
    servers: int = 0
    """How many to start on this machine."""
    python: str = sys.executable
    """The interpreter to start them with: of the environment that vLLM or SGLang is installed in."""
    options: Sequence[str] = ()
    """Further options of the server's command line; ``{server}`` becomes the server's number."""
    environment: Mapping[str, str] | None = None
    """Further environment variables of the servers; ``{server}`` likewise (for ``CUDA_VISIBLE_DEVICES``)."""
    weights_folder: str | None = None
    """Where weights are handed over; None: in the run's folder. In ``/dev/shm``: through memory."""
    start_limit_s: float = START_LIMIT_S
    """Seconds that a server may take to start, or to come back."""

    def __post_init__(self) -> None:
        if bool(self.urls) == (self.servers > 0):
            raise ConfigError(
                f"give either urls (of running servers) or servers (how many to start), got urls = "
                f"{list(self.urls)}, servers = {self.servers}"
            )
        if self.start_limit_s <= 0:
            raise ConfigError(f"start_limit_s must be positive, got {self.start_limit_s}")
        far = [url for url in self.urls if not _is_loopback(url)]
        if far and self.weights_folder is None:
            raise ConfigError(
                f"{', '.join(far)} is on another machine: set weights_folder to a folder that it sees, too"
            )


def http_engines(
    kind: str,
    settings: HTTPSettings,
    *,
    model_folder: Path,
    dtype: str,
    max_context_tokens: int | None,
    tokenizer: Any,
    scratch: Path,
) -> list[Engine]:
    """Engines for the servers that `settings` describe; servers are started when the first is used.

    Raises:
        ConfigError: a server is not there, or serves less than `max_context_tokens`.
    """
    dialect = DIALECTS[kind]()
    served, shared = model_folder, dict[str, str]()
    if settings.servers and kind == "vllm" and not _has_gpu() and (shared := shared_weights(model_folder)):
        served = write_untied(model_folder, scratch / "model", shared)
    folder = scratch / "weights" if settings.weights_folder is None else Path(settings.weights_folder)
    files = WeightFiles(folder.resolve(), served, written_out=shared)
    common: dict[str, Any] = {
        "files": files,
        "dialect": dialect,
        "tokenizer": tokenizer,
        "start_limit_s": settings.start_limit_s,
    }
    if settings.urls:
        engines: list[Engine] = []
        for url in settings.urls:
            model, context = _ask(url.rstrip("/"), max_context_tokens)
            engines.append(HTTPEngine(url.rstrip("/"), model=model, max_context_tokens=context, **common))
        return engines
    context = max_context_tokens or _own_context(model_folder)
    return [
        HTTPEngine(
            _local_server(number, settings, dialect, served.resolve(), context, dtype, scratch),
            model=MODEL_NAME,
            max_context_tokens=context,
            **common,
        )
        for number in range(settings.servers)
    ]


def _local_server(
    number: int,
    settings: HTTPSettings,
    dialect: Dialect,
    model_folder: Path,
    context: int,
    dtype: str,
    scratch: Path,
) -> LocalServer:
    def numbered(text: str) -> str:
        return str(text).replace("{server}", str(number))

    options = [numbered(option) for option in settings.options]
    return LocalServer(
        lambda port: [settings.python, *dialect.command(str(model_folder), port, context, dtype), *options],
        log=scratch / f"server_{number}.log",
        environment={
            **dialect.environment,
            **{name: numbered(value) for name, value in (settings.environment or {}).items()},
        },
        start_limit_s=settings.start_limit_s,
    )


def _ask(url: str, wanted: int | None) -> tuple[str, int]:
    """The name of the model that the server at `url` serves, and the context to use."""
    try:
        with urlopen(f"{url}/v1/models", timeout=_ASK_LIMIT_S) as answer:
            model = json.load(answer)["data"][0]
        name, context = str(model["id"]), int(model["max_model_len"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"no server to use at {url!r}: {type(error).__name__}: {error}") from error
    if wanted is not None and wanted > context:
        raise ConfigError(
            f"the server at {url!r} takes {context} tokens, but model.max_context is {wanted}: start it "
            f"with more, or lower model.max_context"
        )
    return name, wanted or context


def _own_context(model_folder: Path) -> int:
    config = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
    context = config.get("text_config", config).get("max_position_embeddings")
    if context is None:
        raise ConfigError(f"the model in {str(model_folder)!r} states no context; set model.max_context")
    return int(context)


def _is_loopback(url: str) -> bool:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"urls holds {url!r}, which is no address; write it like 'http://127.0.0.1:8000'")
    try:
        return ipaddress.ip_address(parts.hostname).is_loopback
    except ValueError:
        return parts.hostname == "localhost"


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
