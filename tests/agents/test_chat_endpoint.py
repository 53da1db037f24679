"""Programs that talk to a chat API: what they see, and what is recorded of it."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import httpx
import openai
import pytest

from forebay.agents.chat.conversation import RequestError, plain_message
from forebay.agents.chat.endpoint import ChatEndpoint
from forebay.agents.chat.rendering import IncrementRenderer
from forebay.agents.chat.session import ChatSession
from forebay.agents.chat.tool_calls import TurnReader
from forebay.agents.program import ProgramAgentLoop, ProgramSession
from forebay.config import ConfigError
from forebay.engines import GenerateRequest, RolloutController
from forebay.engines.scripted import ScriptedEngine
from forebay.models.tiny import character_tokenizer
from forebay.types import RolloutState, SampleParams, Status

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}|{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant|{% endif %}"
)
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 []|?+MARKED"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = character_tokenizer(ALPHABET)
    made.chat_template = TEMPLATE
    return made


def count_turns(tokenizer: Any) -> Any:
    """A model that answers with the number of turns it has seen: a1, a2, ..."""

    def script(request: GenerateRequest) -> list[int]:
        text = tokenizer.decode(request.input_ids.tolist())
        turn, _, begun = text.rpartition("[assistant|")
        whole = f"a{turn.count('[assistant|') + 1}"
        return [*tokenizer.encode(whole[len(begun) :], add_special_tokens=False), tokenizer.eos_token_id]

    return script


def make_state(number: int = 0, **fields: Any) -> RolloutState:
    return RolloutState(
        [{"role": "user", "content": "hello"}], rollout_id=f"r{number}", group_id="g", task_name="t", **fields
    )


def make_loop(tokenizer: Any, program: Any, *, max_tokens: int = 64, **engine: Any) -> ProgramAgentLoop:
    controller = RolloutController(ScriptedEngine(count_turns(tokenizer), **engine))
    return ProgramAgentLoop(
        controller, None, tokenizer, sample_params=SampleParams(max_tokens=max_tokens), program=program
    )


async def talk(session: ProgramSession) -> float:
    """An unmodified agent: three turns, each with the whole conversation so far."""
    messages: list[Any] = list(session.messages)
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        for number in range(3):
            answer = await client.chat.completions.create(model=session.model, messages=messages, temperature=0.3)
            messages.append(answer.choices[0].message.model_dump(exclude_none=True))
            messages.append({"role": "user", "content": f"more {number}"})
    return 0.5


async def test_a_conversation_is_one_trajectory_of_the_tokens_that_the_model_saw(tokenizer: Any) -> None:
    loop = make_loop(tokenizer, talk)
    (state,) = await loop.generate_group([make_state()])
    await loop.close()
    assert state.status is Status.COMPLETED, state.error_msg
    assert state.reward == {"score": 0.5}
    end = tokenizer.eos_token
    assert tokenizer.decode(state.tokens.tolist()) == (
        f"[user|hello{end}[assistant|a1{end}[user|more 0{end}[assistant|a2{end}[user|more 1{end}[assistant|a3{end}"
    )
    written = [t for t, m in zip(state.response_ids.tolist(), state.response_mask, strict=True) if m]
    assert tokenizer.decode(written) == f"a1{end}a2{end}a3{end}"
    assert (state.logprobs[state.response_mask == 1] == -1.0).all()
    assert (state.logprobs[state.response_mask == 0] == 0.0).all()
    assert set(state.response_model_steps.tolist()) == {0}
    assert len(state.prompt_ids) + len(state.response_ids) == len(state.tokens)


async def test_what_it_asks_otherwise_becomes_a_further_trajectory(tokenizer: Any) -> None:
    async def program(session: ProgramSession) -> float:
        await talk(session)
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key="k") as client:
            for _ in range(2):
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "sub agent"}])
        return 1.0

    loop = make_loop(tokenizer, program)
    group = await loop.generate_group([make_state(0), make_state(1)])
    await loop.close()
    assert [state.rollout_id for state in group] == ["r0", "r0/1", "r0/2", "r1", "r1/1", "r1/2"]
    assert all(state.status is Status.COMPLETED and state.reward == {"score": 1.0} for state in group)
    end = tokenizer.eos_token
    assert tokenizer.decode(group[1].tokens.tolist()) == f"[user|sub agent{end}[assistant|a1{end}"


async def test_sessions_at_the_same_time_are_isolated(tokenizer: Any) -> None:
    async def program(session: ProgramSession) -> float:
        name = session.task["rollout_id"]
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key="same") as client:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": name}])
        return 0.0

    loop = make_loop(tokenizer, program, request_latency_s=0.01)
    group = await loop.generate_group([make_state(number) for number in range(8)])
    await loop.close()
    end = tokenizer.eos_token
    for number, state in enumerate(group):
        assert tokenizer.decode(state.tokens.tolist()) == f"[user|r{number}{end}[assistant|a1{end}"


async def test_a_pause_aborts_and_the_same_program_goes_on_from_its_tokens(tokenizer: Any) -> None:
    num_calls = 0
    second = asyncio.Event()

    async def program(session: ProgramSession) -> float:
        nonlocal num_calls
        messages: list[Any] = list(session.messages)
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key="k", max_retries=0) as client:
            for number in range(3):
                num_calls += 1
                answer = await client.chat.completions.create(model="m", messages=messages)
                messages += [
                    {"role": "assistant", "content": answer.choices[0].message.content},
                    {"role": "user", "content": f"more {number}"},
                ]
        return 1.0

    def begin_at(request: GenerateRequest) -> float:
        """Every turn ends at once, but for the second one when it is first asked for: it has one token."""
        if num_calls != 2:
            return -100_000.0
        second.set()
        return -1500.0

    loop = make_loop(tokenizer, program, token_latency_s=1000.0, request_latency_s=begin_at)
    task = asyncio.create_task(loop.generate_group([make_state()]))
    await second.wait()
    await loop.rollout_controller.pause_generation()
    (state,) = await task
    assert state.status is Status.ABORTED
    end = tokenizer.eos_token
    begun = f"[user|hello{end}[assistant|a1{end}[user|more 0{end}[assistant|a"
    assert tokenizer.decode(state.tokens.tolist()) == begun
    await loop.rollout_controller.continue_generation()
    # All that is needed to go on is plain data, as a store keeps it.
    state.extra_fields = json.loads(json.dumps(state.extra_fields))
    (state,) = await loop.generate_group([state], enable_partial_rollout=True)
    await loop.close()
    assert state.status is Status.COMPLETED, state.error_msg
    assert tokenizer.decode(state.tokens.tolist()) == f"{begun}2{end}[user|more 1{end}[assistant|a3{end}"
    # The first turn came from the record, the second was finished, the third made: all three asked again.
    assert num_calls == 2 + 3


async def test_a_program_that_asks_something_else_after_a_pause_starts_over(tokenizer: Any) -> None:
    loop = make_loop(tokenizer, talk)
    state = make_state(sample_params=SampleParams(max_tokens=64))
    controller = loop.rollout_controller
    parts = (controller, tokenizer, IncrementRenderer(tokenizer), TurnReader(tokenizer))
    first = ChatSession(state, *parts)
    await first.complete([{"role": "user", "content": "hello"}])
    again = ChatSession(state, *parts)
    turn = await again.complete([{"role": "user", "content": "other"}])
    assert turn.message["content"] == "a1"
    end = tokenizer.eos_token
    assert tokenizer.decode(state.tokens.tolist()) == f"[user|other{end}[assistant|a1{end}"
    assert again.finished() == [state]


async def test_the_budget_holds_over_all_turns_and_cuts_the_rollout(tokenizer: Any) -> None:
    loop = make_loop(tokenizer, talk, max_tokens=5)
    (state,) = await loop.generate_group([make_state()])
    await loop.close()
    assert state.status is Status.COMPLETED, state.error_msg
    assert state.finish_reason == "length"
    assert int(state.response_mask.sum()) == 5
    # Nothing hangs on the end that the model did not answer.
    assert state.response_mask[-1] == 1


@pytest.mark.parametrize("kind", ["raises", "exits", "silent", "slow"])
async def test_a_program_that_fails_fails_its_rollout_with_its_name(tokenizer: Any, kind: str) -> None:
    async def broken(session: ProgramSession) -> None:
        if kind == "raises":
            raise KeyError("no such tool")
        if kind == "exits":
            sys.exit(3)
        if kind == "slow":
            await asyncio.Event().wait()

    loop = make_loop(tokenizer, broken)
    loop.arguments = loop.arguments.model_copy(update={"timeout_s": 0.05 if kind == "slow" else 60.0})
    (state,) = await loop.generate_group([make_state()])
    await loop.close()
    assert state.status is Status.FAILED
    expected = {
        "raises": "no such tool",
        "exits": "called sys.exit(3)",
        "silent": "without one answer",
        "slow": "longer than 0.05 s",
    }
    assert expected[kind] in str(state.error_msg)
    assert "broken" in str(state.error_msg)


async def test_a_command_is_a_program_too(tokenizer: Any) -> None:
    code = (
        "import json, openai, os, sys; task = json.load(sys.stdin); client = openai.OpenAI();"
        "a = client.chat.completions.create(model=os.environ['OPENAI_MODEL'], messages=task['messages']);"
        "print('thinking'); print(json.dumps({'score': 0.25, 'said': a.choices[0].message.content}))"
    )
    loop = make_loop(tokenizer, [sys.executable, "-c", code])
    (state,) = await loop.generate_group([make_state()])
    bad = make_loop(tokenizer, [sys.executable, "-c", "import sys; sys.exit('no good')"])
    (failed,) = await bad.generate_group([make_state()])
    await loop.close()
    await bad.close()
    assert state.reward == {"score": 0.25, "said": "a1"}
    assert failed.status is Status.FAILED
    assert "code 1: no good" in str(failed.error_msg)


async def test_streams_logprobs_models_and_errors_are_as_clients_expect(tokenizer: Any) -> None:
    seen: dict[str, Any] = {}

    async def program(session: ProgramSession) -> float:
        messages: Any = session.messages
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key="k") as client:
            seen["models"] = [model.id async for model in client.models.list()]
            stream = await client.chat.completions.create(
                model="m", messages=messages, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            seen["text"] = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            seen["usage"] = chunks[-1].usage.completion_tokens
            whole = await client.chat.completions.create(model="m", messages=messages, logprobs=True)
            seen["logprobs"] = [item.logprob for item in whole.choices[0].logprobs.content]
            wrongs: list[Any] = [{"n": 2}, {"messages": []}, {"max_tokens": 0}, {"tool_choice": "required"}]
            for wrong in [*wrongs, {"tool_choice": {"type": "function", "function": {"name": "f"}}}]:
                with pytest.raises(openai.BadRequestError) as error:
                    await client.chat.completions.create(**{"model": "m", "messages": messages, **wrong})
                seen.setdefault("errors", []).append(str(error.value))
            with pytest.raises(openai.NotFoundError, match="chat/completions"):
                await client.completions.create(model="m", prompt="x")
            seen["url"] = session.base_url
        return 0.0

    loop = make_loop(tokenizer, program)
    (state, *_) = await loop.generate_group([make_state()])
    async with httpx.AsyncClient() as client:
        late = await client.post(f"{seen['url']}/chat/completions", json={"messages": []})
    await loop.close()
    assert state.status is Status.COMPLETED, state.error_msg
    assert seen["models"] == ["policy"]
    assert seen["text"] == "a1"
    assert seen["usage"] == 3
    assert seen["logprobs"] == [-1.0, -1.0, -1.0]
    assert "n = 2" in seen["errors"][0]
    assert all("cannot be enforced" in error for error in seen["errors"][3:])
    assert late.status_code == 404


def test_it_listens_on_loopback_unless_told_otherwise() -> None:
    with pytest.raises(ConfigError, match=r"remote:0\.0\.0\.0"):
        ChatEndpoint("0.0.0.0")
    ChatEndpoint("remote:0.0.0.0:8080")
    for host in ("[::1]:0", "::1"):
        ChatEndpoint(host)
    for host in ("127.0.0.1:x", "127.0.0.1:99999"):
        with pytest.raises(ConfigError, match="is neither HOST nor HOST:PORT"):
            ChatEndpoint(host)


def test_messages_are_compared_in_one_form() -> None:
    sent = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
    }
    plain = plain_message(sent)
    assert plain["content"] == ""
    assert plain["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    parts = plain_message({"role": "developer", "content": [{"type": "text", "text": "a"}]})
    assert parts == {"role": "system", "content": "a"}
    with pytest.raises(RequestError, match="image_url"):
        plain_message({"role": "user", "content": [{"type": "image_url", "image_url": {}}]})
