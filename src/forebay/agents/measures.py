"""What agents count for each rollout in its ``extra_fields``, and the means that reports show."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forebay.types import RolloutState

TURNS_KEY = "turns"
"""Finished turns of the model."""
TOOL_CALLS_KEY = "num_tool_calls"
"""Calls that the model made, wrong ones included."""
TOOL_ERRORS_KEY = "num_tool_errors"
"""Those of them that gave an error in place of a result."""

COUNTS = {"turns": TURNS_KEY, "tool_calls": TOOL_CALLS_KEY, "tool_errors": TOOL_ERRORS_KEY}
"""Keys in ``extra_fields`` by the name of the metric."""


def mean_counts(rollouts: Sequence[RolloutState]) -> dict[str, float]:
    """The mean of each count over the rollouts that have it; those that none has are left out.

    >>> mean_counts([RolloutState([], extra_fields={"turns": number}) for number in (1, 2)])
    {'turns': 1.5}
    """
    found = {
        name: [state.extra_fields[key] for state in rollouts if key in state.extra_fields]
        for name, key in COUNTS.items()
    }
    return {name: float(np.mean(values)) for name, values in found.items() if values}
