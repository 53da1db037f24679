"""The numbers of a run's steps: logged, held against the alarms, shown; and the totals of its end."""

import math
from collections.abc import Sequence

from forebay.produce import ProduceBatchResult
from forebay.runs.build import Run
from forebay.runs.config import NUM_SAMPLES
from forebay.types import RolloutState

STEP_PHASES = ("generate", "wait", "train", "pause", "sync")


def report(run: Run, train_step: int, batch: ProduceBatchResult, metrics: dict[str, float]) -> None:
    """Count the step as done, log its numbers and show them."""
    run.train_step = train_step
    groups = batch.rollout_states
    phases = run.timer.consume()
    # The costs of lost parts so far; without a cluster there are numbers only where an engine was lost.
    if run.cluster is not None:
        losses = run.cluster.counts()
    else:
        losses = {f"engines/{name}": count for name, count in run.controller.counts().items() if count}
    # An evaluation or a checkpoint since the last report is not part of the step.
    wall_s = sum(phases[name].wall_s for name in STEP_PHASES if name in phases)
    sync_s = phases["sync"].wall_s if "sync" in phases else 0.0
    values = {
        **batch_numbers(groups),
        "tokens_per_s": batch.produced_tokens / wall_s if wall_s > 0 else 0.0,
        "step_s": wall_s,
        **{f"time/{name}_s": wall for name, (wall, _) in phases.items()},
        "sync/bytes": float(run.synced_bytes),
        "sync/share": sync_s / wall_s if wall_s > 0 else 0.0,
        **{f"cpu/{name}_s": cpu for name, (_, cpu) in phases.items()},
        **run.status.step_values(train_step, groups),
        **batch.metrics(),
        **losses,
        **metrics,
    }
    run.synced_bytes = 0
    values |= raise_alarms(run, {"train_step": float(train_step), **values})
    run.history.append({"train_step": float(train_step), **values})
    run.metrics.log(train_step, values)
    run.display.step(train_step, run.config.steps, values)
    if (train_step - 1) % math.ceil(run.config.steps / NUM_SAMPLES) == 0:
        run.display.rollouts(groups)
    if run.rollouts_history is not None:
        for outcome, told in batch.by_outcome().items():
            run.rollouts_history.left(told, outcome, train_step=train_step, learned=run.learned)
        # It holds the arrays of a whole batch, which nothing needs any more.
        run.learned = None


def raise_alarms(run: Run, row: dict[str, float]) -> dict[str, float]:
    """Warn of what `row` shows to go wrong; the alarms that hold, as metrics."""
    run.alarms.judge_failure = run.status.judge_failure
    for message in run.alarms.see(row).values():
        run.display.warning(message)
    return run.alarms.held


def batch_numbers(groups: Sequence[Sequence[RolloutState]]) -> dict[str, float]:
    """The numbers of a step that depend on its batch alone."""
    states = [state for group in groups for state in group]
    scores = [state.reward["score"] for state in states if state.reward]
    return {
        "reward": sum(scores) / len(scores),
        "response_tokens": sum(int(state.response_mask.sum()) for state in states) / len(scores),
        "truncated": sum(state.finish_reason == "length" for state in states) / len(states),
        "samples": float(len(scores)),
        "staleness": max(state.seq_staleness for state in states),
    }


async def totals(run: Run) -> dict[str, str]:
    """The lines of the summary about the whole run, by name."""
    trained = [row["samples"] for row in run.history]
    tokens = sum(row["samples"] * row["response_tokens"] for row in run.history)
    facts = {"rollouts": f"{sum(trained):,.0f} with {tokens:,.0f} tokens trained"}
    for task, part in run.manager.ledger.balance(await run.manager.count_live()).by_task.items():
        counts = {
            "generated": part.generated,
            "trained": part.trained,
            "live": part.live,
            **{f"dropped ({reason})": count for reason, count in part.dropped.items()},
            "retried": part.retried,
            "trained again": part.reused,
            "rollouts left out (failed)": part.left,
        }
        named = [f"{count:,} {outcome}" for outcome, count in counts.items() if count]
        facts[f"groups {task}"] = ", ".join(named)
    if run.best_checkpoint is not None:
        facts["best"] = run.best_checkpoint
    if run.config.produce.is_async:
        facts |= run.status.run_facts(run.history)
    if run.cluster is not None:
        # "trainer restarts 1, groups retried 3"
        restarts = [
            f"{name.rpartition('/')[2].replace('_', ' ')} {count:g}"
            for name, count in run.cluster.counts().items()
            if count
        ]
        facts["restarts"] = ", ".join(restarts) or "none"
    return facts


def accuracy_line(run: Run) -> str | None:
    """The one line to remember: held-out accuracy before and after; None where nothing was held out."""
    if len(run.evaluations) < 2:
        return None
    before, after = (run.evaluations[at].get("eval/accuracy", math.nan) for at in (0, -1))
    if math.isnan(before) or math.isnan(after):
        return None
    return f"held-out accuracy: {before:.1%} -> {after:.1%}"
