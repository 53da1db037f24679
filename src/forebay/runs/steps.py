"""The verbs a run is made of. Each does one thing to a `Run` and can be called on its own.

::

    sync_weights -> evaluate
    repeat: produce -> fit -> forget_consumed -> sync_weights -> report
            -> evaluate when due -> checkpoint when due
    finish

CPU-heavy work runs in the run's compute thread, so that the event loop stays free.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from forebay.config import ConfigError
from forebay.produce import ProduceBatchResult
from forebay.produce.results import LEFTOVER_STATUSES
from forebay.runs.build import EvalSet, Run
from forebay.runs.folder import list_checkpoints, publish
from forebay.runs.pictures import learning_curve
from forebay.types import RolloutState

T = TypeVar("T")

ROLLOUTS_PER_RECORD = 8
"""Rollouts of each batch that are written to ``rollouts.jsonl``: enough to read, too few to fill a disk."""

STEP_PHASES = ("generate", "train", "sync")


async def compute(run: Run, function: Callable[..., T], *args: Any) -> T:
    """Call `function` in the compute thread and wait for it."""
    return await asyncio.get_running_loop().run_in_executor(run.compute_thread, function, *args)


async def sync_weights(run: Run) -> None:
    """Give the engines the trainer's weights; rollouts made from now on carry its model step."""
    run.display.phase("sync")
    with run.timer.phase("sync"):
        await run.trainer.sync_weights(run.controller)


async def produce(run: Run, train_step: int) -> ProduceBatchResult:
    """Generate, judge and take the batch of `train_step`."""
    run.display.phase("generate")
    run.progress.start_step()
    with run.timer.phase("generate"):
        return await run.manager.produce_batch(run.config.batch_size, train_step, run.controller.model_step)


async def fit(run: Run, groups: list[list[RolloutState]]) -> dict[str, float]:
    """One train step on `groups`; its metrics.

    Raises:
        ConfigError: the trainer refuses the batch.
        FloatingPointError: the training diverged.
    """
    run.display.phase("train")
    try:
        with run.timer.phase("train"):
            batch = await compute(run, run.trainer.fit, groups)
    except ValueError as error:
        raise ConfigError(f"the trainer, in train step {run.train_step + 1}: {error}") from error
    except FloatingPointError as error:
        await _give_back(run, groups)
        raise FloatingPointError(f"the trainer, in train step {run.train_step + 1}: {error}") from error
    return batch.metrics


async def _give_back(run: Run, groups: list[list[RolloutState]]) -> None:
    """Make the batch of a train step that did not happen live again, in the buffer and in the books."""
    await run.manager.replay_buffer.restore(run.train_step)
    for group in groups:
        group_id, task_name = group[0].group_id, group[0].task_name
        assert group_id is not None
        assert task_name is not None
        run.manager.ledger.record(group_id, task_name, "requeued")


async def forget_consumed(run: Run, train_step: int) -> None:
    """Drop what was consumed up to `train_step`, unless the run keeps it.

    Buffer and trainer are in one process and go back to a checkpoint together, so nothing can ask for these
    groups again. A durable store, which outlives the trainer, has to wait for the checkpoint.
    """
    await run.manager.replay_buffer.commit(train_step)


async def evaluate(run: Run, label: str) -> dict[str, float]:
    """Try the held-out prompts with the current weights; {} without any."""
    if not run.eval_sets:
        return {}
    run.display.phase("evaluate")
    with run.timer.phase("evaluate"):
        await run.controller.continue_generation()
        try:
            groups = await evaluation_groups(run.eval_sets)
        finally:
            await run.controller.pause_generation()
    metrics = run.evaluator.evaluate(groups)
    run.evaluations.append({"train_step": run.train_step, **metrics})
    run.metrics.log(run.train_step, metrics)
    run.display.evaluation(label, metrics)
    return metrics


async def evaluation_groups(eval_sets: list[EvalSet]) -> list[list[RolloutState]]:
    """A judged group for every held-out prompt; all are generated at once."""
    work = [
        eval_set.agent_loop.generate_group(group)
        for eval_set in eval_sets
        for group in await eval_set.groups()
    ]
    async with asyncio.TaskGroup() as task_group:
        tasks = [task_group.create_task(coroutine) for coroutine in work]
    return [task.result() for task in tasks]


def report(run: Run, train_step: int, batch: ProduceBatchResult, metrics: dict[str, float]) -> None:
    """Count the step as done, log its numbers and show them."""
    run.train_step = train_step
    groups = batch.rollout_states
    scores = [state.reward["score"] for group in groups for state in group if state.reward]
    tokens = sum(int(state.response_mask.sum()) for group in groups for state in group)
    phases = run.timer.consume()
    # An evaluation or a checkpoint since the last report is not part of the step.
    wall_s = sum(phases[name].wall_s for name in STEP_PHASES if name in phases)
    values = {
        "reward": sum(scores) / len(scores),
        "response_tokens": tokens / len(scores),
        "samples": float(len(scores)),
        "staleness": max(state.seq_staleness for group in groups for state in group),
        "tokens_per_s": batch.produced_tokens / wall_s if wall_s > 0 else 0.0,
        "step_s": wall_s,
        **{f"time/{name}_s": wall for name, (wall, _) in phases.items()},
        **{f"cpu/{name}_s": cpu for name, (_, cpu) in phases.items()},
        **batch.metrics(),
        **metrics,
    }
    run.history.append({"train_step": float(train_step), **values})
    run.metrics.log(train_step, values)
    run.display.step(train_step, run.config.steps, values)
    if run.config.show_every and (train_step - 1) % run.config.show_every == 0:
        run.display.rollouts(groups)
    _record_rollouts(run, train_step, groups)


def _record_rollouts(run: Run, train_step: int, groups: list[list[RolloutState]]) -> None:
    with (run.folder / "rollouts.jsonl").open("a", encoding="utf-8") as file:
        for state in [state for group in groups for state in group][:ROLLOUTS_PER_RECORD]:
            record = {
                "train_step": train_step,
                "rollout_id": state.rollout_id,
                "prompt": state.message,
                "response": state.response,
                "reward": state.reward,
                "finish_reason": state.finish_reason,
                "staleness": state.seq_staleness,
            }
            file.write(json.dumps(record, default=str) + "\n")


def is_due(step: int, every: int) -> bool:
    """Whether something done every so many steps (0: never) is due after `step`."""
    return every > 0 and step % every == 0


async def checkpoint(run: Run) -> Path:
    """Save everything a resumed run needs; the folder appears under its name only when it is complete."""
    run.display.phase("checkpoint")
    final = run.folder / "checkpoints" / f"step_{run.train_step:06d}"
    if final.exists():
        return final
    temporary = final.with_name(final.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    with run.timer.phase("checkpoint"):
        await compute(run, run.trainer.save, temporary / "trainer")
        await run.manager.save(temporary / "manager")
        state = {"train_step": run.train_step, "history": run.history, "evaluations": run.evaluations}
        (temporary / "run.json").write_text(json.dumps(state), encoding="utf-8")
        await compute(run, publish, temporary, final)
    for old in list_checkpoints(run.folder)[: -run.config.keep_checkpoints]:
        shutil.rmtree(old)
    return final


async def resume(run: Run, path: Path) -> None:
    """Go back to the checkpoint at `path`; the engines get its weights at the next `sync_weights`.

    Raises:
        ConfigError: the checkpoint is not one of this run as it is configured.
    """
    state = json.loads((path / "run.json").read_text(encoding="utf-8"))
    try:
        await compute(run, run.trainer.resume, path / "trainer")
        await run.manager.resume(path / "manager")
    except ValueError as error:
        raise ConfigError(f"cannot go on from {str(path)!r}: {error}") from error
    run.train_step = state["train_step"]
    run.history = state["history"]
    run.evaluations = state["evaluations"]
    run.display.message(f"resumed after train step {run.train_step} from {path}")


async def rescue(run: Run, error: Exception) -> None:
    """Save the last finished step of a run that failed with `error`, if there is one to save."""
    # After a diverged optimiser step that was not the step's first, the weights belong to no step.
    between = isinstance(error, FloatingPointError) and (
        run.config.train.optimiser_steps > 1 or run.config.train.uses_critic
    )
    if run.train_step > 0 and not between:
        path = await checkpoint(run)
        run.display.warning(
            f"train step {run.train_step} was the last; saved in {path}, to go on with --resume"
        )


async def finish(run: Run) -> None:
    """Save the last state, the model and the picture, and say where they are."""
    final = await checkpoint(run)
    await compute(run, _publish_model, final / "trainer" / "model", run.folder / "model")
    if run.history:
        await compute(run, learning_curve, run.history, run.evaluations, run.folder / "learning_curve.png")
    run.display.summary(run.history, run.evaluations, await group_counts(run), run.folder)


def _publish_model(source: Path, target: Path) -> None:
    temporary = target.with_name(target.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(source, temporary)
    shutil.rmtree(target, ignore_errors=True)
    publish(temporary, target)


async def group_counts(run: Run) -> dict[str, dict[str, int]]:
    """What became of the groups of each task: trained, live, dropped by reason."""
    names = run.manager.task_names
    cells = await run.manager.replay_buffer.count_statuses(names, list(LEFTOVER_STATUSES))
    balance = run.manager.ledger.balance({name: sum(cells[name].values()) for name in names})
    return {
        name: {"generated": part.generated, "trained": part.trained, "live": part.live, **part.dropped}
        for name, part in balance.by_task.items()
    }


async def close(run: Run) -> None:
    """Free engines, sinks and the compute thread."""
    await run.controller.close()
    run.metrics.close()
    run.manager.ledger.close()
    run.display.close()
    run.compute_thread.shutdown()


def accuracy_line(run: Run) -> str | None:
    """The one line to remember: held-out accuracy before and after; None where nothing was held out."""
    if len(run.evaluations) < 2:
        return None
    before, after = run.evaluations[0]["eval/accuracy"], run.evaluations[-1]["eval/accuracy"]
    if math.isnan(before) or math.isnan(after):
        return None
    return f"held-out accuracy: {before:.1%} -> {after:.1%}"


def is_evaluated(run: Run) -> bool:
    """Whether the current weights were tried already."""
    return bool(run.evaluations) and run.evaluations[-1]["train_step"] == run.train_step
