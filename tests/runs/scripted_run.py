"""A separate run with a scripted engine and a trainer that only remembers what it was given, to be killed.

::

    scripted engine -> real manager, strategy, buffer (memory, SQLite, PostgreSQL) -> RememberingTrainer
    FOLDER/checkpoints/step_N/  manager/      the manager's cut
                                trainer.json  the groups of every step so far, as the trainer remembers them

A checkpoint is written under another name and published as a run's is: after the last step, and of every
second one, the cut is made while groups are in flight, and written while production goes on. Time is real and
short.
"""

import asyncio
import json
import random
import shutil
from pathlib import Path

from forebay.agents.base import AgentLoop
from forebay.engines import RolloutController
from forebay.engines.scripted import ScriptedEngine
from forebay.io.safe_files import publish
from forebay.judges.base import Judge
from forebay.ledger import Ledger
from forebay.produce import AgentLoopManager, AsyncProduceStrategyConfig, Prompt, Sampler, TaskRunner
from forebay.replay import ReplayBuffer, SQLStorage, StalenessReplayPolicy
from forebay.replay.reuse import Reuse
from forebay.runs.folder import list_checkpoints, prune_checkpoints, step_of
from forebay.types import SampleParams

TASKS = {"a": 1.0, "b": 2.0}
BATCH_SIZE, GROUP_SIZE, STEPS = 4, 2, 12
NUM_PROMPTS = 400
REUSE = Reuse(times=3, share=0.5, stale_threshold=5)
SAVE_PARTIAL_EVERY_S = 0.01
STALE_FROM = 2
"""Train steps: ``max_staleness = 1`` with a sync after every step."""


class Agent(AgentLoop):
    is_whole_at_awaits = True

    async def generate_sample(self, state):
        if len(state.prompt_ids) == 0:
            state.prompt_ids = [1 + int(state.message[0]["content"])]
        if len(state.tokens) == 0:
            state.tokens = state.prompt_ids
        return await self.rollout_controller.generate_sample(state)


class LengthJudge(Judge):
    async def score(self, state):
        await asyncio.sleep(0.0003)
        return float(len(state.response_ids))


def script(request):
    """A few tokens; once in a while an error."""
    rng = random.Random(f"{request.request_id}/{request.seed}")
    if rng.random() < 0.03:
        raise ConnectionResetError("the engine's fault")
    return [7] * rng.randint(1, 12)


def accept(samples):
    """Rejects one group in ten, the same ones every time."""
    return random.Random(samples[0].group_id).random() > 0.1


class Run:
    """The components, built anew by every process."""

    def __init__(self, folder, store):
        self.folder, self.trained, self.step = folder, {}, 0
        self.controller = RolloutController(
            ScriptedEngine(script, token_latency_s=0.0008, request_latency_s=0.001, max_running=12),
            time_limit_s=SAVE_PARTIAL_EVERY_S / 2,
            goes_on=True,
        )
        self.buffer = build_buffer(folder, store)
        is_durable = self.buffer.storage.is_durable
        self.runners = {name: self.runner(name) for name in TASKS}
        self.manager = AgentLoopManager(
            task_runners=list(self.runners.values()),
            replay_buffer=self.buffer,
            rollout_controller=self.controller,
            ledger=Ledger(folder / "ledger.jsonl"),
            keeps_dropped=is_durable,
            save_partial_every_s=SAVE_PARTIAL_EVERY_S if is_durable else None,
        )

    async def owed(self):
        """Ids of the groups that were in flight, or failed, at a kill after the last step."""
        groups = [
            await runner.sampler.sample(name)
            for name, runner in self.runners.items()
            for _ in range(runner.sampler.num_owed)
        ]
        return [group[0].group_id for group in groups]

    def runner(self, name):
        strategy = AsyncProduceStrategyConfig(
            is_valid_sample_fn=accept,
            max_staleness=STALE_FROM - 1,
            over_sample_threshold=1.0,
            enable_partial_rollout=True,
            staleness_rule="drop" if name == "a" else "requeue",
            max_retries=1,
        )
        return TaskRunner(
            task_name=name,
            agent_loop=Agent(self.controller, LengthJudge()),
            produce_strategy=strategy.build(rollout_controller=self.controller),
            sampler=build_sampler(name, self.buffer),
            weight=TASKS[name],
        )

    async def train(self, every):
        manager = self.manager
        producing = asyncio.create_task(manager.produce_loop(BATCH_SIZE))
        await self.controller.update_weights([], self.step)
        if self.step < STEPS:
            await manager.continue_produce(self.step)
        while self.step < STEPS:
            result = await manager.get_batch(BATCH_SIZE, self.step + 1)
            if result.rollout_states:
                await asyncio.sleep(0.003)
                self.step += 1
                self.remember(result.rollout_states)
                if not self.buffer.storage.is_durable:
                    await self.buffer.commit(self.step)
                print(f"{self.step}/{STEPS}", flush=True)
            await manager.pause_produce()
            await self.controller.update_weights([], self.step)
            is_last = self.step == STEPS
            is_due = bool(result.rollout_states) and (self.step % every == 0 or is_last)
            if is_due and (is_last or self.step % 2):
                await self.checkpoint()
            if not is_last:
                await manager.continue_produce(self.step)
                if is_due and self.step % 2 == 0:
                    await asyncio.sleep(0.002)
                    await self.checkpoint()
        await manager.shutdown()
        await producing

    def remember(self, groups):
        self.trained[self.step] = {group[0].group_id: max(state.seq_staleness for state in group) for group in groups}

    async def checkpoint(self):
        final = self.folder / "checkpoints" / f"step_{self.step:06d}"
        temporary = final.with_name(final.name + ".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        cut = await self.manager.cut(final / "manager", train_step=self.step)
        (temporary / "trainer.json").write_text(json.dumps(self.trained))
        await cut.write(temporary / "manager")
        await cut.aclose()
        await asyncio.to_thread(publish, temporary, final)
        await asyncio.to_thread(prune_checkpoints, self.folder, 2)
        if self.buffer.storage.is_durable:
            await self.buffer.commit(step_of(list_checkpoints(self.folder)[0]))

    async def resume(self):
        checkpoints = list_checkpoints(self.folder)
        if checkpoints:
            self.trained = read_trained(checkpoints[-1])
            self.step = max(self.trained)
            is_durable = self.buffer.storage.is_durable
            await self.manager.resume(checkpoints[-1] / "manager", has_groups=is_durable)
        elif self.buffer.storage.is_durable:
            await self.manager.settle(0)


def build_buffer(folder, store):
    storage = None if store == "memory" else SQLStorage(store)
    if storage is not None:
        storage.claim_now()
    return ReplayBuffer(StalenessReplayPolicy(), storage, reuse=REUSE)


def build_sampler(name, buffer):
    prompts = [Prompt(message=[{"role": "user", "content": str(i)}]) for i in range(NUM_PROMPTS)]
    return Sampler(
        prompts, buffer, task_name=name, prompt_repeat_k=GROUP_SIZE, seed=1, sample_params=SampleParams(max_tokens=64)
    )


def read_trained(checkpoint):
    """Staleness by group id, by train step."""
    trained = json.loads((checkpoint / "trainer.json").read_text())
    return {int(step): groups for step, groups in trained.items()}


def main(arguments):
    folder, store, every = Path(arguments[0]), arguments[1], int(arguments[2])
    folder.mkdir(parents=True, exist_ok=True)

    async def go():
        run = Run(folder, store)
        await run.resume()
        await run.train(every)
        assert run.manager.ledger.balance(await run.manager.count_live()).ok
        (folder / "owed.json").write_text(json.dumps(await run.owed()))
        run.manager.ledger.close()
        await run.buffer.close()

    asyncio.run(go())
