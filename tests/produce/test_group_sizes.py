"""Groups that get further members where the scores of the first ones vary: how many, and only once."""

import asyncio

import numpy as np
import pytest
from test_group_rules import rules
from test_sync_production import make_context, make_group

from forebay.agents.base import AgentLoop
from forebay.config import ConfigError, parse_config
from forebay.judges import FunctionJudge, judges_group
from forebay.plan.estimate import _largest_batch
from forebay.plan.turns import num_running
from forebay.runs.config import RunConfig
from forebay.train import TrainBatch, TrainConfig
from forebay.train.objective.advantages import find_advantage
from forebay.types import Status, expire_group


def place_of(state):
    return int(state.rollout_id.rpartition("/")[2])


class Scored(AgentLoop):
    """One token for each rollout, unless it is among those `aborted`."""

    def __init__(self, judge, aborted=()):
        super().__init__(None, judge)
        self.aborted, self.made = set(aborted), []

    async def generate_sample(self, state):
        if place_of(state) in self.aborted:
            state.status = Status.ABORTED
            return state
        self.made.append(place_of(state))
        state.append([place_of(state)], logprobs=[-0.5])
        state.response, state.status = "text", Status.COMPLETED
        return state


def scoring(scores):
    """A judge by place; further members earn 0."""
    return FunctionJudge(lambda state: dict(enumerate(scores)).get(place_of(state), 0.0))


def context(scores, sizes, aborted=(), judge=None):
    ctx = make_context(Scored(judge or scoring(scores), aborted), batch_size=1)
    ctx.rules = rules(sizes=sizes)
    return ctx


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([1, 1, 1, 1], 4),
        ([0, 0, 0, 0], 4),
        ([1, 1, 0, 0], 12),
        # p = 1/4: 8 further ones times 4 * 1/4 * 3/4.
        ([0, 1, 0, 0], 10),
        # A variance of 1/64, so a sixteenth of 8 is 0.5, and rounded to even.
        ([0.5, 0.75, 0.5, 0.75], 4),
        # Scores beyond 0 and 1 vary more than any of these: all.
        ([0, 9, 0, 0], 12),
    ],
)
async def test_a_group_grows_with_the_variance_of_its_first_scores(scores, expected):
    ctx = context(scores, (4, 12))
    given = make_group("t", 0, k=4)
    given[0].mm_info, given[0].extra_fields = {"images": []}, {"level": 2}
    group = await ctx.generate_group(given)
    # In place: what pauses, displays and copies hold is this list.
    assert [state.rollout_id for state in given] == [state.rollout_id for state in group]
    assert [state.rollout_id for state in group] == [f"t/0/{place}" for place in range(expected)]
    assert sorted(ctx.agent_loop.made) == list(range(expected))
    for state in group[4:]:
        assert (state.group_id, state.message, state.mm_info) == ("t/0", group[0].message, given[0].mm_info)
        assert state.extra_fields["level"] == 2
        assert state.response_ids.tolist() == [place_of(state)]
        assert state.reward == {"score": 0.0}
    assert await ctx.put_generated_group(group)
    assert ctx.progress.produced_samples["t"] == expected
    assert ctx.progress.produced_tokens["t"] == expected
    (stored,) = await ctx.replay_buffer.get(1, "t", Status.COMPLETED)
    assert len(stored) == expected


async def test_further_members_share_nothing_that_an_agent_may_add_to():
    ctx = context([1, 0], (2, 4))
    given = make_group("t", 0, k=2)
    given[0].extra_fields = {"seen": []}
    group = await ctx.generate_group(given)
    assert len(group) == 4
    for state in group:
        state.message.append({"role": "user", "content": "more"})
        state.extra_fields.setdefault("seen", []).append(1)
    assert [len(state.message) for state in group] == [2] * 4
    assert group[0].extra_fields["seen"] == group[2].extra_fields["seen"] == [1]


async def test_a_group_that_lost_members_after_it_had_grown_does_not_grow_again():
    ctx = context([1, 0], (2, 4))
    group = await ctx.generate_group(make_group("t", 0, k=2))
    left = [group[0], group[2]]
    left[0].reward, left[1].reward = {"score": 1.0}, {"score": 0.0}
    assert ctx.rules.further_members(left) == []


async def test_ids_of_further_members_that_left_do_not_come_again():
    """Found by a random schedule: they failed, and the others expired in the buffer and were generated again."""
    ctx = context([1, 0], (2, 4))
    firsts = (await ctx.generate_group(make_group("t", 0, k=2)))[:2]
    expire_group(firsts)
    again = await ctx.generate_group(firsts)
    assert [state.rollout_id for state in again] == ["t/0/0", "t/0/1"]
    # Scores that agree add none, and other ones may.
    ctx = context([0, 0], (2, 4))
    same = await ctx.generate_group(make_group("t", 1, k=2))
    ctx.agent_loop.judge = scoring([1, 0])
    expire_group(same)
    assert len(await ctx.generate_group(same)) == 4


async def test_an_interruption_before_or_after_the_decision_changes_nothing():
    for aborted in ({2}, {5, 7}, {0, 1, 2, 3}, {4}):
        ctx = context([1, 0, 0, 1], (4, 8), aborted)
        group = await ctx.generate_group(make_group("t", 0, k=4))
        assert len(group) == (4 if aborted & {0, 1, 2, 3} else 8)
        assert not await ctx.put_generated_group(group)
        (group,) = await ctx.replay_buffer.get(1, "t", Status.ABORTED)
        ctx.agent_loop.aborted = set()
        group = await ctx.generate_group(group)
        assert [state.status for state in group] == [Status.COMPLETED] * 8
        # Each was made once, and the further ones earned 0, by which alone nothing would have been added.
        assert sorted(ctx.agent_loop.made) == list(range(8))
        assert await ctx.put_generated_group(group)
        assert ctx.progress.produced_tokens["t"] == 8


async def test_a_pause_keeps_further_members_for_later():
    ctx = context([1, 0], (2, 4))
    ctx.update_event.set()
    group = await ctx.generate_group(make_group("t", 0))
    assert [state.status for state in group] == [Status.COMPLETED] * 2 + [Status.ABORTED] * 2
    ctx.update_event.clear()
    group = await ctx.generate_group(group)
    assert [state.status for state in group] == [Status.COMPLETED] * 4


async def test_a_cancellation_puts_back_the_group_as_it_had_grown():
    ctx = context([1, 0], (2, 4))
    started = asyncio.Event()

    async def hang(state):
        if place_of(state) >= 2:
            started.set()
            await asyncio.Event().wait()
        return await Scored.generate_sample(ctx.agent_loop, state)

    ctx.agent_loop.generate_sample = hang
    given = make_group("t", 0)
    generating = asyncio.create_task(ctx.generate_group(given))
    await started.wait()
    generating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await generating
    await ctx.put_back(given, wipe=True)
    (group,) = await ctx.replay_buffer.get(1, "t", Status.ABORTED)
    assert [state.rollout_id for state in group] == ["t/0/0", "t/0/1", "t/0/2", "t/0/3"]


async def test_members_that_failed_or_cannot_be_trained_leave_the_group_as_it_is():
    def judged(state):
        return {"score": 1.0} if place_of(state) else float("nan")

    ctx = context([], (2, 4), judge=FunctionJudge(judged))
    assert len(await ctx.generate_group(make_group("t", 0))) == 2
    ctx = make_context(Scored(scoring([1, 0])), batch_size=1)
    assert len(await ctx.generate_group(make_group("t", 0))) == 2


async def test_a_judge_of_whole_groups_judges_all_again():
    asked = []

    @judges_group
    def rank(states):
        asked.append(len(states))
        return [float(place) for place, _ in enumerate(states)]

    ctx = context([], (2, 4), judge=FunctionJudge(rank))
    group = await ctx.generate_group(make_group("t", 0))
    assert asked == [2, 4]
    assert [state.reward["score"] for state in group] == [0, 1, 2, 3]


async def test_a_member_that_was_generated_again_is_compared_with_all():
    asked = []

    @judges_group
    def rank(states):
        asked.append([place_of(state) for state in states])
        return [float(len(states))] * len(states)

    class FailsOnce(Scored):
        async def generate_sample(self, state):
            if place_of(state) == 1 and not asked:
                raise OSError("the agent's fault")
            return await super().generate_sample(state)

    loop = FailsOnce(FunctionJudge(rank))
    group = await loop.generate_group(make_group("t", 0, k=3))
    assert group[1].status is Status.FAILED
    group = await loop.generate_group(group)
    assert asked == [[0, 2], [0, 1, 2]]
    assert [state.reward["score"] for state in group] == [3, 3, 3]


async def test_further_trajectories_have_the_reward_that_was_judged_last():
    class Two(Scored):
        async def generate_sample(self, state):
            first = await super().generate_sample(state)
            (other,) = make_group("t", 0, k=1)
            other.append([9])
            other.status = Status.COMPLETED
            # The second attempt's brings its own.
            other.reward = {"score": 7.0} if place_of(state) == 1 else None
            return [first, other]

    @judges_group
    def rank(states):
        return [float(len(states) + place) for place, _ in enumerate(states)]

    ctx = make_context(Two(FunctionJudge(rank)), batch_size=1)
    ctx.rules = rules(sizes=(2, 3))
    group = await ctx.generate_group(make_group("t", 0))
    assert [state.reward["score"] for state in group] == [3, 3, 4, 7, 5, 5]


def test_advantages_compare_groups_of_unequal_sizes():
    """Against a reference of one line for each group."""
    sizes, rng = (4, 7, 12), np.random.default_rng(0)
    groups = [make_group("t", index, k=size) for index, size in enumerate(sizes)]
    for state in (state for group in groups for state in group):
        state.append([1, 2], logprobs=[-1.0, -1.0])
        state.status, state.reward = Status.COMPLETED, {"score": float(rng.integers(2))}
    batch = TrainBatch.from_groups(groups)
    scores = [np.array([state.reward["score"] for state in group]) for group in groups]
    expected = {
        "grpo": [(s - s.mean()) / (s.std(ddof=1) + 1e-6) for s in scores],
        "dr_grpo": [s - s.mean() for s in scores],
        "rloo": [(s - s.mean()) * len(s) / (len(s) - 1) for s in scores],
    }
    for name, found in expected.items():
        config = TrainConfig(advantage=name)
        assert find_advantage(name)(batch, config) == pytest.approx(np.concatenate(found))


def run(**changes):
    given = {
        "name": "r",
        "steps": 1,
        "batch_size": 2,
        "rollouts_per_prompt": [4, 12],
        "model": {"source": "tiny"},
        "tasks": [{"name": "s", "data": {"source": "sorting"}, "judge": {"name": "exact_match"}}],
    }
    return parse_config(RunConfig, given | changes)


def test_a_run_file_gives_one_number_or_a_pair():
    assert run().group_sizes == (4, 12)
    assert run(rollouts_per_prompt=4).group_sizes == (4, 4)
    # Memory is planned for the most.
    assert _largest_batch(run(train={"token_budget": 80}), 5, 10).num_sequences == 16
    assert _largest_batch(run(batch_size=1, train={"token_budget": 80}), 5, 10).num_sequences == 12
    assert num_running(run(engine={"name": "transformers", "arguments": {"max_batch": 99}})) == 24
    assert run(rollouts_per_prompt=[12, 4]).group_sizes == (4, 12)
    with pytest.raises(ConfigError, match="nothing to compare"):
        run(rollouts_per_prompt=[1, 8], train={"advantage": "gae", "critic_lr": 1e-3})
    with pytest.raises(ConfigError, match="rollouts_per_prompt"):
        run(rollouts_per_prompt=[0, 8])
