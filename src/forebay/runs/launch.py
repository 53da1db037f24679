"""Starts a run from its config: folder, components, log, signals, and then the loop.

::

    launch --> folder, cluster --> open_run ---> loop --> cluster closed
                                       ^           | PartLost
                                       '-----------' from the last checkpoint, a limited number of times
"""

import asyncio
import contextlib
import gc
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import transformers
from rich.console import Console

from forebay.agents.build import check_agent
from forebay.config import ConfigError
from forebay.evaluate import Evaluator
from forebay.io.safe_files import DamagedError, check, is_disk_error
from forebay.judges import build_judge
from forebay.produce import ProductionError, Prompt, Sampler, TaskRunner
from forebay.produce.prompts.dataset import last_user_text
from forebay.replay import FIFOReplayPolicy, ReplayBuffer, StorageBackend
from forebay.runs import folder as run_folder
from forebay.runs import steps, store
from forebay.runs.build import Run, open_run
from forebay.runs.colocated import run_colocated
from forebay.runs.config import RunConfig, changed
from forebay.runs.placement import Cluster, PartLost, device_fact, idle_gpus, opened_cluster
from forebay.runs.reporting import accuracy_line
from forebay.runs.rollouts import TaskData, build_rollouts, load_data, with_alphabet
from forebay.runs.separate import run_separate
from forebay.runs.show import surroundings
from forebay.runs.show.display import RunDisplay
from forebay.runs.show.wording import clean
from forebay.train.parallel import launched
from forebay.train.parallel.ranks import RankError
from forebay.types import FAILED_AT_KEY, RolloutState, Status


async def launch(
    config: RunConfig, *, resume: Path | None = None, overwrite: bool = False, without_groups: bool = False
) -> tuple[str | None, bool]:
    """Run `config`, or go on with the run in the folder `resume`, `without_groups` where its database is lost.

    Returns:
        The accuracy line, if prompts were held out, and whether Ctrl-C or SIGTERM ended the run early.

    Raises:
        ConfigError: something in the config, or the folder, does not fit; another process works in it; the
            last checkpoint is damaged.
        DiskError: the folder cannot be written to, from the beginning or any more.
        ProductionError, StallError, FloatingPointError: as `run_colocated` and `run_separate`.
        PartLost: a part of the cluster was lost again and again.
    """
    is_new, folder = resume is None, config.folder
    store.check_partial_saves(config, is_new=is_new)
    with run_folder.disk_errors_of_run(folder), store.file_errors_named(config), run_folder.occupied(folder):
        checkpoint, step, changes = None, 0, []
        if resume is not None:
            if not (checkpoints := run_folder.list_checkpoints(folder)):
                raise ConfigError(f"nothing to resume in {str(folder)!r}: no checkpoint; begin anew with --overwrite")
            checkpoint = checkpoints[-1]
            step = run_folder.step_of(checkpoint)
            changes = changed(run_folder.saved_config(folder), config)
            if step >= config.steps and run_folder.is_finished(folder, checkpoint):
                return run_folder.finished_line(folder, step), False
        with RunDisplay() as display, surroundings.logs_shown(display):
            facts = {
                "model": config.model.source,
                "device": device_fact(config),
                "tasks": ", ".join(task.name for task in config.tasks),
                "batch": f"{config.batch_size} prompts x {config.rollouts_per_prompt} rollouts",
                "training": f"{config.train.advantage}, {config.train.loss}, lr {config.train.lr:g}"
                + "".join(f", {name} frozen" for name in config.train.frozen),
                "groups": store.store_of(config, is_new=is_new),
                "folder": folder,
            }
            display.start(config.name, facts, step=step, total=config.steps)
            for line in filter(None, (idle_gpus(config), *_costs_of_a_kill(config, is_new=is_new))):
                display.warning(line)
            for line in changes:
                display.message(line)
            async with opened_cluster(config) as cluster:
                try:
                    if checkpoint is None:
                        run = await _begun(config, display, cluster, overwrite=overwrite)
                    else:
                        run = await _resumed(config, checkpoint, step, display, cluster, without_groups=without_groups)
                        # Only now: overrides that do not fit must not spoil the run file.
                        run_folder.write_run_file(config, folder)
                except (KeyboardInterrupt, asyncio.CancelledError):
                    kept = "nothing of this run is kept" if checkpoint is None else "the run is as it was"
                    display.stopped(f"{kept}; start it again with the same command")
                    raise
                with surroundings.board_beside(folder, display) if config.board else contextlib.nullcontext():
                    run = await _to_the_end(run)
    return accuracy_line(run), run.stop.is_set()


def _costs_of_a_kill(config: RunConfig, *, is_new: bool) -> Iterator[str]:
    """Warnings of what is lost with the run's process and would be kept with other settings."""
    if store.would_outlive(config, is_new=is_new) and (mount := store.network_mount(config.folder)):
        yield (
            f"groups are in memory, as the folder is on {mount}: set replay.store = 'postgresql' or "
            f"'sqlite:///LOCAL' to keep them through a kill"
        )
    for task in config.tasks if config.produce.save_partial_every_s is not None else []:
        # A function may make loops of any kind.
        if not getattr(check_agent(task.agent), "is_whole_at_awaits", True):
            yield f"task {task.name}: its agent cannot go on half-way; its rollouts begin again after a kill"


async def _begun(config: RunConfig, display: RunDisplay, cluster: Cluster | None, *, overwrite: bool) -> Run:
    """A new run; what can be wrong with its data and judges is found before its folder is touched."""
    display.phase("data")
    with surroundings.ended_by_ctrl_c():
        data = load_data(config)
        config = with_alphabet(config, data)
    await try_judges(config, data)
    with run_folder.new_folder(config, overwrite=overwrite):
        return await open_run(config, display, cluster, data=data)


async def _resumed(
    config: RunConfig,
    checkpoint: Path,
    step: int,
    display: RunDisplay,
    cluster: Cluster | None,
    storage: StorageBackend | None = None,
    without_groups: bool = False,
) -> Run:
    # Before anything is built: the answer comes at once, and nothing has to be undone.
    await asyncio.to_thread(run_folder.check_checkpoint, checkpoint)
    run = await open_run(config, display, cluster, resume_step=step, storage=storage)
    try:
        await steps.resume(run, checkpoint, has_groups=storage is not None, without_groups=without_groups)
    except BaseException:
        await steps.close(run)
        raise
    return run


MAX_RESTARTS = 3
"""How often a run in one process may lose its trainer's ranks without finishing a step in between."""
LOOPS = {"colocated": run_colocated, "separate": run_separate}
"""The loop of each ``produce.mode``."""


async def _to_the_end(run: Run) -> Run:
    """Do what the run is to do; after the loss of a part, from the last checkpoint and with a new `Run`."""
    furthest, num_lost, reason = -1, 0, ""
    while True:
        try:
            if reason:
                run = await _back_to_checkpoint(run, reason)
            with surroundings.stopped_by_signals(run.stop, run.display, run.folder), _start_up_frozen():
                async with surroundings.scaled_by_command(run.folder, run.scale):
                    await LOOPS[run.config.produce.mode](run)
            return run
        # Whichever it is: `_lost_part` raises it again, unless it tells of a lost part.
        except Exception as error:
            reason = _lost_part(run, error)
            # A step that was never reached before shows that going back helps: the count begins anew.
            num_lost = 1 if run.train_step > furthest else num_lost + 1
            furthest = max(furthest, run.train_step)
            if num_lost > (MAX_RESTARTS if run.cluster is None else run.cluster.max_restarts):
                raise PartLost(reason) from error


GC_THRESHOLDS = (50_000, 20, 20)
"""With Python's own, (700, 10, 10), it visits all rollouts in flight every few hundred groups: with 16,000 of
them that was a third of the driver's time, for next to no garbage in cycles."""


@contextlib.contextmanager
def _start_up_frozen() -> Iterator[None]:
    """While open, the garbage collector passes over the objects of libraries and start-up, and works seldom.

    Every dozen train steps a full collection would take a quarter of a second to visit them, and nothing else
    runs meanwhile. A program around the run that has frozen its own objects keeps them so.
    """
    if gc.get_freeze_count():
        yield
        return
    # With next to no garbage, which a collection would take a quarter of a second to look for.
    gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _lost_part(run: Run, error: Exception) -> str:
    """Which part's loss ended the run; raises `error` if it was none that going back brings back."""
    if launched.beside is not None and isinstance(error, RankError):
        # torchrun sends it as soon as one process has ended, and the reason is still to be told.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise PartLost(
            f"{error}; torchrun or srun has to start all again, to go on with --resume {run.folder}"
        ) from error
    if isinstance(error, PartLost) or (isinstance(error, RankError) and error.is_lost):
        return str(error)
    if store.store_of(run.config) == "postgresql" and (lost := store.lost_database(error)):
        return f"the database of the replay buffer is lost: {lost}"
    if isinstance(error, ProductionError) and is_disk_error(error.__cause__):
        # Groups could not be entered in the books: it is the disk that a person has to look at.
        raise error.__cause__
    raise error


async def _back_to_checkpoint(run: Run, reason: str) -> Run:
    config, display = run.config, run.display
    # Lost parts are not to be frozen with those that take their place.
    gc.collect()
    checkpoints = run_folder.list_checkpoints(config.folder)
    # Before the first one nothing was trained or produced that would have to be taken back.
    step = run_folder.step_of(checkpoints[-1]) if checkpoints else 0
    # Of an error in a rank the traceback is for the end.
    display.warning(f"{reason.splitlines()[0]}; the run goes back from train step {run.train_step} to {step}")
    display.start(config.name, {}, step=step, total=config.steps)
    storage = run.manager.replay_buffer.storage
    await asyncio.to_thread(store.wait_for_database, config)
    # A durable store is opened anew, which fences off its owner of before; groups in memory are only here.
    kept = storage if store.keeps_consumed(config) and not storage.is_durable else None
    if checkpoints:
        again = await _resumed(config, checkpoints[-1], step, display, run.cluster, kept)
    else:
        again = await open_run(config, display, run.cluster, resume_step=step, storage=kept)
        # Whatever a store still holds, its train steps are those of the run that is taken back.
        try:
            await again.manager.settle(step)
        except BaseException:
            await steps.close(again)
            raise
    # Each `Run` has its own event, and a stop may have been asked for while a part was lost.
    if run.stop.is_set():
        again.stop.set()
    return again


async def launch_evaluation(config: RunConfig, model_folder: Path | None = None) -> dict[str, float]:
    """Try a model on the run's held-out prompts and show the metrics.

    Without a `model_folder`: the run's trained model, or that of its last checkpoint if it is unfinished.

    Raises:
        ConfigError: the run holds out no prompts, or the model does not load.
    """
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(config.threads)
    if model_folder is None:
        model_folder = await asyncio.to_thread(_newest_model, config.folder)
    async with opened_cluster(config) as cluster:
        if cluster is not None:
            await cluster.open(trains=False)
            await asyncio.to_thread(cluster.start, model_folder)
        rollouts = build_rollouts(config, model_folder, load_data(config), trains=False, cluster=cluster)
        try:
            if not rollouts.eval_sets:
                raise ConfigError(f"run {config.name!r} holds out no prompts: give a task eval_data")
            with RunDisplay() as display, surroundings.logs_shown(display):
                display.start(f"eval {model_folder}", {})
                groups = await steps.evaluation_groups(rollouts.eval_sets, rollouts.manager.stall_watch)
                metrics = Evaluator().evaluate(groups)
                display.evaluation("now", metrics)
                display.rollouts(groups)
        finally:
            await steps.close_rollouts(rollouts)
    return metrics


def _newest_model(folder: Path) -> Path:
    """The run's trained model, or that of its last checkpoint, once its files are known to be whole."""
    checkpoints = [path / "trainer" for path in run_folder.list_checkpoints(folder)]
    published = [folder / "model"] if (folder / "model").is_dir() else []
    newest_first = [*published, *reversed(checkpoints)]
    if not newest_first:
        raise ConfigError(f"no model to try in {str(folder)!r}: neither model/ nor a checkpoint; give --model")
    try:
        check(newest_first[0])
    except DamagedError as error:
        advice = "name another model with --model"
        for path in newest_first[1:]:
            with contextlib.suppress(DamagedError):
                check(path)
                advice = f"{path.parent.name} is whole, try it with --model {path / 'model'}"
                break
        raise ConfigError(f"{error}; {advice}") from None
    return newest_first[0] if published else newest_first[0] / "model"


async def try_judges(config: RunConfig, data: Sequence[TaskData]) -> None:
    """Have each task's judge score the first row's own answer, as before every new run.

    Agents with several turns are left out: they give their judges what only they can make.

    Raises:
        ConfigError: a judge has no verdict on it.
    """
    for task, part in zip(config.tasks, data, strict=True):
        if task.agent.name != "single_turn" or not part.training:
            continue
        state = await _answered(task.name, part.training[0])
        async with contextlib.aclosing(build_judge(task.judge)) as judge:
            await judge.judge([state])
        if state.status is Status.FAILED:
            place = part.training[0].place or "the first row"
            raise ConfigError(
                f"task {task.name!r}: {_reason(state)} (tried before the start on {place}, with the response "
                f"{state.response!r}); mend the judge, or name another with judge.name"
            )


def _reason(state: RolloutState) -> str:
    """Why it failed, and where in code of the user's own."""
    reason = (state.error_msg or "").removeprefix(f"rollout {state.rollout_id}: ")
    raised = state.extra_fields.get(FAILED_AT_KEY)
    return f"{reason} ({raised})" if raised else reason


async def _answered(task_name: str, prompt: Prompt) -> RolloutState:
    """A rollout of `prompt` whose response is the row's answer; without one, any text."""
    answer = (prompt.reward_model or {}).get("ground_truth")
    response = str(answer) if isinstance(answer, str | int | float) else last_user_text(prompt.message)
    sampler = Sampler([prompt], ReplayBuffer(FIFOReplayPolicy()), task_name=task_name, prompt_repeat_k=1)
    [state] = await sampler.sample(task_name)
    state.rollout_id = state.group_id = f"{task_name}/before the start"
    state.response, state.finish_reason, state.status = response, "stop", Status.COMPLETED
    # Judges of length count tokens; no tokenizer is needed for so many.
    state.append([0] * len(response), logprobs=[0.0] * len(response), model_step=0)
    return state


async def try_all(config: RunConfig, say: Callable[[str], None]) -> None:
    """Open everything that the run needs, make one group of each task, and say what worked; keep nothing.

    It is ``forebay train --check``: data, model, trainer, engine, agent and judge, each once.

    Raises:
        ConfigError: something does not fit, or all rollouts of a group failed.
    """
    store.check_partial_saves(config, is_new=True)
    run_folder.try_folder(config.folder, say)
    data = load_data(config)
    config = with_alphabet(config, data)
    for task, part in zip(config.tasks, data, strict=True):
        held_out = f", {len(part.held_out)} held out" if part.held_out else ""
        say(f"data    {task.name}: {len(part.training)} prompts to train on{held_out}")
    # Beside the run's folder: parts on other machines see it there.
    with tempfile.TemporaryDirectory(prefix=".forebay-check-", dir=config.output) as scratch:
        trial = config.model_copy(
            update={
                "output": Path(scratch),
                # Nothing of a trial is kept, and a warm-up would train.
                "warmup": None,
                "metrics": type(config.metrics)(),
                "record": False,
                "history_gb": 0,
                "replay": type(config.replay)(store="memory"),
            }
        )
        async with opened_cluster(trial) as cluster:
            run = await open_run(trial, RunDisplay(Console(quiet=True)), cluster, data=data)
            try:
                say(f"model   {config.model.source}, and its trainer")
                # Engines on a cluster answer nothing before they have the trainer's weights.
                await steps.sync_weights(run)
                for runner in run.manager.task_runners:
                    await _try_task(runner, config.engine.name, say)
            finally:
                await steps.close(run)


async def _try_task(runner: TaskRunner, engine: str, say: Callable[[str], None]) -> None:
    made = await runner.agent_loop.generate_group(await runner.sampler.sample(runner.task_name))
    failed = [state for state in made if state.status is Status.FAILED]
    if len(failed) == len(made):
        raise ConfigError(f"task {runner.task_name!r}: {_reason(failed[0])}")
    if failed:
        say(f"warning {len(failed)} of {len(made)} rollouts failed: {_reason(failed[0])}")
    state = next(state for state in made if state.status is not Status.FAILED)
    prompt, response = last_user_text(state.message), state.response
    say(f"engine  {engine}: {clean(prompt, 60)!r} -> {clean(response, 60)!r}")
    say(f"judge   {runner.task_name}: {state.reward}")
