"""What a random schedule consists of, all of it drawn from its seed."""

import math
import random
from dataclasses import dataclass, fields

from forebay.produce import AsyncProduceStrategyConfig, SyncProduceStrategyConfig
from forebay.watching.stalls import StallWatch

MAX_STEPS = 4

WARN_AFTER_S, STALL_AFTER_S = 1000.0, 5000.0
"""Longer than anything takes that is not meant to hang, retries and time limits included."""


@dataclass(kw_only=True)
class Faults:
    """How often something goes wrong, as a probability per occasion."""

    engine_error: float = 0.0
    engine_raises: float = 0.0
    engine_hangs: float = 0.0
    odd_reason: float = 0.0
    judge_raises: float = 0.0
    judge_hangs: float = 0.0
    agent_raises: float = 0.0
    agent_hangs: float = 0.0
    group_raises: float = 0.0
    rejected: float = 0.0
    filter_raises: float = 0.0
    no_score: float = 0.0
    """An agent of the user's own that takes the score out of a completed rollout."""

    @property
    def total(self):
        return sum(getattr(self, f.name) for f in fields(self))


@dataclass(kw_only=True)
class Habits:
    """How often the trainer and whoever disturbs it do something, as a probability per occasion."""

    cancels_get: float = 0.0
    gives_back: float = 0.0
    skips_commit: float = 0.0
    evaluates: float = 0.0
    saves: float = 0.0
    crashes: float = 0.0
    updates_in_flight: float = 0.0
    ends_early: float = 0.0
    """By a shutdown, or by a cancelled producer."""
    num_disturbances: int = 0
    disturbed_every_s: float = 1.0
    """Mean time between two disturbances."""


@dataclass(kw_only=True)
class Members:
    """What the run asks of its groups (`forebay.produce.strategies.rules`)."""

    min_members: int
    most_tokens: int
    """Longer responses cannot be trained."""
    max_failed_groups: int | None


@dataclass(kw_only=True)
class TaskPlan:
    weight: float
    group_size: int
    num_prompts: int
    strategy: AsyncProduceStrategyConfig | SyncProduceStrategyConfig


@dataclass(kw_only=True)
class Plan:
    """A schedule before it is run. `random` is for what is drawn on the way."""

    seed: int
    tasks: dict[str, TaskPlan]
    colocated: bool
    batch_size: int
    steps: int
    interval: int
    num_engines: int
    max_running: int | None
    time_limit_s: float | None
    token_s: float
    latency: tuple[str, float]
    longest: int
    max_tokens: int
    judge_s: tuple[str, float]
    train_s: tuple[str, float]
    store_s: float
    """What the buffer takes for a put, and for a sampler's get."""
    limit: int | None
    fifo: bool
    faults: Faults
    habits: Habits
    members: Members | None
    random: random.Random

    @property
    def may_stall(self):
        """Whether something hangs that nothing but a pause would end."""
        faults = self.faults
        return faults.agent_hangs > 0 or (faults.engine_hangs > 0 and self.time_limit_s is None)

    @property
    def may_give_up(self):
        """Whether enough may fail to make production give up."""
        if self.members is not None and self.members.most_tokens < self.longest:
            return True
        return self.faults.total > 0 or self.time_limit_s is not None

    def chance(self, probability):
        return probability > 0 and self.random.random() < probability

    def seconds(self, distribution):
        """A duration drawn from ("constant" | "log-normal", the median)."""
        kind, median = distribution
        return median if kind == "constant" else median * math.exp(self.random.gauss(0, 1.0))

    def stall_watch(self, activities, controller):
        return StallWatch(
            activities, warn_after_s=WARN_AFTER_S, fail_after_s=STALL_AFTER_S, describe=controller.describe
        )


class Filter:
    """A validity function that rejects and raises as planned."""

    def __init__(self, faults, seed):
        self.faults, self.random = faults, random.Random(f"filter/{seed}")
        self.__name__ = "planned_filter"

    def __call__(self, samples):
        if self.random.random() < self.faults.filter_raises:
            raise KeyError("the filter's fault")
        return not self.random.random() < self.faults.rejected


def wants_more(completed_count, batch_size, **kwargs):
    return completed_count < batch_size + 1


def draw_plan(seed):
    rng = random.Random(f"schedule/{seed}")
    faults, habits = _faults(rng), _habits(rng)
    interval, batch_size = rng.choice([1, 1, 2, 3]), rng.randint(1, 5)
    tasks = _tasks(rng, faults, seed)
    plan = Plan(
        seed=seed,
        tasks=tasks,
        colocated=rng.random() < 0.12,
        batch_size=batch_size,
        steps=rng.randint(2, MAX_STEPS),
        interval=interval,
        num_engines=rng.choice([1, 1, 2]),
        max_running=rng.choice([None, None, 1, 2, 3, 6, 8]),
        time_limit_s=rng.choice([None, None, None, 20.0]),
        token_s=rng.choice([0.0, 0.05, 0.3]),
        latency=(rng.choice(["constant", "log-normal"]), rng.choice([0.0, 0.5, 3.0])),
        longest=rng.choice([1, 6, 25]),
        max_tokens=rng.choice([1000, 1000, 9]),
        judge_s=(rng.choice(["constant", "log-normal"]), rng.choice([0.0, 0.0, 0.4])),
        train_s=(rng.choice(["constant", "log-normal"]), rng.choice([0.0, 1.0, 6.0])),
        store_s=rng.choice([0.0, 0.0, 0.01, 0.4]),
        limit=_limit(rng, tasks, batch_size, interval),
        fifo=rng.random() < 0.2,
        faults=faults,
        habits=habits,
        members=None,
        random=random.Random(f"on the way/{seed}"),
    )
    # Of a source of their own, so that the schedules of these seeds are the same otherwise.
    plan.members = _members(random.Random(f"members/{seed}"), faults, plan.longest)
    return plan


def _faults(rng):
    if rng.random() < 0.35:
        return Faults()
    rates = {f.name: rng.choice([0.0, 0.0, 0.0, 0.02, 0.08]) for f in fields(Faults) if f.name != "no_score"}
    if rng.random() < 0.5:
        rates["engine_hangs"] = rates["agent_hangs"] = 0.0
    return Faults(**rates)


def _members(rng, faults, longest):
    """Without them, which is less often, no rollout loses its score."""
    if rng.random() < 0.3:
        return None
    faults.no_score = rng.choice([0.0, 0.0, 0.02, 0.08])
    return Members(
        min_members=rng.choice([1, 1, 2, 3]),
        most_tokens=rng.choice([10**6, math.ceil(0.9 * longest)]),
        max_failed_groups=rng.choice([None, None, 30]),
    )


def _habits(rng):
    rates = {f.name: rng.choice([0.0, 0.0, 0.1, 0.3]) for f in fields(Habits)}
    rates["ends_early"] /= 4
    rates["num_disturbances"] = rng.choice([0, 0, 4, 10])
    rates["disturbed_every_s"] = rng.choice([0.7, 4.0])
    return Habits(**rates)


def _tasks(rng, faults, seed):
    names = ["a", "b", "c"][: rng.choice([1, 1, 2, 3])]
    weights = [rng.choice([0.0, 0.2, 1.0, 1.0, 3.0]) for _ in names]
    if not any(weights):
        weights[0] = 1.0
    shared = _strategy(rng, faults, seed)
    own = rng.random() < 0.3
    return {
        name: TaskPlan(
            weight=weight,
            group_size=rng.randint(1, 3),
            num_prompts=rng.choice([1, 7, 60]),
            strategy=_strategy(rng, faults, seed) if own else shared,
        )
        for name, weight in zip(names, weights, strict=True)
    }


def _strategy(rng, faults, seed):
    accept = Filter(faults, seed)
    more = {"should_continue_fn": wants_more} if rng.random() < 0.08 else {}
    if rng.random() < 0.08:
        return SyncProduceStrategyConfig(is_valid_sample_fn=accept, **more)
    return AsyncProduceStrategyConfig(
        is_valid_sample_fn=accept,
        max_staleness=rng.choice([0, 0, 1, 2]),
        over_sample_threshold=rng.choice([0.0, 0.0, 0.5, 2.0]),
        enable_partial_rollout=rng.random() < 0.5,
        staleness_rule=rng.choice(["drop", "requeue", "admit", "mask", "correct"]),
        tail_batch_trigger_size=rng.choice([0, 0, 1, 3]),
        tail_batch_max_tries=rng.choice([0, 0, 1, 2]),
        max_retries=rng.choice([0, 1, 3]),
        pause_timeout_s=rng.choice([0.0, 2.0, 60.0]),
        **more,
    )


def _limit(rng, tasks, batch_size, interval):
    """Groups that the buffer may hold: no limit, or about as many as all tasks may have at once."""
    lag = max((getattr(t.strategy, "max_staleness", 0) + 1) * interval for t in tasks.values())
    most = math.ceil((lag + 1) * batch_size * 3)
    return rng.choice([None, None, None, most, math.ceil(most / 2)])
