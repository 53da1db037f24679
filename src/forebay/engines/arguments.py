"""The keys of ``engine.arguments`` for each engine; importing this module loads no torch."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field, create_model, model_validator

from forebay.config import ConfigError, StrictModel, check_arguments
from forebay.engines.servers.launch import START_LIMIT_S

DEFAULT_MAX_BATCH = 256
"""Requests that decode together: more gain nothing on a CPU, and caches of as many fit a GPU."""


class TransformersArguments(StrictModel, strict=True):
    """Arguments of the engine ``transformers``."""

    max_batch: int = Field(default=DEFAULT_MAX_BATCH, ge=1)
    """Requests that decode together; the rest wait."""
    prefill_tokens: int = Field(default=8192, ge=1)
    """Tokens, padding included, that one pass over prompts may hold; a longer prompt goes alone."""
    takes_adapters: bool = True
    """With LoRA, keep a second copy of the adapted weights and take adapters alone; false: be given merged
    weights."""
    device: str = "cpu"
    """Where the model computes, as torch calls it: ``cpu``, ``cuda``, ``cuda:1``."""


class ProcessArguments(StrictModel, strict=True):
    """Arguments of the engine ``process``, besides those of the engine inside."""

    engines: int = Field(default=1, ge=1)
    """Processes on this machine, each with an engine of its own."""
    engine: str = "transformers"
    """The engine in each of them, by its name."""
    threads: int = Field(default=1, ge=1)
    """CPU threads for torch in each."""


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
    """Further environment variables of the servers; ``{server}`` likewise (for ``CUDA_VISIBLE_DEVICES``)."""
    weights_folder: str | None = None
    """Where weights are handed over; None: in the run's folder. In ``/dev/shm``: through memory."""
    start_limit_s: float = Field(default=START_LIMIT_S, gt=0)
    """Seconds that a server may take to start, or to come back."""
    takes_adapters: bool | None = None
    """Whether a run with LoRA hands over adapters alone; None: to servers that it starts. A server that
    others run must have been started for that."""
    api_key_env: str | None = None
    """The environment variable that holds the servers' API key; None sends none."""

    @model_validator(mode="after")
    def _check(self) -> HTTPArguments:
        if bool(self.urls) == (self.servers > 0):
            raise ConfigError(
                f"give either urls (of running servers) or servers (how many to start), got urls = "
                f"{list(self.urls)}, servers = {self.servers}"
            )
        for url in self.urls:
            _check_address(url)
        far = [url for url in self.urls if not _is_loopback(url)]
        if far and self.weights_folder is None:
            raise ConfigError(
                f"{', '.join(far)} is on another machine: set weights_folder to a folder that it sees, too"
            )
        return self


def _check_address(url: str) -> None:
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise ConfigError(
            f"urls holds a user name or password for {parts.hostname!r}, which would be in every log; put a "
            f"key into an environment variable and name it in api_key_env"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"urls holds {url!r}, which is no address; write it like 'http://127.0.0.1:8000'")


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


ENGINE_ARGUMENTS: dict[str, type[StrictModel]] = {
    "process": ProcessArguments,
    "sglang": HTTPArguments,
    "transformers": TransformersArguments,
    "vllm": HTTPArguments,
}


def check_engine(name: str, arguments: Mapping[str, Any]) -> None:
    """Check the `arguments` of the engine `name`; those of one that is not named here are its own affair.

    Raises:
        ConfigError: an argument is unknown, missing or of a wrong value.
    """
    model = ENGINE_ARGUMENTS.get(name)
    if model is ProcessArguments:
        if "checksum" in arguments:
            raise ConfigError(
                f"engine {name!r}: the argument 'checksum' was removed; leave it out. verify_weights = true "
                f"proves after every hand-over that engines hold the weights"
            )
        own = {key: value for key, value in arguments.items() if key in model.model_fields}
        inside = ENGINE_ARGUMENTS.get(own.get("engine", "transformers"))
        if inside is None:
            # The other arguments are those of an engine that is not known here.
            arguments = own
        elif inside is not model:
            # One model, so that a misspelled argument is compared with those of both.
            model = create_model(name, __base__=(model, inside))
    if model is not None:
        check_arguments("engine", name, model, arguments)
