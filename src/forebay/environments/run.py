"""A run in environments: everything that is built, and the loop around it.

::

    crew of workers --fragments--> buffer --batches, leased--> PPOTrainer
          ^                                                        |
          '-------- hub <-- weights of step + 1 <------------------'
                     '----> buffer.update_model_version(step + 1)

The event loop belongs to the buffer, the hub and the workers' connections; reading a batch, training,
evaluating and drawing happen in a thread, one after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from forebay.config import ConfigError
from forebay.environments import evaluation
from forebay.environments.batch import StepBatch
from forebay.environments.config import FragmentRunConfig
from forebay.environments.display import RETURN, STEPS_PER_S, FragmentDisplay
from forebay.environments.folder import save_checkpoint
from forebay.environments.pictures import frame_strip, learning_curve
from forebay.environments.ppo import PPOTrainer
from forebay.environments.workers.hub import Hub
from forebay.environments.workers.messages import WorkerError
from forebay.environments.workers.worker_pool import Crew
from forebay.fragments import FragmentBatch, FragmentStore, ReplayBufferActor
from forebay.metrics import STEP_S, MetricsLogger, PhaseTimer, read_jsonl

STALL_S = 900.0
"""Without a batch for so long, workers hang: no environment takes a quarter of an hour for a few steps."""
STOP_GRACE_S = 30.0
"""For workers to finish the fragment they are at; then they are ended."""
_BUFFER_METRICS = ("mean_staleness", "max_staleness", "mean_reuse", "chunks", "waiting_additions")


@dataclass(kw_only=True)
class FragmentRun:
    """What a run consists of; `forebay.environments.launch` builds it.

    >>> run = FragmentRun(config=config, trainer=trainer, buffer=buffer, ...)
    >>> await train(run)
    """

    config: FragmentRunConfig
    trainer: PPOTrainer
    buffer: ReplayBufferActor
    store: FragmentStore
    hub: Hub
    crew: Crew
    metrics: MetricsLogger
    display: FragmentDisplay
    session_id: str
    num_resumes: int
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set: save after this step and end."""


async def train(run: FragmentRun) -> None:
    """Train until the last step, or until `run.stop`; then save and evaluate.

    consumes: batches of chunks / waits for: the next batch / woken by: the buffer, `run.stop` / produces:
    weights of the next version, checkpoints, metrics

    Raises:
        WorkerError: no batch arrives.
        FloatingPointError: a gradient is not finite.
    """
    total, every = run.config.steps, run.config.checkpoint_every
    await run.hub.publish(run.trainer.step, run.trainer.policy.weights())
    if run.trainer.step == 0:
        await _evaluate(run)
    while run.trainer.step < total and not run.stop.is_set():
        if not await _step(run):
            break
        due = every > 0 and run.trainer.step % every == 0
        if due and run.trainer.step < total and not run.stop.is_set():
            await _evaluate(run)
            await _save(run)
    if not run.stop.is_set():
        await _evaluate(run)
    await _save(run)


async def _step(run: FragmentRun) -> bool:
    """One train step; False: the run was stopped while it waited."""
    begun_s, timer = time.perf_counter(), PhaseTimer()
    with timer.phase("wait"):
        run.display.phase("waiting for workers")
        fetched = await _fetch(run)
    if fetched is None:
        return False
    run.display.phase("training")
    with timer.phase("train"):
        batch = await asyncio.to_thread(_read, run, fetched)
        assert fetched.lease is not None
        await run.buffer.release(fetched.lease)
        metrics = await asyncio.to_thread(run.trainer.update, batch)
        await run.hub.publish(run.trainer.step, run.trainer.policy.weights())
    seconds = time.perf_counter() - begun_s
    metrics |= {
        STEP_S: seconds,
        STEPS_PER_S: run.config.steps_per_batch / seconds,
        **{f"time/{name}_s": phase.wall_s for name, phase in timer.consume().items()},
        **_account(run, await run.buffer.metrics()),
    }
    run.metrics.log(run.trainer.step, metrics)
    run.display.step(run.trainer.step, run.config.steps, metrics)
    return True


def _read(run: FragmentRun, fetched: FragmentBatch) -> StepBatch:
    stacked = run.store.stack(fetched.fragment_ids)
    return StepBatch.from_fragments(stacked, run.config.fragments.fragments_per_chunk)


async def _fetch(run: FragmentRun) -> FragmentBatch | None:
    """The next batch; None: the run is to stop."""
    fetching = asyncio.ensure_future(
        run.buffer.fetch_fragments(run.config.fragments_per_batch, timeout_s=STALL_S)
    )
    stopping = asyncio.ensure_future(run.stop.wait())
    try:
        await asyncio.wait([fetching, stopping], return_when=asyncio.FIRST_COMPLETED)
        return fetching.result() if fetching.done() else None
    except TimeoutError:
        raise WorkerError(f"no batch arrived within {STALL_S:g} s: the environments seem to hang") from None
    finally:
        for task in (fetching, stopping):
            task.cancel()
        await asyncio.wait([fetching, stopping])


def _account(run: FragmentRun, buffer: Mapping[str, float]) -> dict[str, float]:
    """What happened so far."""
    recent = run.hub.recent
    numbers: dict[str, float] = {
        "env_steps": run.hub.num_steps,
        "episodes": run.hub.num_episodes,
        "worker_restarts": run.crew.num_restarts,
        **{f"buffer/{name}": buffer[name] for name in _BUFFER_METRICS},
        **{f"buffer/{name}": value for name, value in buffer.items() if name.startswith("dropped/")},
    }
    if recent:
        numbers |= {
            RETURN: float(np.mean([reward for reward, _ in recent])),
            "episode_steps": float(np.mean([steps for _, steps in recent])),
        }
    return numbers


async def _evaluate(run: FragmentRun) -> None:
    run.display.phase("evaluating")
    metrics = await asyncio.to_thread(evaluation.measure, run.config, run.trainer.policy)
    run.metrics.log(run.trainer.step, metrics)
    run.display.evaluation(f"step {run.trainer.step}", metrics)


async def _save(run: FragmentRun) -> None:
    run.display.phase("saving")
    counts = {
        "step": run.trainer.step,
        "session_id": run.session_id,
        "num_resumes": run.num_resumes,
        "num_restarts": run.crew.num_restarts,
        "stream": run.config.stream,
        **run.hub.counts(),
    }
    arrays = run.trainer.arrays()
    await save_checkpoint(run.config.folder, run.trainer.step, arrays, counts, run.buffer.save)


def draw(run: FragmentRun) -> list[dict[str, float | None]]:
    """Write the pictures of the run, as far as its libraries are there; all its rows of metrics."""
    config = run.config
    rows = read_jsonl(config.folder / "metrics.jsonl")
    try:
        learning_curve(rows, config.folder / "learning_curve.png", config.environment.id)
        if frames := evaluation.watch(config, run.trainer.policy):
            frame_strip(frames, config.folder / "episode.png")
    except (ImportError, ConfigError) as error:
        run.display.warning(f"pictures are missing: {error}")
    return rows


@contextlib.asynccontextmanager
async def working(run: FragmentRun) -> AsyncIterator[None]:
    """Keep the workers alive inside the block; at its end they are told to stop, and have ended.

    Raises:
        WorkerError: a worker cannot be kept alive; the block is cancelled.
    """
    async with run.hub.listening(), asyncio.TaskGroup() as tasks:
        crew = tasks.create_task(run.crew.keep_all(run.config.environment.workers))
        try:
            yield
        except BaseException:
            crew.cancel()
            raise
        run.hub.stop()
        # Whoever waits for its turn is told now; the others when they report.
        await run.buffer.close()
        await asyncio.wait([crew], timeout=STOP_GRACE_S)
        crew.cancel()
