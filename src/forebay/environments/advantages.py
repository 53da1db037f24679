"""Advantages and value targets of streams of steps, corrected for the lag of the weights that acted.

::

    delta_t = reward_t + gamma * next_value_t * (not terminated_t) - value_t
    trace_t = rho_t * delta_t + gamma * lam * c_t * (not done_t) * trace_{t+1}
    target_t = value_t + trace_t       advantage_t = delta_t + gamma * lam * (not done_t) * trace_{t+1}

V-trace (Espeholt et al., 2018, arXiv 1802.01561) with the lambda of its reference implementation: rho_t and
c_t are the ratio of the probabilities under the current weights and under those that acted, cut off at 1.
Where both weights are the same this is generalized advantage estimation (Schulman et al., 2016, arXiv
1506.02438), exactly.

A terminated episode has no future. A truncated one goes on with the value of its last observation, and so
does a stream that is cut: nothing is summed across the end of an episode, but everything across the border
of two fragments. Shapes: S consecutive steps, B streams.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

MAX_RATIO = 1.0
"""Both cut-offs of V-trace, as in the paper: the traces are then those of a policy between the two."""


class Targets(NamedTuple):
    """Advantages and value targets; 0, and the value itself, at steps that are not live."""

    advantages_SB: Array
    values_SB: Array


def vtrace(
    reward_SB: Array,
    value_SB: Array,
    next_value_B: Array,
    terminated_SB: Array,
    done_SB: Array,
    *,
    gamma: float,
    lam: float,
    ratio_SB: Array | None = None,
    live_SB: Array | None = None,
) -> Targets:
    """Targets of S steps; see the module.

    `next_value_B` is of the observation after the last step. A step that is not live (None: all are) only
    resets the environment: it carries the value of the last observation of the episode before it.

    >>> one = np.ones((1, 1))
    >>> no = np.zeros((1, 1), np.bool_)
    >>> vtrace(one, 2 * one, np.array([4.0]), no, no, gamma=0.5, lam=1.0).advantages_SB
    array([[1.]])
    """
    cut_SB = np.ones_like(reward_SB) if ratio_SB is None else np.minimum(ratio_SB, MAX_RATIO)
    live_SB = np.ones_like(done_SB) if live_SB is None else live_SB
    next_value_SB = np.concatenate([value_SB[1:], next_value_B[None]])
    delta_SB = reward_SB + gamma * next_value_SB * ~terminated_SB - value_SB
    traces_SB, advantages_SB = np.zeros_like(delta_SB), np.zeros_like(delta_SB)
    trace_B = np.zeros_like(next_value_B)
    for t in reversed(range(len(reward_SB))):
        future_B = gamma * lam * ~done_SB[t] * trace_B
        advantages_SB[t] = live_SB[t] * (delta_SB[t] + future_B)
        trace_B = live_SB[t] * cut_SB[t] * (delta_SB[t] + future_B)
        traces_SB[t] = trace_B
    return Targets(advantages_SB, value_SB + traces_SB)
