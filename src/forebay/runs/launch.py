"""Starts a run from its config: folder, components, Ctrl-C, and then the loop."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import transformers

from forebay.config import ConfigError
from forebay.evaluate import Evaluator
from forebay.runs import steps
from forebay.runs.build import Run, build_rollouts, build_run
from forebay.runs.colocated import run_colocated
from forebay.runs.config import RunConfig
from forebay.runs.display import RunDisplay
from forebay.runs.folder import list_checkpoints, prepare


async def launch(
    config: RunConfig, *, resume: Path | None = None, overwrite: bool = False
) -> tuple[str | None, bool]:
    """Run `config`, or go on with the run in the folder `resume`.

    Returns:
        The accuracy line, if prompts were held out, and whether Ctrl-C ended the run early.

    Raises:
        ConfigError: something in the config, or the folder, does not fit.
        ProductionError: rollouts cannot be produced any more.
    """
    _silence_progress_bars()
    checkpoint = _last_checkpoint(config.folder) if resume is not None else None
    folder = config.folder if checkpoint is not None else prepare(config, overwrite=overwrite)
    step = 0 if checkpoint is None else int(checkpoint.name.removeprefix("step_"))
    with RunDisplay() as display:
        display.start(config.name, _facts(config), step=step, total=config.steps)
        run = build_run(config, folder, display, resume_step=None if checkpoint is None else step)
        if checkpoint is not None:
            await steps.resume(run, checkpoint)
        remove_handler = _stop_on_ctrl_c(run)
        try:
            await run_colocated(run)
        finally:
            remove_handler()
    return steps.accuracy_line(run), run.stop_requested


async def launch_evaluation(config: RunConfig, model_folder: Path) -> dict[str, float]:
    """Try the model in `model_folder` on the run's held-out prompts and show the metrics.

    Raises:
        ConfigError: the run holds out no prompts, or the model does not load.
    """
    _silence_progress_bars()
    rollouts = build_rollouts(config, model_folder, ledger_path=None)
    try:
        if not rollouts.eval_sets:
            raise ConfigError(f"run {config.name!r} holds out no prompts: give a task eval_data")
        with RunDisplay() as display:
            display.start(f"eval {model_folder}", {})
            groups = await steps.evaluation_groups(rollouts.eval_sets)
            metrics = Evaluator().evaluate(groups)
            display.evaluation("now", metrics)
            display.rollouts(groups)
    finally:
        await rollouts.controller.close()
    return metrics


def _silence_progress_bars() -> None:
    """Those of transformers, for loading and writing, would tear the display; a run has its own."""
    transformers.utils.logging.disable_progress_bar()


def _last_checkpoint(folder: Path) -> Path:
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        raise ConfigError(f"nothing to resume in {str(folder)!r}: it has no complete checkpoint")
    return checkpoints[-1]


def _facts(config: RunConfig) -> dict[str, object]:
    tasks = ", ".join(task.name for task in config.tasks)
    batch = f"{config.batch_size} prompts x {config.rollouts_per_prompt} rollouts"
    return {
        "model": config.model.source,
        "tasks": tasks,
        "batch": batch,
        "training": f"{config.train.advantage}, {config.train.loss}, lr {config.train.lr:g}",
        "folder": config.folder,
    }


def _stop_on_ctrl_c(run: Run) -> Callable[[], None]:
    """First Ctrl-C: stop after this step. Second: leave now, without saving."""
    loop = asyncio.get_running_loop()

    def leave(*_: object) -> None:
        run.display.close()
        os._exit(130)

    def stop() -> None:
        run.stop_requested = True
        run.display.interrupted()
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, leave)

    before = signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, stop)

    def remove() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)

    return remove
