"""The synchronous strategy and the manager over a real buffer, with scripted agent loops."""

import asyncio
import itertools
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.ledger import Ledger
from forebay.produce import (
    AgentLoopManager,
    ProduceBatchStatus,
    ProduceContext,
    ProduceProgress,
    ProductionError,
    SyncProduceStrategyConfig,
    TaskRunner,
    has_reward_variance,
)
from forebay.replay import SyncReplayBufferConfig
from forebay.types import RolloutState, Status


def make_group(task, index, k=2):
    return [
        RolloutState(
            [{"role": "user", "content": f"prompt {index}"}],
            prompt_ids=[index],
            group_id=f"{task}/{index}",
            rollout_id=f"{task}/{index}/{j}",
            task_name=task,
        )
        for j in range(k)
    ]


class CountingSampler:
    """Interrupted groups first, then prompts 0, 1, 2, ..."""

    def __init__(self, buffer):
        self.buffer = buffer
        self.position = 0

    async def sample(self, task_name, group_status=None):
        for status in group_status or []:
            groups = await self.buffer.get(1, task_name, status)
            if groups:
                return groups[0]
        self.position += 1
        return make_group(task_name, self.position - 1)

    def save(self, path):
        Path(path).write_text(str(self.position))

    def resume(self, path):
        self.position = int(Path(path).read_text())


class ScriptedLoop:
    """`outcome(index)` is a list of scores, an exception, or a status; `delay(index)` in event-loop turns."""

    def __init__(self, outcome=lambda index: [0.0, 1.0], delay=lambda index: 0):
        self.outcome, self.delay = outcome, delay
        self.started = []
        self.running = 0

    async def generate_group(self, states, *, enable_partial_rollout=False):
        index = int(states[0].prompt_ids[0])
        self.started.append(index)
        self.running += 1
        try:
            for _ in range(self.delay(index)):
                await asyncio.sleep(0)
            outcome = self.outcome(index)
            if isinstance(outcome, Exception):
                raise outcome
            for j, state in enumerate(states):
                state.append([7, 8, 9], logprobs=[-0.1] * 3)
                state.finish_reason = "stop"
                if isinstance(outcome, Status):
                    state.status, state.error_msg = outcome, "scripted"
                else:
                    state.status, state.reward = Status.COMPLETED, {"score": outcome[j]}
        finally:
            self.running -= 1
        return states

    async def pause(self):
        pass


def make_manager(loops, *, weights=None, filter_fn=None, buffer=None):
    buffer = SyncReplayBufferConfig().build() if buffer is None else buffer
    config = SyncProduceStrategyConfig(**({"is_valid_sample_fn": filter_fn} if filter_fn else {}))
    runners = [
        TaskRunner(
            task_name=name,
            agent_loop=loop,
            produce_strategy=config.build(),
            sampler=CountingSampler(buffer),
            weight=(weights or {}).get(name, 1.0),
        )
        for name, loop in loops.items()
    ]
    return AgentLoopManager(task_runners=runners, replay_buffer=buffer, ledger=Ledger())


def make_context(loop, *, batch_size, filter_fn=None, train_step=1, model_step=0, stale_threshold=None):
    buffer = SyncReplayBufferConfig().build()
    return ProduceContext(
        agent_loop=loop,
        sampler=CountingSampler(buffer),
        replay_buffer=buffer,
        task_batch_size=batch_size,
        task_name="t",
        train_step=train_step,
        update_event=asyncio.Event(),
        model_step=model_step,
        progress=ProduceProgress.build_local(["t"], {"t": batch_size}, train_step),
        stale_threshold=stale_threshold,
        **({"is_valid_sample_fn": filter_fn} if filter_fn else {}),
    )


def indices(groups):
    return [int(group[0].prompt_ids[0]) for group in groups]


async def test_put_counts_rewards_before_filtering_and_wipes_rejects():
    ctx = make_context(ScriptedLoop(), batch_size=1, filter_fn=lambda samples: False)
    group = await ctx.generate_group(make_group("t", 0))
    assert not await ctx.put_generated_group(group)
    assert [state.status for state in group] == [Status.FILTERED] * 2
    assert all(len(state.response_ids) == 0 and state.reward is None for state in group)
    assert ctx.progress.consume_raw_rewards("t") == (1.0, 2)
    assert ctx.progress.consume_produced("t") == (2, 6)
    assert await ctx.replay_buffer.count("t", Status.FILTERED) == 1


async def test_put_validates_completed_groups_only():
    seen = []
    ctx = make_context(
        ScriptedLoop(lambda index: Status.ABORTED), batch_size=1, filter_fn=lambda s: seen.append(s) or True
    )
    group = await ctx.generate_group(make_group("t", 0))
    assert not await ctx.put_generated_group(group)
    assert seen == []
    assert await ctx.replay_buffer.count("t", Status.ABORTED) == 1


@pytest.mark.parametrize("reward", [None, {"other": 1}, {"score": None}])
async def test_a_missing_score_is_left_out_with_a_warning(caplog, reward):
    ctx = make_context(ScriptedLoop(), batch_size=1)
    group = await ctx.generate_group(make_group("t", 0))
    group[0].reward = reward
    assert await ctx.put_generated_group(group)
    assert ctx.progress.consume_raw_rewards("t") == (1.0, 1)
    assert "t/0/0" in caplog.text
    # The other one's score differs from none.
    assert not has_reward_variance(group)


async def test_put_reports_a_group_that_expires_in_the_put():
    ctx = make_context(ScriptedLoop(), batch_size=1, train_step=5, model_step=1, stale_threshold=2)
    group = await ctx.generate_group(make_group("t", 0))
    assert not await ctx.put_generated_group(group)
    assert group[0].status is Status.EXPIRED


async def test_tokens_carry_the_model_step_of_the_context():
    ctx = make_context(ScriptedLoop(), batch_size=1, train_step=4, model_step=3)
    group = await ctx.generate_group(make_group("t", 0))
    await ctx.put_generated_group(group)
    assert group[0].response_model_steps.tolist() == [3, 3, 3]
    assert group[0].seq_staleness == 0


async def test_an_agent_that_raises_fails_its_group_only():
    manager = make_manager({"t": ScriptedLoop(lambda i: OSError("no disk") if i == 1 else [0.0, 1.0])})
    result = await manager.produce_batch(4, 1, 0)
    assert indices(result.rollout_states) == [0, 2, 3, 4]
    assert result.leftovers[Status.FAILED] == 1
    assert await manager.replay_buffer.count("t", Status.FAILED) == 0
    balance = manager.ledger.balance({"t": 0})
    assert (balance.generated, balance.trained, balance.dropped) == (5, 4, {"failed": 1})


async def test_constant_failure_ends_with_the_reason():
    manager = make_manager({"t": ScriptedLoop(lambda index: OSError("no disk"))})
    with pytest.raises(ProductionError, match="no disk"):
        await manager.produce_batch(2, 1, 0)


async def test_nothing_valid_ends_with_the_counts():
    loop = ScriptedLoop(lambda index: [0.0, 0.0])
    manager = make_manager({"t": loop}, filter_fn=has_reward_variance)
    with pytest.raises(ProductionError, match="64 filtered"):
        await manager.produce_batch(1, 1, 0)
    assert loop.running == 0


async def test_filtered_groups_are_replaced_until_the_batch_is_full():
    loop = ScriptedLoop(lambda index: [1.0, 1.0] if index % 3 else [0.0, 1.0])
    manager = make_manager({"t": loop}, filter_fn=has_reward_variance)
    result = await manager.produce_batch(3, 1, 0)
    assert sorted(indices(result.rollout_states)) == [0, 3, 6]
    assert all(has_reward_variance(group) for group in result.rollout_states)
    assert result.produced_samples == 2 * len(loop.started)
    assert result.raw_rewards_count == result.produced_samples


@given(st.integers(1, 6), st.integers(0, 2**32), st.floats(0.2, 1.0))
@settings(deadline=None)
def test_the_batch_does_not_depend_on_which_group_finishes_first(batch_size, seed, share_valid):
    rng = random.Random(seed)
    valid = [rng.random() < share_valid for _ in range(4096)]

    def run(delay):
        loop = ScriptedLoop(lambda i: [0.0, 1.0] if valid[i] else [1.0, 1.0], delay)
        manager = make_manager({"t": loop}, filter_fn=has_reward_variance)
        batches = {}

        async def produce():
            for step in range(1, 4):
                result = await manager.produce_batch(batch_size, step, 0)
                batches[step] = sorted(indices(result.rollout_states))
            assert loop.running == 0
            assert len(manager.replay_buffer) == 0
            assert asyncio.all_tasks() == {asyncio.current_task()}

        asyncio.run(produce())
        return batches

    delays = [rng.randrange(5) for _ in range(4096)]
    assert run(lambda i: 0) == run(lambda i: delays[i])


async def test_several_tasks_split_the_batch_by_weight():
    loops = {name: ScriptedLoop() for name in ("b", "a", "off")}
    manager = make_manager(loops, weights={"b": 1, "a": 2, "off": 0})
    result = await manager.produce_batch(7, 1, 0)
    assert result.task_batch_sizes == {"b": 2, "a": 5, "off": 0}
    assert [group[0].task_name for group in result.rollout_states] == ["b"] * 2 + ["a"] * 5
    assert loops["off"].started == []
    assert result.produced_samples == 14
    assert result.task_results["a"].produced_samples == 10
    assert result.status is ProduceBatchStatus.NORMAL
    assert len(result.group_gen_times_s) == 7


async def test_a_failing_task_stops_the_others_and_loses_nothing():
    forever = ScriptedLoop(delay=lambda index: 10**9)
    manager = make_manager({"bad": ScriptedLoop(lambda i: ValueError("broken")), "slow": forever})
    with pytest.raises(ProductionError, match="broken"):
        await manager.produce_batch(4, 1, 0)
    assert forever.running == 0
    assert await manager.replay_buffer.count("slow", Status.ABORTED) == len(forever.started) == 2
    forever.delay = lambda index: 0
    manager.task_runners[0].agent_loop.outcome = lambda index: [0.0, 1.0]
    result = await manager.produce_batch(4, 1, 0)
    assert sorted(indices(result.task_results["slow"].rollout_states)) == [0, 1]


async def test_a_task_that_fails_to_pause_leaves_neither_the_others_nor_the_engines_running():
    async def cannot_pause(ctx):
        raise OSError("the store is full")

    class Engines:
        is_running = False

        async def continue_generation(self):
            self.is_running = True

        async def pause_generation(self):
            self.is_running = False

    manager, paused = make_manager({"a": ScriptedLoop(), "b": ScriptedLoop()}), []
    bad, good = (runner.produce_strategy for runner in manager.task_runners)

    async def note_pause(ctx):
        paused.append(ctx.task_name)
        return 0.0

    bad.pause_produce, good.pause_produce = cannot_pause, note_pause
    manager.rollout_controller = engines = Engines()
    with pytest.raises(ProductionError, match=r"OSError.*full"):
        await manager.produce_batch(2, 1, 0)
    assert (paused, engines.is_running) == (["b"], False)


async def test_a_cancelled_step_puts_its_groups_back():
    loop = ScriptedLoop(delay=lambda index: 0 if index == 0 else 10**9)
    manager = make_manager({"t": loop})
    step = asyncio.create_task(manager.produce_batch(3, 1, 0))
    for _ in range(50):
        await asyncio.sleep(0)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert loop.running == 0
    assert await manager.replay_buffer.count("t", Status.COMPLETED) == 1
    assert await manager.replay_buffer.count("t", Status.ABORTED) == 2
    loop.delay = lambda index: 0
    result = await manager.produce_batch(3, 1, 0)
    assert sorted(indices(result.rollout_states)) == [0, 1, 2]


async def test_what_was_taken_comes_back_when_the_step_is_undone():
    manager = make_manager({"t": ScriptedLoop()})
    first = await manager.produce_batch(2, 1, 0)
    await manager.replay_buffer.restore(0)
    again = await manager.produce_batch(2, 1, 0)
    assert indices(first.rollout_states) == indices(again.rollout_states)


async def test_save_and_resume_continue_with_the_next_prompt(tmp_path):
    manager = make_manager({"t": ScriptedLoop()})
    await manager.produce_batch(3, 1, 0)
    await manager.save(tmp_path / "checkpoint")
    resumed = make_manager({"t": ScriptedLoop()})
    await resumed.resume(tmp_path / "checkpoint")
    assert indices((await resumed.produce_batch(2, 2, 1)).rollout_states) == [3, 4]
    assert resumed.ledger.balance({"t": 0}).trained == 5
    other = make_manager({"u": ScriptedLoop()})
    with pytest.raises(ValueError, match="'t'"):
        await other.resume(tmp_path / "checkpoint")


async def test_an_evicted_group_is_in_the_ledger():
    buffer = SyncReplayBufferConfig(limit=2).build()
    manager = make_manager({"t": ScriptedLoop()}, buffer=buffer)
    for index in range(3):
        await buffer.put(make_group("t", index), "t")
    assert manager.ledger.balance({"t": 2}).dropped == {"evicted": 1}


def test_duplicate_task_names_are_refused():
    runner = make_manager({"t": ScriptedLoop()}).task_runners[0]
    with pytest.raises(ValueError, match="unique"):
        AgentLoopManager(task_runners=[runner, runner], replay_buffer=SyncReplayBufferConfig().build())


async def test_an_agent_that_cancels_itself_fails_its_group():
    loop = ScriptedLoop(lambda index: asyncio.CancelledError() if index == 0 else [0.0, 1.0])

    async def generate_group(states, **kwargs):
        if int(states[0].prompt_ids[0]) == 0:
            raise asyncio.CancelledError
        return await ScriptedLoop().generate_group(states)

    loop.generate_group = generate_group
    manager = make_manager({"t": loop})
    result = await manager.produce_batch(2, 1, 0)
    assert indices(result.rollout_states) == [1, 2]
    assert manager.ledger.balance({"t": 0}).dropped == {"failed": 1}


def broken_filter(samples):
    raise KeyError("no such field")


@pytest.mark.parametrize(
    "answer",
    [None, [], [3], "ragged", "no status"],
    ids=["None", "empty", "no rollouts", "ragged token fields", "no status"],
)
async def test_malformed_groups_fail_with_a_reason(answer):
    async def generate_group(states, **kwargs):
        if answer == "no status":
            return states
        if answer != "ragged":
            return answer
        for state in states:
            state.response_ids, state.logprobs = [1, 2, 3], [-0.5]
            state.status = Status.COMPLETED
        return states

    loop = ScriptedLoop()
    loop.generate_group = generate_group
    manager = make_manager({"t": loop})
    reasons = r"RolloutState|returned 0 rollouts|logprobs has 1 entries|without a status"
    with pytest.raises(ProductionError, match=reasons):
        await manager.produce_batch(1, 1, 0)


def forgets_to_return(samples):
    len(samples)


@pytest.mark.parametrize(
    ("filter_fn", "message"),
    [(broken_filter, "broken_filter.*no such field"), (forgets_to_return, "forgets_to_return.*returned None")],
)
async def test_a_filter_that_fails_fails_groups_with_its_name(filter_fn, message):
    manager = make_manager({"t": ScriptedLoop()}, filter_fn=filter_fn)
    with pytest.raises(ProductionError, match=message):
        await manager.produce_batch(1, 1, 0)


async def test_finished_groups_go_through_the_filter_also_when_the_call_ends_early():
    loop = ScriptedLoop(lambda index: [1.0, 1.0])
    ctx = make_context(loop, batch_size=3, filter_fn=has_reward_variance)
    calls = itertools.count()
    strategy = SyncProduceStrategyConfig(
        is_valid_sample_fn=has_reward_variance, should_continue_fn=lambda done, size: next(calls) == 0
    ).build()
    await strategy.produce_batch(ctx)
    assert await ctx.replay_buffer.count("t", Status.COMPLETED) == 0
    held = await ctx.replay_buffer.count("t", Status.FILTERED)
    held += await ctx.replay_buffer.count("t", Status.ABORTED)
    assert held == 3


@given(st.integers(0, 60))
@settings(deadline=None, max_examples=60)
def test_no_group_is_lost_or_doubled_wherever_a_cancel_strikes(turns):
    async def run():
        loop = ScriptedLoop(delay=lambda index: index % 4)
        manager = make_manager({"t": loop})
        step = asyncio.create_task(manager.produce_batch(4, 1, 0))
        put = manager.replay_buffer.put

        async def slow_put(*args, **kwargs):
            await asyncio.sleep(0)  # as if another caller held the buffer
            await put(*args, **kwargs)
            await asyncio.sleep(0)

        manager.replay_buffer.put = slow_put
        for _ in range(turns):
            await asyncio.sleep(0)
        step.cancel()
        try:
            await step
            trained = 4
        except asyncio.CancelledError:
            trained = 0
        position = manager.task_runners[0].sampler.position
        counts = await manager.replay_buffer.count_statuses(["t"], list(Status))
        live = sum(n for status, n in counts["t"].items() if status is not Status.ARCHIVED)
        assert live + trained == position
        assert manager.ledger.balance({"t": live}).ok

    asyncio.run(run())


async def test_a_batch_of_no_groups_is_refused():
    manager = make_manager({"t": ScriptedLoop()})
    for size in (0, -2):
        with pytest.raises(ValueError, match="batch_size"):
            await manager.produce_batch(size, 1, 0)


async def test_an_engine_that_aborts_everything_is_named():
    manager = make_manager({"t": ScriptedLoop(lambda index: Status.ABORTED)})
    with pytest.raises(ProductionError, match="paused or closed"):
        await manager.produce_batch(2, 1, 0)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=5))
def test_reward_variance_is_the_filter_it_says(scores):
    group = make_group("t", 0, k=len(scores))
    for state, score in zip(group, scores, strict=True):
        state.reward = {"score": score}
    assert has_reward_variance(group) == any(a != b for a, b in itertools.pairwise(scores))


@pytest.mark.parametrize("interval", [1, 3])
async def test_what_is_left_over_is_trained_only_within_the_sync_interval(interval):
    """A `should_continue_fn` that wants twice the batch leaves a batch over at every step."""
    config = SyncProduceStrategyConfig(should_continue_fn=lambda done, size, **_: done < 2 * size)
    manager = make_manager({"t": ScriptedLoop()})
    (runner,) = manager.task_runners
    runner.produce_strategy = config.build(sync_weights_interval=interval)
    trained = []
    for step in range(1, 13):
        model_step = (step - 1) // interval * interval
        result = await manager.produce_batch(2, step, model_step)
        states = [state for group in result.rollout_states for state in group]
        assert max(state.seq_staleness for state in states) < interval
        assert all(step - 1 - min(state.response_model_steps) < interval for state in states)
        trained += [group[0].group_id for group in result.rollout_states]
        await manager.replay_buffer.commit(step)
    assert len(trained) == len(set(trained)) == 24
    balance = manager.ledger.balance(await manager.count_live())
    assert balance.ok, balance
    # Of each interval of the same weights, what was left over of its last step, once only.
    assert balance.dropped == {"expired": 2 * (12 // interval - 1)}


async def test_what_is_left_over_of_weights_that_were_not_synchronized_is_no_worse_than_what_is_new():
    config = SyncProduceStrategyConfig(should_continue_fn=lambda done, size, **_: done < size + 1)
    manager = make_manager({"t": ScriptedLoop()})
    (runner,) = manager.task_runners
    runner.produce_strategy = config.build()
    assert len((await manager.produce_batch(2, 1, 0)).rollout_states) == 2
    for step in (5, 6):
        result = await manager.produce_batch(2, step, 0)
        assert {state.seq_staleness for group in result.rollout_states for state in group} == {step - 1}


async def test_what_a_bare_context_left_over_is_counted_only_while_it_is_fresh():
    ctx = make_context(ScriptedLoop(), batch_size=2, train_step=5, model_step=4)
    old, fresh = make_group("t", 100), make_group("t", 101)
    for group, step in ((old, 1), (fresh, 4)):
        for state in group:
            state.append([1], model_step=step)
            state.status, state.reward = Status.COMPLETED, {"score": 1.0}
        await ctx.replay_buffer.put(group, "t")
    await SyncProduceStrategyConfig().build().produce_batch(ctx)
    assert ctx.agent_loop.started == [0]
    assert await ctx.replay_buffer.count("t", Status.COMPLETED) == 2
    assert await ctx.replay_buffer.count("t", Status.EXPIRED) == 1


async def test_more_than_the_batch_is_produced_side_by_side_and_no_more_than_wanted():
    loop = ScriptedLoop(delay=lambda index: 5)
    ctx, most = make_context(loop, batch_size=4), []
    generate = loop.generate_group

    async def note_and_generate(states, **options):
        most.append((loop.running + 1, len(loop.started) >= 4))
        return await generate(states, **options)

    loop.generate_group = note_and_generate
    strategy = SyncProduceStrategyConfig(should_continue_fn=lambda done, size, **_: done < 10).build()
    await strategy.produce_batch(ctx)
    assert await ctx.replay_buffer.count("t", Status.COMPLETED) == 10
    assert sorted(loop.started) == list(range(10))
    assert max(running for running, _ in most) == 4
    assert max(running for running, is_beyond in most if is_beyond) == 4


@pytest.mark.parametrize("step", [None, -1, 1.5, "2"])
async def test_a_model_step_that_is_none_is_refused_before_anything_starts(step):
    manager = make_manager({"t": (loop := ScriptedLoop())})
    with pytest.raises(ValueError, match=f"model_step must be a whole number, 0 for the first weights, got {step!r}"):
        await manager.produce_batch(1, 1, step)
    with pytest.raises(ValueError, match="model_step must be a whole number"):
        await manager.continue_produce(step)
    assert manager.model_step == 0
    assert not loop.started


@pytest.mark.parametrize("size", [None, 0, -1])
async def test_a_batch_size_that_is_none_is_refused_before_anything_starts(size):
    manager = make_manager({"t": (loop := ScriptedLoop())})
    with pytest.raises(ValueError, match=f"batch_size must be at least 1 group, got {size!r}"):
        await manager.produce_batch(size, 1, 0)
    with pytest.raises(ValueError, match=f"batch_size must be at least 1 group, got {size!r}"):
        await manager.get_batch(size, 1)
    assert not loop.started


async def test_a_model_step_of_numpy_is_saved_as_a_number(tmp_path):
    manager = make_manager({"t": ScriptedLoop()})
    await manager.continue_produce(np.int64(3))
    await manager.pause_produce()
    await manager.save(tmp_path / "saved")
    assert await make_manager({"t": ScriptedLoop()}).resume(tmp_path / "saved") == 3
