"""Weights to the engines, and held-out prompts tried: with production at rest, or beside it.

::

    pause    sync --> the engines answer all held-out prompts, nothing else --> metrics
    beside   the trainer's weights --> engine for evaluation; held there
               task `run.evaluating`: it answers --> metrics of that step, logged when they are there
             meanwhile: production, train steps, hand-overs to the other engines, checkpoints
             what falls due meanwhile is left out: its tasks are tried with the next evaluation
             waits for the task: the end of the last step
             its engine is lost for good: no more prompts are tried; production goes on

A checkpoint says which evaluation is under way. The run that goes on from it takes the result from
`metrics.jsonl`, or does that evaluation again with the weights of its own step, which are those of the
checkpoint, or of the older one that is kept for it. One whose evaluation failed is saved without it: the
resumed run tries the held-out prompts when they are due next.
"""

import asyncio
import contextlib
from collections.abc import Sequence

import numpy as np

from forebay.engines.base import EngineLost
from forebay.engines.pool import EnginePool
from forebay.produce.strategies.rules import generated
from forebay.runs.build import Run
from forebay.runs.checkpoints import compute, find_best, phase
from forebay.runs.folder import checkpoint_path
from forebay.runs.reporting import raise_alarms
from forebay.runs.rollouts import EvalSet
from forebay.runs.verify import WeightsDifferError
from forebay.types import RolloutState, Status, made_by
from forebay.watching.activity import EVALUATE, EVALUATE_BESIDE, SYNC
from forebay.watching.stalls import StallWatch


async def sync_weights(run: Run) -> None:
    """Give the engines the trainer's weights; rollouts made from now on carry its model step."""
    with phase(run, "sync", SYNC):
        if run.turns is not None:
            await run.turns.leave()
        run.synced_bytes += await run.trainer.sync_weights(run.controller)
        if run.weight_check is None:
            return
        # Engines that are not up take over the weights when they come back, unchecked.
        differences: list[float] = []
        for number, engine in run.controller.engines_up.items():
            try:
                states = await run.weight_check.probe(engine, number)
            except WeightsDifferError:
                # One that has left meanwhile is not checked.
                if engine in run.controller.engines_up.values():
                    raise
                continue
            if states is not None:
                differences.append(await compute(run, run.weight_check.compare, number, states, run.trainer))
        metrics = {"sync/engines_unchecked": float(len(run.controller.engines) - len(differences))}
        if differences:
            metrics["sync/logprob_difference"] = max(differences)
        run.metrics.log(run.train_step, metrics)


def is_due(step: int, every: int) -> bool:
    """Whether something done every so many steps (0: never) is due after `step`."""
    return every > 0 and step % every == 0


def due_sets(run: Run, step: int) -> list[EvalSet]:
    """The held-out prompts to try after train step `step`; before the first and at the end all have their turn."""
    if step >= run.config.steps:
        return []
    return [eval_set for eval_set in run.eval_sets if step == 0 or is_due(step, eval_set.tries.every)]


async def evaluate_again(run: Run, step: int) -> None:
    """Do the evaluation of `step` that was cut off: with the weights of then, or the latest if they are gone."""
    run.evaluating_step = None
    if step != run.train_step:
        try:
            await _load(run, step)
        except ValueError as error:
            run.display.warning(f"step {run.train_step} is evaluated in place of step {step}, which is gone: {error}")
            await _load(run, run.train_step)
    tried = run.trainer.model_step
    await evaluate(run, due_sets(run, step))
    if tried != run.train_step:
        await _load(run, run.train_step)


async def _load(run: Run, step: int) -> None:
    await compute(run, run.trainer.resume, checkpoint_path(run.folder, step) / "trainer")


async def evaluate(run: Run, eval_sets: Sequence[EvalSet] | None = None) -> None:
    """Try the held-out prompts, or only `eval_sets`, with the weights of the trainer.

    Beside production it is only begun; while another is under way it is left out, with a warning. Otherwise
    nothing else may be generated meanwhile: a background producer is paused first.

    Raises:
        EngineLost, StallError: of this evaluation or, beside production, of the one before.
    """
    eval_sets = run.eval_sets if eval_sets is None else eval_sets
    if not eval_sets:
        return
    step = run.trainer.model_step
    if run.eval_controller is not None:
        # One at a time: its engine holds the weights of one step.
        if run.evaluating is not None and not run.evaluating.done():
            if not run.left_out:
                said = f"step {step} is not evaluated, since the evaluation of step {run.evaluating_step} is under way"
                run.display.warning(f"{said}: raise evaluate.every, or hold out fewer prompts")
            run.left_out += eval_sets
            run.metrics.log(step, {"eval/left_out": 1.0})
            return
        await evaluation_ended(run)
        try:
            # The trainer would gather all weights for no engine.
            run.eval_controller.check_left()
            with phase(run, "sync", SYNC):
                run.synced_bytes += await run.trainer.sync_weights(run.eval_controller)
        except EngineLost as error:
            # One that never came up is set up wrongly.
            if not run.eval_was_up:
                raise
            run.display.warning(f"step {step} is not evaluated: {error}")
            run.metrics.log(step, {"eval/left_out": 1.0})
            return
        run.eval_was_up = True
        # No task is left out again and again.
        wanted, run.left_out = [*eval_sets, *run.left_out], []
        eval_sets = [eval_set for eval_set in run.eval_sets if eval_set in wanted]
        # With its step: when it ends, the run may be further on.
        working = _evaluate_beside(run, run.eval_controller, eval_sets, step)
        run.evaluating, run.evaluating_step = asyncio.create_task(working, name=f"evaluation of step {step}"), step
        return
    # Between two hand-overs the engines hold older weights than the trainer.
    if run.controller.model_step != step:
        await sync_weights(run)
    with phase(run, "evaluate", EVALUATE):
        if run.turns is not None:
            await run.turns.generate()
        groups = await _answers(run.controller, eval_sets, run.manager.stall_watch)
    _note(run, eval_sets, groups, step)


async def evaluation_ended(run: Run) -> None:
    """Wait for the evaluation that is under way, if one is.

    Raises:
        EngineLost, StallError, PartLost: it failed.
    """
    if (working := run.evaluating) is not None:
        # A caller that is cancelled does not end it.
        await asyncio.wait([working])
        run.evaluating = run.evaluating_step = None
        working.result()


async def _evaluate_beside(run: Run, controller: EnginePool, eval_sets: Sequence[EvalSet], train_step: int) -> None:
    with run.activities.span(EVALUATE_BESIDE, f"step {train_step}"):
        groups = await _answers(controller, eval_sets, run.eval_watch)
    found = set[int]().union(*(np.unique(made_by(state)).tolist() for group in groups for state in group))
    why = None
    if found - {train_step}:
        why = f"came back with other weights, and answered with those of the steps {sorted(found)}"
    elif not controller.engines_up and any(state.status is Status.FAILED for group in groups for state in group):
        why = f"is not back: {(await controller.health()).detail}"
    if why is not None:
        run.display.warning(f"the evaluation of step {train_step} is left out: its engine was lost, and {why}")
        return
    _note(run, eval_sets, groups, train_step)
    # Its checkpoint may be there already.
    find_best(run)


async def _answers(
    controller: EnginePool, eval_sets: Sequence[EvalSet], stall_watch: StallWatch | None
) -> list[list[RolloutState]]:
    await controller.continue_generation()
    try:
        return await evaluation_groups(eval_sets, stall_watch)
    finally:
        await controller.pause_generation()


def _note(run: Run, eval_sets: Sequence[EvalSet], groups: list[list[RolloutState]], train_step: int) -> None:
    """Log the metrics of `groups`, answered by the weights of `train_step`, in the row of that step."""
    metrics = run.evaluator.evaluate(groups, whole=len(eval_sets) == len(run.eval_sets))
    metrics["eval/model_step"] = float(train_step)
    run.evaluations.append({"train_step": train_step, **metrics})
    metrics |= raise_alarms(run, {"train_step": train_step, **metrics})
    # A later row is cut by a resume from the checkpoint of `train_step`, or may be the next evaluation's.
    run.metrics.log(train_step, metrics)
    label = {0: "before", run.config.steps: "after"}.get(train_step, f"step {train_step}")
    run.display.evaluation(label, metrics)
    if run.rollouts_history is not None:
        run.rollouts_history.left(groups, "evaluated", train_step=train_step)


async def evaluation_groups(
    eval_sets: Sequence[EvalSet], stall_watch: StallWatch | None = None
) -> list[list[RolloutState]]:
    """A judged group for every held-out prompt, FAILED as in production; all are generated at once.

    Raises:
        StallError: none of them has been finished for too long.
    """
    work = [
        generated(eval_set.agent_loop.generate_group, group, eval_set.task_name)
        for eval_set in eval_sets
        for group in await eval_set.groups()
    ]
    watched = contextlib.nullcontext() if stall_watch is None else stall_watch.guard()
    async with watched, asyncio.TaskGroup() as task_group:
        tasks = [task_group.create_task(coroutine) for coroutine in work]
        if stall_watch is not None:
            for task in tasks:
                task.add_done_callback(lambda _: stall_watch.progressed())
    return [task.result() for task in tasks]
