"""Stop texts: whether the token just made completes one.

::

    token -> can it end the text? (its own text has the last character; remembered per token id)
          -> yes: decode the last few tokens, look for the text ending in the last one

The text may span several tokens and, in a continued rollout, begin in tokens that an earlier call made.
"""

from collections.abc import Sequence
from typing import Any

_MARGIN_TOKENS = 4
"""Decoded before the stop text could begin, so that what a decoder trims at the start is not part of it."""


class StopTexts:
    """Finds stop texts in token ids. One per engine.

    ::

        stops = StopTexts(tokenizer)
        stops.completed(("END",), tokenizer.encode("the END"))  # True
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._token_texts: dict[int, str] = {}

    @staticmethod
    def num_tail_tokens(stop: Sequence[str]) -> int:
        """How many of the last tokens `completed` needs to see: a token has at least one byte."""
        return max((len(text.encode()) for text in stop), default=0) + _MARGIN_TOKENS

    def completed(self, stop: Sequence[str], tail_ids: Sequence[int]) -> bool:
        """Whether one of the `stop` texts ends within the last of these token ids."""
        if not any(self._may_end(text, tail_ids[-1]) for text in stop):
            return False
        text = self._decode(tail_ids)
        # The last token completes a character, not the replacement characters that stood for it.
        before = len(self._decode(tail_ids[:-1]).rstrip("\ufffd"))
        return any(text.find(wanted, max(0, before - len(wanted) + 1)) >= 0 for wanted in stop)

    def _may_end(self, text: str, token_id: int) -> bool:
        if token_id not in self._token_texts:
            # Twice, because some decoders trim the space before a first token.
            self._token_texts[token_id] = self._decode([token_id, token_id])
        token_text = self._token_texts[token_id]
        # Part of a character decodes to the replacement character: it may complete anything.
        return text[-1] in token_text or "\ufffd" in token_text

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text
