"""A request's place in a decode batch, and the per-row numbers of all of them."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.engines.base import Completion, GenerateRequest
from forebay.types import IntArray

TOKEN_FIELDS = np.dtype([("id", np.int32), ("logprob", np.float32), ("model_step", np.int32)])


@dataclass(eq=False)
class Row:
    """One request's place in the batch; compared by identity, so a request may be asked twice."""

    request: GenerateRequest
    made: NDArray[Any] = field(default_factory=lambda: np.empty(0, TOKEN_FIELDS), kw_only=True)
    """Its tokens, once it has left the batch; where it enters again, it goes on after them."""
    experts: NDArray[Any] | None = field(default=None, kw_only=True)
    """The experts that its tokens were sent to (`Completion.routed_experts`), likewise."""
    turn: int = field(default=-1, kw_only=True)
    """The how-manieth it entered first."""

    @property
    def token_ids(self) -> IntArray:
        """int32: the request's tokens and those made."""
        ids = self.request.input_ids
        return np.concatenate([ids, self.made["id"]]) if len(self.made) else ids

    def completion(self, finish_reason: str, error_msg: str | None = None) -> Completion:
        """The answer with the tokens made so far."""
        return Completion(
            response_ids=self.made["id"].copy(),
            logprobs=self.made["logprob"].copy(),
            model_steps=self.made["model_step"].copy(),
            routed_experts=self.experts,
            finish_reason=finish_reason,
            error_msg=error_msg,
        )


Ended = tuple[Row, Completion | None]
"""A row that left the batch; without a completion it was given up for want of memory: admit it again."""

ROW_FIELDS = np.dtype(
    [
        ("token", np.int64),  # the next to feed
        ("position", np.int64),  # its column
        ("shift", np.int64),  # from there to the model's position
        ("num_made", np.int64),
        ("limit", np.int64),  # of num_made
        ("stream", np.uint64),  # of random numbers
        ("num_earlier", np.int64),  # of them used by earlier calls
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float32),
    ]
)


def grown(array: NDArray[Any], num_rows: int, num_columns: int = 0, fill: Any = 0) -> NDArray[Any]:
    """`array` with at least these sizes, new entries `fill`."""
    shape = (max(num_rows, len(array)), *(max(num_columns, size) for size in array.shape[1:]))
    if shape == array.shape:
        return array
    grown = np.full(shape, fill, array.dtype)
    grown[tuple(slice(size) for size in array.shape)] = array
    return grown
