"""What a run asks of its groups: failed members leave, what cannot be trained never reaches the trainer."""

import asyncio

import pytest
from test_sync_production import CountingSampler, ScriptedLoop, make_context, make_group

from forebay.agents.base import AgentLoop
from forebay.judges import FunctionJudge
from forebay.ledger import Ledger
from forebay.produce import (
    AgentLoopManager,
    AsyncProduceStrategyConfig,
    ProductionError,
    SyncProduceStrategyConfig,
    TaskRunner,
    has_reward_variance,
)
from forebay.produce.strategies.rules import GroupRules
from forebay.replay import SyncReplayBufferConfig
from forebay.types import FAILED_AT_KEY, TRAJECTORY_OF_KEY, Status

LIMIT = 5
"""Response tokens."""


def why_untrainable(state):
    if "score" not in (state.reward or {}):
        return "no score"
    length = len(state.response_ids)
    return f"its {length} tokens are more than train.token_budget = {LIMIT}" if length > LIMIT else None


def rules(**changes):
    return GroupRules(why_untrainable=why_untrainable, **changes)


class Members(ScriptedLoop):
    """`outcome(index)` has a score, None (no score), a status or a length over the limit for each member."""

    async def generate_group(self, states, *, enable_partial_rollout=False):
        outcome = self.outcome(int(states[0].prompt_ids[0]))
        for state, found in zip(states, outcome, strict=True):
            if state.status is Status.COMPLETED:
                continue
            state.append([7, 8, 9], logprobs=[-0.1] * 3)
            if isinstance(found, Status):
                state.status, state.error_msg = found, f"{state.rollout_id} has failed"
                continue
            state.status, state.reward = Status.COMPLETED, {} if found is None else {"score": found}
            if found is not None and found >= LIMIT:
                state.append([1] * int(found))
        return states


class Groups(CountingSampler):
    """Groups of four."""

    async def sample(self, task_name, group_status=None):
        for status in group_status or []:
            if groups := await self.buffer.get(1, task_name, status):
                return groups[0]
        self.position += 1
        return make_group(task_name, self.position - 1, k=4)


def manager_of(outcome, *, strategy=None, ledger=None, **settings):
    buffer = SyncReplayBufferConfig().build()
    runner = TaskRunner(
        task_name="t",
        agent_loop=Members(outcome),
        produce_strategy=(strategy or SyncProduceStrategyConfig()).build(),
        sampler=Groups(buffer),
    )
    return AgentLoopManager(
        task_runners=[runner], replay_buffer=buffer, ledger=ledger or Ledger(), rules=rules(**settings)
    )


async def put_one(outcome, *, filter_fn=None, **settings):
    ctx = make_context(Members(lambda index: outcome), batch_size=1, filter_fn=filter_fn)
    ctx.rules, ctx.ledger = rules(**settings), Ledger()
    group = await ctx.generate_group(make_group("t", 0, k=len(outcome)))
    return ctx, group, await ctx.put_generated_group(group)


async def test_failed_members_leave_before_the_groups_status_is_taken_and_are_booked():
    ctx, group, is_completed = await put_one([0.0, Status.FAILED, None, 1.0, 9.0])
    assert is_completed
    assert [state.rollout_id for state in group] == ["t/0/0", "t/0/3"]
    ((stored,), _) = await ctx.replay_buffer.take_batch({"t": 1})
    life = ctx.ledger.life("t/0", "t")
    assert (life.place, life.num_left, life.score) == ("live", 3, 0.5)
    # What was generated counts whole: 5 responses of 3 tokens and the 9 that made one too long.
    assert life.num_tokens == 24
    assert ctx.progress.consume_produced("t") == (5, 24)
    assert ctx.progress.consume_raw_rewards("t") == (1.0, 2)
    assert stored == "t"


async def test_each_rollout_that_left_has_its_line_with_what_it_failed_of(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    manager = manager_of(lambda index: [0.0, 1.0, None, 9.0], ledger=ledger)
    (group,) = (await manager.produce_batch(1, 1, 0)).rollout_states
    assert [state.rollout_id for state in group] == ["t/0/0", "t/0/1"]
    ledger.close()
    read = Ledger.read(tmp_path / "ledger.jsonl")
    assert read.state_dict() == ledger.state_dict()
    assert read.balance({}).left == 2
    assert read.balance({}).ok
    text = (tmp_path / "ledger.jsonl").read_text()
    assert '"reason": "failed", "rollout": "t/0/2", "error": "rollout t/0/2 cannot be trained: no score"' in text
    assert "its 12 tokens are more than train.token_budget = 5" in text


async def test_with_too_few_others_the_whole_group_fails_and_is_replaced():
    manager = manager_of(lambda index: [0.0, 1.0, None, 9.0], min_members=3)
    with pytest.raises(ProductionError, match="8 failed groups"):
        await manager.produce_batch(1, 1, 0)
    manager = manager_of(lambda index: [0.0, 1.0, 1.0, 9.0] if index % 2 else [0.0, None, 9.0, 9.0])
    result = await manager.produce_batch(2, 1, 0)
    assert [group[0].group_id for group in result.rollout_states] == ["t/1", "t/3"]
    balance = manager.ledger.balance({"t": 0})
    assert (balance.generated, balance.trained, balance.left) == (4, 2, 2)
    assert balance.dropped == {"failed": 2}


@pytest.mark.parametrize("mode", ["colocated", "separate"])
async def test_a_group_that_shrank_under_other_rules_is_replaced_where_it_is_too_small_now(mode):
    """As after a resume with an advantage that compares three rollouts: pass@k would raise in every step."""
    manager = manager_of(lambda index: [0.0, 1.0, 0.0, 1.0], min_members=3, needed_members=3)
    buffer = manager.replay_buffer
    for number, size in ((100, 2), (101, 3)):
        group = make_group("t", number, k=size)
        for state in group:
            state.append([7])
            state.status, state.reward = Status.COMPLETED, {"score": 1.0}
        await buffer.put(group, "t", model_step=0)
        manager.ledger.record(f"t/{number}", "t", "produced")
    if mode == "colocated":
        result = await manager.produce_batch(2, 1, 0)
    else:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(manager.produce_loop(2))
            result = await manager.get_batch(2, 1)
            await manager.pause_produce()
            await manager.shutdown()
    names = {group[0].group_id: len(group) for group in result.rollout_states}
    assert "t/100" not in names
    assert names["t/101"] == 3
    assert manager.ledger.life("t/100", "t").place == "dropped"


async def test_the_validity_function_sees_who_is_left():
    _, group, is_completed = await put_one([1.0, 1.0, Status.FAILED, 9.0], filter_fn=has_reward_variance)
    assert not is_completed
    assert [state.status for state in group] == [Status.FILTERED] * 2


async def test_an_interrupted_group_goes_on_without_its_failed_members():
    ctx, group, _ = await put_one([1.0, Status.ABORTED, Status.FAILED])
    assert [state.rollout_id for state in group] == ["t/0/0", "t/0/1"]
    assert await ctx.replay_buffer.count("t", Status.ABORTED) == 1


async def test_a_context_without_rules_leaves_groups_as_they_are():
    ctx = make_context(Members(lambda index: [None, 9.0]), batch_size=1)
    group = await ctx.generate_group(make_group("t", 0))
    assert await ctx.put_generated_group(group)
    assert [state.status for state in group] == [Status.COMPLETED] * 2


async def test_an_attempt_leaves_with_all_its_trajectories():
    """Of three attempts one has a further trajectory that is too long: two members are left, not three."""
    ctx = make_context(Members(), batch_size=1)
    ctx.rules = rules()
    group = make_group("t", 0, k=4)
    group[1].extra_fields[TRAJECTORY_OF_KEY] = "t/0/0"
    for state in group:
        state.append([1, 2])
        state.status, state.reward = Status.COMPLETED, {"score": 1.0}
    group[1].append([3] * LIMIT)
    assert await ctx.put_generated_group(group)
    assert [state.rollout_id for state in group] == ["t/0/2", "t/0/3"]


async def test_retries_are_for_groups_that_cannot_go_on():
    tried = []

    def outcome(index):
        tried.append(index)
        bad = [0.0, None, None, None] if tried.count(0) == 1 else [0.0, 1.0, None, 1.0]
        return [1.0] * 4 if index else bad

    manager = manager_of(outcome, strategy=AsyncProduceStrategyConfig(max_retries=1))
    (group,) = (await manager.produce_batch(1, 1, 0)).rollout_states
    assert tried == [0, 0]
    assert [state.num_tries for state in group] == [0, 1, 1]
    assert manager.ledger.balance({}).left == 1


@pytest.mark.parametrize("strategy", [SyncProduceStrategyConfig(), AsyncProduceStrategyConfig()])
async def test_the_run_file_sets_how_many_groups_may_fail_and_the_error_names_its_keys(strategy):
    def outcome(index):
        return [0.0, 1.0, 1.0, 1.0] if index == 3 else [Status.FAILED] * 4

    manager = manager_of(outcome, strategy=strategy, max_failed_groups=3)
    await manager.produce_batch(1, 1, 0)
    manager = manager_of(outcome, strategy=strategy, max_failed_groups=2)
    with pytest.raises(ProductionError) as failure:
        await manager.produce_batch(1, 1, 0)
    for part in (
        "3 failed groups, 1 are needed",
        "the first failure: t/0/0 has failed",
        "produce.max_failed_groups, now 2",
        "produce.min_members = 2",
    ):
        assert part in str(failure.value)


def fails_on_even(state):
    if int(state.rollout_id.rpartition("/")[2]) % 2 == 0:
        raise KeyError("the answer")
    return 1.0


class Judged(AgentLoop):
    async def generate_sample(self, state):
        state.append([1])
        state.status = Status.COMPLETED


async def test_a_judge_that_raises_is_named_with_file_and_line():
    loop = Judged(None, FunctionJudge(fails_on_even))
    group = await loop.generate_group(make_group("t", 0))
    line = fails_on_even.__code__.co_firstlineno + 2
    assert group[0].error_msg == "rollout t/0/0: judge fails_on_even: KeyError: 'the answer'"
    assert group[0].extra_fields[FAILED_AT_KEY] == f"{__file__}, line {line}"
    await loop.close()


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("remaining", [1, 2])
async def test_a_group_that_an_older_version_left_in_the_buffer_is_dropped_or_shrunk(separate, remaining):
    """It was stored COMPLETED; the trainer would refuse the batch, and after every resume meet it again."""
    strategy = AsyncProduceStrategyConfig(max_staleness=5)
    manager = manager_of(lambda index: [0.0, 1.0, 1.0, 1.0], strategy=strategy)
    order = []
    for index in range(100, 104):
        group = make_group("t", index, k=4)
        for place, state in enumerate(group):
            state.append([1], model_step=0)
            is_bad = index == 101 and place >= remaining
            state.status, state.reward = Status.COMPLETED, None if is_bad else {"score": 1.0}
        await manager.replay_buffer.put(group, "t")
        manager.ledger.record(f"t/{index}", "t", "produced")
        order += [] if index == 101 and remaining == 1 else [f"t/{index}"]
    producing = asyncio.create_task(manager.produce_loop(1)) if separate else None
    trained = []
    for step in (1, 2, 3):
        if separate:
            result = await manager.get_batch(1, step)
        else:
            result = await manager.produce_batch(1, step, 0)
        trained += [group[0].group_id for group in result.rollout_states]
        assert all(why_untrainable(state) is None for group in result.rollout_states for state in group)
    await manager.shutdown()
    if producing is not None:
        await producing
    assert trained == order[:3]
    balance = manager.ledger.balance(await manager.count_live())
    assert balance.ok, balance
    assert balance.dropped == ({"failed": 1} if remaining == 1 else {})
    assert balance.left == (0 if remaining == 1 else 2)
