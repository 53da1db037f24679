"""The asynchronous strategy over a real buffer, with fake agent loops and samplers, under virtual time."""

import asyncio
import inspect
import itertools

import pytest

from forebay.aio import virtual_time
from forebay.produce import (
    GROUP_GENERATE_TIME_KEY,
    AsyncProduceStrategyConfig,
    ProduceBatchStatus,
    ProduceContext,
    ProduceProgress,
    ProductionError,
)
from forebay.produce.strategies.asynchronous import LAST_FAILURE_KEY, PAUSE_REPEAT_S
from forebay.produce.strategies.context import COUNTED_TOKENS_KEY
from forebay.replay import AsyncReplayBufferConfig
from forebay.types import RolloutState, Status, reset_rollout_response

NORMAL, PAUSED, EXPIRED = (
    ProduceBatchStatus.NORMAL,
    ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT,
    ProduceBatchStatus.EXPIRED_BATCH,
)


def make_group(index, *, k=2, status=Status.INIT, **fields):
    return [
        RolloutState(
            [{"role": "user", "content": str(index)}],
            prompt_ids=[index],
            group_id=f"t/{index}",
            rollout_id=f"t/{index}/{j}",
            task_name="t",
            status=status,
            **fields,
        )
        for j in range(k)
    ]


class Loop:
    """`seconds(index)` until a group completes; `pause` ends what runs as ABORTED, if it listens."""

    def __init__(self, seconds=lambda index: 1.0, *, listens=True, outcome=None, tokens=3):
        self.seconds, self.listens, self.outcome, self.tokens = seconds, listens, outcome, tokens
        self.started, self.pauses, self.running = [], [], 0
        self.stop = asyncio.Event()

    async def generate_group(self, states, *, enable_partial_rollout=False):
        index = int(states[0].message[0]["content"])
        self.started.append(index)
        self.running += 1
        try:
            status = await self._wait(index)
        finally:
            self.running -= 1
        for state in states:
            state.append([7] * self.tokens)
            state.status = status
            state.reward = {"score": 1.0} if status is Status.COMPLETED else None
        if self.outcome is not None:
            self.outcome(index, states)
        return states

    async def _wait(self, index):
        if not self.listens:
            await asyncio.sleep(self.seconds(index))
            return Status.COMPLETED
        try:
            await asyncio.wait_for(self.stop.wait(), self.seconds(index))
        except TimeoutError:
            return Status.COMPLETED
        return Status.ABORTED

    async def pause(self):
        self.pauses.append(asyncio.get_running_loop().time())
        self.stop.set()


class Prompts:
    """The buffer's groups first, then prompts 0, 1, 2, ..."""

    def __init__(self, buffer):
        self.buffer, self.asked, self.numbers = buffer, [], itertools.count()

    async def sample(self, task_name, group_status=None):
        self.asked.append(group_status)
        for status in group_status or []:
            if groups := await self.buffer.get(1, task_name, status):
                return groups[0]
        return make_group(next(self.numbers))


class Setting:
    """A strategy and what its contexts have in common."""

    def __init__(self, loop=None, *, interval=1, consumed=0, target=2, **config):
        self.buffer = AsyncReplayBufferConfig().build()
        self.loop = Loop() if loop is None else loop
        self.prompts = Prompts(self.buffer)
        self.event = asyncio.Event()
        self.strategy = AsyncProduceStrategyConfig(**config).build(sync_weights_interval=interval)
        self.progress = ProduceProgress.build(["t"])
        self.progress.consumed_samples["t"] = consumed
        self.progress.target_samples["t"] = target

    def context(self, *, batch_size=2, train_step=1, model_step=0):
        self.progress.target_upto_future_step = train_step
        self.progress.next_consumer_step = train_step
        return ProduceContext(
            agent_loop=self.loop,
            sampler=self.prompts,
            replay_buffer=self.buffer,
            task_batch_size=batch_size,
            task_name="t",
            train_step=train_step,
            update_event=self.event,
            model_step=model_step,
            progress=self.progress,
            is_valid_sample_fn=self.strategy.is_valid_sample_fn,
            stale_threshold=self.strategy.stale_threshold,
        )

    async def produce(self, **context):
        return await self.strategy.produce_batch(self.context(**context))

    async def pause(self, **context):
        self.event.set()
        return await self.strategy.pause_produce(self.context(**context))

    async def count(self, status):
        return await self.buffer.count("t", status)

    async def groups(self, status):
        return await self.buffer.get(1000, "t", status)


def on_virtual_time(test):
    def run(*args, **kwargs):
        virtual_time.run(test(*args, **kwargs))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    if hasattr(test, "pytestmark"):
        run.pytestmark = test.pytestmark
    run.__signature__ = inspect.signature(test)
    return run


@on_virtual_time
async def test_no_target_is_normal_at_once():
    s = Setting(target=0)
    s.event.set()
    assert await s.produce(train_step=99) is NORMAL
    assert s.prompts.asked == []


@on_virtual_time
async def test_a_task_unknown_to_the_progress_is_a_key_error():
    for table in ("target_samples", "consumed_samples"):
        s = Setting()
        del getattr(s.progress, table)["t"]
        with pytest.raises(KeyError, match=r"^'t'$"):
            await s.produce()


@on_virtual_time
async def test_pause_and_old_weights_are_seen_before_any_work():
    s = Setting()
    s.event.set()
    assert await s.produce() is PAUSED
    s.event.clear()
    assert await s.produce(train_step=2, model_step=0) is EXPIRED
    assert s.prompts.asked == []


@on_virtual_time
async def test_available_and_in_flight_stay_at_the_target_and_its_over_sampling():
    s = Setting(consumed=9, target=10, over_sample_threshold=0.4, max_staleness=5)
    call = asyncio.create_task(s.produce(batch_size=4))
    await asyncio.sleep(0.5)
    # 9 taken and the target 10: ceil(0.4 * 4) = 2 more.
    assert len(s.loop.started) == 3
    assert s.prompts.asked == [[Status.ABORTED]] * 3
    assert await call is NORMAL
    assert await s.count(Status.COMPLETED) == 3


@on_virtual_time
async def test_groups_outlive_the_call_and_are_neither_lost_nor_doubled():
    s = Setting(Loop(lambda index: 1.0 + index), over_sample_threshold=1.0, target=2)
    assert await s.produce() is NORMAL
    assert asyncio.get_running_loop().time() == 2.0
    assert s.strategy.pending_task_count() == 2
    assert [group[0].group_id for group in s.strategy.pending_groups()] == ["t/2", "t/3"]
    s.progress.target_samples["t"] = 4
    await asyncio.sleep(10)
    assert await s.produce() is NORMAL
    assert s.strategy.pending_task_count() == 0
    groups = await s.groups(Status.COMPLETED)
    assert [group[0].group_id for group in groups] == ["t/0", "t/1", "t/2", "t/3"]
    assert [group[0].extra_fields[GROUP_GENERATE_TIME_KEY] for group in groups] == [1.0, 2.0, 3.0, 4.0]


@on_virtual_time
async def test_a_pause_request_ends_the_call_while_it_waits():
    s = Setting(Loop(lambda index: 10**9))
    call = asyncio.create_task(s.produce())
    await asyncio.sleep(1)
    s.event.set()
    assert await call is PAUSED
    assert asyncio.get_running_loop().time() == 1.0
    assert s.strategy.pending_task_count() == 2
    assert await s.pause() == 0.0
    assert await s.count(Status.ABORTED) == 2
    assert asyncio.all_tasks() == {asyncio.current_task()}


@on_virtual_time
async def test_a_pause_in_the_middle_of_sampling_starts_nothing_and_keeps_the_group():
    s = Setting(target=1)
    sample = s.prompts.sample

    async def pausing_sample(task_name, group_status=None):
        s.event.set()
        return await sample(task_name, group_status)

    s.prompts.sample = pausing_sample
    assert await s.produce(batch_size=1) is PAUSED
    assert s.loop.started == []
    assert await s.pause() == 0.0
    (group,) = await s.groups(Status.ABORTED)
    assert group[0].group_id == "t/0"
    assert group[0].num_tries == 0


@on_virtual_time
async def test_aborted_groups_come_before_new_prompts():
    s = Setting(target=2)
    await s.buffer.put(make_group(99, status=Status.ABORTED), "t")
    assert await s.produce() is NORMAL
    assert s.loop.started == [99, 0]


@on_virtual_time
async def test_a_tail_batch_takes_expired_and_exhausted_groups_and_nothing_more():
    s = Setting(target=2, over_sample_threshold=2.0, tail_batch_trigger_size=3, tail_batch_max_tries=9)
    await s.buffer.put(make_group(90, status=Status.EXPIRED), "t")
    await s.buffer.put(make_group(91, status=Status.MAX_TRIES), "t")
    assert await s.produce() is NORMAL
    # Two wait, three are needed: an ordinary round, with over-sampling.
    assert s.loop.started == [0, 1, 2, 3, 4, 5]
    await s.buffer.put(make_group(92, status=Status.EXPIRED), "t")
    s.loop.started.clear()
    s.progress.target_samples["t"] = 8
    assert await s.produce() is NORMAL
    assert s.loop.started == [90, 92]
    assert s.prompts.asked[-1] == [Status.EXPIRED, Status.MAX_TRIES, Status.ABORTED]


@on_virtual_time
@pytest.mark.parametrize("statuses", [(Status.EXPIRED, Status.MAX_TRIES), (Status.MAX_TRIES,) * 2])
async def test_exhausted_groups_count_for_the_tail_batch_also_without_a_limit_of_tries(statuses):
    s = Setting(target=2, tail_batch_trigger_size=2, over_sample_threshold=1.0)
    for index, status in enumerate(statuses):
        await s.buffer.put(make_group(90 + index, status=status), "t")
    assert await s.produce() is NORMAL
    assert sorted(s.loop.started) == [90, 91]


@on_virtual_time
async def test_aborts_without_partial_rollout_count_as_tries_up_to_the_limit():
    s = Setting(Loop(lambda index: 100.0), target=1, tail_batch_max_tries=2)
    for tries, status in ((1, Status.ABORTED), (2, Status.MAX_TRIES)):
        s.loop.stop.clear()
        s.event.clear()
        call = asyncio.create_task(s.produce(batch_size=1))
        await asyncio.sleep(1)
        await s.pause(batch_size=1)
        assert await call is PAUSED
        (group,) = await s.groups(status)
        assert [state.num_tries for state in group] == [tries] * 2
        # What starts over must not age, nor be saved: only the prompt is left.
        assert all(len(state.response_ids) == 0 for state in group)
        await s.buffer.put(group, "t")
    # Without a trigger size, exhausted groups are taken up at once, by a round that does not over-sample.
    s.event.clear()
    s.loop.stop.clear()
    assert await s.produce(batch_size=1) is NORMAL
    assert await s.count(Status.MAX_TRIES) == 0
    assert s.loop.started == [0, 0, 0]


@on_virtual_time
async def test_a_partial_rollout_keeps_its_tokens_and_their_steps_and_counts_them_once():
    s = Setting(
        Loop(lambda index: 100.0), target=1, enable_partial_rollout=True, max_staleness=3, tail_batch_max_tries=1
    )
    call = asyncio.create_task(s.produce(batch_size=1, train_step=2, model_step=1))
    await asyncio.sleep(1)
    await s.pause(batch_size=1, train_step=2, model_step=1)
    assert await call is PAUSED
    assert s.progress.consume_produced("t") == (2, 6)
    s.loop.stop.clear()
    s.event.clear()
    assert await s.produce(batch_size=1, train_step=5, model_step=3) is NORMAL
    (group,) = await s.groups(Status.COMPLETED)
    assert group[0].response_model_steps.tolist() == [1, 1, 1, 3, 3, 3]
    assert (group[0].num_tries, group[0].seq_staleness) == (0, 3)
    assert s.progress.consume_produced("t")[1] == 6
    assert set(group[0].extra_fields) == {GROUP_GENERATE_TIME_KEY}


@on_virtual_time
async def test_a_response_that_starts_over_is_counted_whole():
    s = Setting(Loop(lambda index: 100.0), target=1)
    call = asyncio.create_task(s.produce(batch_size=1))
    await asyncio.sleep(1)
    await s.pause(batch_size=1)
    await call
    s.loop.stop.clear()
    s.event.clear()
    await s.produce(batch_size=1)
    assert s.progress.consume_produced("t")[1] == 12


@on_virtual_time
async def test_what_was_counted_of_an_interrupted_response_counts_again_when_it_starts_over():
    """A partial rollout that a run without partial rollouts takes up, after a resume with other settings."""
    s = Setting(target=1, max_staleness=3)
    await s.buffer.put(
        make_group(7, status=Status.ABORTED, response_ids=[10], extra_fields={COUNTED_TOKENS_KEY: 1}), "t"
    )

    def start_over(index, states):
        for state in states:
            reset_rollout_response(state)
            state.append([1, 2])

    s.loop.outcome = start_over
    await s.produce(batch_size=1)
    assert s.progress.consume_produced("t")[1] == 4


@on_virtual_time
async def test_what_was_counted_of_an_expired_response_counts_again_with_the_new_one():
    s = Setting(target=1, enable_partial_rollout=True, tail_batch_trigger_size=1)
    wiped = make_group(7, status=Status.EXPIRED, extra_fields={COUNTED_TOKENS_KEY: 2})
    await s.buffer.put(wiped, "t")
    await s.produce(batch_size=1)
    assert s.progress.consume_produced("t")[1] == 6


@on_virtual_time
async def test_no_more_is_started_than_wanted_although_counting_takes_a_while():
    """Groups end between the count of what is available and the look at what is in flight."""
    s = Setting(Loop(lambda index: 0.1 + index % 7 / 30), target=40, over_sample_threshold=1.0)
    count = s.buffer.count

    async def slow_count(*args, **kwargs):
        result = await count(*args, **kwargs)
        await asyncio.sleep(0.05)
        return result

    s.buffer.count = slow_count
    assert await s.produce(batch_size=4) is NORMAL
    assert len(s.loop.started) <= 44


@on_virtual_time
async def test_tokens_get_the_step_they_began_with_although_newer_weights_came_meanwhile():
    s = Setting(Loop(lambda index: 10.0), target=2, over_sample_threshold=1.0, max_staleness=9)
    s.loop.seconds = lambda index: 1.0 if index < 2 else 10.0
    assert await s.produce(model_step=0) is NORMAL
    s.progress.target_samples["t"] = 4
    # An in-flight update of the weights: nothing was paused.
    assert await s.produce(train_step=2, model_step=1) is NORMAL
    steps = {g[0].group_id: g[0].response_model_steps.tolist() for g in await s.groups(Status.COMPLETED)}
    assert steps["t/2"] == steps["t/3"] == [0, 0, 0]


@on_virtual_time
async def test_a_pause_asks_again_every_few_seconds_and_then_cuts_short():
    s = Setting(Loop(lambda index: 10**9, listens=False), target=3, pause_timeout_s=12.0)
    call = asyncio.create_task(s.produce())
    await asyncio.sleep(1)
    assert await s.pause() == 12.0
    assert await call is PAUSED
    assert s.loop.pauses == [1.0, 1.0 + PAUSE_REPEAT_S, 1.0 + 2 * PAUSE_REPEAT_S]
    assert s.loop.running == s.strategy.pending_task_count() == 0
    groups = await s.groups(Status.ABORTED)
    assert sorted(group[0].group_id for group in groups) == ["t/0", "t/1", "t/2"]
    assert all(len(state.response_ids) == 0 and state.num_tries == 1 for g in groups for state in g)


@on_virtual_time
async def test_a_pause_collects_what_finishes_meanwhile_and_survives_a_loop_that_cannot_pause():
    s = Setting(Loop(lambda index: 2.0 + index, listens=False), target=2)

    async def broken_pause():
        raise ConnectionError("engine gone")

    s.loop.pause = broken_pause
    call = asyncio.create_task(s.produce())
    await asyncio.sleep(1)
    assert await s.pause() == 2.0
    await call
    assert await s.count(Status.COMPLETED) == 2


@on_virtual_time
async def test_a_hanging_pause_request_does_not_hang_the_pause():
    s = Setting(Loop(lambda index: 10**9, listens=False), target=1, pause_timeout_s=7.0)
    s.loop.pause = asyncio.Event().wait
    call = asyncio.create_task(s.produce(batch_size=1))
    await asyncio.sleep(1)
    assert await s.pause() <= 10.0
    await call
    assert await s.count(Status.ABORTED) == 1


def fail_members(failures):
    """An outcome that makes member 1 FAILED in these calls of a prompt."""
    calls = {}

    def outcome(index, states):
        calls[index] = calls.get(index, 0) + 1
        if calls[index] <= failures.get(index, 0):
            states[1].status, states[1].error_msg = Status.FAILED, f"engine error {calls[index]}"

    return outcome


class KeepingLoop(Loop):
    """Keeps completed members, as `forebay.agents.AgentLoop` does."""

    async def generate_group(self, states, *, enable_partial_rollout=False):
        todo = [state for state in states if state.status is not Status.COMPLETED]
        kept = [(state, state.response_ids) for state in states if state.status is Status.COMPLETED]
        self.kept = getattr(self, "kept", 0) + len(kept)
        index = int(states[0].message[0]["content"])
        self.started.append(index)
        for state in todo:
            state.append([7] * self.tokens)
            state.status, state.reward = Status.COMPLETED, {"score": 1.0}
        self.outcome(index, states)
        return states


@on_virtual_time
async def test_by_default_a_failed_group_is_kept_out_with_its_reason_and_replaced():
    s = Setting(KeepingLoop(outcome=fail_members({0: 1})), target=2)
    assert await s.produce() is NORMAL
    (group,) = await s.groups(Status.FAILED)
    assert group[1].error_msg == "engine error 1"
    assert await s.count(Status.COMPLETED) == 2


@on_virtual_time
async def test_failed_members_are_generated_again_within_the_budget_and_completed_ones_kept():
    s = Setting(KeepingLoop(outcome=fail_members({0: 2, 1: 9})), target=2, max_retries=2)
    assert await s.produce() is NORMAL
    (dropped,) = await s.groups(Status.FAILED)
    assert dropped[0].group_id == "t/1"
    assert dropped[1].error_msg == "engine error 3"
    completed = {group[0].group_id: group for group in await s.groups(Status.COMPLETED)}
    assert set(completed) == {"t/0", "t/2"}
    first, second = completed["t/0"]
    assert (first.num_tries, second.num_tries) == (0, 2)
    assert second.extra_fields[LAST_FAILURE_KEY] == "engine error 2"
    assert s.loop.started.count(0) == s.loop.started.count(1) == 3
    assert s.loop.kept == 4
    # Of prompts 0 and 1, member 0 once and member 1 three times; of prompt 2, both once.
    assert s.progress.consume_produced("t")[1] == 3 * (2 * (1 + 3) + 2)


@on_virtual_time
async def test_constant_failure_ends_production_across_pauses_with_the_reason():
    s = Setting(KeepingLoop(outcome=fail_members(dict.fromkeys(range(99), 99))), target=2, max_retries=1)
    with pytest.raises(ProductionError, match="engine error"):
        await s.produce()
    assert len(s.loop.started) < 40


@on_virtual_time
async def test_every_batch_has_a_budget_of_its_own():
    s = Setting(KeepingLoop(outcome=fail_members({i: 1 for i in range(99) if i % 7 < 5})), max_staleness=9)
    for step in range(1, 9):
        s.progress.target_samples["t"] = 2 * step
        assert await s.produce(train_step=step) is NORMAL
    assert await s.count(Status.FAILED) == 8 * 5


@on_virtual_time
async def test_an_engine_that_aborts_everything_is_an_error_not_a_spin():
    s = Setting(target=2)
    s.loop.stop.set()
    with pytest.raises(ProductionError, match="aborts everything"):
        await s.produce()


@pytest.mark.parametrize("answer", ["fewer", "more", "others", "mixed"])
def test_a_group_that_comes_back_with_other_members_fails(answer):
    def outcome(index, states):
        if answer == "fewer":
            states.pop()
        elif answer == "more":
            states.append(make_group(index, k=3, status=Status.COMPLETED)[2])
        elif answer == "others":
            states[1] = make_group(index + 500, status=Status.COMPLETED)[1]
        else:
            states.reverse()

    class Copying(Loop):
        async def generate_group(self, states, **options):
            returned = list(await super().generate_group(states))
            outcome(int(returned[0].message[0]["content"]), returned)
            return returned

    async def main():
        s = Setting(Copying(), target=1)
        with pytest.raises(ProductionError, match=r"returned (1|3) rollouts for a group of 2|in place of"):
            await s.produce(batch_size=1)
        (group, *_) = await s.groups(Status.FAILED)
        assert [state.rollout_id for state in group] == ["t/0/0", "t/0/1"]

    virtual_time.run(main())


@on_virtual_time
async def test_where_a_continuation_extends_the_ids_alone_the_rest_is_filled():
    class IdsOnly(Loop):
        async def generate_group(self, states, **options):
            for state in states:
                state.response_ids = [*state.response_ids, 11, 12]
                state.status = Status.COMPLETED
            return states

    s = Setting(IdsOnly(), target=1, enable_partial_rollout=True, max_staleness=3)
    group = make_group(7, status=Status.ABORTED, response_ids=[10], response_model_steps=[1])
    await s.buffer.put(group, "t")
    assert await s.produce(batch_size=1, train_step=5, model_step=3) is NORMAL
    (group,) = await s.groups(Status.COMPLETED)
    assert group[0].response_model_steps.tolist() == [1, 3, 3]
    assert group[0].seq_staleness == 3


@on_virtual_time
async def test_a_cancelled_call_loses_nothing_that_is_in_flight():
    s = Setting(Loop(lambda index: 1.0 + index), target=3)
    call = asyncio.create_task(s.produce())
    await asyncio.sleep(1.5)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert s.strategy.pending_task_count() == 2
    assert await s.produce() is NORMAL
    assert s.loop.started == [0, 1, 2]


def test_settings_that_make_no_sense_are_refused():
    too_many = {"over_sample_threshold": float("inf")}
    for wrong in ({"max_staleness": -1}, {"over_sample_threshold": -0.1}, {"staleness_rule": "dorp"}, too_many):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            AsyncProduceStrategyConfig(**wrong)


def test_the_weights_expire_at_the_threshold():
    strategy = AsyncProduceStrategyConfig(max_staleness=1).build(sync_weights_interval=4)
    assert not strategy.is_model_expired(train_step=12, model_step=4)
    assert strategy.is_model_expired(train_step=13, model_step=4)
    assert strategy.stale_threshold == 8
    assert AsyncProduceStrategyConfig(staleness_rule="mask").build().stale_threshold is None
