"""Starts a run in environments from its recipe: folder, components, signals, and then the loop."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forebay.config import ConfigError, look_up
from forebay.environments import evaluation
from forebay.environments.actions import head_for
from forebay.environments.config import FragmentRunConfig
from forebay.environments.display import EVAL_RETURN, FragmentDisplay
from forebay.environments.folder import Checkpoint, buffer_folder, load_checkpoint, newest_checkpoint
from forebay.environments.policy import Policy
from forebay.environments.ppo import PPOTrainer
from forebay.environments.run import FragmentRun, draw, train, working
from forebay.environments.workers.hub import Hub
from forebay.environments.workers.messages import WorkerMode, WorkerSpec
from forebay.environments.workers.vector import MODES, spaces
from forebay.environments.workers.worker_pool import Crew
from forebay.fragments import FragmentStore, ReplayBufferActor
from forebay.metrics import STEP_S, MetricsConfig
from forebay.runs.folder import RUN_FILE, disk_errors_of_run, finished_line, occupied, prepare, write_run_file
from forebay.runs.surroundings import logs_shown, stopped_by_signals
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
        return await _launch(config, resume, overwrite=overwrite)


async def _launch(config: FragmentRunConfig, resume: Path | None, *, overwrite: bool) -> bool:
    trainer, mode = build_trainer(config), build_mode(config)
    saved = None if resume is None else _load(newest_checkpoint(config.folder), trainer)
    if saved is not None and trainer.step >= config.steps:
        with FragmentDisplay() as display:
            display.message(finished_line(config.folder, trainer.step))
        return False
    if saved is None:
        prepare(config, overwrite=overwrite)
    else:
        # Only now: overrides that do not fit must not spoil the recipe.
        write_run_file(config, config.folder)
    # Fragments of another shape, or from elsewhere, cannot be trained together with new ones.
    fits = saved is not None and saved.counts["stream"] == config.stream
    with (
        buffer_folder(config.folder, saved.fragments if saved is not None and fits else None) as path,
        FragmentDisplay() as display,
        logs_shown(display),
    ):
        run = _build(config, trainer, mode, saved, {"path": str(path)}, display)
        display.start(config.name, _facts(run), step=trainer.step, total=config.steps)
        if saved is not None and not fits:
            display.warning("the fragments of the checkpoint are of another stream of steps and stay behind")
        try:
            with stopped_by_signals(run.stop, display, config.folder):
                async with working(run):
                    await train(run)
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        finally:
            await run.buffer.close()
            run.metrics.close()
        rows = await asyncio.to_thread(draw, run)
        trained = [row for row in rows if STEP_S in row]
        tried = [row for row in rows if EVAL_RETURN in row]
        display.end(trained, tried, _totals(run), config.folder)
    return run.stop.is_set()


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
    _load(newest_checkpoint(config.folder), trainer)
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
    """What runs the workers.

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


def _load(path: Path, trainer: PPOTrainer) -> Checkpoint:
    saved = load_checkpoint(path)
    try:
        trainer.load(saved.counts["step"], saved.arrays)
    except ValueError as error:
        raise ConfigError(f"{str(path)!r}: {error}") from error
    return saved


def _build(
    config: FragmentRunConfig,
    trainer: PPOTrainer,
    mode: WorkerMode,
    saved: Checkpoint | None,
    database: dict[str, Any],
    display: FragmentDisplay,
) -> FragmentRun:
    counts = {} if saved is None else saved.counts
    session_id = counts.get("session_id", f"{config.name}-{uuid.uuid4().hex[:8]}")
    num_resumes = counts.get("num_resumes", -1) + 1
    buffer = ReplayBufferActor(database_config=database, **config.buffer_settings())
    hub = Hub(buffer, session_id)

    def make_spec(worker_uuid: str, seed: int) -> WorkerSpec:
        return WorkerSpec(
            worker_uuid=worker_uuid,
            environment=config.environment,
            policy=config.policy.model_dump(),
            length=config.fragments.length,
            database_config=database,
            session_id=session_id,
            seed=seed,
        )

    # A resumed run must not see the episodes of its first hour again.
    crew = Crew(hub, mode, make_spec=make_spec, seed=_seed(config.seed, num_resumes))
    if saved is not None:
        hub.load(counts)
        crew.num_restarts = counts["num_restarts"]
    resume_step = None if saved is None else trainer.step
    return FragmentRun(
        config=config,
        trainer=trainer,
        buffer=buffer,
        store=FragmentStore(**database),
        hub=hub,
        crew=crew,
        metrics=MetricsConfig().build(config.folder, resume_step=resume_step, report=display.warning),
        display=display,
        session_id=session_id,
        num_resumes=num_resumes,
    )


def _seed(*parts: int) -> int:
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


def _facts(run: FragmentRun) -> dict[str, object]:
    config = run.config
    env, fragments = config.environment, config.fragments
    return {
        "environment": f"{env.id}, {env.workers} {env.mode} x {env.num_envs} environments",
        "policy": f"{config.policy.hidden_size} units, memory {config.policy.memory}",
        "batch": f"{config.batch_size} chunks x {fragments.fragments_per_chunk} fragments x "
        f"{fragments.length} steps x {env.num_envs} = {config.steps_per_batch} steps",
        "training": f"PPO, lr {config.train.lr:g}, {config.train.epochs} epochs",
        "folder": config.folder,
    }


def _totals(run: FragmentRun) -> dict[str, object]:
    facts: dict[str, object] = {
        "environment steps": f"{run.hub.num_steps:,} in {run.hub.num_episodes:,} episodes",
        "evaluations": f"mean return of {run.config.eval_episodes} episodes with the likeliest actions",
    }
    if run.crew.num_restarts:
        facts["restarts"] = f"{run.crew.num_restarts} workers died and were started again"
    return facts
