"""Starts a run in environments from its recipe: folder, components, signals, and then the loop."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from forebay.config import ConfigError, look_up
from forebay.environments import evaluation
from forebay.environments.actions import head_for
from forebay.environments.config import MODES, FragmentRunConfig
from forebay.environments.policy import Policy
from forebay.environments.ppo import PPOTrainer
from forebay.environments.run import Checkpoint, FragmentRun, load_checkpoint
from forebay.environments.show import CURVES, EVAL_RETURN, FragmentDisplay, frame_strip
from forebay.environments.workers.stepper import spaces
from forebay.environments.workers.worker_pool import WorkerMode
from forebay.metrics import STEP_S, read_jsonl
from forebay.runs.folder import (
    RUN_FILE,
    disk_errors_of_run,
    finished_line,
    list_checkpoints,
    new_folder,
    occupied,
    write_run_file,
)
from forebay.runs.show.pictures import Rows, learning_curve
from forebay.runs.show.surroundings import logs_shown, stopped_by_signals
from forebay.tracebacks import first_error


async def launch(config: FragmentRunConfig, *, resume: Path | None = None, overwrite: bool = False) -> bool:
    """Run `config`, or go on with the run in the folder `resume`; whether it was stopped early.

    Raises:
        ConfigError: something in the recipe, or the folder, does not fit; the last checkpoint is damaged.
        DiskError: the folder cannot be written to, from the beginning or any more.
        WorkerError: the workers cannot go on.
        FloatingPointError: the training broke down.
    """
    with disk_errors_of_run(config.folder), occupied(config.folder):
        trainer, mode = build_trainer(config), build_mode(config)
        saved = None if resume is None else _load_newest(config.folder, trainer)
        if saved is not None and trainer.step >= config.steps:
            with FragmentDisplay() as display:
                display.message(finished_line(config.folder, trainer.step))
            return False
        if saved is None:
            with new_folder(config, overwrite=overwrite):
                # Nothing to build in it: an earlier run is gone at once.
                pass
        else:
            # Only now: overrides that do not fit must not spoil the recipe.
            write_run_file(config, config.folder)
        with FragmentDisplay() as display, logs_shown(display):
            return await _run(config, trainer, mode, display, saved)


async def _run(
    config: FragmentRunConfig,
    trainer: PPOTrainer,
    mode: WorkerMode,
    display: FragmentDisplay,
    saved: Checkpoint | None,
) -> bool:
    # Fragments of another shape, or from elsewhere, cannot be trained together with new ones.
    fits = saved is not None and saved.counts["stream"] == config.stream
    with _buffer_folder(config.folder, saved.fragments if saved is not None and fits else None) as path:
        run = FragmentRun(config, trainer, mode, display, path, saved)
        display.start(config.name, run.facts(), step=trainer.step, total=config.steps)
        if saved is not None and not fits:
            display.warning("the fragments of the checkpoint are of another stream of steps and stay behind")
        try:
            with stopped_by_signals(run.stop, display, config.folder):
                async with run.working():
                    await run.train()
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        finally:
            await run.close()
        rows = read_jsonl(config.folder / "metrics.jsonl")
        trained = [row for row in rows if STEP_S in row]
        tried = [row for row in rows if EVAL_RETURN in row]
        await asyncio.to_thread(draw, run, trained, tried)
        display.summary(trained, tried, run.totals(), config.folder)
    return run.stop.is_set()


@contextlib.contextmanager
def _buffer_folder(folder: Path, fragments: Path | None) -> Iterator[Path]:
    """The place of the buffer inside the block: empty, or a copy of the one in `fragments`."""
    for left_over in folder.glob("buffer-*"):
        shutil.rmtree(left_over)
    # A name of its own: workers of a killed run may still hold the files of theirs.
    live = folder / f"buffer-{uuid.uuid4().hex[:8]}"
    if fragments is not None:
        shutil.copytree(fragments, live)
    try:
        yield live
    finally:
        shutil.rmtree(live, ignore_errors=True)


def draw(run: FragmentRun, trained: Rows, tried: Rows) -> None:
    """Write the pictures of the run, as far as its libraries are there."""
    folder = run.config.folder
    try:
        learning_curve(trained, tried, folder / "learning_curve.png", CURVES)
        if frames := evaluation.watch(run.config, run.trainer.policy):
            frame_strip(frames, folder / "episode.png")
    except (ImportError, ConfigError) as error:
        run.display.warning(f"pictures are missing: {error}")


def try_parts(config: FragmentRunConfig, say: Callable[[str], None]) -> None:
    """Make an environment, the policy and what runs the workers, act once, say what worked; keep nothing.

    Raises:
        ConfigError: something does not fit.
    """
    with occupied(config.folder):
        state = "holds a run: --overwrite replaces it" if (config.folder / RUN_FILE).exists() else "is free"
        say(f"folder  {config.folder} {state}")
    policy = build_trainer(config).policy
    say(f"policy  {config.policy.hidden_size} units, and its trainer")
    build_mode(config)
    say(f"workers {config.environment.workers} {config.environment.mode}")
    (reward, _) = evaluation.play(config.environment, policy, 1, config.seed, max_steps=1)[0]
    say(f"step    {config.environment.id}: reward {reward:g}")


async def evaluate(config: FragmentRunConfig) -> dict[str, float]:
    """Play `config.eval_episodes` episodes with the newest checkpoint of the run.

    Raises:
        ConfigError: there is none.
    """
    trainer = build_trainer(config)
    _load_newest(config.folder, trainer)
    return {"step": trainer.step} | await asyncio.to_thread(evaluation.measure, config, trainer.policy)


def build_trainer(config: FragmentRunConfig) -> PPOTrainer:
    """The trainer with a new policy for the environment.

    Raises:
        ConfigError: there is no such environment, or none that a policy here can act in.
    """
    torch.set_num_threads(1)
    obs_size, action_space = spaces(config.environment)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        policy = Policy(obs_size, head_for(action_space), config.policy)
    return PPOTrainer(policy, config.train, total_steps=config.steps, seed=config.seed)


def build_mode(config: FragmentRunConfig) -> WorkerMode:
    """The way to run workers.

    Raises:
        ConfigError: there is none of that name, or it needs what is not installed.
    """
    name = config.environment.mode
    path = MODES.get(name, name)
    try:
        mode: WorkerMode = look_up("environment.mode", path if ":" in path else name, MODES)()
    except ImportError as error:
        raise ConfigError(f"environment.mode = {name!r}: {error}") from error
    return mode


def _load_newest(folder: Path, trainer: PPOTrainer) -> Checkpoint:
    """The newest checkpoint of the run in `folder`, from which `trainer` goes on."""
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        raise ConfigError(f"nothing to go on from in {str(folder)!r}: it has no complete checkpoint")
    path = checkpoints[-1]
    saved = load_checkpoint(path)
    try:
        trainer.load(saved.counts["step"], saved.arrays)
    except ValueError as error:
        raise ConfigError(f"{str(path)!r}: {error}") from error
    return saved
