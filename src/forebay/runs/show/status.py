"""The numbers of this moment: work in flight, groups in the buffer, how busy the two sides are, stalls.

::

    activities in flight --> counts by stage, the oldest; stalls ------+--> now() ---------> live view
    rows of the buffer --count_buffer()--> groups by status and age ---+--> step_values() -> metrics, trackers
    busy shares, stall watch, groups in flight, engines' weights ------+--> run_facts() ---> summary

It reads and decides nothing. Rows are counted without the buffer's lock: for people, a count between two
changes is good enough, and no put should wait for it. No payload is looked at, so a count costs the same
however many groups there are.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.engines.pool import EnginePool
from forebay.ledger.bias import length_bias
from forebay.metrics import RESPONSE_TOKENS, SAMPLES
from forebay.models.devices import gpu_use
from forebay.produce import AgentLoopManager
from forebay.replay import ReplayBuffer
from forebay.replay.stores.contract import STALEST
from forebay.runs.show.wording import number, percent
from forebay.types import UNLABELED, RolloutState, Status
from forebay.watching.activity import GENERATE, JUDGE, SIDES, STAGES, Activities, Activity, BusyShare, loop_time

if TYPE_CHECKING:
    # The board reads what this module writes, in a process of a third of the memory.
    import torch

PRODUCER_STAGES = frozenset(name for name, stage in STAGES.items() if stage.doing)

COUNTED_STATUSES = tuple(status for status in Status if status is not Status.ARCHIVED)
_LOGGED_STATUSES = (Status.COMPLETED, Status.ABORTED, Status.EXPIRED, Status.MAX_TRIES)
"""Groups of these may stay in the buffer for long; the others leave with the next batch, as dropped."""

MAX_AGE = 32
"""Groups this stale, and staler ones, are counted together: every age takes a query of its own."""

JUDGE_FAILED = "failed/judge"
LENGTH_BIAS = "tokens_over_trained"
"""Last part of the metric that says how much longer dropped groups are than trained ones."""


@dataclass(eq=False, repr=False)
class RunStatus:
    """Collects the numbers of a run as they are now.

    Invariant: everything is as of the call, but the buffer, which is as of the last `count_buffer`.

    ::

        status = RunStatus(manager, activities, controller, batch_size=16)
        await status.count_buffer()
        status.now().tasks["math"].buffer[Status.COMPLETED]  # 12
    """

    manager: AgentLoopManager
    activities: Activities
    """Listened to from now on."""
    controller: EnginePool
    _: KW_ONLY
    batch_size: int
    device: "torch.device | None" = None
    """The trainer's, if it is of this machine."""

    def __post_init__(self) -> None:
        self._busy = BusyShare(self.activities)
        self._gpu: list[dict[str, float]] = []
        """Looks at `device` since the last step."""
        self._rows: dict[str, TaskNow] = {}
        self._judged: dict[Any, list[bool]] = {}
        """By task: for each group judged since the last step, whether the judge failed in it."""
        self.judge_failure = ""
        """The last failure of a judge: its name and what it said."""
        self._started_s = self._reported_s = loop_time()
        self._reported_busy_s = dict.fromkeys(SIDES, 0.0)
        self.activities.listen(lambda _: None, self._ended)

    def _ended(self, activity: Activity) -> None:
        # A cancelled one, as of a group that expired, says nothing of the judge.
        if activity.stage == JUDGE and activity.note != "CancelledError":
            self._judged.setdefault(activity.task, []).append(bool(activity.note))
            self.judge_failure = activity.note or self.judge_failure

    async def count_buffer(self) -> None:
        """Count the groups of every task anew."""
        buffer = self.manager.replay_buffer
        self._rows = {name: await _count_rows(buffer, name) for name in self.manager.task_names}

    @property
    def num_stalls(self) -> int:
        """Stalls that were warned of so far."""
        watch = self.manager.stall_watch
        return 0 if watch is None else watch.num_warnings

    def now(self) -> "Now":
        """The numbers of this moment; those of the buffer are as of the last `count_buffer`."""
        watch = self.manager.stall_watch
        producing, tasks = self._producing(), self._tasks()
        # Once over all, of which there may be 16,000, and not once for each task.
        counts = Counter((activity.task, activity.stage) for activity in producing)
        firsts = {(activity.stage, activity.task): activity for activity in reversed(producing)}.values()
        self._gpu.append(gpu_use(self.device))
        others = [one for one in self.activities.in_flight() if one.stage not in PRODUCER_STAGES]
        return Now(
            tasks=tasks,
            stages=dict(Counter(activity.stage for activity in producing)),
            stages_of={task: {stage: n for (of, stage), n in counts.items() if of == task} for task in tasks},
            # The first are the oldest; those of 16,000 rollouts in flight are not sorted. With the oldest of
            # each stage and task, or a judge that hangs could not be seen behind long generations, nor a task
            # whose work is younger than another's.
            oldest=[self._told(activity) for activity in dict.fromkeys([*producing[:NUM_OLDEST], *firsts])],
            doing=[self._told(activity) for activity in others[:NUM_OLDEST]],
            busy={side: self._busy.share(side) for side in SIDES},
            model_step=self.controller.model_step,
            stall=watch.report() if watch is not None and watch.has_warned else "",
        )

    def step_values(self, train_step: int, groups: Sequence[Sequence[RolloutState]]) -> dict[str, float]:
        """The numbers that a train step on `groups` logs; docs/metrics.md lists the names."""
        producing, tasks = self._producing(), self._tasks()
        judged, self._judged = self._judged.values(), {}
        now_s, busy_s = loop_time(), {side: self._busy.busy_s(side) for side in SIDES}
        past_s, before_s = now_s - self._reported_s, self._reported_busy_s
        self._reported_s, self._reported_busy_s = now_s, busy_s
        # One more, since there may have been no look during the step.
        looks, self._gpu = [*self._gpu, gpu_use(self.device)], []
        values = {
            **_group_values(tasks.values(), ""),
            "in_flight/rollouts": float(sum(activity.stage == GENERATE for activity in producing)),
            "in_flight/oldest_s": self.activities.age_s(producing[0]) if producing else 0.0,
            "stalls": float(self.num_stalls),
            # Where it is worst: in a mean over tasks a judge that always fails could hide.
            JUDGE_FAILED: max((sum(failed) / len(failed) for failed in judged), default=0.0),
            **{f"busy/{side}": (busy_s[side] - before_s[side]) / past_s if past_s > 0 else 0.0 for side in SIDES},
            **{name: statistics.fmean(look.get(name, 0.0) for look in looks) for name in looks[-1]},
            **_staleness_shares(train_step, groups),
            **self._dropped_values(),
        }
        if len(tasks) > 1:
            for name, task in tasks.items():
                values |= _group_values([task], f"{name}/")
        return values

    def run_facts(self, history: Sequence[Mapping[str, float]]) -> dict[str, str]:
        """The lines of the summary about the whole run, given the metrics of its steps."""
        tokens = [row[SAMPLES] * row[RESPONSE_TOKENS] for row in history]
        lags = [row.get("train/staleness_mean", 0.0) * count for row, count in zip(history, tokens, strict=True)]
        mean = sum(lags) / sum(tokens) if sum(tokens) else math.nan
        most = max((row["staleness"] for row in history), default=math.nan)
        seconds = loop_time() - self._started_s
        shares = {side: self._busy.busy_s(side) / seconds if seconds > 0 else 0.0 for side in SIDES}
        return {
            "staleness": f"mean {number(mean)}, max {most:g} train steps, of what was trained",
            "busy": ", ".join(f"{side} {percent(share).strip()} of the time" for side, share in shares.items()),
            "stalls": f"{self.num_stalls or 'none'} warned of",
        }

    def _tasks(self) -> "dict[str, TaskNow]":
        manager = self.manager
        pending = manager.pending_task_count()
        sizes = manager.get_task_batch_sizes(self.batch_size, manager.progress.next_consumer_step)
        return {
            name: replace(self._rows.get(name, TaskNow()), batch=sizes[name], in_flight=pending[name])
            for name in manager.task_names
        }

    def _producing(self) -> list[Activity]:
        """The producer's work in flight, the oldest first."""
        return [activity for activity in self.activities.in_flight() if activity.stage in PRODUCER_STAGES]

    def _told(self, activity: Activity) -> "Doing":
        group = None if activity.group is None else str(activity.group)
        age_s, note = self.activities.age_s(activity), self.controller.describe(activity)
        return Doing(activity.stage, str(activity.name), age_s, note, group, activity.task)

    def _dropped_values(self) -> dict[str, float]:
        """Groups dropped so far, by reason, and how much longer than the trained ones those are that aged."""
        ledger = self.manager.ledger
        balance = ledger.balance({})
        values = {f"dropped/{reason}": float(count) for reason, count in balance.dropped.items()}
        for name in balance.by_task:
            if (ratio := length_bias(ledger, name)) is not None:
                scope = f"{name}/" if len(balance.by_task) > 1 else ""
                values[f"dropped/{scope}{LENGTH_BIAS}"] = ratio
        return values


@dataclass(frozen=True, kw_only=True)
class TaskNow:
    """One task: its groups."""

    batch: int = 0
    """Groups of the next batch."""
    in_flight: int = 0
    buffer: Mapping[Status, int] = field(default_factory=dict)
    """Groups in the buffer, by status; without those that none has."""
    ages: Mapping[int, int] = field(default_factory=dict)
    """Those of them that are COMPLETED, by staleness; `MAX_AGE` stands for that or more."""
    max_age: int = 0


NUM_OLDEST = 10


@dataclass(frozen=True)
class Doing:
    """One thing that goes on."""

    stage: str
    name: str
    age_s: float
    note: str
    """How far it is ("412 tokens"), or empty."""
    group: str | None = None
    task: str | int | None = None


@dataclass(frozen=True, kw_only=True)
class Now:
    """The numbers of one moment."""

    tasks: Mapping[str, TaskNow]
    stages: Mapping[str, int]
    """The producer's work in flight, by stage: rollouts that are generated, groups that are judged."""
    stages_of: Mapping[str, Mapping[str, int]]
    """The same by task."""
    oldest: Sequence[Doing]
    """The producer's work that has been in flight for longest, the oldest first: `NUM_OLDEST`, and after them
    the oldest of each other stage, by task."""
    doing: Sequence[Doing]
    """All other work in flight, as that of the trainer, the oldest first."""
    busy: Mapping[str, float]
    """Share of the last half minute, by side: "producer", "trainer"."""
    model_step: int
    """Step of the weights that generate."""
    stall: str
    """The report of a stall that was warned of and goes on; else empty."""


@dataclass(frozen=True, kw_only=True)
class StepNow:
    """The present step of the run, and the trainer's work in it."""

    step: int
    total: int
    done: float
    """The share of this step that is done, 0 to 1, where that is known."""
    eta: str
    phase: str
    phase_s: float
    facts: Mapping[str, str]
    """Names and numbers of the last steps, the most important first."""


async def _count_rows(buffer: ReplayBuffer, task_name: str) -> TaskNow:
    counts = (await buffer.count_statuses([task_name], COUNTED_STATUSES))[task_name]
    groups = {status: count for status, count in counts.items() if count}
    if Status.COMPLETED not in groups:
        return TaskNow(buffer=groups)
    completed = {"task_name": task_name, "status": Status.COMPLETED}
    stalest = await buffer.storage.get(completed, order=STALEST, limit=1, rows_only=True)
    max_age = max(0, stalest[0].staleness) if stalest else 0
    # Rollouts of a source that is ahead of the trainer (negative staleness) are as good as fresh ones.
    comparisons = {0: "$lte", MAX_AGE: "$gte"}
    staleness = [{comparisons.get(age, "$eq"): age} for age in range(min(max_age, MAX_AGE) + 1)]
    numbers = await buffer.storage.count_many([{**completed, "staleness": value} for value in staleness])
    ages = {age: count for age, count in enumerate(numbers) if count}
    return TaskNow(buffer=groups, ages=ages, max_age=max_age)


def _group_values(tasks: Iterable[TaskNow], scope: str) -> dict[str, float]:
    """The counts of these tasks together; `scope` is a task's name with a slash, or empty for all."""
    tasks = list(tasks)
    num_completed = sum(sum(task.ages.values()) for task in tasks)
    ages = sum(age * count for task in tasks for age, count in task.ages.items())
    return {
        **{
            f"buffer/{scope}{status.value}": float(sum(task.buffer.get(status, 0) for task in tasks))
            for status in _LOGGED_STATUSES
        },
        f"buffer/{scope}staleness_mean": ages / num_completed if num_completed else 0.0,
        f"buffer/{scope}staleness_max": float(max(task.max_age for task in tasks)),
        f"in_flight/{scope}groups": float(sum(task.in_flight for task in tasks)),
    }


_LAST_SHARE = 8
STALENESS_SHARES = {
    **{str(age): (age, age) for age in range(4)},
    "4_to_7": (4, 7),
    f"{_LAST_SHARE}_up": (_LAST_SHARE, _LAST_SHARE),
}
"""The shares of trained tokens that are logged, ``{name: (first, last)}``: finest where most runs are."""


def _staleness_shares(train_step: int, groups: Sequence[Sequence[RolloutState]]) -> dict[str, float]:
    """The share of the policy's tokens in `groups` in each class of staleness; 0 without labeled tokens."""
    counts = np.zeros(_LAST_SHARE + 1, np.int64)
    for group in groups:
        steps = np.concatenate([state.response_model_steps for state in group])
        masks = np.concatenate([state.response_mask for state in group])
        staleness = train_step - 1 - steps[(masks > 0) & (steps != UNLABELED)]
        counts += np.bincount(np.clip(staleness, 0, _LAST_SHARE), minlength=_LAST_SHARE + 1)
    return {
        f"staleness/share_{name}": float(counts[low : high + 1].sum() / max(1, counts.sum()))
        for name, (low, high) in STALENESS_SHARES.items()
    }
