"""Interrupted and continued rollouts, and weights that change under running ones, with a real model.

What an interruption may not change: which tokens are drawn, how many, and what is recorded of each.
"""

from __future__ import annotations

import asyncio
import copy
import random
import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import torch

from forebay.agents import AgentLoop
from forebay.engines import RolloutController, TransformersEngine
from forebay.judges import FunctionJudge
from forebay.types import RolloutState, SampleParams, Status, update_sample_version
from forebay.watching.activity import Activities

GREEDY = SampleParams(max_tokens=40, temperature=0.0)
SAMPLED = SampleParams(max_tokens=40, temperature=1.0, top_p=0.9)


def rollout(params: SampleParams, name: str = "r", **fields: Any) -> RolloutState:
    return RolloutState([], prompt_ids=[3, 1, 4, 1, 5], rollout_id=name, sample_params=params, **fields)


class Tokens:
    """Lets a test act in the engine's thread after chosen forward passes."""

    def __init__(self, model: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self._turns = 0
        self._stop_at: int | None = None
        self._stopped = asyncio.Event()
        self._go = threading.Event()
        self._hook = model.register_forward_pre_hook(self._before)

    def _before(self, model: Any, args: Any) -> None:
        self._turns += 1
        if self._turns == self._stop_at:
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._go.wait()

    def stop_before(self, count: int) -> None:
        """Hold the `count`-th forward pass from now."""
        self._stopped.clear()
        self._go.clear()
        self._stop_at = self._turns + count

    async def stopped(self) -> None:
        await self._stopped.wait()

    def go(self) -> None:
        self._go.set()


@pytest.fixture
async def controller(llama: Any) -> AsyncIterator[RolloutController]:
    controller = RolloutController(TransformersEngine(llama), seed=1)
    yield controller
    await controller.close()


async def has_reached_the_engine() -> None:
    """Lets a task of the controller start its tasks of the engine, which ask the engine's thread."""
    for _ in range(3):
        await asyncio.sleep(0)


async def interrupt_after(controller: RolloutController, tokens: Tokens, work: Any, count: int) -> Any:
    """Pause while `work` has made `count` tokens; its result."""
    tokens.stop_before(count)
    running = asyncio.create_task(work)
    stopped = asyncio.create_task(tokens.stopped())
    await asyncio.wait([running, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    pausing = asyncio.create_task(controller.pause_generation())
    await has_reached_the_engine()
    tokens.go()
    await pausing
    result = await running
    await controller.continue_generation()
    return result


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("seed", range(3))
async def test_however_often_interrupted_it_is_the_uninterrupted_rollout(controller, llama, params, seed):
    whole = await controller.generate_sample(rollout(params))
    rng, state, parts = random.Random(seed), rollout(params), 0
    tokens = Tokens(llama)
    while state.status is not Status.COMPLETED:
        before = len(state.response_ids)
        wanted = rng.randrange(1, 12)
        await interrupt_after(controller, tokens, controller.generate_sample(state), wanted)
        assert state.status is Status.COMPLETED or len(state.response_ids) == before + wanted
        assert state.tokens.tolist() == [*state.prompt_ids, *state.response_ids]
        parts += 1
    assert parts > 3
    assert state.response_ids.tolist() == whole.response_ids.tolist()
    assert len(state.response_ids) == params.max_tokens
    assert state.finish_reason == whole.finish_reason == "length"
    assert state.response_model_steps.tolist() == [0] * len(whole.response_ids)
    # Continuing computes in one pass what was computed token by token: the same but for rounding.
    np.testing.assert_allclose(state.logprobs, whole.logprobs, atol=1e-4)


async def test_a_rollout_aborted_before_its_first_token_loses_nothing(controller):
    whole = await controller.generate_sample(rollout(SAMPLED))
    await controller.pause_generation()
    state = await controller.generate_sample(rollout(SAMPLED))
    assert (state.status, len(state.response_ids)) == (Status.ABORTED, 0)
    await controller.continue_generation()
    await controller.generate_sample(state)
    assert state.response_ids.tolist() == whole.response_ids.tolist()


async def test_a_new_try_draws_anew(controller):
    first = await controller.generate_sample(rollout(SAMPLED))
    again = await controller.generate_sample(rollout(SAMPLED, num_tries=1))
    assert first.response_ids.tolist() != again.response_ids.tolist()


def other_weights(model: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: parameter.detach() + 0.2 * torch.randn(parameter.shape, generator=generator)
        for name, parameter in model.named_parameters()
    }


async def test_weights_change_under_a_running_rollout_from_one_token_to_the_next(controller, llama):
    old = copy.deepcopy(llama)
    tokens = Tokens(llama)
    tokens.stop_before(10)
    state = rollout(GREEDY)
    running = asyncio.create_task(controller.generate_sample(state))
    await tokens.stopped()
    updating = asyncio.create_task(controller.update_weights(other_weights(llama).items(), 5))
    await has_reached_the_engine()
    tokens.go()
    await updating
    await running
    # One call, not interrupted, and the label of each token is that of the weights that made it.
    assert state.status is Status.COMPLETED
    assert state.response_model_steps.tolist() == [0] * 10 + [5] * 30
    update_sample_version(state, 9)
    assert state.response_model_steps.max() == 5
    with torch.inference_mode():
        logits = old(torch.from_numpy(state.tokens.astype(np.int64))[None]).logits[0, 4:-1]
        by_old = logits.log_softmax(-1)[torch.arange(40), torch.from_numpy(state.response_ids.astype(np.int64))]
    np.testing.assert_allclose(state.logprobs[:10], by_old[:10], atol=1e-4)
    assert np.abs(state.logprobs[10:] - by_old[10:].numpy()).max() > 0.1


async def test_continued_over_new_weights_each_part_has_its_own_step_and_logprobs(controller, llama):
    old = copy.deepcopy(llama)
    tokens, state = Tokens(llama), rollout(SAMPLED)
    await interrupt_after(controller, tokens, controller.generate_sample(state), 15)
    first = state.response_ids.tolist(), state.logprobs.tolist()
    await controller.update_weights(other_weights(llama).items(), 1)
    await controller.generate_sample(state)
    assert (state.response_ids[:15].tolist(), state.logprobs[:15].tolist()) == first
    assert state.response_model_steps.tolist() == [0] * 15 + [1] * 25
    # The continuation saw the whole rollout with the new weights only: a fresh pass gives its logprobs.
    ids = torch.from_numpy(state.tokens.astype(np.int64))[None]
    with torch.inference_mode():
        new = llama(ids).logits[0, 4:-1].argmax(-1)[15:]
        assert not torch.equal(new, old(ids).logits[0, 4:-1].argmax(-1)[15:])
    greedy = rollout(SampleParams(max_tokens=16, temperature=0.0))
    greedy.append(state.response_ids[:15], logprobs=state.logprobs[:15], model_step=0)
    await controller.generate_sample(greedy)
    assert int(greedy.response_ids[15]) == int(new[0])


class Plain(AgentLoop):
    async def generate_sample(self, state: RolloutState) -> RolloutState:
        return await self.rollout_controller.generate_sample(state)


async def test_completed_members_of_an_aborted_group_keep_response_and_reward(controller, llama):
    judged: list[str] = []

    def score(state: RolloutState) -> float:
        judged.append(state.rollout_id)
        return float(len(judged))

    agent_loop, tokens = Plain(controller, FunctionJudge(score)), Tokens(llama)
    params = [SampleParams(max_tokens=length) for length in (3, 40, 5, 40)]
    group = [rollout(each, f"g/{i}", group_id="g") for i, each in enumerate(params)]
    alone = [await controller.generate_sample(rollout(each, f"g/{i}")) for i, each in enumerate(params)]

    group = await interrupt_after(controller, tokens, agent_loop.generate_group(group), 8)
    assert [state.status for state in group] == [Status.COMPLETED, Status.ABORTED] * 2
    assert [len(state.response_ids) for state in group] == [3, 8, 5, 8]
    assert [state.reward is None for state in group] == [False, True] * 2
    rewards = {state.rollout_id: state.reward for state in group if state.reward}

    group = await interrupt_after(controller, tokens, agent_loop.generate_group(group, enable_partial_rollout=True), 6)
    assert [len(state.response_ids) for state in group] == [3, 14, 5, 14]
    group = await agent_loop.generate_group(group, enable_partial_rollout=True)
    assert {state.status for state in group} == {Status.COMPLETED}
    assert sorted(judged) == ["g/0", "g/1", "g/2", "g/3"]
    assert rewards.items() <= {state.rollout_id: state.reward for state in group}.items()
    assert [s.response_ids.tolist() for s in group] == [s.response_ids.tolist() for s in alone]


async def test_a_time_limit_ends_the_straggler_with_its_tokens_and_no_other(llama):
    engine = TransformersEngine(llama, max_batch=2)
    controller = RolloutController(engine, time_limit_s=3600.0)
    tokens, clock = Tokens(llama), asyncio.get_running_loop()
    tokens.stop_before(6)
    straggler, other, queued = (rollout(SAMPLED, name) for name in ("slow", "other", "queued"))
    running = asyncio.gather(*(controller.generate_sample(s) for s in (straggler, other, queued)))
    await tokens.stopped()
    call, _ = engine._running
    assert call.request.request_id == "slow:0:0"
    assert call.timer.when() - clock.time() > 3000
    # An hour passes for the straggler.
    call.timer._run()
    tokens.go()
    await running
    assert (straggler.status, len(straggler.response_ids)) == (Status.ABORTED, 6)
    assert straggler.error_msg == "rollout slow: aborted after its time limit of 3600.0 s"
    assert [state.status for state in (other, queued)] == [Status.COMPLETED] * 2
    await controller.generate_sample(straggler)
    assert (straggler.status, straggler.error_msg) == (Status.COMPLETED, None)
    assert len(straggler.response_ids) == 40
    assert engine._running == {}
    await controller.close()


async def test_a_running_rollout_can_be_described(controller, llama):
    tokens, activities = Tokens(llama), Activities()
    state = rollout(SAMPLED)
    state.append([7, 8], logprobs=[-1, -1])
    tokens.stop_before(6)
    with activities.span("generate", "r") as activity:
        assert controller.describe(activity) == ""
        running = asyncio.create_task(controller.generate_sample(state))
        await tokens.stopped()
        assert controller.describe(activity) == "7 tokens"
        tokens.go()
        await running
        assert controller.describe(activity) == ""
