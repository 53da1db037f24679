"""From what a run file calls a model to a local folder that holds it.

::

    a folder      -> itself
    tiny          -> made once into the cache, by sizes and seed
    pypi:PACKAGE  -> converted once into the cache, by package and version
    owner/name    -> the hub's local copy, downloaded if needed

What is written to the cache is written beside its place and then renamed, so a folder there is whole.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from forebay.config import ConfigError
from forebay.models.config import PYPI_PREFIX, TINY, ModelConfig, TinyConfig
from forebay.models.gguf import convert_gguf, find_gguf
from forebay.models.tiny import DEFAULT_CONTEXT, write_tiny

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
"""What a decoder needs; repositories often hold the same weights again in other formats."""


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/forebay``, else ``~/.cache/forebay``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forebay"


def resolve_model(model: str | ModelConfig, *, cache_dir: Path | None = None, seed: int = 0) -> Path:
    """The local folder of a model, in Hugging Face format, with its tokenizer.

    A text is the config's ``source``. `seed` makes the initial weights of ``tiny``; nothing else uses it.

    Raises:
        ConfigError: there is no such folder, package or hub model, or the hub cannot be reached.
    """
    config = ModelConfig(source=model) if isinstance(model, str) else model
    source, cache = config.source, cache_dir or default_cache_dir()
    if source == TINY:
        return _tiny(cache, config.tiny, config.max_context or DEFAULT_CONTEXT, seed)
    if source.startswith(PYPI_PREFIX):
        package = source.removeprefix(PYPI_PREFIX)
        file, version = find_gguf(package)
        return _cached(cache / f"{package}-{version}", lambda folder: convert_gguf(file, folder))
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if _HUB_ID.fullmatch(source):
        return _from_hub(source)
    raise ConfigError(
        f"no model at {source!r}: it is not a folder, and neither 'tiny', 'pypi:PACKAGE' nor a hub id "
        f"'owner/name'"
    )


def _tiny(cache: Path, config: TinyConfig, max_context: int, seed: int) -> Path:
    # Another version may make another model of the same sizes.
    versions = [metadata.version(name) for name in ("forebay", "transformers", "torch")]
    key = f"{config.model_dump_json()} {max_context} {seed} {versions}"
    digest = hashlib.sha256(key.encode()).hexdigest()
    return _cached(
        cache / f"tiny-{digest[:16]}",
        lambda folder: write_tiny(folder, config, max_context=max_context, seed=seed),
    )


def _cached(target: Path, write: Callable[[Path], None]) -> Path:
    """`target`, which `write` fills if it is not there."""
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        write(unfinished)
        # mkdtemp makes it private; a cache may be shared.
        unfinished.chmod(0o755)
        try:
            unfinished.rename(target)
        except OSError:
            # Another process was faster; what it wrote is the same.
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _from_hub(source: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=_HUB_FILES))
    # The client raises its own errors, those of its HTTP library and OSError; all mean the same here.
    except Exception as error:
        raise ConfigError(
            f"no model at {source!r}: there is no such folder, and the hub did not give it "
            f"({type(error).__name__}: {error}); offline, name a folder"
        ) from error
