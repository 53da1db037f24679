"""The run file's ``[engine]`` table; importing it loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from forebay.config import StrictModel

if TYPE_CHECKING:
    from forebay.engines.transformers import TransformersEngine


class EngineConfig(StrictModel):
    """How a `TransformersEngine` schedules.

    >>> EngineConfig(max_batch=64).build(model, tokenizer)                          # doctest: +SKIP
    """

    max_batch: int = Field(default=256, ge=1)
    """Requests that decode together; the rest wait."""
    prefill_tokens: int = Field(default=8192, ge=1)
    """Prompt tokens, padding included, that one prefill pass may hold; a longer prompt goes alone."""

    def build(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        max_context_tokens: int | None = None,
        model_step: int = 0,
        device: str = "cpu",
    ) -> TransformersEngine:
        """The engine; the arguments are those of `TransformersEngine`."""
        from forebay.engines.transformers import TransformersEngine

        return TransformersEngine(
            model,
            tokenizer,
            config=self,
            max_context_tokens=max_context_tokens,
            model_step=model_step,
            device=device,
        )
