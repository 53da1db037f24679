"""Proximal policy optimization on chunks of fragments whose actions other weights may have chosen.

::

    StepBatch --current weights--> values, log-probs --vtrace--> advantages, value targets
                                                                     |
        epochs x mini-batches:  clipped loss + value loss - entropy --> Adam --> weights --> scales

Three policies take part, as in decoupled PPO (Hilton et al., 2022, arXiv 2110.00641): the one that acted
(mu, its log-probs are in the fragments), the one before this update (old), and the trained one (pi). The
clip keeps pi near old; the ratio old / mu, cut off at 1, weighs each step for its lag. Without lag it is 1,
and this is plain PPO (Schulman et al., 2017, arXiv 1707.06347).

A batch of C chunks of K consecutive fragments, each of T steps of E environments, is B = C * E streams of
S = K * T steps: the borders of fragments disappear inside a chunk. A stream begins with the state that the
first fragment of its chunk began with, and ends with the observation that the last one would go on with. N is
the part of S x B in one mini-batch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch

from forebay.config import errors_about
from forebay.environments.config import PPOConfig
from forebay.environments.policy import MIN_STD, Policy
from forebay.fragments import SampleFragment

Array = np.ndarray[Any, Any]

VALUE_COEF = 0.5
"""The weight of the squared error of normalized values, whose scale is fixed, so it needs no tuning."""
MAX_GRAD_NORM = 0.5
"""The usual bound for PPO: advantages are normalized, so it does not depend on the task."""
MAX_RATIO = 1.0
"""Both cut-offs of V-trace, as in the paper: the traces are then those of a policy between the two."""
ADAM_EPSILON = 1e-5
"""Tiny gradients of a nearly certain policy are not blown up to full steps."""


class PPOTrainer:
    """Trains a policy, batch by batch.

    Invariants: `step` counts updates, and is the version of the weights after them; equal states, batches
    and configs give equal weights.
    """

    def __init__(self, policy: Policy, config: PPOConfig, *, total_steps: int, seed: int) -> None:
        """`total_steps` is when the learning rate reaches 0."""
        # Here, because `vtrace` needs no gymnasium.
        from gymnasium.wrappers.utils import RunningMeanStd

        self.step = 0
        self.policy = policy
        self._config, self._total_steps = config, total_steps
        self._optimizer = torch.optim.Adam(policy.parameters(), config.lr, eps=ADAM_EPSILON)
        self._generator = torch.Generator().manual_seed(seed)
        self._observations = RunningMeanStd(  # type: ignore[no-untyped-call]
            epsilon=0.0, shape=policy.obs_mean.shape
        )

    def update(self, batch: StepBatch) -> dict[str, float]:
        """One train step; its metrics."""
        old_SB, targets, metrics = self._look(batch)
        live_SB = torch.from_numpy(batch.live_SB)
        # After `_look`, whose values it does not change; before `_optimize`, which trains in the new units.
        self.policy.rescale_values(torch.from_numpy(targets.values_SB)[live_SB], self.step)
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.lr * max(0.0, 1 - self.step / max(1, self._total_steps))
        self._optimize(batch, old_SB, targets, metrics)
        # The scale of observations follows last: weights that act have the one that they were trained under.
        seen = self._observations
        seen.update(batch.obs_SBD[:-1][live_SB].double().numpy())  # type: ignore[no-untyped-call]
        std = np.sqrt(seen.var)
        self.policy.obs_mean.copy_(torch.from_numpy(seen.mean))
        # Numbers that hardly change are left as they are.
        self.policy.obs_std.copy_(torch.from_numpy(np.where(std < MIN_STD, 1.0, std)))
        self.step += 1
        return metrics

    @torch.no_grad()
    def _look(self, batch: StepBatch) -> tuple[torch.Tensor, Targets, dict[str, float]]:
        """Log-probs [S, B] under the current weights, targets, and what they say about the batch."""
        policy, config = self.policy, self._config
        features, _ = policy.features(batch.obs_SBD, batch.first_SB, batch.state)
        values = policy.values(features).double().numpy()
        logprobs_SB = policy.head.log_prob(policy.params(features[:-1]), batch.action_SB)
        log_ratio_SB = (logprobs_SB - batch.logprobs_SB).double().numpy()
        targets = vtrace(
            batch.reward_SB.astype(np.float64),
            values[:-1],
            values[-1],
            batch.terminated_SB,
            batch.done_SB,
            gamma=config.gamma,
            lam=config.lam,
            ratio_SB=np.exp(log_ratio_SB),
            live_SB=batch.live_SB,
        )
        live = batch.live_SB
        # Before anything has changed: weights and scales stay those of the last step.
        if not (np.isfinite(targets.values_SB[live]).all() and np.isfinite(log_ratio_SB[live]).all()):
            raise FloatingPointError(
                f"the batch of train step {self.step + 1} holds numbers that are not finite; look for "
                f"infinite or missing observations and rewards in the environment"
            )
        errors, spread = (targets.values_SB - values[:-1])[live], targets.values_SB[live]
        return (
            logprobs_SB,
            targets,
            {
                "lag": self.step - float(batch.versions_SB[live].mean()),
                "lag_kl": float(-log_ratio_SB[live].mean()),
                "explained_variance": 1 - float(errors.var() / max(spread.var(), 1e-12)),
            },
        )

    def _optimize(self, batch: StepBatch, old_SB: torch.Tensor, targets: Targets, metrics: dict[str, float]) -> None:
        live_SB = torch.from_numpy(batch.live_SB)
        advantages_SB = torch.from_numpy(targets.advantages_SB).float()
        advantages_SB = (advantages_SB - advantages_SB[live_SB].mean()) / (
            # The corrected deviation of a single live step would be NaN.
            advantages_SB[live_SB].std(correction=0) + 1e-8
        )
        policy = self.policy
        values_SB = ((torch.from_numpy(targets.values_SB) - policy.value_mean) / policy.value_std).float()
        weights_SB = (old_SB - batch.logprobs_SB).exp().clamp(max=MAX_RATIO)
        rows: list[dict[str, float]] = []
        for index, params, values in self._mini_batches(batch, live_SB):
            logprobs = policy.head.log_prob(params, batch.action_SB[index])
            ratio = (logprobs - old_SB[index]).exp()
            advantages = advantages_SB[index]
            clip = self._config.clip
            gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
            entropy = policy.head.entropy(params).mean()
            value_loss = (values - values_SB[index]).square().mean()
            policy_loss = -(weights_SB[index] * gain).mean()
            loss = policy_loss + VALUE_COEF * value_loss - self._config.entropy_coef * entropy
            numbers = {
                "policy_loss": policy_loss,
                "value_loss": value_loss,
                "entropy": entropy,
                # Without lag -log(ratio) has the same mean, but may be negative and varies more.
                "kl": (ratio - 1 - ratio.log()).mean(),
                "clip_share": ((ratio - 1).abs() > clip).float().mean(),
                "grad_norm": self._descend(loss),
            }
            rows.append({name: value.item() for name, value in numbers.items()})
        metrics.update((name, fmean(row[name] for row in rows)) for name in rows[0])

    def _descend(self, loss: torch.Tensor) -> torch.Tensor:
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), MAX_GRAD_NORM)
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient of train step {self.step + 1} is not finite; lower train.lr")
        self._optimizer.step()
        return norm

    def _mini_batches(
        self, batch: StepBatch, live_SB: torch.Tensor
    ) -> Iterator[tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor]]:
        """Positions ([N], [N]) of live steps, with the params [N, P] and normal values [N] there."""
        config, policy = self._config, self.policy
        with_memory = policy.cell is not None
        steps, streams = live_SB.nonzero(as_tuple=True)
        size = live_SB.shape[1] if with_memory else len(steps)
        for _ in range(config.epochs):
            order = torch.randperm(size, generator=self._generator)
            # No more parts than there are steps or streams: the mean over an empty one is NaN.
            for part in order.tensor_split(min(config.mini_batches, size)):
                if with_memory:
                    at, column = live_SB[:, part].nonzero(as_tuple=True)
                    state = tuple(tensor[part] for tensor in batch.state)
                    # Whole streams, also the steps that only reset: the memory has passed through them.
                    features, _ = policy.features(batch.obs_SBD[:-1, part], batch.first_SB[:-1, part], state)
                    features, index = features[at, column], (at, part[column])
                else:
                    index = (steps[part], streams[part])
                    features, _ = policy.features(batch.obs_SBD[index], batch.first_SB[index], ())
                yield index, policy.params(features), policy.normal_values(features)

    # Checkpoints.

    def arrays(self) -> dict[str, Array]:
        """Everything that changes with training but `step`, for `load`."""
        parts: dict[str, Mapping[str, Any]] = {"policy/": self.policy.state_dict()}
        parts |= {f"adam/{number}/": state for number, state in self._optimizer.state_dict()["state"].items()}
        parts["observations/"] = {name: getattr(self._observations, name) for name in _MOMENTS}
        parts[""] = {"generator": self._generator.get_state()}
        return {part + name: np.asarray(value) for part, values in parts.items() for name, value in values.items()}

    def load(self, step: int, arrays: Mapping[str, Array]) -> None:
        """Go on from what `arrays` gave after `step` updates.

        Raises:
            ConfigError: they are of another policy.
        """
        parts: defaultdict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for path, array in arrays.items():
            part, _, name = path.rpartition("/")
            parts[part][name] = torch.tensor(array)
        with errors_about("the checkpoint is of another policy: keep [policy] and [environment]", RuntimeError):
            self.policy.load_state_dict(parts["policy"])
        adam = {int(part.removeprefix("adam/")): state for part, state in parts.items() if part.startswith("adam/")}
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": adam})
        for name in _MOMENTS:
            setattr(self._observations, name, parts["observations"][name].numpy())
        self._generator.set_state(parts[""]["generator"])
        self.step = step


_MOMENTS = ("count", "mean", "var")


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """B streams of S consecutive steps; D numbers in an observation, H units of memory."""

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
            # [C * K, T, E, ...] --> [S, B, ...]
            num, steps, envs, *rest = array.shape
            chunks = array.reshape(num // fragments_per_chunk, fragments_per_chunk * steps, envs, *rest)
            swapped = np.swapaxes(chunks, 0, 1)
            return np.ascontiguousarray(swapped).reshape(chunks.shape[1], -1, *rest)

        def columns(array: Array, which: int) -> Array:
            of_one = array[which::fragments_per_chunk]
            return of_one.reshape(-1, *of_one.shape[2:])

        live_SB = stream(stacked.extras["live"])
        next_BD = columns(stacked.next_obs, fragments_per_chunk - 1)
        # The same weights act in all environments of a step.
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
    ratio_SB: Array,
    live_SB: Array,
) -> Targets:
    """Advantages and value targets of S steps of B streams, corrected for the lag of the weights that acted.

    ::

        delta_t = reward_t + gamma * next_value_t * (not terminated_t) - value_t
        trace_t = rho_t * delta_t + gamma * lam * c_t * (not done_t) * trace_{t+1}
        target_t = value_t + trace_t       advantage_t = delta_t + gamma * lam * (not done_t) * trace_{t+1}

    V-trace (Espeholt et al., 2018, arXiv 1802.01561) with the lambda of its reference implementation: rho_t
    and c_t are the ratio of the probabilities under the current weights and under those that acted, cut off
    at 1. Where both weights are the same this is generalized advantage estimation (Schulman et al., 2016,
    arXiv 1506.02438), exactly.

    A terminated episode has no future. A truncated one goes on with the value of its last observation, and
    so does a stream that is cut: nothing is summed across the end of an episode, but everything across the
    border of two fragments. `next_value_B` is of the observation after the last step. A step that is not live
    only resets the environment: it carries the value of the last observation of the episode before it.

    >>> one = np.ones((1, 1))
    >>> no = np.zeros((1, 1), np.bool_)
    >>> settings = {"gamma": 0.5, "lam": 1.0, "ratio_SB": one, "live_SB": ~no}
    >>> vtrace(one, 2 * one, np.array([4.0]), no, no, **settings).advantages_SB
    array([[1.]])
    """
    cut_SB = np.minimum(ratio_SB, MAX_RATIO)
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
