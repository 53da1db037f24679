"""Tool calls through the chat endpoint: what an unmodified client sees, and what is recorded."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from chat_families import FAMILIES, make_tokenizer

from forebay.agents.chat.tool_calls import TurnReader, choose_parser, choose_reader, parse_hermes
from forebay.agents.program import ProgramAgentLoop, ProgramSession
from forebay.engines import RolloutController
from forebay.engines.scripted import ScriptedEngine
from forebay.types import RolloutState, SampleParams, Status

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {}, "b": {}}},
    },
}


def script(tokenizer: Any, turns: list[str]) -> Any:
    """A model that writes `turns`, one after the other, whatever it reads."""
    written = iter(turns)
    return lambda request: tokenizer.encode(next(written), add_special_tokens=False)


def make_loop(name: str, turns: list[str], program: Any, **arguments: Any) -> ProgramAgentLoop:
    tokenizer = make_tokenizer(name)
    controller = RolloutController(ScriptedEngine(script(tokenizer, turns)))
    return ProgramAgentLoop(
        controller, None, tokenizer, sample_params=SampleParams(max_tokens=500), program=program, **arguments
    )


async def run(loop: ProgramAgentLoop) -> list[RolloutState]:
    state = RolloutState([{"role": "user", "content": "1 + 2 + 3?"}], rollout_id="r", group_id="g")
    group = await loop.generate_group([state])
    await loop.close()
    return group


async def agent(session: ProgramSession) -> dict[str, Any]:
    """An unmodified tool agent: calls what the model asks for until it answers."""
    messages: list[Any] = list(session.messages)
    seen = []
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key="k") as client:
        while True:
            answer = await client.chat.completions.create(model="m", messages=messages, tools=[ADD])
            (choice,) = answer.choices
            seen.append(choice)
            messages.append(choice.message.model_dump(exclude_none=True))
            if not choice.message.tool_calls:
                return {"score": 1.0, "answer": choice.message.content, "choices": seen}
            for call in choice.message.tool_calls:
                arguments = json.loads(call.function.arguments)
                result = arguments["a"] + arguments["b"]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


def written_calls(name: str, *calls: dict[str, Any]) -> str:
    if name == "qwen":
        return "".join(f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    if name == "llama3":
        return json.dumps({"name": calls[0]["name"], "parameters": calls[0]["arguments"]})
    return f"[TOOL_CALLS] {json.dumps(calls)}"


@pytest.mark.parametrize("name", ["qwen", "llama3", "mistral"])
async def test_a_client_calls_tools_and_all_of_it_is_one_trajectory(name: str) -> None:
    end = FAMILIES[name].end
    turns = [
        written_calls(name, {"name": "add", "arguments": {"a": 1, "b": 2}}) + end,
        written_calls(name, {"name": "add", "arguments": {"a": 3, "b": 3}}) + end,
        "It is 6." + end,
    ]
    (state,) = await run(make_loop(name, turns, agent))
    assert state.status is Status.COMPLETED, state.error_msg
    assert state.reward["answer"] == "It is 6."
    first, second, last = state.reward["choices"]
    assert [choice.finish_reason for choice in (first, second, last)] == ["tool_calls", "tool_calls", "stop"]
    assert first.message.content is None
    (call,) = first.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "add",
        {"a": 1, "b": 2},
    )
    assert call.id != second.message.tool_calls[0].id
    tokenizer = make_tokenizer(name)
    written = [t for t, m in zip(state.response_ids.tolist(), state.response_mask, strict=True) if m]
    assert tokenizer.decode(written) == "".join(turns)
    # What stands between two turns is what the template adds for the result.
    text = tokenizer.decode(state.tokens.tolist())
    between = text[text.index(turns[0]) + len(turns[0]) : text.index(turns[1])]
    assert "3" in between
    assert between.rstrip("\n ").endswith({"qwen": "assistant", "llama3": "<|end_header_id|>", "mistral": "]"}[name])


async def test_several_calls_and_the_text_before_them() -> None:
    calls = [{"name": "add", "arguments": {"a": n, "b": 1}} for n in range(2)]
    turns = ["I add." + written_calls("qwen", *calls) + "<|im_end|>", "Done.<|im_end|>"]
    (state,) = await run(make_loop("qwen", turns, agent))
    message = state.reward["choices"][0].message
    assert message.content == "I add."
    assert [json.loads(call.function.arguments)["a"] for call in message.tool_calls] == [0, 1]
    assert len({call.id for call in message.tool_calls}) == 2
    text = make_tokenizer("qwen").decode(state.tokens.tolist())
    assert "<tool_response>\n1\n</tool_response><tool_response>\n2\n</tool_response>" in text


async def test_a_call_that_cannot_be_read_is_text_and_so_is_one_that_is_not_wanted() -> None:
    async def program(session: ProgramSession) -> float:
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key="k") as client:
            for choice in ("auto", "none"):
                answer = await client.chat.completions.create(
                    model="m", messages=session.messages, tools=[ADD], tool_choice=choice
                )
                assert answer.choices[0].message.tool_calls is None
                assert "<tool_call>" in answer.choices[0].message.content
                assert "<|im_end|>" not in answer.choices[0].message.content
        return 1.0

    broken = '<tool_call>\n{"name": "add", </tool_call><|im_end|>'
    good = written_calls("qwen", {"name": "add", "arguments": {}}) + "<|im_end|>"
    group = await run(make_loop("qwen", [broken, good], program))
    assert [state.status for state in group] == [Status.COMPLETED] * 2, group[0].error_msg


def test_a_call_full_of_blanks_is_read_in_one_pass() -> None:
    # Tried in every split of the blanks, this would take minutes.
    [call] = parse_hermes("<tool_call>{" + "\n" * 400_000 + "}")
    assert call.problem
    [call] = parse_hermes('<tool_call>\n\n{"name": "add", "arguments": {}}\n\n</tool_call>')
    assert call.name == "add"


async def test_streams_carry_tool_calls() -> None:
    async def program(session: ProgramSession) -> dict[str, Any]:
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key="k") as client:
            stream = await client.chat.completions.create(
                model="m", messages=session.messages, tools=[ADD], stream=True
            )
            chunks = [chunk.choices[0] async for chunk in stream]
        (call,) = chunks[0].delta.tool_calls
        assert (call.index, call.function.name) == (0, "add")
        return {"score": 1.0, "reason": chunks[-1].finish_reason}

    good = written_calls("qwen", {"name": "add", "arguments": {"a": 1}}) + "<|im_end|>"
    (state,) = await run(make_loop("qwen", [good], program))
    assert state.reward == {"score": 1.0, "reason": "tool_calls"}


async def test_a_model_whose_calls_nobody_can_read_is_given_no_tools() -> None:
    async def program(session: ProgramSession) -> float:
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key="k") as client:
            with pytest.raises(openai.BadRequestError, match="set the agent's argument parser"):
                await client.chat.completions.create(model="m", messages=session.messages, tools=[ADD])
            with pytest.raises(openai.BadRequestError, match="tools must be a list"):
                await client.chat.completions.create(
                    model="m", messages=session.messages, extra_body={"tools": {"add": ADD}}
                )
            await client.chat.completions.create(model="m", messages=session.messages)
        return 1.0

    (state,) = await run(make_loop("gemma", ["Hi.<end_of_turn>"], program))
    assert state.status is Status.COMPLETED, state.error_msg


async def test_a_parser_of_ones_own_reads_calls_without_names() -> None:
    """`=1+2=`, the form of a small model, becomes a call of the only tool with its only parameter."""
    tool = {"type": "function", "function": {"name": "calc", "parameters": {"properties": {"x": {}}}}}
    reader = choose_reader(make_tokenizer("gemma"), r"=(?P<arguments>[^=]*)=")
    ids = make_tokenizer("gemma").encode("so =1+2=", add_special_tokens=False)
    (call,) = reader.read(ids, [tool], num_calls=4)["tool_calls"]
    assert call["function"] == {"name": "calc", "arguments": {"x": "1+2"}}
    assert call["id"] == "call00004"
    assert "tool_calls" not in reader.read(ids, [tool, ADD])
    with pytest.raises(ValueError, match="unknown parser"):
        make_loop("gemma", [], agent, parser="hermess")


def test_ids_are_as_long_as_templates_insist_on() -> None:
    tokenizer = make_tokenizer("mistral")
    reader = TurnReader(tokenizer, choose_parser("mistral", tokenizer))
    ids = tokenizer.encode('[TOOL_CALLS] [{"name": "add", "arguments": {}}]</s>', add_special_tokens=False)
    assert len(reader.read(ids, [ADD], num_calls=12)["tool_calls"][0]["id"]) == 9
