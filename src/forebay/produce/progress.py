"""How far production and consumption have come: one live object shared by producer and consumer.

All counts are absolute, per task, since the start of the run. Groups that the consumer has taken stay counted
in ``consumed_samples``, so the producer never mistakes a consumed group for a missing one::

    available = consumed_samples + COMPLETED groups in the buffer        (compare with target_samples)

The object is only ever updated in place: contexts, strategies and the manager hold references to it. A task
that is not one of ours is a `KeyError`, never a silent 0.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self


@dataclass
class ProduceProgress:
    """Counts of groups by task, and statistics of the window since they were last read.

    Invariant: ``target_samples`` never falls.

    >>> progress = ProduceProgress.build(["math"])
    >>> allocate = lambda batch_size, step: {"math": batch_size}
    >>> progress.ensure_target_upto(batch_size=4, future_step=2, allocate_batch_sizes=allocate)
    {'math': 4}
    >>> progress.target_samples
    {'math': 8}
    """

    next_consumer_step: int = 1
    """The train step that samples stored now will at the earliest be trained at."""
    producer_future_step: int = 1
    """The train step the producer is working for."""
    consumed_samples: dict[str, int] = field(default_factory=dict)
    """Groups the consumer has taken."""
    target_samples: dict[str, int] = field(default_factory=dict)
    """Groups that should be available by ``target_upto_future_step``."""
    target_upto_future_step: int = 0
    # Windows, read and reset by the consume_* methods.
    raw_rewards_sum: dict[str, float] = field(default_factory=dict)
    """Over all completed rollouts, before the validity filter."""
    raw_rewards_count: dict[str, int] = field(default_factory=dict)
    produced_samples: dict[str, int] = field(default_factory=dict)
    """Rollouts that came back from generation, whatever their status."""
    produced_tokens: dict[str, int] = field(default_factory=dict)
    produce_time_s: float = 0.0

    @classmethod
    def build(cls, task_names: Iterable[str]) -> Self:
        """Progress at the start of a run."""
        progress, names = cls(), list(task_names)
        for entry in fields(cls):
            if isinstance(table := getattr(progress, entry.name), dict):
                table.update(dict.fromkeys(names, 0))
        progress.raw_rewards_sum.update(dict.fromkeys(names, 0.0))
        return progress

    @classmethod
    def build_local(cls, task_names: Iterable[str], task_batch_sizes: Mapping[str, int], train_step: int) -> Self:
        """Progress of one colocated step: its target is this step's batch, and nothing is consumed yet."""
        progress = cls.build(task_names)
        progress.next_consumer_step = progress.producer_future_step = train_step
        progress.target_upto_future_step = train_step
        # In place of the zeros: a task that is left out is a KeyError.
        progress.target_samples = dict(task_batch_sizes)
        return progress

    def ensure_target_upto(
        self, *, batch_size: int, future_step: int, allocate_batch_sizes: Callable[[int, int], dict[str, int]]
    ) -> dict[str, int]:
        """Raise the target step by step up to `future_step`; return that step's batch size per task.

        Raises:
            KeyError: a split leaves a task out, or names another one; the targets are those of the step before.
        """
        # Step by step, because a batch may be split otherwise at each of them.
        for step in range(self.target_upto_future_step + 1, future_step + 1):
            sizes = allocate_batch_sizes(batch_size, step)
            if wrong := sorted(sizes.keys() ^ self.target_samples.keys()):
                raise KeyError(f"the split of step {step} must name every task once and no other, but: {wrong}")
            for task_name, size in sizes.items():
                self.target_samples[task_name] += size
            self.target_upto_future_step = step
        return allocate_batch_sizes(batch_size, future_step)

    def begin_consume(self, train_step: int) -> None:
        """The consumer now waits for the batch of `train_step`."""
        self.next_consumer_step = train_step

    def finish_consume(self, train_step: int) -> None:
        """The consumer has the batch of `train_step`; groups stored from now on are for later steps."""
        self.next_consumer_step = train_step + 1

    def mark_consumed(self, consumed_counts: Mapping[str, int]) -> None:
        """Add the groups that the consumer took."""
        for task_name, count in consumed_counts.items():
            self.consumed_samples[task_name] += count

    def advance_future_step(self) -> None:
        """The producer goes on to the next train step."""
        self.producer_future_step += 1

    def add_raw_rewards(self, task_name: str, rewards_sum: float, rewards_count: int) -> None:
        """Count the rewards of one completed group, before filtering."""
        self.raw_rewards_sum[task_name] += rewards_sum
        self.raw_rewards_count[task_name] += rewards_count

    def add_produced(self, task_name: str, samples: int, tokens: int) -> None:
        """Count one group that came back from generation."""
        self.produced_samples[task_name] += samples
        self.produced_tokens[task_name] += tokens

    def add_produce_time(self, elapsed_s: float) -> None:
        """Add wall time spent producing."""
        self.produce_time_s += elapsed_s

    def consume_raw_rewards(self, task_name: str) -> tuple[float, int]:
        """(sum, count) since the last call."""
        window = self.raw_rewards_sum[task_name], self.raw_rewards_count[task_name]
        self.raw_rewards_sum[task_name], self.raw_rewards_count[task_name] = 0.0, 0
        return window

    def consume_produced(self, task_name: str) -> tuple[int, int]:
        """(rollouts, response tokens) since the last call."""
        window = self.produced_samples[task_name], self.produced_tokens[task_name]
        self.produced_samples[task_name] = self.produced_tokens[task_name] = 0
        return window

    def consume_produce_time(self) -> float:
        """Seconds since the last call."""
        window, self.produce_time_s = self.produce_time_s, 0.0
        return window

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain JSON values."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a `state_dict`, in place: the object and its dicts stay the same objects.

        Raises:
            ValueError: a field is missing or unknown.
        """
        names = {f.name for f in fields(self)}
        if names != set(state):
            raise ValueError(f"progress state does not fit: differs in {sorted(names ^ set(state))}")
        for name, value in state.items():
            if isinstance(table := getattr(self, name), dict):
                table.clear()
                table.update(value)
            else:
                setattr(self, name, value)
