"""A run of production for tests: scripted engine, real controller, agent loop, sampler, buffer, manager."""

import asyncio
import random
from dataclasses import dataclass, field

from forebay.agents.base import AgentLoop
from forebay.engines import RolloutController
from forebay.engines.scripted import ScriptedEngine
from forebay.judges.base import Judge
from forebay.ledger import Ledger
from forebay.produce import AgentLoopManager, AsyncProduceStrategyConfig, Prompt, Sampler, TaskRunner
from forebay.replay import AsyncReplayBufferConfig
from forebay.types import SampleParams


class PromptLoop(AgentLoop):
    """One response per prompt; a prompt is its own token."""

    def __init__(self, controller, judge, faults=()):
        super().__init__(controller, judge)
        self.faults = set(faults)
        """Calls, counted from 0, in which the agent raises."""
        self.num_calls = 0

    async def generate_sample(self, state):
        if len(state.prompt_ids) == 0:
            state.prompt_ids = [1 + int(state.message[0]["content"])]
        if len(state.tokens) == 0:
            state.tokens = state.prompt_ids
        call, self.num_calls = self.num_calls, self.num_calls + 1
        if call in self.faults:
            raise OSError(f"no disk in call {call}")
        return await self.controller_call(state)

    async def controller_call(self, state):
        return await self.rollout_controller.generate_sample(state)


class LengthJudge(Judge):
    """The score is the length; judging takes `delay_s`."""

    def __init__(self, delay_s=0.0):
        super().__init__()
        self.delay_s = delay_s

    async def score(self, state):
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        return float(len(state.response_ids))


def length_of(request, *, seed, longest):
    """How long the response to a request is in all: the same however often it is continued."""
    name = request.request_id.rsplit(":", 2)[0]
    rng = random.Random(f"{seed}/{name}")
    return rng.randint(1, longest)


def script_of(seed, longest):
    """Answers whose tokens count 100, 101, ... over the whole response."""

    def script(request):
        done = int(request.request_id.rsplit(":", 1)[1])
        return [100 + i for i in range(done, max(done + 1, length_of(request, seed=seed, longest=longest)))]

    return script


@dataclass
class World:
    """Everything of a run; `build` it inside the event loop."""

    strategy: AsyncProduceStrategyConfig = field(default_factory=AsyncProduceStrategyConfig)
    weights: dict = field(default_factory=lambda: {"t": 1.0})
    interval: int = 1
    k: int = 2
    num_prompts: int = 1000
    seed: int = 0
    longest: int = 6
    token_s: float = 0.1
    slots: int | None = None
    judge_s: float = 0.0
    faults: tuple = ()
    limit: int | None = None
    buffer: object = None
    strategies: dict = field(default_factory=dict)
    manager_options: dict = field(default_factory=dict)
    controller_options: dict = field(default_factory=dict)

    def build(self):
        self.engine = ScriptedEngine(
            script_of(self.seed, self.longest), token_latency_s=self.token_s, max_running=self.slots
        )
        self.controller = RolloutController(self.engine, seed=self.seed, **self.controller_options)
        if self.buffer is None:
            self.buffer = AsyncReplayBufferConfig(limit=self.limit).build()
        self.loops = {}
        runners = []
        for name, weight in self.weights.items():
            self.loops[name] = PromptLoop(self.controller, LengthJudge(self.judge_s), self.faults)
            runners.append(
                TaskRunner(
                    task_name=name,
                    agent_loop=self.loops[name],
                    produce_strategy=self.strategies.get(name, self.strategy).build(
                        sync_weights_interval=self.interval, rollout_controller=self.controller
                    ),
                    sampler=Sampler(
                        [Prompt(message=[{"role": "user", "content": str(i)}]) for i in range(self.num_prompts)],
                        self.buffer,
                        task_name=name,
                        prompt_repeat_k=self.k,
                        seed=self.seed,
                        sample_params=SampleParams(max_tokens=1000),
                    ),
                    weight=weight,
                )
            )
        self.manager = AgentLoopManager(
            task_runners=runners,
            replay_buffer=self.buffer,
            rollout_controller=self.controller,
            ledger=Ledger(clock=lambda: 0.0),
            **self.manager_options,
        )
        return self

    async def sync(self, model_step):
        """Pause, give the engine the weights of `model_step`, go on."""
        await self.manager.pause_produce()
        await self.controller.update_weights([], model_step)
        await self.manager.continue_produce(model_step)

    async def check_balance(self):
        balance = self.manager.ledger.balance(await self.manager.count_live())
        assert balance.ok, balance
        return balance


async def train(world, batch_size, steps, *, train_s=0.0, on_batch=None):
    """The separate run in a few lines; the batches by train step."""
    manager = world.manager
    producing = asyncio.create_task(manager.produce_loop(batch_size))
    batches, step = {}, 1
    try:
        while step <= steps:
            result = await manager.get_batch(batch_size, step)
            if result.rollout_states:
                batches[step] = result.rollout_states
                if on_batch is not None:
                    await on_batch(step, result)
                await asyncio.sleep(train_s)
                await world.buffer.commit(step)
                synced = step
                step += 1
            else:
                synced = step - 1
            if synced % world.interval == 0 or not result.rollout_states:
                await world.sync(synced)
    finally:
        await manager.shutdown()
        await asyncio.gather(producing, return_exceptions=True)
    return batches
