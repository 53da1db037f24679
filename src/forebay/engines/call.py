"""A request on its way through one engine of a pool or several: what it has, and what is to come."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import numpy as np

from forebay.engines.base import Completion, Engine, GenerateRequest, joined_experts

Within = AbstractContextManager[Any]
UNSEEN: Within = nullcontext()


@dataclass(eq=False, slots=True)
class Call:
    """A request on its way through one engine or several."""

    request: GenerateRequest
    caller: str
    queued: Within = UNSEEN
    """Open while it waits for an engine."""
    parts: list[Completion] = field(default_factory=list)
    engine: Engine | None = None
    is_aborted: bool = False
    """Whether it is to end; no engine gets it any more."""
    num_counted: int = 0
    """Its tokens that `EnginePool.count_tokens_made` has seen."""

    @property
    def is_queued(self) -> bool:
        """Whether it waits for an engine, or for room in that engine's process."""
        return self.engine is None or self.engine.num_made(self.request.request_id) < 0

    def num_made(self) -> int:
        """Its tokens so far, over all engines."""
        made = sum(len(part.response_ids) for part in self.parts)
        return made + (0 if self.engine is None else max(0, self.engine.num_made(self.request.request_id)))

    def rest(self) -> GenerateRequest:
        """The request that makes the tokens which are still missing."""
        return self.request.after([token for part in self.parts for token in part.response_ids])

    def joined(self, last: Completion) -> Completion:
        """All parts as one completion that ended as `last` did."""
        # Nearly every call: no engine was lost, and the arrays need no copy.
        if not self.parts:
            return last
        parts = [*self.parts, last]
        return replace(
            last,
            response_ids=np.concatenate([part.response_ids for part in parts]),
            logprobs=np.concatenate([part.logprobs for part in parts]),
            model_steps=np.concatenate([part.model_steps for part in parts]),
            routed_experts=reduce(joined_experts, [part.routed_experts for part in parts]),
        )
