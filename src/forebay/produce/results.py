"""The result of a call to the manager: the batch, and the statistics of how it was made."""

from collections import Counter
from dataclasses import dataclass, field

from forebay.agents.extra_fields import mean_counts
from forebay.judges.base import mean_parts
from forebay.metrics import nearest_rank
from forebay.produce.strategies.base import ProduceBatchStatus, worst_status
from forebay.produce.strategies.context import GROUP_GENERATE_TIME_KEY
from forebay.types import RolloutState, Status

# ARCHIVED groups did not stay behind: they were taken.
LEFTOVER_STATUSES = tuple(status for status in Status if status is not Status.ARCHIVED)


@dataclass(kw_only=True)
class TaskResult:
    """One task's part of a batch, or the sum over tasks."""

    rollout_states: list[list[RolloutState]] = field(default_factory=list)
    """The groups to train on."""
    status: ProduceBatchStatus = ProduceBatchStatus.NORMAL
    leftovers: dict[Status, int] = field(default_factory=dict)
    """Groups that stayed behind when the batch was taken, by status."""
    group_gen_times_s: list[float] = field(default_factory=list)
    """Seconds to generate and judge each of the groups that were timed."""
    group_gen_pause_time_s: float = 0.0
    produced_samples: int = 0
    """Rollouts generated, those that were rejected or failed among them."""
    produced_tokens: int = 0
    raw_rewards_sum: float = 0.0
    """Over all completed rollouts, before filtering."""
    raw_rewards_count: int = 0

    reuse: Counter[str] = field(default_factory=Counter)
    """``past_groups``: groups that were trained on before, the last of the task's; ``past_staleness``: of
    them together; ``replaced_groups``: new ones without a signal, whose places past ones have."""

    def __post_init__(self) -> None:
        # Read now: a group that is given back or trained may lose its extra fields.
        if not self.group_gen_times_s:
            new = self.rollout_states[: len(self.rollout_states) - self.reuse["past_groups"]]
            times = (group[0].extra_fields.get(GROUP_GENERATE_TIME_KEY) for group in new)
            self.group_gen_times_s = [time for time in times if time is not None]


@dataclass(kw_only=True)
class ProduceBatchResult(TaskResult):
    """A whole batch: `TaskResult` summed over tasks, and each task's own."""

    task_batch_sizes: dict[str, int] = field(default_factory=dict)
    task_results: dict[str, TaskResult] = field(default_factory=dict)
    produce_time_s: float = 0.0

    def by_outcome(self) -> dict[str, list[list[RolloutState]]]:
        """The groups as a history has them: ``trained``, or ``reused`` if an earlier step did so."""
        found: dict[str, list[list[RolloutState]]] = {"trained": [], "reused": []}
        # By task: past groups stand at the end of each task's, not of the whole batch.
        for part in self.task_results.values() or [self]:
            num_new = len(part.rollout_states) - part.reuse["past_groups"]
            found["trained"] += part.rollout_states[:num_new]
            found["reused"] += part.rollout_states[num_new:]
        return found

    def metrics(self) -> dict[str, float]:
        """The numbers worth logging, flat; per task too when there are several."""
        values = _metrics(self, "produce")
        values["produce/time_s"] = self.produce_time_s
        if len(self.task_results) > 1:
            for name, result in self.task_results.items():
                values.update(_metrics(result, f"produce/{name}"))
        return values


def summarize(results: dict[str, TaskResult], task_batch_sizes: dict[str, int]) -> ProduceBatchResult:
    """Sum the tasks' results; groups stay in task order."""
    parts = list(results.values())
    return ProduceBatchResult(
        rollout_states=[group for part in parts for group in part.rollout_states],
        status=worst_status(part.status for part in parts),
        leftovers={s: sum(part.leftovers.get(s, 0) for part in parts) for s in LEFTOVER_STATUSES},
        **{name: sum(getattr(part, name) for part in parts) for name in _SUMMED},
        group_gen_times_s=[time_s for part in parts for time_s in part.group_gen_times_s],
        reuse=sum((part.reuse for part in parts), Counter()),
        task_batch_sizes=task_batch_sizes,
        task_results=results,
    )


_SUMMED = ("group_gen_pause_time_s", "produced_samples", "produced_tokens", "raw_rewards_sum", "raw_rewards_count")


def _metrics(result: TaskResult, prefix: str) -> dict[str, float]:
    # Of a part without groups the times are 0; without a score there is no mean.
    times_s, num_scores = result.group_gen_times_s, result.raw_rewards_count
    p50_s, p99_s = (nearest_rank(times_s, percent) for percent in (50, 99))
    values = {
        "raw_reward": result.raw_rewards_sum / num_scores if num_scores else float("nan"),
        "group_mean_s": sum(times_s) / max(1, len(times_s)),
        "group_p50_s": p50_s,
        "group_p99_s": p99_s,
        "group_p99_over_p50": p99_s / p50_s if p50_s > 0 else 0.0,
        "pause_s": result.group_gen_pause_time_s,
        "samples": float(result.produced_samples),
        "tokens": float(result.produced_tokens),
    }
    states = [state for group in result.rollout_states for state in group]
    values |= mean_counts(states) | mean_parts(state.reward for state in states)
    if num_past := result.reuse["past_groups"]:
        values |= {**result.reuse, "past_staleness": result.reuse["past_staleness"] / num_past}
    values.update({f"left_{s.value}": float(n) for s, n in result.leftovers.items() if n})
    return {f"{prefix}/{key}": value for key, value in values.items()}
