"""A run whose production is real and whose devices are described: built like `forebay.runs.build`'s.

::

    real        controller, agent loops, samplers, strategies, manager, replay buffer, ledger, the run's loop
    described   engines (`engine`) and the parts below; each takes the time that the cluster says

    tokenizer   prompts of the cluster's length; responses have no text
    judge       judge_s, then a score
    manager     the real one; a checkpoint's cut takes checkpoint_s
    trainer     seconds to train, to change turns and to sync; notes how stale every token is that it gets
    compute     the thread in which a run trains: its work takes the virtual time it is charged with
    display     silent; tells how far the run is
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from rich.console import Console

from forebay.agents import AgentLoop, SingleTurnAgentLoop
from forebay.aio.virtual_time import VirtualTimeLoop
from forebay.engines import RolloutController
from forebay.engines.base import GenerateRequest, request_seed, scalable
from forebay.judges.base import Judge
from forebay.ledger import Ledger
from forebay.metrics import MetricsLogger, PhaseTimer
from forebay.produce import AgentLoopManager, Prompt, Sampler, TaskRunner
from forebay.produce.recovery import Cut
from forebay.runs.build import Run
from forebay.runs.config import RunConfig, TaskConfig
from forebay.runs.rollouts import EvalSet, build_buffer, build_strategy
from forebay.runs.show.display import RunDisplay
from forebay.runs.turns import DeviceTurns
from forebay.simulation.cluster import ClusterConfig
from forebay.simulation.engine import ModeledEngine
from forebay.types import RolloutState
from forebay.watching.activity import Activities

Result = TypeVar("Result")

_SEED_SPAN = float(1 << 63)
"""Seeds of requests are drawn evenly from 0 to this."""

_PROMPTS = [Prompt(message=[{"role": "user", "content": "simulated"}])]
"""One is enough: every epoch gives its group another id, and so other lengths."""


@dataclass(kw_only=True)
class World:
    """A simulated run, and the parts that know what happened in it."""

    run: Run
    engines: list[ModeledEngine]
    """All that ever took part in production."""
    trainer: "TimedTrainer"
    display: "SilentDisplay"
    held_out_judge: "TimedJudge"


def build_world(config: RunConfig, cluster: ClusterConfig, folder: Path) -> World:
    """The run of `config` on `cluster`; inside the event loop, whose clock everything takes."""
    clock = asyncio.get_running_loop().time
    tried = [task for task in config.tasks if task.eval_data is not None and cluster.held_out]
    # As in a real run: the last of several, or one more.
    is_beside = bool(tried) and config.evaluate.mode == "beside"
    engines = [_engine(cluster, config.seed, number) for number in range(max(cluster.engines, 1 + is_beside))]
    eval_controller = RolloutController([engines.pop()], seed=config.seed) if is_beside else None

    def another(url: str) -> ModeledEngine:
        engines.append(_engine(cluster, config.seed, len(engines) + is_beside))
        return engines[-1]

    controller = RolloutController(scalable(engines, another), seed=config.seed)
    activities, buffer, tokenizer = Activities(), build_buffer(config), PromptTokenizer(cluster.prompt_tokens)
    held_out_judge = TimedJudge(cluster.judge_s)
    rejected_below = cluster.filtered_share * _SEED_SPAN

    def accept(samples: list[RolloutState]) -> bool:
        # By a draw of the group's own, so that always the same groups are rejected.
        return request_seed(config.seed, "filter", str(samples[0].group_id)) >= rejected_below

    def agent_loop(task: TaskConfig, judge: Judge, apart: RolloutController | None = None) -> AgentLoop:
        # Rollouts of an evaluation beside production are none of the producer's.
        register, at = (activities, controller) if apart is None else (Activities(), apart)
        return SingleTurnAgentLoop(at, judge, tokenizer, sample_params=task.sample, activities=register)

    def eval_set(task: TaskConfig) -> EvalSet:
        loop = agent_loop(task, held_out_judge, eval_controller)
        return EvalSet(task.name, _PROMPTS * cluster.held_out, loop, config.tries(task), buffer)

    def task_runner(task: TaskConfig) -> TaskRunner:
        strategy = build_strategy(config, task, controller)
        strategy.is_valid_sample_fn = accept
        return TaskRunner(
            task_name=task.name,
            agent_loop=agent_loop(task, TimedJudge(cluster.judge_s)),
            produce_strategy=strategy,
            sampler=Sampler(
                _PROMPTS,
                buffer,
                task_name=task.name,
                prompt_repeat_k=config.rollouts_per_prompt,
                seed=config.seed,
                shuffle=False,
                sample_params=task.sample,
            ),
            weight=task.weight,
        )

    manager = TimedManager(
        task_runners=[task_runner(task) for task in config.tasks],
        replay_buffer=buffer,
        rollout_controller=controller,
        ledger=Ledger(clock=clock),
        activities=activities,
    )
    manager.checkpoint_s = cluster.checkpoint_s
    thread = TimedThread()
    trainer, display = TimedTrainer(cluster, thread), SilentDisplay(clock, engines)
    run = Run(
        config=config,
        folder=folder,
        tokenizer=tokenizer,
        controller=controller,
        manager=manager,
        # They have what the loops call, and no more.
        trainer=cast(Any, trainer),
        compute_thread=cast(Any, thread),
        eval_sets=[eval_set(task) for task in tried],
        eval_controller=eval_controller,
        display=display,
        metrics=MetricsLogger([]),
        activities=activities,
        timer=PhaseTimer(wall_clock=clock, cpu_clock=clock),
        turns=DeviceTurns(controller, cast(Any, trainer), thread, offload="moments") if cluster.sleeping else None,
    )
    return World(run=run, engines=engines, trainer=trainer, display=display, held_out_judge=held_out_judge)


def _engine(cluster: ClusterConfig, seed: int, number: int) -> ModeledEngine:
    prefill_rate, start_s = cluster.prefill_tokens_per_s, cluster.start_s

    def life_s(place: int) -> float:
        # At one rate, whatever its age. The half keeps the share above 0.
        share = (request_seed(seed, "failure", number, place) + 0.5) / _SEED_SPAN
        return -math.log(share) * 3600 / cluster.failures_per_hour

    def length(request: GenerateRequest) -> int:
        """The same for all calls of one try, however often it is interrupted."""
        # TASK/SEED/EPOCH/INDEX, as the sampler names groups; a task may have slashes in its name.
        task_name = (request.session_id or "").rsplit("/", 3)[0]
        lengths = cluster.task_lengths.get(task_name, cluster.lengths)
        # The half keeps the share above 0, where a log-normal has no quantile.
        return lengths.quantile((request.seed + 0.5) / _SEED_SPAN) - request.num_earlier

    return ModeledEngine(
        rate=cluster.decode_rate,
        slots=cluster.slots,
        length=length,
        prefill_s=lambda num_tokens: start_s + (num_tokens / prefill_rate if prefill_rate else 0.0),
        lives_s=map(life_s, count()) if cluster.failures_per_hour else (),
        restart_s=cluster.restart_s,
        keeps_tokens=cluster.keeps_tokens,
        sleeps=number < cluster.sleeping,
    )


class PromptTokenizer:
    """Renders every chat to `num_tokens` tokens; it has what loops of a single turn call, and no more."""

    chat_template = "simulated"

    def __init__(self, num_tokens: int) -> None:
        self._ids = [0] * num_tokens

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """The ids of any chat."""
        return self._ids

    def decode(self, token_ids: Any, **kwargs: Any) -> Any:
        """Empty: simulated tokens have no text."""
        return ""


class TimedJudge(Judge):
    """Gives a rollout 0 or 1, always the same, `seconds` later."""

    def __init__(self, seconds: float) -> None:
        super().__init__(timeout_s=None)
        self._seconds = seconds
        self.num_tokens = 0
        """The tokens of all rollouts that it has judged."""

    async def score(self, state: RolloutState) -> float:
        """Return 0 or 1, by the name of the rollout, after the judge's seconds."""
        self.num_tokens += len(state.response_ids)
        if self._seconds:
            await asyncio.sleep(self._seconds)
        # Scores that differ within a group: others carry no signal, and nothing would be used again.
        return float(request_seed("score", str(state.rollout_id)) & 1)


class TimedManager(AgentLoopManager):
    """A manager whose cut for a checkpoint takes `checkpoint_s` of the loop; a producer beside it goes on."""

    checkpoint_s = 0.0

    async def cut(self, path: Path, **options: Any) -> Cut:
        """Make the cut of the base class, after `checkpoint_s` seconds."""
        await asyncio.sleep(self.checkpoint_s)
        return await super().cut(path, **options)


class TimedThread(Executor):
    """Stands for a thread: what is done in it takes as long as it is charged with while it is done."""

    charged_s = 0.0
    """Virtual seconds that the work being done takes."""


# Simulated engines fail by the hundred: that is a number of the report, and no event to warn of.
for _name in ("pool", "members"):
    logging.getLogger(f"forebay.engines.{_name}").addFilter(
        lambda record: not isinstance(asyncio._get_running_loop(), SimulationLoop)
    )


class SimulationLoop(VirtualTimeLoop):
    """A virtual-time loop on which the work of a `TimedThread` takes virtual time."""

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Result], *args: Any
    ) -> asyncio.Future[Result]:
        """Call `func` now; its result comes when the time it was charged with has passed."""
        result = super().run_in_executor(executor, func, *args)
        if not isinstance(executor, TimedThread) or result.exception() is not None:
            return result
        seconds, executor.charged_s = executor.charged_s, 0.0
        return self.create_task(asyncio.sleep(seconds, result.result()))


class TrainedStep(NamedTuple):
    """The content of one train step: how many tokens and groups, by staleness."""

    token_staleness: Counter[int]
    group_staleness: Counter[int]


class TimedTrainer:
    """Has the part of a trainer that a run's loop calls; it trains nothing."""

    def __init__(self, cluster: ClusterConfig, thread: TimedThread) -> None:
        self._cluster = cluster
        self._thread = thread
        self.model_step = 0
        self.steps: list[TrainedStep] = []

    def fit(
        self, groups: list[list[RolloutState]], *, stale_thresholds: Mapping[str, int] | None = None
    ) -> SimpleNamespace:
        """Take the time of a train step; what is masked takes as long as what is not."""
        states = [state for group in groups for state in group]
        # This is train step `model_step` + 1, so the weights of now have staleness 0.
        made_by = np.concatenate([state.response_model_steps for state in states])
        step = TrainedStep(
            token_staleness=Counter((self.model_step - made_by).tolist()),
            group_staleness=Counter(max(state.seq_staleness for state in group) for group in groups),
        )
        self.steps.append(step)
        self._thread.charged_s += self._cluster.training_s(len(made_by))
        self.model_step += 1
        return SimpleNamespace(metrics={})

    def offload(self, *, weights: bool = False) -> None:
        """Take the time in which memory leaves a device that engines share, or comes back."""
        self._thread.charged_s += self._cluster.turn_s

    onload = offload

    async def sync_weights(self, controller: RolloutController) -> int:
        """Take the time that the weights take."""
        await asyncio.sleep(self._cluster.sync_s)
        await controller.update_weights([], self.model_step)
        return 0

    def begin_save(self, path: Path) -> None:
        """Do nothing: the manager takes the time of a checkpoint."""

    def finish_save(self) -> None:
        """Do nothing; there are no weights."""

    def close(self) -> None:
        """Do nothing; there is no process."""


class EnoughSteps(Exception):
    """Ends a simulated run after its last step: it has nothing to save or to show."""


class StepEnd(NamedTuple):
    """The moment in which a train step ended."""

    time_s: float
    slot_s: float
    """Seconds that slots of all engines were taken until then."""


class SilentDisplay(RunDisplay):
    """Shows nothing; notes when steps ended, and ends the run after the last one."""

    def __init__(self, clock: Callable[[], float], engines: list[ModeledEngine]) -> None:
        super().__init__(Console(quiet=True), clock=clock)
        self._now_s, self._engines = clock, engines
        self.steps: list[StepEnd] = []

    def step(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Note the end of a train step.

        Raises:
            EnoughSteps: this was the last.
        """
        self.steps.append(StepEnd(self._now_s(), sum(engine.slot_s() for engine in self._engines)))
        if step == total:
            raise EnoughSteps
