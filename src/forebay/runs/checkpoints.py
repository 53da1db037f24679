"""Checkpoints of a run: written beside production and training, and gone back to.

::

    begin_checkpoint: cut of production, history --> task `run.saving`: trainer (compute thread: before the
                      next train step) -> cut, history -> checksums, fsync, rename -> older ones deleted
                      -> groups consumed up to the oldest that is left: forgotten
    resume:           trainer, production, history <-- folder; groups <-- folder, or the store has them

Every function takes a `Run`; `forebay.runs.steps` has the other verbs.
"""

import asyncio
import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from forebay.aio.time_limits import contained
from forebay.config import ConfigError, errors_about
from forebay.io.safe_files import check, publish, unfinished, write_json
from forebay.metrics import read_jsonl
from forebay.produce.recovery import GROUPS, Cut
from forebay.runs.build import Run
from forebay.runs.folder import checkpoint_path, list_checkpoints, prune_checkpoints, step_of
from forebay.runs.placement import device_fact
from forebay.runs.store import holder_name, keeps_consumed, store_of
from forebay.types import Status
from forebay.watching.activity import CHECKPOINT, SYNC, TRAIN

T = TypeVar("T")


async def checkpoint(run: Run) -> Path:
    """Save everything a resumed run needs; the folder appears under its name only when it is complete."""
    await begin_checkpoint(run)
    await checkpoint_written(run)
    return checkpoint_path(run.folder, run.train_step)


async def begin_checkpoint(run: Run) -> None:
    """Begin a `checkpoint` of this moment, which is written beside production and training.

    The next train step waits until the trainer has copied its part: both are done in the compute thread, in
    this order.
    An error of the writing is raised by the next of these verbs, or by the next `fit`.
    """
    final = checkpoint_path(run.folder, run.train_step)
    with phase(run, "checkpoint", CHECKPOINT):
        await checkpoint_written(run)
        if final.exists():
            return
        cut = await run.manager.cut(final / "manager", train_step=run.train_step)
        state = {
            "train_step": run.train_step,
            "history": list(run.history),
            "evaluations": list(run.evaluations),
            "evaluating": run.evaluating_step,
            "guard": run.guard.state_dict(),
            "lag_limit": run.lag_limit,
            "device": device_fact(run.config),
        }
        try:
            if run.record is not None:
                await run.record.checkpoint(run.train_step)
        except BaseException:
            await cut.aclose()
            raise
        run.saving = asyncio.create_task(_write_checkpoint(run, final, cut, state), name=f"save {final.name}")
        # It runs up to its first wait, which is for the compute thread.
        await asyncio.sleep(0)


async def _write_checkpoint(run: Run, final: Path, cut: Cut, state: dict[str, Any]) -> None:
    async with contextlib.aclosing(cut):
        with unfinished(final) as temporary:
            await compute(run, run.trainer.begin_save, temporary / "trainer")
            await asyncio.to_thread(run.trainer.finish_save)
            await cut.write(temporary / "manager")
            await asyncio.to_thread(write_json, temporary / "run.json", state)
            await asyncio.to_thread(publish, temporary, final)
        # Once it counts: a resume from an earlier one would have no use for them.
        await asyncio.to_thread(cut.ledger.keep, cut.state["ledger"])
    # One that is being evaluated may turn out to be the best, and a resume may need its weights.
    spared = find_best(run), run.evaluating_step
    await asyncio.to_thread(prune_checkpoints, run.folder, run.config.keep_checkpoints, spared)
    if keeps_consumed(run.config):
        # A run in a durable store may be asked to go on from any of the latest checkpoints. Not for the best
        # one, which may be as old as the run: from it, consumed groups that are gone are generated again.
        latest = list_checkpoints(run.folder)[-run.config.keep_checkpoints :]
        covered = latest[0] if store_of(run.config) != "memory" else final
        await run.manager.replay_buffer.commit(step_of(covered))


def find_best(run: Run) -> int | None:
    """The step of the checkpoint with the best evaluation, the earliest of equals; None where none has both."""
    metric = run.config.evaluate.best
    found = {int(row["train_step"]): row.get(metric, math.nan) for row in run.evaluations}
    values = {step: value for step, value in found.items() if math.isfinite(value)}
    saved = [path for path in list_checkpoints(run.folder) if step_of(path) in values]
    if not saved:
        return None
    best = max(saved, key=lambda path: values[step_of(path)])
    run.best_checkpoint = f"{best.name} ({metric} {values[step_of(best)]:.3g})"
    return step_of(best)


async def checkpoint_written(run: Run) -> None:
    """Wait until the checkpoint that was begun last is on the disk, if one was begun.

    Raises:
        DiskError, PartLost, RankError: it could not be written.
    """
    if (saving := run.saving) is not None:
        # A caller that is cancelled must not leave half a checkpoint.
        try:
            await asyncio.shield(saving)
        finally:
            # An error is raised once: what comes next may save again.
            if saving.done():
                run.saving = None


async def resume(run: Run, path: Path, *, has_groups: bool = False, without_groups: bool = False) -> None:
    """Go back to the checkpoint at `path`; the engines get its weights at the next `sync_weights`.

    A run that `has_groups` already, from before it lost a part, keeps those that were finished since. Where
    the database that had them is lost, the live ones are generated again, if the caller goes on `without_groups`.

    Raises:
        ConfigError: the checkpoint is not one of this run as it is configured.
    """
    with errors_about(f"cannot go on from {str(path)!r}", ConfigError, ValueError):
        # The trainer and the manager check their own folders as they read them.
        await compute(run, check, path)
        state = json.loads((path / "run.json").read_text(encoding="utf-8"))
        if path != checkpoint_path(path.parents[1], state["train_step"]):
            raise ValueError(f"it is the checkpoint of train step {state['train_step']}")
        await compute(run, run.trainer.resume, path / "trainer")
        await _resume_production(run, path / "manager", has_groups, without_groups)
    run.train_step = state["train_step"]
    run.history = state["history"]
    _resume_evaluations(run, state["evaluations"], state.get("evaluating"))
    run.alarms.catch_up(run.history, run.evaluations)
    run.guard.load_state_dict(state["guard"])
    if state["lag_limit"] is not None:
        limit_lag(run, state["lag_limit"])
    # Keys that are "auto" stand for something else on another machine. Older checkpoints do not say it.
    if (was := state.get("device", now := device_fact(run.config))) != now:
        run.display.message(f"changed: device is {now}, was {was}")
    run.display.message(f"resumed after train step {run.train_step} from {path}")


def _resume_evaluations(run: Run, saved: list[dict[str, float]], under_way: int | None) -> None:
    """Take those of the checkpoint, and any that ended later; the one that did not is to be done again."""
    known = {row["train_step"]: row for row in saved}
    # Rows of later steps were cut off as the file was opened.
    for row in read_jsonl(run.folder / "metrics.jsonl"):
        if "eval/model_step" in row and (step := row["train_step"] or 0) not in known:
            found = {name: value for name, value in row.items() if name.startswith("eval/")}
            known[step] = {"train_step": step} | {n: math.nan if v is None else v for n, v in found.items()}
    run.evaluations = list(known.values())
    run.evaluating_step = None if under_way in known else under_way
    find_best(run)


async def _resume_production(run: Run, path: Path, has_groups: bool, without_groups: bool) -> None:
    storage = run.manager.replay_buffer.storage
    has_snapshot = (path / GROUPS).exists()
    is_lost = not has_groups and not has_snapshot and storage.holder is None
    if is_lost and not (without_groups and storage.is_durable):
        lost = ", or, if the database is lost, add --without-groups to generate its live groups again"
        raise ValueError(
            f"the store holds no run: leave replay.store and its database as they were{lost * storage.is_durable}"
        )
    if not has_groups and has_snapshot and storage.is_durable:
        # The checkpoint has the groups. Those in this store are older: the run has since used another one.
        await storage.delete_where({"status": {"$in": [status.value for status in Status]}})
    await run.manager.resume(path, has_groups=has_groups or not has_snapshot)
    if is_lost:
        owed = sum(getattr(runner.sampler, "num_owed", 0) for runner in run.manager.task_runners)
        run.display.warning(f"the database held no run: {owed} groups that were live are generated again")
    if storage.is_durable:
        storage.holder = holder_name(run.folder)


def limit_lag(run: Run, train_steps: int) -> None:
    """Let weights and rollouts be at most `train_steps` behind, where more was allowed."""
    run.lag_limit = train_steps
    run.sync_interval = min(run.sync_interval, train_steps)
    for runner in run.manager.task_runners:
        runner.produce_strategy.limit_lag(train_steps)


async def compute(run: Run, function: Callable[..., T], *args: Any) -> T:
    """Call `function` in the compute thread and wait for it; a loss or an advantage may be the user's."""
    return await asyncio.get_running_loop().run_in_executor(run.compute_thread, contained(function), *args)


@contextlib.contextmanager
def phase(run: Run, name: str, stage: str | None = None) -> Iterator[None]:
    """Show that the run now does `name`, count its time, and register it as an activity of that stage.

    Training, a sync or a checkpoint that takes `stall_after_s`, and three times as long as any before, may hang, and
    is warned of; what production has to end has a stall watch.
    """
    run.display.phase(name)
    with run.timer.phase(name), contextlib.ExitStack() as parts:
        if stage is not None:
            parts.enter_context(run.activities.span(stage, f"step {run.train_step + 1}"))
        if stage in (TRAIN, SYNC, CHECKPOINT):
            longest_s = max((row.get(f"time/{name}_s", 0.0) for row in run.history), default=0.0)
            limit_s = max(run.config.produce.stall_after_s, 3 * longest_s)
            warning = f"{name} has taken {limit_s:g} s and goes on; before, at most {longest_s:.3g} s"
            parts.callback(asyncio.get_running_loop().call_later(limit_s, run.display.warning, warning).cancel)
        yield
