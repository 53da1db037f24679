"""From the arguments of ``[engine] name = "vllm"`` (or ``"sglang"``) to engines.

::

    urls = [...]      servers that somebody else runs; asked once what they serve
    servers = N       N servers of this machine, started with the run and ended with it

The servers of a run share one folder of weights, which all of them must see.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from forebay.config import ConfigError
from forebay.engines.arguments import HTTPArguments
from forebay.engines.base import Engine, EngineSurroundings
from forebay.engines.servers.dialects import MODEL_NAME, VLLM, Dialect, SGLang
from forebay.engines.servers.engine import HTTPEngine
from forebay.engines.servers.launch import LocalServer
from forebay.engines.weights.files import WeightFiles
from forebay.engines.weights.untie_embeddings import shared_weights, write_untied

DIALECTS: dict[str, type[Dialect]] = {"vllm": VLLM, "sglang": SGLang}

_ASK_LIMIT_S = 10.0


def http_engines(kind: str, settings: HTTPArguments, surroundings: EngineSurroundings) -> list[Engine]:
    """Engines for the servers that `settings` describe; servers are started when the first is used.

    Raises:
        ConfigError: a server is not there, or serves less than the run's context.
    """
    dialect, scratch, model_folder = DIALECTS[kind](), surroundings.scratch, surroundings.model_folder
    takes_adapters = settings.takes_adapters
    # Only a server that is started here is known to be set up for adapters.
    lora_rank = (
        surroundings.lora_rank if takes_adapters or (takes_adapters is None and settings.servers) else 0
    )
    served, shared = model_folder, dict[str, str]()
    if settings.servers and kind == "vllm" and not _has_gpu() and (shared := shared_weights(model_folder)):
        served = write_untied(model_folder, scratch / "model", shared)
    key = _api_key(settings.api_key_env)
    folder = scratch / "weights" if settings.weights_folder is None else Path(settings.weights_folder)
    starting_dtype = surroundings.dtype if settings.servers else None
    engine = partial(
        HTTPEngine,
        files=WeightFiles(folder.resolve(), served, written_out=shared, starting_dtype=starting_dtype),
        dialect=dialect,
        tokenizer=surroundings.tokenizer,
        start_limit_s=settings.start_limit_s,
        api_key=key,
        lora_rank=lora_rank,
    )
    wanted = surroundings.model.max_context
    if settings.urls:
        asked = [(url, *_ask(url, wanted, key)) for url in (url.rstrip("/") for url in settings.urls)]
        return [engine(url, model=model, max_context_tokens=context) for url, model, context in asked]
    context = wanted or _own_context(model_folder)

    def command(port: int) -> list[str]:
        return dialect.command(str(served.resolve()), port, context, surroundings.dtype, lora_rank)

    # A server that cannot be started is an error now.
    command(0)
    environment = {**dialect.environment, **(dialect.lora_environment if lora_rank else {})}
    servers = [
        _local_server(number, settings, command, environment, scratch) for number in range(settings.servers)
    ]
    return [engine(server, model=MODEL_NAME, max_context_tokens=context) for server in servers]


def _local_server(
    number: int,
    settings: HTTPArguments,
    command: Callable[[int], list[str]],
    environment: Mapping[str, str | None],
    scratch: Path,
) -> LocalServer:
    def numbered(text: str) -> str:
        return str(text).replace("{server}", str(number))

    options = [numbered(option) for option in settings.options]
    own = {name: numbered(value) for name, value in (settings.environment or {}).items()}
    return LocalServer(
        lambda port: [settings.python, *command(port), *options],
        log=scratch / f"server_{number}.log",
        environment={**environment, **own},
        start_limit_s=settings.start_limit_s,
    )


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if key := os.environ.get(variable, "").strip():
        return key
    raise ConfigError(f"api_key_env: the environment variable {variable} is not set")


def _ask(url: str, wanted: int | None, key: str | None) -> tuple[str, int]:
    """The name of the model that the server at `url` serves, and the context to use."""
    request = Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        # Without a proxy, as everything that is asked later.
        with build_opener(ProxyHandler({})).open(request, timeout=_ASK_LIMIT_S) as answer:
            model = json.load(answer)["data"][0]
        name, context = str(model["id"]), int(model["max_model_len"])
    except HTTPError as error:
        # It holds the connection.
        error.close()
        hint = ": wrong or missing key, see api_key_env" if error.code in (401, 403) else ""
        raise ConfigError(f"the server at {url!r} answered {error.code} {error.reason}{hint}") from error
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


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
