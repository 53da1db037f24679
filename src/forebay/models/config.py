"""The run file's ``[model]`` table; importing it loads no torch."""

from collections import Counter
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, model_validator

from forebay.config import StrictModel, locate

TINY, PYPI_PREFIX = "tiny", "pypi:"


class TinyConfig(StrictModel):
    """The sizes of ``source = "tiny"``: a Llama decoder whose tokens are characters."""

    hidden_size: int = Field(default=128, ge=8)
    """Numbers in a token's hidden state; a multiple of twice `num_heads`."""
    num_layers: int = Field(default=4, ge=1)
    """Decoder layers."""
    num_heads: int = Field(default=4, ge=1)
    """Attention heads of a layer."""
    alphabet: str | None = Field(default=None, min_length=1)
    """Its characters, one token each; any other character in a text is an error. None: printable ASCII and
    every other character of a run's data; fewer are learned faster."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if repeated := sorted(c for c, count in Counter(self.alphabet or "").items() if count > 1):
            raise ValueError(f"the alphabet has {repeated} more than once")
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of twice num_heads {self.num_heads}, "
                f"since positions are encoded in pairs of numbers"
            )
        return self


Precision = Literal["float32", "bfloat16"]
"""The number format of weights, or of passes."""
DEVICE_PATTERN = r"^(auto|cpu|mps|cuda(:\d+)?)$"
"""The names of devices in a run file."""
PrecisionKey = Literal["auto", Precision]
"""The precision in a run file; ``auto`` is bfloat16 on a CUDA device, float32 elsewhere."""

Attention = Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention", "varlen"]
"""Kernels of attention (`forebay.models.attention`)."""
AttentionKey = Literal["auto", Attention]
"""The kernel in a run file; ``auto`` is the one that suits the device, the layout and the model."""


def _found(source: str, info: ValidationInfo) -> str:
    is_named = source == TINY or source.startswith(PYPI_PREFIX)
    return source if is_named else locate(source, info.context)


class ModelConfig(StrictModel):
    """Which model, and what it is asked for."""

    source: Annotated[str, AfterValidator(_found)]
    """A folder, a hub id ``owner/name``, ``pypi:PACKAGE`` (a package with a GGUF file), or ``tiny``."""
    max_context: int | None = Field(default=None, ge=2)
    """Longest prompt and response together, in tokens; None: what the model was made for (tiny: 512)."""
    tiny: TinyConfig = TinyConfig()
    """Only for ``source = "tiny"``."""
