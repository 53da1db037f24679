"""What a simulated run has in place of a model, a tokenizer, judges, a trainer and a display.

Each takes the time that the cluster says, and does nothing else::

    tokenizer   prompts of the cluster's length; responses have no text
    judge       judge_s, then a score
    trainer     train and sync seconds; notes how stale every token is that it gets
    compute     the thread in which a run trains: its work takes the virtual time it is charged with
    display     silent; tells how far the run is
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
from rich.console import Console

from forebay.aio.virtual_time import VirtualTimeLoop
from forebay.engines import RolloutController
from forebay.judges.base import Judge
from forebay.runs.show.display import RunDisplay
from forebay.simulation.cluster import ClusterConfig
from forebay.types import RolloutState

Result = TypeVar("Result")


class PromptTokenizer:
    """Renders every chat to `num_tokens` tokens."""

    chat_template = "simulated"
    name_or_path = "simulated"

    def __init__(self, num_tokens: int) -> None:
        self._ids = [0] * num_tokens
        self.all_special_ids: list[int] = []
        self.all_special_tokens: list[str] = []

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """The ids of any chat."""
        return self._ids

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        """The ids of any text."""
        return self._ids

    def decode(self, token_ids: Any, **kwargs: Any) -> Any:
        """No text."""
        return ""


class TimedJudge(Judge):
    """Gives every rollout the same score, `seconds` later."""

    def __init__(self, seconds: float) -> None:
        super().__init__(timeout_s=None)
        self._seconds = seconds

    async def score(self, state: RolloutState) -> float:
        """See `Judge.score`."""
        if self._seconds:
            await asyncio.sleep(self._seconds)
        return 1.0


class TimedThread(Executor):
    """Stands for a thread: what is done in it takes as long as it is charged with while it is done."""

    def __init__(self) -> None:
        self._charged_s = 0.0

    def charge(self, seconds: float) -> None:
        """The work that is being done takes this much longer."""
        self._charged_s += seconds

    def take_charge(self) -> float:
        """What was charged since the last call."""
        seconds, self._charged_s = self._charged_s, 0.0
        return seconds


class SimulationLoop(VirtualTimeLoop):
    """A virtual-time loop on which the work of a `TimedThread` takes virtual time."""

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Result], *args: Any
    ) -> asyncio.Future[Result]:
        """Call `func` now; its result comes when the time it was charged with has passed."""
        result = super().run_in_executor(executor, func, *args)
        seconds = executor.take_charge() if isinstance(executor, TimedThread) else 0.0
        if not seconds or result.exception() is not None:
            return result
        later: asyncio.Future[Result] = self.create_future()
        self.call_later(seconds, _hand_over, result, later)
        return later


def _hand_over(result: asyncio.Future[Result], later: asyncio.Future[Result]) -> None:
    if not later.done():
        later.set_result(result.result())


@dataclass
class TrainedStep:
    """What one train step was made of."""

    num_tokens: int
    token_staleness: Counter[int] = field(default_factory=Counter)
    group_staleness: Counter[int] = field(default_factory=Counter)


class TimedTrainer:
    """Has the part of a trainer that a run's loop calls; it trains nothing."""

    def __init__(self, cluster: ClusterConfig, thread: TimedThread) -> None:
        self._cluster = cluster
        self._thread = thread
        self.model_step = 0
        self.steps: list[TrainedStep] = []

    def fit(
        self, groups: list[list[RolloutState]], *, stale_thresholds: Mapping[str, int] | None = None
    ) -> SimpleNamespace:
        """Take the time of a train step; what is masked takes as long as what is not."""
        states = [state for group in groups for state in group]
        step = TrainedStep(sum(len(state.response_ids) for state in states))
        made_by = np.concatenate([state.response_model_steps for state in states])
        for lag, count in zip(*np.unique(self.model_step - made_by, return_counts=True), strict=True):
            step.token_staleness[int(lag)] = int(count)
        for group in groups:
            step.group_staleness[max(state.seq_staleness for state in group)] += 1
        self.steps.append(step)
        self._thread.charge(self._cluster.training_s(step.num_tokens))
        self.model_step += 1
        return SimpleNamespace(metrics={})

    async def sync_weights(self, controller: RolloutController) -> None:
        """Take the time that the weights take."""
        await asyncio.sleep(self._cluster.sync_s)
        await controller.update_weights([], self.model_step)

    def close(self) -> None:
        """Nothing to end."""


class EnoughSteps(Exception):
    """Ends a simulated run after its last step: it has nothing to save or to show."""


class SilentDisplay(RunDisplay):
    """Shows nothing; notes when phases began and steps ended, and ends the run after the last step."""

    def __init__(self, clock: Callable[[], float], on_step: Callable[[], None]) -> None:
        super().__init__(Console(quiet=True), clock=clock)
        self._now_s = clock
        self._on_step = on_step
        self.step_ends_s: list[float] = []
        self.phases: list[tuple[str, float]] = []
        """Names and beginnings; each lasts at most until the next."""

    def phase(self, name: str) -> None:
        """See `RunDisplay.phase`."""
        self.phases.append((name, self._now_s()))

    def step(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """See `RunDisplay.step`.

        Raises:
            EnoughSteps: this was the last.
        """
        self.step_ends_s.append(self._now_s())
        self._on_step()
        if step == total:
            raise EnoughSteps

    def production(self, done: int, total: int) -> None:
        """See `RunDisplay.production`."""
