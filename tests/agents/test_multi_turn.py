"""Episodes: turns, budgets, pauses at every point, failures; on a virtual clock, without a model."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
from chat_families import make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.agents import Environment, LiveEnvironment, MultiTurnAgentLoop, Reply, episode_reward
from forebay.agents.build import build_agent_loop
from forebay.aio.virtual_time import run
from forebay.config import Component, ConfigError
from forebay.engines import RolloutController, ScriptedEngine
from forebay.judges.base import Judge
from forebay.replay import SyncReplayBufferConfig
from forebay.types import RolloutState, SampleParams, Status
from forebay.watching.activity import Activities

TOKENIZER = make_tokenizer("tiny")
EOS = TOKENIZER.eos_token_id


class Count(Environment):
    """Says how many turns there were and what the last said, after a second; done after `turns` of them."""

    def __init__(self, *, turns: int = 3, reply_s: float = 1.0) -> None:
        self.turns, self.reply_s = turns, reply_s
        self.steps: list[str] = []
        self.open: set[int] = set()

    async def reset(self, state: RolloutState) -> dict[str, Any]:
        self.open.add(id(state))
        return {"count": 0, "texts": []}

    async def step(self, state: RolloutState, memory: dict[str, Any], text: str) -> Reply:
        # Changed before the wait: what an interrupted step did must not count.
        memory["count"] += 1
        memory["texts"].append(text)
        await asyncio.sleep(self.reply_s)
        self.steps.append(text)
        if memory["count"] == self.turns:
            return Reply(done=True, reward=1.0)
        return Reply(f"{memory['count']}:{text};", reward=0.25)

    async def resume(self, state: RolloutState, memory: dict[str, Any]) -> None:
        self.open.add(id(state))

    async def close(self, state: RolloutState) -> None:
        self.open.discard(id(state))


def letters(request: Any) -> list[int]:
    """Turn n is the n-th letter, three times, and the end; the continuation of a cut turn is its rest."""
    ids = request.input_ids.tolist()
    text = TOKENIZER.decode(ids)
    turn = text.count(";")
    written = len(text) - 1 - max(text.rfind(";"), text.rfind("?"))
    return [*TOKENIZER.encode("abcdefgh"[turn] * 3, add_special_tokens=False), EOS][written:]


def make_loop(environment: Environment, script: Callable[..., Any] = letters, **options: Any):
    engine = ScriptedEngine(
        script,
        token_latency_s=1.0,
        eos_token_ids=[EOS],
        max_context_tokens=options.pop("context", 1000),
        model_step=options.pop("model_step", 0),
    )
    controller = RolloutController(engine)
    return MultiTurnAgentLoop(
        controller,
        options.pop("judge", None),
        TOKENIZER,
        sample_params=SampleParams(max_tokens=options.pop("max_tokens", 100)),
        environment=environment,
        **options,
    )


def make_group(size: int = 1) -> list[RolloutState]:
    return [
        RolloutState([{"role": "user", "content": "how?"}], rollout_id=f"g/{i}", group_id="g", task_name="t")
        for i in range(size)
    ]


def text_of(state: RolloutState, mask: int | None = None) -> str:
    ids = state.response_ids if mask is None else state.response_ids[state.response_mask == mask]
    return str(TOKENIZER.decode(ids.tolist()))


def play(environment: Environment, **options: Any) -> RolloutState:
    return run(make_loop(environment, **options).generate_group(make_group()))[0]


WHOLE = "aaa<eos>1:aaa;bbb<eos>2:bbb;ccc<eos>"


def test_model_and_environment_take_turns() -> None:
    state = play(Count(), model_step=4)
    assert text_of(state) == WHOLE
    assert text_of(state, mask=1) == "aaa<eos>bbb<eos>ccc<eos>"
    assert state.tokens.tolist() == [*state.prompt_ids, *state.response_ids]
    assert (state.status, state.finish_reason, state.response) == (Status.COMPLETED, "stop", "ccc")
    assert set(state.logprobs[state.response_mask == 0]) == {0.0}
    assert set(state.logprobs[state.response_mask == 1]) == {-1.0}
    assert set(state.response_model_steps) == {4}
    assert state.reward == {"score": 1.5}
    assert state.extra_fields["turns"] == 3
    assert state.extra_fields["conversation"] == [
        {"role": "assistant", "content": "aaa"},
        {"role": "user", "content": "1:aaa;"},
        {"role": "assistant", "content": "bbb"},
        {"role": "user", "content": "2:bbb;"},
        {"role": "assistant", "content": "ccc"},
    ]
    assert state.extra_fields["episode"]["ended_by"] == "environment"


@pytest.mark.parametrize(
    ("options", "text", "ended_by"),
    [
        ({}, "aaa<eos>1:aaa;bbb<eos>2:bbb;ccc<eos>", "environment"),
        ({"max_turns": 2}, "aaa<eos>1:aaa;bbb<eos>", "max_turns"),
        ({"max_tokens": 6}, "aaa<eos>1:aaa;bb", "max_tokens"),
        # A reply to which no answer is possible is taken off again.
        ({"max_tokens": 4}, "aaa<eos>", "max_tokens"),
        ({"max_turn_tokens": 2}, "aa<eos>1:aa;bb<eos>2:bb;cc", "environment"),
        ({"max_turn_tokens": 2, "max_tokens": 5}, "aa<eos>1:aa;bb<eos>2:bb;c", "max_tokens"),
        ({"max_context": 16}, "aaa<eos>1:aaa;b", "context"),
        ({"max_context": 14}, "aaa<eos>", "context"),
        ({"context": 18}, "aaa<eos>1:aaa;bbb", "context"),
        ({"context": 15}, "aaa<eos>", "context"),
    ],
)
def test_budgets_end_an_episode_as_truncated(options, text, ended_by) -> None:
    state = play(Count(), **options)
    assert text_of(state) == text
    assert state.tokens.tolist() == [*state.prompt_ids, *state.response_ids]
    assert state.status is Status.COMPLETED
    # An answer that a limit cut is no answer that the model ended.
    assert state.finish_reason == ("length" if options else "stop")
    # What people and judges read is what the model has seen and written.
    conversation = state.extra_fields["conversation"]
    shown = text_of(state).replace("<eos>", "")
    assert "".join(message["content"] for message in conversation) == shown
    assert state.response == conversation[-1]["content"] != ""
    assert state.extra_fields["episode"]["ended_by"] == ended_by
    assert state.sample_params.max_tokens == options.get("max_tokens", 100)
    used = int(state.response_mask.sum())
    assert used <= options.get("max_tokens", 100)
    limit = options.get("max_context") or options.get("context") or math.inf
    assert len(state.tokens) <= limit


def test_a_prompt_that_leaves_no_room_is_an_error_that_says_so() -> None:
    state = play(Count(), max_context=5)
    assert (state.status, len(state.response_ids)) == (Status.FAILED, 0)
    assert "has 5 tokens and leaves no room for an answer within max_context = 5" in state.error_msg


def test_no_reward_and_no_judge_is_a_reward_of_zero() -> None:
    assert play(Count(), max_tokens=2).reward == {"score": 0.0}


def test_an_environment_that_does_not_close_keeps_nobody_waiting(caplog) -> None:
    class Open(Count):
        async def close(self, state: RolloutState) -> None:
            await asyncio.sleep(math.inf)

    state = play(Open())
    assert (state.status, state.reward) == (Status.COMPLETED, {"score": 1.5})
    assert "environment Open did not close rollout g/0 within 60 s" in caplog.text


def stored(group: list[RolloutState]) -> list[RolloutState]:
    """As a buffer gives a group back after the process was killed: only plain data is left."""
    copies = []
    for state in group:
        fields = {name: getattr(state, name) for name in type(state).__slots__}
        fields["extra_fields"] = json.loads(json.dumps(state.extra_fields))
        copies.append(RolloutState(**fields))
    return copies


async def interrupt(loop: MultiTurnAgentLoop, group: list[RolloutState], after_s: float, partial: bool):
    loop.rollout_controller.engines[0]._paused = False
    task = asyncio.create_task(loop.generate_group(group, enable_partial_rollout=partial))
    await asyncio.sleep(after_s)
    before = asyncio.get_running_loop().time()
    await loop.pause()
    group = await task
    assert asyncio.get_running_loop().time() == before
    return group


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 6), max_size=5), st.booleans())
def test_an_episode_paused_anywhere_any_number_of_times_is_the_same_in_the_end(pauses_s, partial) -> None:
    async def main() -> None:
        group, environments = make_group(2), []
        for after_s in [*pauses_s, 1000.0]:
            environments.append(Count())
            # Another loop and environment each time, as in a process that was started again.
            loop = make_loop(environments[-1])
            group = stored(await interrupt(loop, group, after_s, partial))
            assert not environments[-1].open
        for state in group:
            assert text_of(state) == WHOLE
            assert state.tokens.tolist() == [*state.prompt_ids, *state.response_ids]
            assert text_of(state, mask=1) == "aaa<eos>bbb<eos>ccc<eos>"
            assert state.reward == {"score": 1.5}
            assert state.extra_fields["turns"] == 3
            assert len(state.extra_fields["conversation"]) == 5
            assert state.extra_fields["episode"]["memory"]["texts"] == ["aaa", "bbb", "ccc"]
            assert state.sample_params.max_tokens == 100
        if partial:
            # A turn that the environment has replied to is never played again.
            steps = [step for environment in environments for step in environment.steps]
            assert sorted(steps) == ["aaa", "aaa", "bbb", "bbb", "ccc", "ccc"]

    run(main())


@pytest.mark.parametrize("num_turns", range(4))
def test_a_reply_that_is_paused_twice_is_aborted_as_by_one_pause(num_turns) -> None:
    async def main() -> None:
        loop = make_loop(Count())
        task = asyncio.create_task(loop.generate_group(make_group(), enable_partial_rollout=True))
        await asyncio.sleep(4.5)
        pausing = asyncio.create_task(loop.pause())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await loop.pause()
        await pausing
        (state,) = await task
        assert (text_of(state), state.status) == ("aaa<eos>", Status.ABORTED)

    run(main())


def test_a_paused_turn_goes_on_from_its_tokens_and_a_paused_reply_with_the_reply() -> None:
    async def main() -> None:
        for after_s, text in ((2.5, "aa"), (4.5, "aaa<eos>"), (5.5, "aaa<eos>1:aaa;"), (7.5, "aaa<eos>1:aaa;bb")):
            (state,) = await interrupt(make_loop(Count()), make_group(), after_s, partial=True)
            assert (text_of(state), state.status, state.finish_reason) == (text, Status.ABORTED, "abort")
            assert state.reward is None
            (state,) = await make_loop(Count(), model_step=1).generate_group([state], enable_partial_rollout=True)
            assert text_of(state) == WHOLE
            # Every token keeps the step that made it; a reply has that of the token before it.
            old = sum(state.response_model_steps == 0)
            assert old == len(TOKENIZER.encode(text.replace("<eos>", "."))) or text == "aaa<eos>"

    run(main())


class Game:
    """An environment for one rollout, with a state of its own."""

    made = 0

    def __init__(self, *, turns: int = 3) -> None:
        self.turns, self.count, self.is_open = turns, 0, False
        Game.made += 1

    async def reset(self, state: RolloutState) -> None:
        self.is_open = True

    async def step(self, text: str) -> Reply:
        assert self.is_open
        self.count += 1
        await asyncio.sleep(1)
        return Reply(f"{self.count}:{text};", done=self.count == self.turns, reward=0.5)

    async def close(self) -> None:
        self.is_open = False


def test_an_environment_with_a_state_of_its_own_is_replayed() -> None:
    async def main() -> None:
        Game.made = 0
        environment = LiveEnvironment(Game, {"turns": 3})
        (state,) = await interrupt(make_loop(environment), make_group(), 9.5, partial=True)
        assert text_of(state) == "aaa<eos>1:aaa;bbb<eos>"
        assert not environment._live
        (state,) = await make_loop(environment).generate_group(stored([state]), enable_partial_rollout=True)
        assert text_of(state) == WHOLE
        assert state.reward == {"score": 1.5}
        assert Game.made == 2
        assert not environment._live

    run(main())


def test_a_replay_may_take_as_long_as_the_replies_together() -> None:
    async def main() -> None:
        loop = make_loop(LiveEnvironment(Game, {"turns": 4}), environment_timeout_s=1.5)
        (state,) = await interrupt(loop, make_group(), 14.5, partial=True)
        assert state.extra_fields["turns"] == 3
        loop = make_loop(LiveEnvironment(Game, {"turns": 4}), environment_timeout_s=1.5)
        (state,) = await loop.generate_group(stored([state]), enable_partial_rollout=True)
        assert (state.error_msg, state.reward) == (None, {"score": 2.0})

    run(main())


def test_rewards_say_at_which_token_they_were_earned() -> None:
    state = play(Count())
    rewards = state.extra_fields["turn_rewards"]
    assert sum(reward for _, reward in rewards) == state.reward["score"]
    # The environment's tokens begin right there, but after the last turn, where there are none.
    assert [int(state.response_mask[end]) for end, _ in rewards[:-1]] == [0] * (len(rewards) - 1)
    assert all(state.response_mask[end - 1] == 1 for end, _ in rewards)
    assert rewards[-1][0] == len(state.response_ids)


def test_a_judge_judges_and_can_read_the_environments_reward() -> None:
    class Half(Judge):
        async def score(self, state: RolloutState) -> float:
            return episode_reward(state) / 2

    assert play(Count(), judge=Half()).reward == {"score": 0.75}


class Broken(Count):
    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__()
        self.act = act

    async def step(self, state: RolloutState, memory: dict[str, Any], text: str) -> Reply:
        reply = await super().step(state, memory, text)
        return reply if memory["count"] < 2 or state.rollout_id != "g/1" else await self.act()


async def hang() -> Reply:
    await asyncio.sleep(math.inf)
    raise AssertionError


async def crash() -> Reply:
    raise KeyError("board")


async def leave() -> Reply:
    sys.exit(3)


async def forget() -> Any:
    return None


async def say_nothing() -> Reply:
    return Reply()


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (hang, "TimeoutError: environment Broken, turn 2 did not answer within 60 s"),
        (crash, "RuntimeError: environment Broken, turn 2: KeyError: 'board'"),
        (leave, "RuntimeError: environment Broken, turn 2: RuntimeError: it called sys.exit(3)"),
        (forget, "TypeError: environment Broken: step must return a Reply, got None"),
        (
            say_nothing,
            "ValueError: environment Broken was neither done nor had anything to say after turn 2; "
            "return Reply(text) or Reply(done=True)",
        ),
    ],
)
def test_a_broken_environment_fails_its_rollout_and_no_sibling(act, reason) -> None:
    environment = Broken(act)
    group = run(make_loop(environment).generate_group(make_group(3)))
    assert [state.status for state in group] == [Status.COMPLETED, Status.FAILED, Status.COMPLETED]
    assert group[1].error_msg == f"rollout g/1: MultiTurnAgentLoop: {reason}"
    assert not environment.open


def test_an_engines_error_in_a_later_turn_fails_the_rollout() -> None:
    def script(request: Any) -> Any:
        return RuntimeError("out of memory") if len(request.input_ids) > 10 else letters(request)

    state = play(Count(), script=script)
    assert (state.status, state.error_msg) == (Status.FAILED, "rollout g/0: RuntimeError: out of memory")


def test_a_cancelled_episode_closes_its_environment() -> None:
    async def main() -> None:
        for after_s in (0.0, 2.5, 4.5):
            environment = Count()
            task = asyncio.create_task(make_loop(environment).generate_group(make_group()))
            await asyncio.sleep(after_s)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not environment.open
            assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())


def test_who_waits_for_the_environment_is_seen() -> None:
    async def main() -> None:
        activities = Activities()
        loop = make_loop(Count(), activities=activities)
        task = asyncio.create_task(loop.generate_group(make_group()))
        await asyncio.sleep(4.5)
        seen = [(a.stage, a.name, a.note) for a in activities.in_flight()]
        assert seen == [("generate", "g/0", ""), ("tool", "g/0", "environment Count, turn 1")]
        await task

    run(main())


def test_a_run_file_names_environments_and_what_does_not_fit_is_said() -> None:
    def build(**arguments: Any) -> Any:
        return build_agent_loop(
            Component(name="multi_turn", arguments=arguments),
            rollout_controller=RolloutController(ScriptedEngine(letters)),
            judge=None,
            tokenizer=TOKENIZER,
            sample_params=SampleParams(),
        )

    own = f"{__name__}:Count"
    assert build(environment={"name": own, "arguments": {"turns": 5}}).environment.turns == 5
    live = build(environment={"name": "live", "arguments": {"make": f"{__name__}:Game"}})
    assert isinstance(live.environment, LiveEnvironment)
    for arguments, message in (
        ({}, "missing a required argument: 'environment'"),
        ({"environment": own, "max_turns": 0}, "'max_turns' = 0: .*greater than or equal to 1"),
        ({"environment": own, "turns": 3}, "unexpected keyword argument 'turns'"),
        ({"environment": {"name": own, "arguments": {"turn": 5}}}, "did you mean 'turns'"),
        ({"environment": "lives"}, "did you mean 'live'"),
        ({"environment": f"{__name__}:Game"}, "must be an Environment"),
    ):
        with pytest.raises(ConfigError, match=message):
            build(**arguments)


def test_an_interrupted_group_survives_a_snapshot_of_the_buffer(tmp_path) -> None:
    async def main() -> None:
        for after_s in (2.5, 4.5, 8.0):
            group = await interrupt(make_loop(Count()), make_group(2), after_s, partial=True)
            buffer = SyncReplayBufferConfig().build()
            await buffer.put(group, "t", model_step=0, current_train_step=1, stale_threshold=5)
            path = tmp_path / str(after_s)
            await buffer.save(path)
            resumed = SyncReplayBufferConfig().build()
            await resumed.resume(path)
            (group,) = await resumed.get(1, "t", Status.ABORTED)
            group = await make_loop(Count()).generate_group(group, enable_partial_rollout=True)
            assert [text_of(state) for state in group] == [WHOLE] * 2
            assert [state.reward for state in group] == [{"score": 1.5}] * 2

    run(main())
