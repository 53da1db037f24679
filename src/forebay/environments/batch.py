"""From the fragments of a fetch to streams of steps: borders of fragments disappear inside a chunk.

::

    stacked fragments [C * K, T, E, ...]   C chunks of K consecutive fragments of T steps of E environments
        --> [C, K * T, E, ...] --> [S, B, ...]   S = K * T steps, B = C * E streams

A stream begins with the state that the first fragment of its chunk began with, and ends with the observation
that the last one would go on with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from forebay.fragments import SampleFragment

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """B streams of S consecutive steps; D numbers in an observation, H units of memory.

    >>> batch = StepBatch.from_fragments(store.stack(fetched.fragment_ids), fragments_per_chunk=2)
    >>> batch.obs_SBD.shape[:2] == batch.reward_SB.shape
    True
    """

    obs_SBD: torch.Tensor
    """[S + 1, B, D]: the last row is what would come next."""
    first_SB: torch.Tensor
    """[S + 1, B] bool."""
    state: tuple[torch.Tensor, ...]
    """[B, H] each, before step 0."""
    action_SB: torch.Tensor
    """[S, B] int64, or [S, B, A] float."""
    logprobs_SB: torch.Tensor
    """[S, B] of the actions, under the weights that chose them."""
    versions_SB: Array
    reward_SB: Array
    done_SB: Array
    terminated_SB: Array
    live_SB: Array
    """False: the step only reset the environment, and its action had no effect."""

    @staticmethod
    def from_fragments(stacked: SampleFragment, fragments_per_chunk: int) -> StepBatch:
        """`stacked` is what `FragmentStore.stack` gives for a batch: whole chunks, each in order."""

        def stream(array: Array) -> Array:
            num, steps, envs, *rest = array.shape
            chunks = array.reshape(num // fragments_per_chunk, fragments_per_chunk * steps, envs, *rest)
            swapped = np.swapaxes(chunks, 0, 1)
            return np.ascontiguousarray(swapped).reshape(chunks.shape[1], -1, *rest)

        def columns(array: Array, which: int) -> Array:
            of_one = array[which::fragments_per_chunk]
            return of_one.reshape(-1, *of_one.shape[2:])

        live_SB = stream(stacked.extras["live"])
        next_BD = columns(stacked.next_obs, fragments_per_chunk - 1)
        versions = np.broadcast_to(stacked.model_versions[..., None], stacked.reward.shape)
        return StepBatch(
            obs_SBD=torch.from_numpy(np.concatenate([stream(stacked.obs), next_BD[None]])),
            # After a step that reset, an episode begins.
            first_SB=torch.from_numpy(np.concatenate([stream(stacked.first), ~live_SB[-1:]])),
            state=tuple(torch.from_numpy(columns(part, 0)) for part in stacked.in_state),
            action_SB=torch.from_numpy(stream(stacked.action)),
            logprobs_SB=torch.from_numpy(stream(stacked.logprobs)),
            versions_SB=stream(versions),
            reward_SB=stream(stacked.reward),
            done_SB=stream(stacked.next_done),
            terminated_SB=stream(stacked.extras["terminated"]),
            live_SB=live_SB,
        )
