"""A staleness rule of your own: over-sample as long as nothing is lost by it.

    python examples/own_staleness_rule.py

Over-sampling keeps the engines busy while the last rollouts of a batch finish, but what it makes beyond the
batch grows old. This rule halves the over-sampling whenever groups have expired and gives back a tenth of it
with every batch in which none has, as congestion control does on a network. Everything else is the product's:
the rule is an object, handed to the strategy.
"""

import asyncio
from dataclasses import dataclass, field

from forebay.agents import AgentLoop
from forebay.aio import virtual_time
from forebay.engines import RolloutController
from forebay.produce import (
    AgentLoopManager,
    AsyncProduceStrategyConfig,
    Outlook,
    Prompt,
    Sampler,
    StalenessRule,
    TaskRunner,
)
from forebay.replay import AsyncReplayBufferConfig
from forebay.testing import ScriptedEngine
from forebay.types import RolloutState


@dataclass
class _Memory:
    share: float = 1.0
    target: int = 0
    num_expired: int = 0


@dataclass(frozen=True, kw_only=True)
class BackOff(StalenessRule):
    """Expired groups halve the over-sampling; batches without any restore it, a tenth at a time."""

    memory: _Memory = field(default_factory=_Memory)

    def limit(self, outlook: Outlook) -> int:
        """How many groups may be available or in flight."""
        memory = self.memory
        if outlook.num_expired > memory.num_expired:
            memory.share /= 2
        elif outlook.target > memory.target:
            memory.share = min(1.0, memory.share + 0.1)
        memory.num_expired, memory.target = outlook.num_expired, max(memory.target, outlook.target)
        return outlook.target + round(memory.share * outlook.over_sample)


class Count(AgentLoop):
    """Answers a number with tokens; there is no model here."""

    async def generate_sample(self, state: RolloutState) -> RolloutState:
        """One response; without a judge, every one is worth the same."""
        state.prompt_ids = state.tokens = [int(state.message[0]["content"])]
        await self.rollout_controller.generate_sample(state)
        state.reward = {"score": 1.0}
        return state


async def main() -> None:
    """Train eight steps on a scripted engine, with the rule and without."""
    for rule in ("drop", BackOff()):
        engine = ScriptedEngine(lambda request: [7] * (1 + request.seed % 50), token_latency_s=0.001)
        controller, buffer = RolloutController(engine), AsyncReplayBufferConfig().build()
        config = AsyncProduceStrategyConfig(max_staleness=1, over_sample_threshold=1.0, staleness_rule=rule)
        prompts = [Prompt(message=[{"role": "user", "content": str(1 + n)}]) for n in range(100)]
        runner = TaskRunner(
            task_name="count",
            agent_loop=Count(controller),
            produce_strategy=config.build(rollout_controller=controller),
            sampler=Sampler(prompts, buffer, task_name="count", prompt_repeat_k=4),
        )
        manager = AgentLoopManager(task_runners=[runner], replay_buffer=buffer, rollout_controller=controller)
        producing, step = asyncio.create_task(manager.produce_loop(batch_size=8)), 1
        while step <= 8:
            batch = await manager.get_batch(8, step)
            step += bool(batch.rollout_states)  # here the trainer would train
            await manager.pause_produce()
            await controller.update_weights([], step - 1)
            await manager.continue_produce(model_step=step - 1)
        await manager.shutdown()
        await producing
        balance = manager.ledger.balance(await manager.count_live())
        name = rule if isinstance(rule, str) else type(rule).__name__
        print(f"{name}: {balance.dropped} of {balance.generated}")


if __name__ == "__main__":
    # Hours of waiting in a moment, and the same numbers every time.
    virtual_time.run(main())
