import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.produce.prompts.dataset import Prompt
from forebay.produce.sampler import Sampler
from forebay.types import RolloutState, SampleParams, Status

TASK = "math"


class Shelf:
    """The sampler's side of a replay buffer: groups by status, first in first out."""

    def __init__(self, *groups: list[RolloutState]) -> None:
        self.groups = list(groups)
        self.asked: list[Status] = []

    async def get(self, batch_size, task_name, group_status, /):
        self.asked.append(group_status)
        assert (batch_size, task_name) == (1, TASK)
        found = [group for group in self.groups if group[0].status is group_status][:batch_size]
        self.groups = [group for group in self.groups if group not in found]
        return found


def make_prompts(count: int) -> list[Prompt]:
    return [
        Prompt(
            message=[{"role": "user", "content": str(i)}], reward_model={"ground_truth": str(i)}, extra={"level": i}
        )
        for i in range(count)
    ]


def make_sampler(count: int, *groups: list[RolloutState], k: int = 2, seed: int = 0, **options) -> Sampler:
    return Sampler(make_prompts(count), Shelf(*groups), task_name=TASK, prompt_repeat_k=k, seed=seed, **options)


async def draw(sampler: Sampler, count: int) -> list[str]:
    return [(await sampler.sample(TASK))[0].group_id for _ in range(count)]


def stored_group(status: Status, name: str) -> list[RolloutState]:
    group = []
    for member in range(2):
        state = RolloutState([], rollout_id=f"{name}/{member}", group_id=name, prompt_ids=[1, 2])
        state.append([3, 4], logprobs=[-1.0, -2.0], model_step=0)
        state.status = status
        state.response = "x"
        state.reward = {"score": 1.0}
        group.append(state)
    return group


class CountedShelf(Shelf):
    """A buffer that says how often it changed."""

    version = 0


async def test_a_buffer_that_has_not_changed_is_not_asked_again_and_a_change_is_never_missed() -> None:
    shelf = CountedShelf()
    sampler = Sampler(make_prompts(9), shelf, task_name=TASK, prompt_repeat_k=2, shuffle=False)
    statuses = [Status.EXPIRED, Status.ABORTED]
    for _ in range(3):
        await sampler.sample(TASK, statuses)
    assert shelf.asked == statuses
    shelf.groups, shelf.version = [stored_group(Status.ABORTED, name) for name in "ab"], 1
    names = [(await sampler.sample(TASK, statuses))[0].group_id for _ in range(2)]
    assert names == ["a", "b"]
    # A change while it is asked counts as one after it.
    shelf.version, get = 2, shelf.get

    async def get_and_change(batch_size, task_name, group_status, /):
        found = await get(batch_size, task_name, group_status)
        shelf.groups, shelf.version = [stored_group(Status.EXPIRED, "c")], 3
        return found

    shelf.get = get_and_change
    assert (await sampler.sample(TASK, Status.EXPIRED))[0].group_id == "math/0/0/3"
    shelf.get = get
    assert (await sampler.sample(TASK, Status.EXPIRED))[0].group_id == "c"


# New groups


async def test_a_new_group_holds_the_prompt_k_times_with_ids_of_its_place() -> None:
    params = SampleParams(max_tokens=5)
    sampler = make_sampler(3, k=2, seed=7, shuffle=False, sample_params=params)
    await sampler.sample(TASK)
    group = await sampler.sample(TASK)
    assert [state.rollout_id for state in group] == ["math/7/0/1/0", "math/7/0/1/1"]
    for state in group:
        assert state.group_id == "math/7/0/1"
        assert state.task_name == TASK
        assert state.message == [{"role": "user", "content": "1"}]
        assert state.reward_model == {"ground_truth": "1"}
        assert state.extra_fields == {"level": 1}
        assert state.sample_params is params
        assert state.status is Status.INIT


async def test_a_rollout_that_extends_its_chat_leaves_prompt_and_siblings_alone() -> None:
    sampler = make_sampler(1)
    first, second = await sampler.sample(TASK)
    first.message.append({"role": "assistant", "content": "hm"})
    first.message[0]["content"] = "changed"
    first.extra_fields["level"] = "changed"
    assert second.message == sampler.prompts[0].message == [{"role": "user", "content": "0"}]
    assert second.extra_fields == {"level": 0}


@given(count=st.integers(1, 40), epochs=st.integers(1, 3), seed=st.integers(0, 3), shuffle=st.booleans())
async def test_every_epoch_takes_every_prompt_once(count, epochs, seed, shuffle) -> None:
    sampler = make_sampler(count, k=1, seed=seed, shuffle=shuffle)
    seen = []
    for epoch in range(epochs):
        groups = [(await sampler.sample(TASK))[0] for _ in range(count)]
        assert Counter(g.message[0]["content"] for g in groups) == Counter(str(i) for i in range(count))
        assert (sampler.epoch, sampler.position) == (epoch, count)
        seen += [group.rollout_id for group in groups]
    assert len(set(seen)) == count * epochs


async def test_seed_and_epoch_each_change_the_order() -> None:
    def order(ids: list[str]) -> list[str]:
        return [name.rsplit("/", 1)[1] for name in ids]

    one, two = make_sampler(30, seed=1), make_sampler(30, seed=2)
    first_epoch, second_epoch, other_seed = (
        order(await draw(one, 30)),
        order(await draw(one, 30)),
        order(await draw(two, 30)),
    )
    assert len({tuple(first_epoch), tuple(second_epoch), tuple(other_seed)}) == 3
    plain = make_sampler(30, shuffle=False)
    assert order(await draw(plain, 60)) == [str(i) for i in range(30)] * 2


# Groups from the buffer


@pytest.mark.parametrize("status", [Status.EXPIRED, Status.MAX_TRIES])
async def test_groups_to_regenerate_come_back_empty(status) -> None:
    sampler = make_sampler(3, stored_group(status, "old"))
    group = await sampler.sample(TASK, status)
    assert [state.rollout_id for state in group] == ["old/0", "old/1"]
    for state in group:
        assert state.status is Status.INIT
        assert len(state.response_ids) == len(state.logprobs) == 0
        assert state.tokens.tolist() == [1, 2]
        assert (state.response, state.reward) == ("", None)
    assert sampler.position == 0


async def test_aborted_groups_keep_their_partial_tokens() -> None:
    sampler = make_sampler(3, stored_group(Status.ABORTED, "cut"))
    group = await sampler.sample(TASK, Status.ABORTED)
    assert all(state.status is Status.ABORTED for state in group)
    assert all(state.tokens.tolist() == [1, 2, 3, 4] for state in group)


async def test_statuses_are_tried_in_order_and_then_the_dataset() -> None:
    shelf_groups = [stored_group(Status.ABORTED, "cut"), stored_group(Status.EXPIRED, "old")]
    sampler = make_sampler(3, *shelf_groups, shuffle=False)
    wanted = [Status.EXPIRED, Status.ABORTED]
    names = [(await sampler.sample(TASK, wanted))[0].group_id for _ in range(3)]
    assert names == ["old", "cut", "math/0/0/0"]
    assert sampler.replay_buffer.asked == [
        Status.EXPIRED,
        Status.EXPIRED,
        Status.ABORTED,
        Status.EXPIRED,
        Status.ABORTED,
    ]
    assert (await sampler.sample(TASK))[0].group_id == "math/0/0/1"


async def test_another_task_is_refused() -> None:
    with pytest.raises(ValueError, match="serves task 'math', not 'code'"):
        await make_sampler(1).sample("code")


# Going back


@given(count=st.integers(1, 12), before=st.integers(0, 30), after=st.integers(1, 30), seed=st.integers(0, 9))
@settings(max_examples=40)
async def test_resume_at_any_point_continues_exactly(tmp_path_factory, count, before, after, seed) -> None:
    path = tmp_path_factory.mktemp("sampler") / "state" / "sampler.json"
    sampler = make_sampler(count, seed=seed)
    await draw(sampler, before)
    sampler.save(path)
    expected = await draw(sampler, after)

    resumed = make_sampler(count, seed=seed)
    await draw(resumed, 3)
    resumed.resume(path)
    assert await draw(resumed, after) == expected
    assert resumed.state_dict() == sampler.state_dict()
    assert [entry.name for entry in path.parent.iterdir()] == ["sampler.json"]


@given(
    count=st.integers(1, 10),
    saved_at=st.integers(0, 15),
    crashed_at=st.integers(0, 15),
    lost=st.sets(st.integers(0, 40)),
)
async def test_a_rewound_sampler_skips_what_is_held_and_misses_nothing(count, saved_at, crashed_at, lost) -> None:
    sampler = make_sampler(count)
    before = await draw(sampler, saved_at)
    state = sampler.state_dict()
    drawn = await draw(sampler, crashed_at)
    held = {name for i, name in enumerate(before + drawn) if i < saved_at or i not in lost}

    rewound = make_sampler(count)
    rewound.load_state_dict(state)
    rewound.catch_up(lambda name, task_name: name in held, [])
    missing = [name for name in drawn if name not in held]
    again = await draw(rewound, len(missing))
    assert again == missing
    # And after that it goes on where the first sampler would have gone on.
    assert await draw(rewound, 2) == await draw(sampler, 2)


def test_a_state_of_another_sampler_is_refused_with_what_differs(tmp_path) -> None:
    make_sampler(5, seed=1, k=2).save(tmp_path / "s.json")
    other = Sampler(make_prompts(6), Shelf(), task_name="code", prompt_repeat_k=4, seed=2)
    with pytest.raises(ValueError, match="task_name was 'math' and is 'code'") as caught:
        other.resume(tmp_path / "s.json")
    for part in ("seed was 1 and is 2", "num_prompts was 5 and is 6", "prompt_repeat_k was 2 and is 4"):
        assert part in str(caught.value)
    assert other.state_dict()["position"] == 0


def test_damaged_and_missing_files_are_named(tmp_path) -> None:
    path = tmp_path / "s.json"
    sampler = make_sampler(2)
    with pytest.raises(FileNotFoundError):
        sampler.resume(path)
    for text in ("{half", "[]"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"s\.json' is not a saved sampler"):
            sampler.resume(path)
    path.write_text(json.dumps({"format": "other/2"}))
    with pytest.raises(ValueError, match="format 'other/2'"):
        sampler.resume(path)


def test_empty_data_and_empty_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="task 'math' has no prompts"):
        make_sampler(0)
    with pytest.raises(ValueError, match="prompt_repeat_k must be at least 1, got 0"):
        make_sampler(1, k=0)
