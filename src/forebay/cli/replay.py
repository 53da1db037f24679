"""The ``forebay replay`` command: a recorded training, once more, without an engine.

::

    forebay replay RUN_FOLDER                        every step; ends with "450 steps, bit-equal"
    forebay replay RUN_FOLDER --until 7              stops after step 7 and shows what it was trained on
    forebay replay RUN_FOLDER --until 7 --output X   X/trainer, X/buffer, X/batches.parquet
    forebay replay RUN_FOLDER --batches-only         the buffer's part alone: seconds, not minutes

Exit status: 0 if all steps are equal, 1 if a number differs, 2 if the record cannot be replayed.
"""

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli.errors import console, one_message

if TYPE_CHECKING:
    from forebay.runs.record.rerun import Rerun, RerunStep

MAX_LINES = 50
"""About so many steps are listed, however many there are; those that differ always are."""
_LOSS = "train/loss"
_LINE = "{:>6}  {:>8}  {:>18}  {:>18}  {}"


def replay(
    folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="Of a run with record = true.")],
    until: Annotated[
        int | None, typer.Option(min=1, metavar="STEP", help="Stop after this train step and show its batch.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="A new folder for trainer, buffer and batches as they are at the end.")
    ] = None,
    batches_only: Annotated[
        bool, typer.Option("--batches-only", help="Check the batches and leave out the training.")
    ] = False,
) -> None:
    """Run a recorded training again, without an engine, and compare batches and losses."""
    with one_message(ValueError, OSError):
        if output is not None and output.exists() and any(output.iterdir()):
            raise ValueError(f"{str(output)!r} is not empty; name a new folder for --output")
        is_equal = asyncio.run(_replay(folder, until, output, batches_only))
    if not is_equal:
        raise typer.Exit(1)


async def _replay(folder: Path, until: int | None, output: Path | None, batches_only: bool) -> bool:
    from transformers.utils.logging import disable_progress_bar

    from forebay.runs.record.journal import batch_file
    from forebay.runs.record.rerun import Rerun

    disable_progress_bar()
    rerun = Rerun(folder, trains=not batches_only)
    last_recorded = max(rerun.recorded, default=0)
    # One more: the step that the run failed at has no numbers.
    if until is not None and until > last_recorded + 1:
        raise ValueError(f"no train step {until} to stop after: the record ends with step {last_recorded}")
    report = _Report(last_recorded if until is None else min(until, last_recorded))
    with contextlib.nullcontext() if output is None else batch_file(output / "batches.parquet") as add_batch:
        async for step in rerun.steps(until=until):
            report.add(step)
            if add_batch is not None:
                add_batch(step.train_step, step.groups)
    last = report.last
    if last is None or (until is not None and last.train_step < until):
        raise ValueError(f"no train step {until or 1} in the record: it ends with step {last_recorded}")
    if output is not None:
        saved = ["batches.parquet", "buffer"]
        await rerun.buffer.save(output / "buffer")
        # After a failed step the weights are those of no step.
        if rerun.trainer is not None and last.failure is None:
            rerun.trainer.save(output / "trainer")
            saved.append("trainer")
        typer.echo(f"after step {last.train_step}: {', '.join(saved)} in {output}")
    if until is not None:
        _show_batch(rerun, last)
    typer.echo(report.verdict(last, batches_only))
    return not report.differing


class _Report:
    """Lists the steps as they come."""

    def __init__(self, total: int) -> None:
        self.last: RerunStep | None = None
        self.differing: list[int] = []
        self._num_steps, self._total = 0, total
        self._every = max(1, -(-total // MAX_LINES))
        typer.echo(_LINE.format("step", "reward", "loss, recorded", "loss, replayed", "equal"))

    def add(self, step: "RerunStep") -> None:
        """Count a step, and print it if it is one of those that are listed."""
        self._num_steps, self.last = self._num_steps + 1, step
        if step.differences:
            self.differing.append(step.train_step)
        listed = step.train_step % self._every == 0 or step.train_step in (1, self._total)
        if listed or step.differences or step.recorded is None or step.failure is not None:
            losses = [_number(values.get(_LOSS)) for values in (step.recorded or {}, step.again)]
            reward = _number(step.again.get("reward"), 4)
            typer.echo(_LINE.format(step.train_step, reward, *losses, _verdict(step)))
        for message in step.alarms:
            typer.echo(f"warning: {message}")

    def verdict(self, last: "RerunStep", batches_only: bool) -> str:
        """The one line that says it all."""
        steps = f"{self._num_steps} step{'' if self._num_steps == 1 else 's'}"
        if self.differing:
            return f"{steps}, {len(self.differing)} differ, the first is step {self.differing[0]}"
        if last.recorded is None:
            # Its result was lost with the process, or it failed as it does now.
            return f"{steps}, bit-equal up to step {last.train_step - 1}"
        return f"{steps}, the same batches" if batches_only else f"{steps}, bit-equal"


def _verdict(step: "RerunStep") -> str:
    if step.failure is not None:
        return step.failure
    if step.recorded is None:
        return "not recorded: the run ended here"
    if not step.differences:
        return "yes"
    # The loss has columns of its own.
    names = [name for name in step.differences if name != _LOSS] or step.differences
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    now, before = _number(step.again.get(names[0])), _number(step.recorded.get(names[0]))
    return f"NO: {names[0]} {now}, recorded {before}{more}"


def _number(value: float | None, digits: int = 12) -> str:
    return "-" if value is None else f"{value:.{digits}g}"


def _show_batch(rerun: "Rerun", step: "RerunStep") -> None:
    """The batch: a line per rollout."""
    from forebay.cli.views import number, table, version_spans
    from forebay.engines.base import request_seed

    states = [state for group in step.groups for state in group]
    lines = []
    for state in states:
        score = (state.reward or {}).get("score")
        own_seed = None if state.sample_params is None else state.sample_params.seed
        run_seed = rerun.seed if own_seed is None else own_seed
        seed = request_seed(run_seed, str(state.rollout_id), state.num_tries, 0)
        facts = number(score, 4), len(state.response_ids), state.finish_reason or "-", state.seq_staleness
        made_by = version_spans(state).removeprefix("weights: ")
        lines.append((str(state.rollout_id), *facts, str(seed), made_by))
    typer.echo(f"\nthe batch of train step {step.train_step}")
    columns = ("rollout", "score", "tokens", "finish", "staleness", "seed", "made by")
    console().print(table(*columns, rows=lines, left=(0, 3, 6)))
