"""How large the key/value cache of a decode batch may become, in tokens: rows times columns.

::

    cache_tokens = N       N
    cache_tokens = "auto"  on a CUDA device a share of the memory that is free when no request runs;
                           elsewhere no bound. One request may always run: the trainer may just have held
                           the memory
    out of memory          half of what was asked for, whatever the key says; an eighth of it comes back
                           each time that no request is left

A bound by running out of memory comes back because the memory may have been another's: the trainer's, say.
"""

import sys
from typing import Literal

import torch

CacheTokens = int | Literal["auto"]

_AUTO_SHARE = 0.6
"""The share of free memory; the rest is for passes over prompts, logits and the trainer's next step."""


class CacheBudget:
    """The bound on rows times columns.

    >>> budget = CacheBudget(1000)
    >>> budget.fell_short(600)
    >>> budget.tokens, budget.most_tokens
    (300, 1000)
    >>> budget.recover()
    >>> budget.tokens
    375
    """

    def __init__(self, cache_tokens: CacheTokens = "auto") -> None:
        self._auto = cache_tokens == "auto"
        self.most_tokens = sys.maxsize if cache_tokens == "auto" else cache_tokens
        """The key's bound, which no request may need more than."""
        self._measured = self._lowered = sys.maxsize
        self._asked_for = 0

    @property
    def tokens(self) -> int:
        """Tokens that the cache may hold now."""
        return min(self.most_tokens, self._measured, self._lowered)

    def measure(self, device: torch.device, held_tokens: int, bytes_per_token: int) -> None:
        """No request runs: look how much memory is free besides a cache of `held_tokens`."""
        if self._auto and device.type == "cuda" and bytes_per_token:
            free, _ = torch.cuda.mem_get_info(device)
            # Memory that torch holds and does not use is free for the cache, too.
            free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            self._measured = int(_AUTO_SHARE * (free / bytes_per_token + held_tokens))

    def fell_short(self, asked_for: int) -> None:
        """Memory ran out with a cache of `asked_for` tokens, or while it was made."""
        self._asked_for, self._lowered = asked_for, asked_for // 2

    def recover(self) -> None:
        """All requests have ended: give back a part of what the last shortage took."""
        self._lowered = min(self._lowered + self._asked_for // 8, sys.maxsize)
