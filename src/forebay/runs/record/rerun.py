"""Runs a recorded training again, without engine, agents and judges, and compares the numbers.

::

    events --BufferRerun-> a real replay buffer --> the batch, which must be the one that was recorded
                                                      |
    run.toml --> trainer ---------------------------> fit --> metrics against metrics.jsonl --> RerunStep

A segment that goes on from a checkpoint gets a trainer and a buffer of its own config, which take over what
the ones before it save, as the run did. One CPU thread and the same versions of everything give the same
numbers, bit by bit.
"""

import math
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from forebay.config import load_config
from forebay.metrics import read_jsonl
from forebay.models import load_tokenizer, resolve_model
from forebay.replay import ReplayBuffer
from forebay.runs.build import build_trainer
from forebay.runs.config import RunConfig
from forebay.runs.record.events import BufferRerun, Groups
from forebay.runs.record.journal import RUN_FILE, Facts, Segment, read_events, read_history
from forebay.runs.reporting import batch_numbers
from forebay.runs.rollouts import build_buffer
from forebay.runs.show.alarms import RunAlarms
from forebay.train import TrainController

Numbers = Mapping[str, float | None]


class Rerun:
    """The training of a recorded run, once more.

    Invariants: no file of the run is written; nothing is generated or judged; the trainer gets the groups
    that a real buffer hands out, and those are the recorded ones.

    ::

        rerun = Rerun(Path("runs/a"))
        async for step in rerun.steps(until=5):
            print(step.train_step, step.differences)
        rerun.trainer.save("step_5/trainer")

    Args:
        folder: the run's.
        trains: False only re-executes the buffer's operations, which takes seconds.

    Raises:
        ValueError: there is no record, or it is not whole.
    """

    def __init__(self, folder: Path, *, trains: bool = True) -> None:
        self.folder = folder
        self.history = read_history(folder)
        path = folder / "metrics.jsonl"
        if not path.exists():
            raise ValueError(f"nothing to compare with: {str(path)!r} is missing")
        rows = read_jsonl(path)
        self.recorded = {int(row["train_step"] or 0): row for row in rows if "train/loss" in row}
        """The rows of ``metrics.jsonl``, by finished train step."""
        self._unseen = deque(rows)
        """Rows that the alarms have not been given; step 0 and an unfinished step have an evaluation only."""
        self._alarms: RunAlarms
        self.seed = 0
        """The seed of the run, known from the first step on."""
        self.trainer: TrainController | None = None
        """As of the last step; None before the first, and where nothing is trained."""
        self._trains = trains
        self._buffer: BufferRerun

    @property
    def buffer(self) -> ReplayBuffer:
        """The replay buffer as it is after the last step that was run again."""
        return self._buffer.buffer

    async def steps(self, *, until: int | None = None) -> "AsyncIterator[RerunStep]":
        """Every train step up to `until`, or all.

        Raises:
            ValueError: the record is damaged; the buffer does not do what it did; a config or model is gone.
        """
        for segment in self.history:
            await self._begin(segment)
            for event in read_events(segment):
                if event.facts["event"] != "train":
                    await self._buffer.execute(event)
                    continue
                step = self._train(event.facts)
                yield step
                if step.train_step == until or step.failure is not None:
                    return

    async def _begin(self, segment: Segment) -> None:
        """A trainer and a buffer as this start of the run made them."""
        config = load_config(RunConfig, segment.folder / RUN_FILE).model_copy(update={"record": False})
        buffer, self.seed = build_buffer(config), config.seed
        trainer = None
        if self._trains:
            torch.set_num_threads(config.threads)
            torch.manual_seed(config.seed)
            # The warm-up is not done again: the run's folder has its model.
            warmed_up = self.folder / "warmup"
            model = resolve_model(config.model, seed=config.seed) if config.warmup is None else warmed_up
            trainer = build_trainer(config, model, load_tokenizer(model))
        if segment.resumed_from is not None:
            with tempfile.TemporaryDirectory(prefix="forebay-rerun-") as name:
                path = Path(name)
                await self.buffer.save(path / "buffer")
                await buffer.resume(path / "buffer")
                if trainer is not None and self.trainer is not None:
                    self.trainer.save(path / "trainer")
                    trainer.resume(path / "trainer")
        self._buffer, self.trainer = BufferRerun(buffer), trainer
        if segment is self.history[0]:
            # One for all segments, as a resumed run brings its own up to date.
            self._alarms = RunAlarms(config)

    def _train(self, facts: Facts) -> "RerunStep":
        train_step = facts["train_step"]
        groups = self._buffer.batch(train_step, facts["groups"])
        numbers = batch_numbers(groups)
        failure = None
        if self.trainer is not None:
            try:
                metrics = self.trainer.fit(groups, stale_thresholds=facts.get("thresholds")).metrics
                # Seconds are those of this time and this machine.
                numbers |= {name: value for name, value in metrics.items() if not name.endswith("_s")}
            except FloatingPointError as error:
                failure = str(error)
        alarms: list[str] = []
        # The rows up to that of this step, the last with the numbers of this time.
        while self._unseen and (self._unseen[0]["train_step"] or 0) <= train_step:
            row = self._unseen.popleft()
            own = numbers if row["train_step"] == train_step else {}
            alarms += self._alarms.see({**row, **own}).values()
        return RerunStep(
            train_step=train_step,
            groups=groups,
            recorded=self.recorded.get(train_step),
            # As ``metrics.jsonl`` has them: null for what JSON cannot say.
            again={name: value if math.isfinite(value) else None for name, value in numbers.items()},
            failure=failure,
            alarms=alarms,
        )


@dataclass(frozen=True, kw_only=True)
class RerunStep:
    """One train step, as it was recorded and as it was this time."""

    train_step: int
    groups: Groups
    """The batch that was trained, as the buffer gave it."""
    recorded: Numbers | None
    """Its line of ``metrics.jsonl``; None if the run ended before it was written."""
    again: Numbers
    """The numbers that depend on batch and trainer alone: no times, nothing about production."""
    failure: str | None = None
    """The error that ended the training."""
    alarms: Sequence[str] = ()
    """Warnings of this step, as the run gave them."""

    @property
    def differences(self) -> list[str]:
        """The names of the numbers that are not equal, bit by bit."""
        if self.recorded is None:
            return []
        if self.failure is not None:
            return ["train/loss"]
        # A record of a version that logged fewer numbers has not all of them.
        known = [name for name in self.again if name in self.recorded]
        return [name for name in known if self.recorded[name] != self.again[name]]
