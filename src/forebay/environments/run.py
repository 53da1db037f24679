"""A run in environments: how it starts, its components, the loop around them, and its checkpoints.

::

    pool of workers --fragments--> buffer --batches, leased--> PPOTrainer
          ^                                                        |
          '-------- hub <-- weights of step + 1 <------------------'
                     '----> buffer.update_model_version(step + 1)

    runs/NAME/  run.toml            the resolved recipe
                metrics.jsonl       every number of every step
                checkpoints/step_N  complete or absent, with checksums of all
                  arrays.npz        policy, optimizer, scales of observations, random numbers
                  run.json          counts, recent episodes, session
                  fragments/        a copy of the buffer
                buffer-*/           the buffer while the run goes on; made anew from a checkpoint
                live.json, notes.jsonl, history/    what `forebay board` shows

The event loop belongs to the buffer, the hub and the workers' connections; reading a batch, training,
evaluating and drawing happen in a thread, one after the other. Nothing that is loaded is unpickled.
"""

import asyncio
import contextlib
import json
import shutil
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from forebay.aio.tasks import unless
from forebay.aio.time_limits import in_thread
from forebay.config import ConfigError, errors_about, look_up
from forebay.environments import evaluation
from forebay.environments.config import FragmentRunConfig
from forebay.environments.evaluation import EVAL_RETURN
from forebay.environments.policy import Policy, head_for
from forebay.environments.ppo import PPOTrainer, StepBatch
from forebay.environments.workers.hub import Hub
from forebay.environments.workers.messages import WorkerError, WorkerSpec
from forebay.environments.workers.stepper import spaces
from forebay.environments.workers.worker_pool import MODES, WorkerMode, WorkerPool
from forebay.fragments import FragmentBatch, FragmentStore, ReplayBufferActor
from forebay.fragments.tallies import DROP_REASONS
from forebay.io.safe_files import publish, unfinished, write_json
from forebay.metrics import STEP_S, MetricsConfig, PhaseTimer, read_jsonl
from forebay.runs import folder as run_folder
from forebay.runs.record.history import History
from forebay.runs.record.live import LiveFile
from forebay.runs.show.display import RunDisplay
from forebay.runs.show.surroundings import logs_shown, stopped_by_signals
from forebay.tracebacks import first_error
from forebay.watching.activity import CHECKPOINT, EVALUATE, TRAIN, WAIT_BATCH, Activities, Activity

RETURN, STEPS_PER_S, LAG = "return", "env_steps_per_s", "lag"


class FragmentRun:
    """Everything that a run consists of, and its loop."""

    def __init__(
        self,
        config: FragmentRunConfig,
        trainer: PPOTrainer,
        mode: WorkerMode,
        display: "FragmentDisplay",
        buffer_folder: Path,
        saved: "Checkpoint | None" = None,
    ) -> None:
        """`saved` is the checkpoint that `trainer` was loaded from; the buffer goes on from its folder."""
        counts = {} if saved is None else saved.counts
        self.config, self.trainer, self.display = config, trainer, display
        self.stop = asyncio.Event()
        """Set: save after this step and end."""
        # A resumed run keeps its session: the buffer drops fragments of any other one.
        self._session_id = counts.get("session_id", f"{config.name}-{uuid.uuid4().hex[:8]}")
        self._num_resumes = counts.get("num_resumes", -1) + 1
        self._database: dict[str, Any] = {"path": str(buffer_folder)}
        self._buffer = ReplayBufferActor(database_config=self._database, **config.buffer_settings())
        self._store = FragmentStore(**self._database)
        self.hub = Hub(self._buffer, self._session_id)
        # A resumed run must not see the episodes of its first hour again.
        seed = int(np.random.SeedSequence((config.seed, self._num_resumes)).generate_state(1)[0])
        self.pool = WorkerPool(self.hub, mode, make_spec=self._make_spec, seed=seed)
        if saved is not None:
            self.hub.load(counts)
            self.pool.num_restarts = counts["num_restarts"]
        resume_step = None if saved is None else trainer.step
        self._activities, self._numbers = Activities(), dict[str, float]()
        self._history = History(config.folder, limit_bytes=HISTORY_BYTES, resumed_from=resume_step)
        self._activities.listen(lambda _: None, lambda activity: self._history.ended(activity.span()))
        self.live = LiveFile(config.folder, self._place, self._live_values, self._refresh)
        display.on_note = self.live.note
        self._metrics = MetricsConfig().build(config.folder, resume_step=resume_step, report=display.warning)

    def _make_spec(self, worker_uuid: str, seed: int) -> WorkerSpec:
        return WorkerSpec(
            worker_uuid=worker_uuid,
            environment=self.config.environment,
            policy=self.config.policy,
            length=self.config.fragments.length,
            database_config=self._database,
            session_id=self._session_id,
            seed=seed,
        )

    async def train(self) -> None:
        """Train until the last step, or until `stop` is set; then save and evaluate.

        consumes: batches of chunks / waits for: the next batch / woken by: the buffer, `stop` / produces:
        weights of the next version, checkpoints, metrics

        Raises:
            WorkerError: no batch arrives.
            FloatingPointError: a gradient is not finite.
        """
        total, every = self.config.steps, self.config.checkpoint_every
        # First, so that workers begin while the policy is evaluated.
        await self.hub.publish(self.trainer.step, self.trainer.policy.weights())
        if self.trainer.step == 0:
            await self._evaluate()
        while self.trainer.step < total and not self.stop.is_set():
            if not await self._step():
                break
            due = every > 0 and self.trainer.step % every == 0
            # At the last step both follow after the loop.
            if due and self.trainer.step < total and not self.stop.is_set():
                await self._evaluate()
                await self._save()
        if not self.stop.is_set():
            await self._evaluate()
        await self._save()

    def _place(self) -> dict[str, Any]:
        return {"train_step": self.trainer.step, "steps": self.config.steps}

    async def _refresh(self) -> None:
        self._numbers = await self._buffer.metrics()

    def _live_values(self) -> dict[str, Any]:
        """Where the fragments are; see `forebay.runs.record.live`."""
        count = Counter(self._numbers)
        dropped = {reason: number for reason in DROP_REASONS if (number := count[f"dropped/{reason}"])}
        books: dict[str, Any] = {"generated": count["added_fragments"], "trained": count["used_up_fragments"]}
        books |= {"dropped": dropped, "live": books["generated"] - books["trained"] - sum(dropped.values())}
        busy = [one.stage for one in self._activities.in_flight()] or ["-"]
        numbers = {"model_step": self.trainer.step, "phase": busy[0], "unit": "fragments"}
        return {**numbers, "books": {self.config.environment.id: books}}

    def _doing(self, stage: str) -> Activity:
        return self._activities.span(stage, f"step {self.trainer.step + (stage in (WAIT_BATCH, TRAIN))}")

    async def _step(self) -> bool:
        """One train step; False: the run was stopped while it waited."""
        begun_s, timer = time.perf_counter(), PhaseTimer()
        with timer.phase("wait"), self._doing(WAIT_BATCH):
            self.display.phase("waiting for workers")
            fetched = await self._fetch()
        if fetched is None:
            return False
        self.display.phase("training")
        with timer.phase("train"), self._doing(TRAIN):
            batch = await asyncio.to_thread(self._read, fetched)
            # The batch is a copy: payloads are let go before the training, not after it.
            assert fetched.lease is not None
            await self._buffer.release(fetched.lease)
            metrics = await asyncio.to_thread(self.trainer.update, batch)
            await self.hub.publish(self.trainer.step, self.trainer.policy.weights())
        seconds = time.perf_counter() - begun_s
        metrics |= {
            STEP_S: seconds,
            STEPS_PER_S: self.config.steps_per_batch / seconds,
            **{f"time/{name}_s": phase.wall_s for name, phase in timer.consume().items()},
            **await self._account(),
        }
        self._metrics.log(self.trainer.step, metrics)
        self.display.step(self.trainer.step, self.config.steps, metrics)
        return True

    def _read(self, fetched: FragmentBatch) -> StepBatch:
        stacked = self._store.stack(fetched.fragment_ids)
        return StepBatch.from_fragments(stacked, self.config.fragments.fragments_per_chunk)

    async def _fetch(self) -> FragmentBatch | None:
        """The next batch; None: the run is to stop."""
        fetch = self._buffer.fetch_fragments(self.config.fragments_per_batch, timeout_s=STALL_S)
        try:
            return await unless(self.stop, fetch)
        except TimeoutError:
            raise WorkerError(f"no batch arrived within {STALL_S:g} s: the environments seem to hang") from None

    async def _account(self) -> dict[str, float]:
        """Counts of what happened so far."""
        buffer, recent = await self._buffer.metrics(), self.hub.recent
        numbers: dict[str, float] = {
            "env_steps": self.hub.num_steps,
            "episodes": self.hub.num_episodes,
            "worker_restarts": self.pool.num_restarts,
            **{
                f"buffer/{name}": value
                for name, value in buffer.items()
                if name in _BUFFER_METRICS or name.startswith("dropped/")
            },
        }
        if recent:
            numbers[RETURN], numbers["episode_steps"] = np.mean(recent, axis=0).tolist()
        return numbers

    async def _evaluate(self) -> None:
        self.display.phase("evaluating")
        with self._doing(EVALUATE):
            # Not `to_thread`: user code that calls sys.exit() in there would end the run without a word.
            metrics = await in_thread(evaluation.measure, self.config, self.trainer.policy)
        self._metrics.log(self.trainer.step, metrics)
        self.display.evaluation(f"step {self.trainer.step}", metrics)

    async def _save(self) -> None:
        """Write the checkpoint of this step, unless it is there; delete those before the last ones."""
        self.display.phase("saving")
        counts = {
            "step": self.trainer.step,
            "session_id": self._session_id,
            "num_resumes": self._num_resumes,
            "num_restarts": self.pool.num_restarts,
            "stream": self.config.stream,
            **self.hub.counts(),
        }
        final = run_folder.checkpoint_path(self.config.folder, self.trainer.step)
        # It exists if a resumed run is stopped before its first step.
        if not final.exists():
            with unfinished(final) as temporary, self._doing(CHECKPOINT):
                np.savez(temporary / "arrays.npz", **self.trainer.arrays())  # type: ignore[arg-type]
                write_json(temporary / "run.json", counts)
                await self._buffer.save(str(temporary / "fragments"))
                # In a thread: workers are answered meanwhile.
                await asyncio.to_thread(publish, temporary, final)
        run_folder.prune_checkpoints(self.config.folder, NUM_CHECKPOINTS)

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Keep the workers alive inside the block; at its end they are told to stop, and have ended.

        Raises:
            WorkerError: a worker cannot be kept alive; the block is cancelled.
        """
        async with self.hub.listening(), asyncio.TaskGroup() as tasks:
            workers = [tasks.create_task(self.pool.keep(number)) for number in range(self.config.environment.workers)]
            # Where the block fails, the group of tasks cancels them.
            yield
            self.hub.stop()
            # Workers that wait for their turn are told now; the others when they report.
            await self._buffer.close()
            await asyncio.wait(workers, timeout=STOP_GRACE_S)
            for worker in workers:
                worker.cancel()

    async def close(self) -> None:
        """Close the buffer, the metrics and what the board reads."""
        await self._refresh()
        is_done = self.trainer.step >= self.config.steps
        self.live.close("finished" if is_done else "stopped" if self.stop.is_set() else "failed")
        self._history.close()
        await self._buffer.close()
        self._metrics.close()

    def facts(self) -> dict[str, object]:
        """Lines for the beginning: what runs."""
        config = self.config
        env, fragments = config.environment, config.fragments
        return {
            "environment": f"{env.id}, {env.workers} {env.mode} x {env.num_envs} environments",
            "policy": f"{config.policy.hidden_size} units, memory {config.policy.memory}",
            "batch": f"{config.batch_size} chunks x {fragments.fragments_per_chunk} fragments x "
            f"{fragments.length} steps x {env.num_envs} = {config.steps_per_batch} steps",
            "training": f"PPO, lr {config.train.lr:g}, {config.train.epochs} epochs",
            "folder": config.folder,
        }

    def totals(self) -> dict[str, object]:
        """Lines for the end: what was done."""
        facts: dict[str, object] = {
            "environment steps": f"{self.hub.num_steps:,} in {self.hub.num_episodes:,} episodes",
            "evaluations": f"mean return of {self.config.eval_episodes} episodes with the likeliest actions",
        }
        if self.pool.num_restarts:
            facts["restarts"] = f"{self.pool.num_restarts} workers died and were started again"
        return facts


STALL_S = 900.0
"""Workers hang if no batch comes for so long: no environment takes a quarter of an hour for a few steps."""
STOP_GRACE_S = 30.0
"""The time that workers get to finish a fragment before they are ended."""
NUM_CHECKPOINTS = 2
"""The newest is kept, and the one before it in case the policy of the newest turns out to be bad."""
HISTORY_BYTES = 200_000_000
"""The history has activities alone here, so this is room for some millions of train steps."""
_BUFFER_METRICS = ("mean_staleness", "max_staleness", "mean_reuse", "chunks", "waiting_additions")


class Checkpoint(NamedTuple):
    """The content of a checkpoint."""

    arrays: dict[str, np.ndarray[Any, Any]]
    counts: dict[str, Any]
    fragments: Path
    """The copy of the buffer."""


def load_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint of a run in environments at `path`.

    Raises:
        ConfigError: it is damaged.
    """
    run_folder.check_checkpoint(path)
    counts = json.loads((path / "run.json").read_text(encoding="utf-8"))
    with np.load(path / "arrays.npz", allow_pickle=False) as arrays:
        return Checkpoint(dict(arrays), counts, path / "fragments")


async def launch(config: FragmentRunConfig, *, resume: Path | None = None, overwrite: bool = False) -> bool:
    """Run `config`, or go on with the run in the folder `resume`; whether it was stopped early.

    Raises:
        ConfigError: something in the recipe, or the folder, does not fit; the last checkpoint is damaged.
        DiskError: the folder cannot be written to, from the beginning or any more.
        WorkerError: the workers cannot go on.
        FloatingPointError: the training broke down.
    """
    with run_folder.disk_errors_of_run(config.folder), run_folder.occupied(config.folder):
        trainer, mode = build_trainer(config), build_mode(config)
        saved = None if resume is None else _load_newest(config.folder, trainer)
        with FragmentDisplay() as display, logs_shown(display):
            if saved is not None and trainer.step >= config.steps:
                display.message(run_folder.finished_line(config.folder, trainer.step))
                return False
            if saved is None:
                with run_folder.new_folder(config, overwrite=overwrite):
                    # Everything that may not fit has been built: an earlier run may go.
                    pass
            else:
                # Only now: overrides that do not fit must not spoil the recipe.
                run_folder.write_run_file(config, config.folder)
            return await _run(config, trainer, mode, display, saved)


async def _run(
    config: FragmentRunConfig,
    trainer: PPOTrainer,
    mode: WorkerMode,
    display: "FragmentDisplay",
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
            error = first_error(group)
            run.live.note("error", f"{type(error).__name__}: {error}")
            raise error from None
        finally:
            await run.close()
        rows = read_jsonl(config.folder / "metrics.jsonl")
        trained = [row for row in rows if STEP_S in row]
        tried = [row for row in rows if EVAL_RETURN in row]
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
        # The checkpoint stays as it is: the run may be killed, and go on from there once more.
        shutil.copytree(fragments, live)
    try:
        yield live
    finally:
        shutil.rmtree(live, ignore_errors=True)


def try_parts(config: FragmentRunConfig, say: Callable[[str], None]) -> None:
    """Make an environment, the policy and what runs the workers, act once, say what worked; keep nothing.

    Raises:
        ConfigError: something does not fit.
    """
    run_folder.try_folder(config.folder, say)
    policy = build_trainer(config).policy
    say(f"policy  {config.policy.hidden_size} units, and its trainer")
    build_mode(config)
    say(f"workers {config.environment.workers} {config.environment.mode}")
    rewards, _ = evaluation.play(config.environment, policy, 1, config.seed, max_steps=1)
    say(f"step    {config.environment.id}: reward {rewards[0]:g}")


async def evaluate(config: FragmentRunConfig) -> dict[str, float]:
    """Play `config.eval_episodes` episodes with the newest checkpoint of the run.

    Raises:
        ConfigError: there is none.
    """
    trainer = build_trainer(config)
    _load_newest(config.folder, trainer)
    return {"step": trainer.step} | await in_thread(evaluation.measure, config, trainer.policy)


def build_trainer(config: FragmentRunConfig) -> PPOTrainer:
    """The trainer with a new policy for the environment.

    Raises:
        ConfigError: there is no such environment, or none that a policy here can act in.
    """
    # As in the workers: with more, small matrix products wait for each other.
    torch.set_num_threads(1)
    obs_size, action_space = spaces(config.environment)
    # The weights depend on the seed alone, and the random numbers of the caller stay as they are.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        policy = Policy(obs_size, head_for(action_space), config.policy)
    return PPOTrainer(policy, config.train, total_steps=config.steps, seed=config.seed)


def build_mode(config: FragmentRunConfig) -> WorkerMode:
    """The way to run workers.

    Raises:
        ConfigError: there is none of that name, or it needs what is not installed.
    """
    mode: WorkerMode = look_up("environment.mode", config.environment.mode, MODES)()
    return mode


def _load_newest(folder: Path, trainer: PPOTrainer) -> Checkpoint:
    """The newest checkpoint of the run in `folder`, from which `trainer` goes on."""
    checkpoints = run_folder.list_checkpoints(folder)
    if not checkpoints:
        raise ConfigError(f"nothing to go on from in {str(folder)!r}: it has no complete checkpoint")
    path = checkpoints[-1]
    saved = load_checkpoint(path)
    with errors_about(repr(str(path)), ConfigError, ValueError):
        trainer.load(saved.counts["step"], saved.arrays)
    return saved


class FragmentDisplay(RunDisplay):
    """Shows one run on a console."""

    numbers: ClassVar[Mapping[str, tuple[str, int]]] = {
        "return": (RETURN, 10),
        "eval": (EVAL_RETURN, 9),
        "length": ("episode_steps", 9),
        "steps/s": (STEPS_PER_S, 9),
        "lag": (LAG, 7),
        "kl": ("kl", 8),
        "s/step": (STEP_S, 8),
    }
    curve_title: ClassVar[str] = "mean return of training episodes, smoothed; o: of an evaluation"
    saved: ClassVar[Mapping[str, str]] = {
        "metrics.jsonl": "every number of every step",
        "checkpoints": "to go on from: forebay train --resume",
    }
