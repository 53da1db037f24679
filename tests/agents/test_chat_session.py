"""What a chat session keeps in order while requests come at once, are refused, given up or interrupted."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from typing import Any

import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.agents.chat.rendering import IncrementRenderer
from forebay.agents.chat.session import BudgetExhaustedError, ChatSession, SessionEndedError
from forebay.agents.chat.tool_calls import TurnReader
from forebay.agents.program import ProgramAgentLoop, ProgramSession
from forebay.aio.virtual_time import run
from forebay.engines import GenerateRequest, RolloutController
from forebay.engines.scripted import ScriptedEngine
from forebay.models.tiny import character_tokenizer
from forebay.types import RolloutState, SampleParams, Status

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}|{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant|{% endif %}"
)
TOKENIZER = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 []|MARKED")
TOKENIZER.chat_template = TEMPLATE


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def decode(ids: Any) -> str:
    return str(TOKENIZER.decode(np.asarray(ids).tolist())).replace(TOKENIZER.eos_token, ".")


def echo(request: GenerateRequest) -> list[int]:
    """A model that repeats the last message, from where its turn was cut."""
    text = decode(request.input_ids)
    whole, _, begun = text.rpartition("[assistant|")
    said = whole.rpartition("|")[2].removesuffix(".") + "."
    for stop in request.params.stop:
        if stop in said:
            return encode(said[len(begun) : said.index(stop) + len(stop)])
    return [*encode(said[len(begun) : -1]), TOKENIZER.eos_token_id]


def make_session(
    *, max_tokens: int = 64, max_turn_tokens: int | None = None, max_context: int | None = None, **engine: Any
) -> ChatSession:
    state = RolloutState([], rollout_id="r", sample_params=SampleParams(max_tokens=max_tokens))
    controller = RolloutController(ScriptedEngine(echo, **engine))
    return ChatSession(
        state,
        controller,
        TOKENIZER,
        IncrementRenderer(TOKENIZER),
        TurnReader(TOKENIZER),
        max_turn_tokens=max_turn_tokens,
        max_context=max_context,
    )


def make_loop(program: Any, **arguments: Any) -> ProgramAgentLoop:
    return ProgramAgentLoop(
        RolloutController(ScriptedEngine(echo)),
        None,
        TOKENIZER,
        sample_params=SampleParams(max_tokens=9),
        program=program,
        **arguments,
    )


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.text("ab", max_size=6), min_size=1, max_size=8),
    st.integers(1, 30),
    st.one_of(st.none(), st.integers(1, 6)),
    st.one_of(st.none(), st.integers(1, 8)),
)
def test_requests_at_once_share_the_budget_and_lose_no_token(texts, budget, turn_tokens, limit) -> None:
    async def main() -> None:
        session = make_session(max_tokens=budget, max_turn_tokens=turn_tokens, token_latency_s=0.1)
        answers = await asyncio.gather(
            *(session.complete([user(text)], max_tokens=limit) for text in texts), return_exceptions=True
        )
        turns = [answer for answer in answers if not isinstance(answer, BaseException)]
        refused = [answer for answer in answers if isinstance(answer, BaseException)]
        assert all(isinstance(error, BudgetExhaustedError) for error in refused)
        used = sum(turn.num_tokens for turn in turns)
        assert used <= budget
        # Refused only where nothing was left, and cut only by a limit.
        assert not refused or used == budget
        for text, answer in zip(texts, answers, strict=True):
            if not isinstance(answer, BaseException) and answer.finish_reason == "stop":
                assert answer.message["content"] == text
        states = session.finished()
        assert sum(int(state.response_mask.sum()) for state in states) == used
        assert len({state.rollout_id for state in states}) == len(states) == len(turns)
        for state in states:
            assert decode(state.tokens).startswith("[user|")
            assert len(state.tokens) == len(state.prompt_ids) + len(state.response_ids)

    run(main())


@pytest.mark.parametrize("limit", ["max_context_tokens", "max_context"])
async def test_a_question_that_does_not_fit_leaves_no_trace(limit: str) -> None:
    session = make_session(**{limit: 50})
    await session.complete([user("a")])
    before = session.state.tokens.copy()
    for _ in range(2):
        # The second time it must not pass for a question that was asked already.
        with pytest.raises(BudgetExhaustedError):
            await session.complete([user("a"), said("a"), user("b" * 60)])
    assert session.is_exhausted
    np.testing.assert_array_equal(session.state.tokens, before)
    turn = await session.complete([user("a"), said("a"), user("b")])
    assert turn.message["content"] == "b"
    assert decode(session.state.tokens) == "[user|a.[assistant|a.[user|b.[assistant|b."
    # What was asked last fitted: what goes wrong with the program now is its own doing.
    assert not session.is_exhausted
    with pytest.raises(BudgetExhaustedError):
        await session.complete([user("c" * 60)])
    assert session.is_exhausted
    assert session.finished() == [session.state]
    assert session.state.finish_reason == "stop"


async def test_a_trajectory_that_fills_the_context_is_cut_and_the_others_are_not() -> None:
    session = make_session(max_context=30)
    turn = await session.complete([user("abcdefghij")])
    assert turn.finish_reason == "length"
    assert len(session.state.tokens) == 30
    turn = await session.complete([user("abc")])
    assert turn.finish_reason == "stop"
    assert [state.finish_reason for state in session.finished()] == ["length", "stop"]
    assert session.is_exhausted


async def test_a_replayed_turn_is_answered_as_it_was() -> None:
    session = make_session()
    asked = [user("abcdef")]
    first = await session.complete(asked, max_tokens=3)
    asked = [*asked, first.message, user("b")]
    second = await session.complete(asked)
    third = [*asked, second.message, user("c")]
    await session.complete(third)
    record = json.loads(json.dumps(session.state.extra_fields))
    state = RolloutState([], rollout_id="r", sample_params=session.state.sample_params, extra_fields=record)
    for name in ("prompt_ids", "tokens", "response_ids", "logprobs", "response_mask"):
        setattr(state, name, getattr(session.state, name))
    again = ChatSession(state, session._controller, TOKENIZER, session._increments, TurnReader(TOKENIZER))
    assert (first.finish_reason, first.num_tokens) == ("length", 3)
    replayed = [await again.complete(part) for part in ([user("abcdef")], asked)]
    told, told_before = (
        [{**vars(t), "logprobs": t.logprobs()} for t in turns] for turns in (replayed, [first, second])
    )
    assert told == told_before


async def test_a_prefix_of_the_prompt_is_no_replay() -> None:
    """Few-shot examples are the program's own: they are no turns of the model."""
    session = make_session()
    shots = [user("a"), said("x"), user("b")]
    await session.complete(shots)
    parts = (session._controller, TOKENIZER, session._increments, TurnReader(TOKENIZER))
    turn = await ChatSession(session.state, *parts).complete(shots[:1])
    assert turn.message == said("a")


async def test_where_the_first_question_never_fits_another_trajectory_becomes_the_rollout() -> None:
    session = make_session(max_context_tokens=50, request_latency_s=0.01)
    first = asyncio.create_task(session.complete([user("c" * 60)]))
    second = asyncio.create_task(session.complete([user("b")]))
    with pytest.raises(BudgetExhaustedError):
        await first
    await second
    (state,) = session.finished()
    assert state is session.state
    assert decode(state.tokens) == "[user|b.[assistant|b."
    assert len(state.logprobs) == len(state.response_ids)


async def test_the_text_that_ends_a_turn_is_recorded_and_not_answered() -> None:
    session = make_session()
    turn = await session.complete([user("a end b")], stop=["end"])
    assert turn.message["content"] == "a "
    assert decode(session.state.response_ids) == "a end"
    await session.complete([user("a end b"), said("a "), user("c")])
    assert decode(session.state.tokens) == "[user|a end b.[assistant|a end.[user|c.[assistant|c."


async def test_single_tokens_become_text_only_where_a_program_asks_for_them(monkeypatch) -> None:
    session, decode_all, single = make_session(), TOKENIZER.decode, []

    def counting(ids: Any, **options: Any) -> Any:
        single.extend(ids if len(ids) == 1 else ())
        return decode_all(ids, **options)

    monkeypatch.setattr(TOKENIZER, "decode", counting)
    turn = await session.complete([user("abc")])
    assert (turn.num_tokens, single) == (4, [])
    texts, values = zip(*turn.logprobs(), strict=True)
    assert ("".join(texts), single) == ("abc<eos>", session.state.response_ids.tolist())
    assert values == (-1.0,) * 4


async def test_close_gives_up_what_nobody_waits_for() -> None:
    session = make_session(token_latency_s=10.0)
    controller = session._controller
    requests = [asyncio.create_task(session.complete([user("abc")])) for _ in range(3)]
    await asyncio.sleep(0.01)
    await session.close()
    results = await asyncio.gather(*requests, return_exceptions=True)
    assert [type(result) for result in results] == [SessionEndedError] * 3
    assert session.finished() == [session.state]
    assert not len(session.state.response_ids)
    assert (await controller.health()).num_running == 0
    with pytest.raises(SessionEndedError):
        await session.complete([user("abc")])


async def test_a_program_that_gives_up_a_request_leaves_no_turn_behind() -> None:
    async def program(session: ProgramSession) -> float:
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key="k", max_retries=0) as client:
            answer = await client.chat.completions.create(model="m", messages=[user("a")])
            messages: Any = [user("a"), said(answer.choices[0].message.content), user("b" * 90)]
            with pytest.raises(openai.APITimeoutError):
                await client.chat.completions.create(model="m", messages=messages, timeout=0.2)
        return 1.0

    controller = RolloutController(ScriptedEngine(echo, token_latency_s=0.01))
    loop = ProgramAgentLoop(controller, None, TOKENIZER, sample_params=SampleParams(max_tokens=500), program=program)
    (state,) = await loop.generate_group([RolloutState([], rollout_id="r")])
    await asyncio.sleep(0)
    assert (await controller.health()).num_running == 0
    await loop.close()
    assert state.status is Status.COMPLETED, state.error_msg
    assert decode(state.tokens) == "[user|a.[assistant|a."


async def test_a_pause_ends_a_program_that_is_at_a_tool_and_repeats_no_turn() -> None:
    at_tool, num_generated = asyncio.Event(), 0

    def count(request: GenerateRequest) -> list[int]:
        nonlocal num_generated
        num_generated += 1
        return echo(request)

    async def program(session: ProgramSession) -> float:
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key="k") as client:
            messages: Any = [user("a")]
            answer = await client.chat.completions.create(model="m", messages=messages)
            messages += [said(answer.choices[0].message.content), user("b")]
            if not at_tool.is_set():
                at_tool.set()
                await asyncio.sleep(60)
            await client.chat.completions.create(model="m", messages=messages)
        return 1.0

    loop = ProgramAgentLoop(
        RolloutController(ScriptedEngine(count)),
        None,
        TOKENIZER,
        sample_params=SampleParams(max_tokens=50),
        program=program,
    )
    task = asyncio.create_task(loop.generate_group([RolloutState([], rollout_id="r")]))
    await at_tool.wait()
    await loop.pause()
    (state,) = await task
    assert (state.status, state.finish_reason) == (Status.ABORTED, "abort")
    assert decode(state.tokens) == "[user|a.[assistant|a."
    await loop.rollout_controller.continue_generation()
    (state,) = await loop.generate_group([state], enable_partial_rollout=True)
    await loop.close()
    assert state.status is Status.COMPLETED, state.error_msg
    assert decode(state.tokens) == "[user|a.[assistant|a.[user|b.[assistant|b."
    assert num_generated == 2


async def test_a_pause_keeps_the_turns_that_were_running_beside_each_other() -> None:
    """The first trajectory's turn ends after the pause was seen elsewhere; nothing is written behind it."""
    running = asyncio.Event()

    def begin_at(request: GenerateRequest) -> float:
        """A turn ends at once, but for the first one when it is first asked for: it has four tokens."""
        if running.is_set():
            return -100_000.0
        running.set()
        return -4500.0

    session = make_session(token_latency_s=1000.0, request_latency_s=begin_at, max_turn_tokens=20)
    first = asyncio.create_task(session.complete([user("abcdefgh")]))
    await running.wait()
    await session.complete([user("x")])
    session.interrupt()
    await asyncio.gather(session.close(), session._controller.pause_generation())
    assert session.end_status is Status.ABORTED
    with pytest.raises(SessionEndedError):
        await first
    written = decode(session.state.response_ids)
    assert written == "abcd"
    again = ChatSession(session.state, session._controller, TOKENIZER, session._increments, TurnReader(TOKENIZER))
    await again._controller.continue_generation()
    turn = await again.complete([user("abcdefgh")])
    assert turn.message["content"] == "abcdefgh"


async def test_a_program_that_does_not_repeat_itself_after_a_pause_fails() -> None:
    session = make_session()
    await session.complete([user("a")])
    await session.complete([user("a"), said("a"), user("b")])
    again = ChatSession(session.state, session._controller, TOKENIZER, session._increments, TurnReader(TOKENIZER))
    assert (await again.complete([user("a")])).message["content"] == "a"
    with pytest.raises(RuntimeError, match="did not ask again"):
        again.finished()


async def test_lost_engines_fail_the_rollout_whatever_the_program_makes_of_it() -> None:
    class Gone:
        async def generate_sample(self, state: RolloutState) -> RolloutState:
            raise OSError("no engine is left")

        async def pause_generation(self) -> None:
            pass

    async def program(session: ProgramSession) -> float:
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key="k") as client:
            with pytest.raises(openai.APIStatusError):
                await client.chat.completions.create(model="m", messages=[user("a")])
        return 1.0

    loop = ProgramAgentLoop(Gone(), None, TOKENIZER, sample_params=SampleParams(max_tokens=5), program=program)
    (state,) = await loop.generate_group([RolloutState([], rollout_id="r")])
    await loop.close()
    assert state.status is Status.FAILED
    assert "no engine is left" in str(state.error_msg)


async def test_plain_functions_may_all_wait_at_the_same_time() -> None:
    """More of them than a pool of threads has, each waiting for all others."""
    barrier = threading.Barrier(40, timeout=300)

    def program(session: ProgramSession) -> float:
        barrier.wait()
        with openai.OpenAI(base_url=session.base_url, api_key="k") as client:
            client.chat.completions.create(model="m", messages=[user(session.task["rollout_id"])])
        return 1.0

    loop = make_loop(program=program)
    group = await loop.generate_group([RolloutState([], rollout_id=f"r{i}") for i in range(40)])
    await loop.close()
    assert {state.status for state in group} == {Status.COMPLETED}, group[0].error_msg


@pytest.mark.parametrize(
    ("command", "score"),
    [
        ("import sys; sys.stdout.write('x' * 3_000_000 + '\\n0.5\\n')", 0.5),
        ("import subprocess; subprocess.Popen(['sleep', '60']); print(0.25)", 0.25),
    ],
    ids=["chatty", "leaves a process"],
)
async def test_commands_that_print_much_or_leave_something_running(command: str, score: float) -> None:
    ask = (
        "import json, os, urllib.request as u; u.urlopen(u.Request(os.environ['OPENAI_BASE_URL'] + "
        "'/chat/completions', json.dumps({'messages': [{'role': 'user', 'content': 'a'}]}).encode()));"
    )
    loop = make_loop(program=[sys.executable, "-c", ask + command], timeout_s=30)
    (state,) = await loop.generate_group([RolloutState([], rollout_id="r")])
    await loop.close()
    assert state.status is Status.COMPLETED, state.error_msg
    assert state.reward == {"score": score}


@pytest.mark.parametrize("result", ["good", [1], {"reward": 1}])
async def test_what_is_no_reward_fails_the_rollout(result: Any) -> None:
    async def program(session: ProgramSession) -> Any:
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key="k") as client:
            await client.chat.completions.create(model="m", messages=[user("a")])
        return result

    loop = make_loop(program=program)
    (state,) = await loop.generate_group([RolloutState([], rollout_id="r")])
    await loop.close()
    assert state.status is Status.FAILED
    assert "must return a number" in str(state.error_msg)
