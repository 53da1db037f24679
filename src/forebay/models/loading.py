"""From a model folder to the model and the tokenizer, with one clear error for each thing that is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forebay.config import ConfigError
from forebay.models.config import ModelConfig, Precision

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)
"""One of these holds the vocabulary of every tokenizer that transformers reads."""


def load_model(folder: Path, config: ModelConfig | None = None, *, dtype: Precision = "float32") -> Any:
    """The decoder in `folder`, in evaluation mode and on the CPU, its weights held in `dtype`.

    Raises:
        ConfigError: there is no folder, no config or no weights in it, or they do not fit each other.
    """
    _require_folder(folder)
    config = config or ModelConfig(source=str(folder))
    import torch
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            attn_implementation=config.attention,
            local_files_only=True,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load the model in {str(folder)!r}: {error}") from error


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

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load the tokenizer in {str(folder)!r}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"the tokenizer in {str(folder)!r} has no end token (eos_token), so nothing ends a response"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _require_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"no model folder at {str(folder)!r}")
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{str(folder)!r} is not a model folder: it has no config.json; "
            f"save one there with model.save_pretrained"
        )
