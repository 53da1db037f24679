"""From a run file to the components of a run, each made by its own constructor and joined here.

::

    model folder --(warm-up)--> trainer --sync_weights--> controller of the engines
                                                              |
    data, judge, agent ------------> build_rollouts: ... --> manager (replay buffer, ledger)

Nothing runs yet: `forebay.runs.steps` has the verbs. The warm-up makes a model without any training able to
answer at all, so that some rollouts earn a reward: it is trained on conversations, or on the
training prompts' own answers.
"""

import asyncio
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from forebay.agents.build import prompt_tools
from forebay.config import ConfigError, errors_about
from forebay.evaluate import Evaluator
from forebay.io.safe_files import DamagedError, check, publish, unfinished, write_text
from forebay.ledger import Ledger
from forebay.metrics import MetricsLogger, PhaseTimer
from forebay.models import context_of, find_device, load_model, load_tokenizer, resolve_model
from forebay.models.loading import save_tokenizer
from forebay.produce import Prompt
from forebay.produce.prompts.conversations import Demonstrations
from forebay.produce.prompts.dataset import load_conversations
from forebay.produce.strategies.rules import name_group
from forebay.replay import StorageBackend
from forebay.runs import rollouts as rollout_parts
from forebay.runs.config import RunConfig, WarmupTable, to_toml
from forebay.runs.placement import Cluster, Trainer, base_precision, device_fact, is_apart, takes_turns, yields_memory
from forebay.runs.record.events import observe_buffer
from forebay.runs.record.history import History
from forebay.runs.record.journal import Recorder
from forebay.runs.record.live import LiveFile, live_values
from forebay.runs.show.alarms import RunAlarms
from forebay.runs.show.display import RunDisplay
from forebay.runs.show.status import RunStatus
from forebay.runs.show.surroundings import ended_by_ctrl_c
from forebay.runs.store import begin_anew, open_storage
from forebay.runs.turns import DeviceTurns
from forebay.runs.verify import WeightCheck
from forebay.train import OffPolicyGuard, TrainBatch, TrainController, supervised_warmup
from forebay.train.batch import Example
from forebay.train.parallel import launched
from forebay.train.parallel.learner import ModelFolder
from forebay.train.parallel.ranks import Ranks
from forebay.types import RolloutState


@dataclass(kw_only=True)
class Run(rollout_parts.Rollouts):
    """A run's components and its state. The verbs in `forebay.runs.steps` take one."""

    config: RunConfig
    folder: Path
    trainer: Trainer
    display: RunDisplay
    metrics: MetricsLogger
    evaluator: Evaluator = field(default_factory=Evaluator)
    record: Recorder | None = None
    rollouts_history: History | None = None
    """Every rollout that left the run, in columns; `history` has the numbers of the steps."""
    learned: TrainBatch | None = None
    """The batch that was trained last, until it is reported: advantages and the trainer's logprobs."""
    has_failed: bool = False
    weight_check: WeightCheck | None = None
    cluster: Cluster | None = None
    """The cluster that has trainer, engines and agents, if they are not here; it outlives the run."""
    turns: DeviceTurns | None = None
    """The turns of ranks and servers, if some of them share a GPU."""
    compute_thread: ThreadPoolExecutor = field(
        # One thread: torch keeps a pool of workers for every thread that computes.
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="compute")
    )
    timer: PhaseTimer = field(default_factory=PhaseTimer)
    train_step: int = 0
    """Finished train steps."""
    history: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)
    synced_bytes: int = 0
    """Weights that each engine was given since the last report."""
    lag_limit: int | None = None
    """Train steps that rollouts may be behind since the guard lowered it; None: as configured."""
    saving: asyncio.Task[None] | None = None
    """Writes the latest checkpoint, beside everything else."""
    evaluating: asyncio.Task[None] | None = None
    """The evaluation under way beside production."""
    evaluating_step: int | None = None
    """The model step whose weights it tries; of a resumed run, the one that it has to try again."""
    left_out: list[rollout_parts.EvalSet] = field(default_factory=list)
    """These were due while another evaluation was under way, and are tried with the next."""
    eval_was_up: bool = False
    """Whether the engine of evaluations beside production has had weights."""
    best_checkpoint: str | None = None
    """The kept checkpoint with the best evaluation, and how good that was."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set: finish this step, save and leave."""
    sync_interval: int = field(init=False)
    """Train steps between weight syncs; the guard may lower it."""
    guard: OffPolicyGuard = field(init=False)
    alarms: RunAlarms = field(init=False)
    status: RunStatus = field(init=False)
    live_file: LiveFile | None = None
    """Written from the end of `build_run` on; None in a simulated run."""

    def __post_init__(self) -> None:
        config = self.config
        self.sync_interval = config.produce.sync_weights_interval
        self.guard = OffPolicyGuard(config.train.guard, config.train.guard_bands)
        self.alarms = RunAlarms(config)
        # The trainer of a cluster may be on another machine, whose GPU cannot be asked here.
        device = find_device(config.device) if self.cluster is None else None
        self.status = RunStatus(
            self.manager, self.activities, self.controller, batch_size=config.batch_size, device=device
        )
        self.manager.on_group = self.display.count_group

    async def scale(self, change: str) -> str:
        """Do as ``forebay scale`` asks, as ``engines=+2``; the answer, which is also in the ledger.

        Raises:
            ValueError: it cannot be done.
        """
        parts, _, how = change.partition("=")
        said = await self.controller.scale(parts, how)
        self.display.message(f"scaled, {change}: {said}")
        self.manager.ledger.note_part(parts, f"{how}: {said}", "scaled")
        return said

    def place(self) -> dict[str, Any]:
        """The place of the run in its steps."""
        return {
            "train_step": self.train_step,
            "steps": self.config.steps,
            "phase": self.display.phase_name,
            "best_checkpoint": self.best_checkpoint,
            "pid": os.getpid(),
        }


async def open_run(
    config: RunConfig,
    display: RunDisplay,
    cluster: Cluster | None = None,
    *,
    resume_step: int | None = None,
    data: Sequence[rollout_parts.TaskData] | None = None,
    storage: StorageBackend | None = None,
) -> Run:
    """`build_run` in the run's own folder, on a `cluster` that has not been opened or has lost a part."""
    if cluster is not None:
        display.phase("ray")
        await cluster.open()
    with ended_by_ctrl_c():
        start = find_start(config, config.folder, display, data)
        build = partial(build_run, config, config.folder, display, cluster=cluster, start=start)
        if cluster is None:
            return build(resume_step=resume_step, storage=storage)
    display.phase("ray")
    # It takes minutes where a model is large, and parts that are on the cluster already need the event loop.
    await asyncio.to_thread(cluster.start, start[0])
    return build(resume_step=resume_step, storage=storage)


_PLAIN = {"attention": "auto", "moments": "float32"}
LOSSES = "losses.json"
"""In the folder of the warm-up: the loss of each step, and of what is held out before each pass and after."""
Start = tuple[Path, list[rollout_parts.TaskData]]
"""The folder of the model and the data that a run starts from."""


def find_start(
    config: RunConfig, folder: Path, display: RunDisplay, data: Sequence[rollout_parts.TaskData] | None = None
) -> Start:
    """The model of the run in `folder`, warmed up if the config says so, and its prompts (`data`, if loaded).

    Raises:
        ConfigError: the model or the data does not fit.
    """
    # They would tear the display.
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    if data is None:
        data = rollout_parts.load_data(config)
        config = rollout_parts.with_alphabet(config, data)
    model_folder = resolve_model(config.model, seed=config.seed)
    data = rollout_parts.check_lengths(config, model_folder, data)
    if config.warmup is not None:
        model_folder = warm_up(config, model_folder, folder / "warmup", display, data)
        # The trainer needs blocks of other sizes than what a warm-up leaves in torch's cache.
        torch.cuda.empty_cache()
    return model_folder, data


def build_run(
    config: RunConfig,
    folder: Path,
    display: RunDisplay,
    *,
    resume_step: int | None = None,
    cluster: Cluster | None = None,
    start: Start | None = None,
    storage: StorageBackend | None = None,
) -> Run:
    """All components of the run in `folder`; `resume_step` is the step a resumed run goes on from.

    The heavy ones are on `cluster`, if one is given (`forebay.runs.placement.make_cluster`); it was opened
    before, and started with the model of `start`. A `storage` holds the groups that the run had
    before it lost a part; None: it is opened as the run file says.

    Raises:
        ConfigError: the model, the data or a setting does not fit; before anything is generated.
    """
    model_folder, data = start or find_start(config, folder, display)
    display.phase("load")
    tokenizer = load_tokenizer(model_folder)
    # Parts that open files come last, so that none is left open where one before it does not fit.
    trainer = cluster.trainer() if cluster else build_trainer(config, model_folder, tokenizer, apart=is_apart(config))
    is_new = storage is None and resume_step is None
    if storage is None:
        storage = open_storage(config, folder, is_new=is_new)
    try:
        rollouts = rollout_parts.build_rollouts(config, model_folder, data, cluster=cluster, storage=storage)
    except BaseException:
        storage.close()
        raise
    metrics = config.metrics.build(folder, resume_step=resume_step, report=display.warning)
    # A resumed run has the line in its file.
    if config.warmup is not None and resume_step is None:
        losses = json.loads((folder / "warmup" / LOSSES).read_text(encoding="utf-8"))
        metrics.log(0, {f"warmup/{name}": values[-1] for name, values in losses.items() if values})
    ledger = rollouts.manager.ledger = Ledger(folder / "ledger.jsonl")
    run = Run(
        **vars(rollouts),
        config=config,
        folder=folder,
        trainer=trainer,
        display=display,
        metrics=metrics,
        cluster=cluster,
    )
    if takes_turns(config):
        offload = config.engine.arguments.get("offload", "moments")
        run.turns = DeviceTurns(run.controller, trainer, run.compute_thread, offload=offload)
    if config.verify_weights:
        run.weight_check = WeightCheck(vocabulary=len(tokenizer), seed=config.seed)
    if cluster is not None:
        cluster.listen(partial(_note_retry, ledger), ledger.note_part)
    display.follow(run.status)
    if config.record:
        run_file, device = to_toml(rollout_parts.with_precisions(config)), device_fact(config)
        run.record = Recorder(folder, run_file=run_file, device=device, resumed_from=resume_step)
        observe_buffer(run.record, run.manager.replay_buffer)
    if config.history_gb:
        _begin_history(run, resume_step)
    run.live_file = LiveFile(folder, run.place, partial(live_values, run.status, run.manager), run.status.count_buffer)
    run.display.on_note = run.live_file.note
    if is_new:
        begin_anew(storage, folder)
    return run


def _begin_history(run: Run, resume_step: int | None) -> None:
    """Write what the board finds rollouts and activities in."""
    limit_bytes = int(run.config.history_gb * 1e9)
    history = run.rollouts_history = History(run.folder, limit_bytes=limit_bytes, resumed_from=resume_step)
    ledger = run.manager.ledger

    def drop(group: Sequence[RolloutState], task_name: str, reason: str) -> None:
        # An expired group is wiped; how long it was, and what it scored, is in the books.
        life = ledger.life(name_group(group), task_name)
        history.left([group], "dropped", reason=reason, train_step=run.train_step + 1, life=life)

    run.manager.batches.on_drop = drop
    run.activities.listen(lambda _: None, lambda activity: history.ended(activity.span()))
    run.controller.on_request = history.ended


def _note_retry(ledger: Ledger, task_name: str | None, group_id: str | int | None, reason: str) -> None:
    # Evaluation's groups are in no books.
    if task_name is not None and group_id is not None and ledger.life(group_id, task_name) is not None:
        ledger.record(group_id, task_name, "retried", reason=reason)


def build_trainer(
    config: RunConfig,
    model_folder: Path,
    tokenizer: Any,
    *,
    device: str | None = None,
    ranks: Ranks | None = None,
    apart: bool = False,
) -> TrainController:
    """The trainer of the model in `model_folder`: on `device`, in this process or `apart` from it, or on `ranks`.

    Raises:
        ConfigError: the model or the training's settings do not fit.
    """
    engine_dtype = rollout_parts.engine_precision(config)
    if device is None and config.cluster is None:
        device = _trainer_device(config)
        if launched.beside is not None:
            ranks = launched.beside.ranks(device, config.folder, model_folder)
    with errors_about("[train] cannot be built", ValueError):
        return TrainController(
            ModelFolder(folder=model_folder, dtype=base_precision(config, engine_dtype)),
            config.train,
            pad_token_id=tokenizer.pad_token_id,
            total_steps=config.steps,
            seed=config.seed,
            tokenizer=tokenizer,
            ref_model=None if config.train.teacher is None else find_teacher(config, tokenizer),
            device=device,
            ranks=ranks,
            apart=apart,
            engine_dtype=engine_dtype,
            yields_memory=yields_memory(config),
        )


def find_teacher(config: RunConfig, tokenizer: Any) -> ModelFolder:
    """The model of ``train.teacher``, held in the precision of its passes.

    Raises:
        ConfigError: there is none, or its tokens are not those of `tokenizer`.
    """
    folder = resolve_model(source := config.train.teacher or "", seed=config.seed)
    if load_tokenizer(folder).get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"train.teacher = {source!r} has another vocabulary than the model: a teacher reads the "
            f"student's own tokens, and text is not aligned between vocabularies; name a model of one family"
        )
    return ModelFolder(folder=folder, dtype=None)


def _trainer_device(config: RunConfig) -> str:
    device = find_device(config.device)
    ranks, count = config.train.ranks, torch.cuda.device_count() if device.type == "cuda" else 0
    # NCCL refuses two ranks on one GPU, and ranks take the first GPUs.
    if count and ranks > 1 and launched.beside is None and (ranks > count or ":" in config.device):
        raise ConfigError(
            f"train.ranks = {ranks} on device {config.device!r} needs as many GPUs, from the first on, and torch "
            f"sees {count}: lower train.ranks, or set device = 'cpu'"
        )
    return str(device)


def warm_up(
    config: RunConfig, source: Path, target: Path, display: RunDisplay, data: Sequence[rollout_parts.TaskData]
) -> Path:
    """Train the model in `source` as ``[warmup]`` says; the folder it is saved in, `target`.

    It learns the turns of the conversations of ``warmup.data``, or the training prompts' own answers. Done
    once: where `target` exists (a resumed run), it is what the run started from.
    """
    settings = config.warmup
    assert settings is not None
    if target.exists():
        with errors_about(f"delete {str(target)!r} to have the warm-up made again", DamagedError):
            check(target)
        return target
    display.phase("warm-up")
    model, tokenizer = load_model(source), load_tokenizer(source)
    # On a cluster the GPUs are given to its parts, and this process is none of them.
    model.to(find_device(config.device if config.cluster is None else "cpu"))
    budget = config.train.token_budget
    limit = min(budget, config.model.max_context or context_of(source) or budget)
    with errors_about("[warmup] cannot be done", ConfigError, ValueError):
        whole = _examples(config, settings, tokenizer, data)
        examples, held_out = ([each for each in part if sum(map(len, each[:2])) <= limit] for part in whole)
        if left_out := sum(map(len, whole)) - len(examples) - len(held_out):
            said = f"{left_out} conversations are left out, longer than {limit} tokens"
            display.warning(f"warm-up: {said} (the model's context, or train.token_budget)")
        num_steps = settings.num_steps(len(examples))
        losses, unseen = supervised_warmup(
            model,
            examples,
            settings,
            held_out=held_out,
            pad_token_id=tokenizer.pad_token_id,
            seed=config.seed,
            # Of a cluster the trainer's device is elsewhere, with its kernels.
            train=config.train if config.cluster is None else config.train.model_copy(update=_PLAIN),
            on_step=lambda step, loss: display.progress(step, num_steps, f"loss {loss:.3f}"),
        )
    with unfinished(target) as temporary:
        model.save_pretrained(temporary)
        save_tokenizer(tokenizer, temporary)
        write_text(temporary / LOSSES, json.dumps({"loss": losses, "held_out_loss": unseen}))
        publish(temporary, target)
    said = f"{num_steps} supervised steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}"
    if unseen:
        said += f", that of {len(held_out)} held-out conversations {unseen[0]:.3f} -> {unseen[-1]:.3f}"
    display.message(f"warm-up: {said}")
    return target


def _examples(
    config: RunConfig, settings: WarmupTable, tokenizer: Any, data: Sequence[rollout_parts.TaskData]
) -> tuple[list[Example], list[Example]]:
    """As many examples as the warm-up can use, drawn from all; of conversations also those held out."""
    held_out: Sequence[Prompt] = ()
    tasks = zip(config.tasks, data, strict=True)
    parts = [(part.training, prompt_tools(task.agent)) for task, part in tasks]
    if settings.data is not None:
        training, held_out = load_conversations(settings.data, config.seed)
        parts = [(training, None)]
    places = [(prompts, index, tools) for prompts, tools in parts for index in range(len(prompts))]
    most = settings.steps * settings.batch_size if isinstance(settings.steps, int) else None
    # Drawn before examples are made: each is rendered and turned into tokens.
    order = np.random.default_rng(config.seed).permutation(len(places))
    shown, drawn = Demonstrations(tokenizer), [places[place] for place in order[:most]]
    return [shown.example(prompts[index], tools) for prompts, index, tools in drawn], [*map(shown.example, held_out)]
