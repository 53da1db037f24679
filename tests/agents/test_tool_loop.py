"""Tool calls: reading them in every dialect, running them, and what a model reads of what went wrong."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
import time
from typing import Any

import pytest
from chat_families import FAMILIES, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.agents import ToolAgentLoop
from forebay.agents.build import build_agent_loop
from forebay.agents.chat.tool_calls import PARSERS, ToolCall, choose_parser, parse_by, parse_pattern
from forebay.aio.time_limits import MAX_OVERRUNNING
from forebay.aio.virtual_time import run
from forebay.config import Component, ConfigError
from forebay.engines import RolloutController, ScriptedEngine
from forebay.judges import ExactMatchJudge
from forebay.tools import FunctionTool, ToolUnavailableError
from forebay.tools.contract import make_schema
from forebay.types import RolloutState, SampleParams, Status
from forebay.watching.activity import Activities

ARGUMENTS = st.dictionaries(st.text("abxy_", min_size=1), st.one_of(st.text(), st.integers(), st.booleans()))


@settings(deadline=None, max_examples=50)
@given(st.lists(ARGUMENTS, min_size=1, max_size=3))
def test_calls_are_read_back_as_they_were_written(arguments) -> None:
    expected = [ToolCall("f.g-1", given) for given in arguments]
    calls = [{"name": "f.g-1", "arguments": given} for given in arguments]
    blocks = "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    # A text with the end tag in it ends the call, in this dialect's own readers too.
    if "</tool_call>" not in json.dumps(calls):
        assert PARSERS["hermes"](f"I see. {blocks}") == expected
    llama = [{"name": "f.g-1", "parameters": given} for given in arguments]
    assert PARSERS["llama3"]("<|python_tag|>" + "; ".join(map(json.dumps, llama))) == expected
    assert PARSERS["llama3"](json.dumps(llama[0])) == expected[:1]
    assert PARSERS["mistral"](f"[TOOL_CALLS] {json.dumps(calls)}") == expected
    named = "".join(f"[TOOL_CALLS]f.g-1[ARGS]{json.dumps(given)}" for given in arguments)
    if "[TOOL_CALLS]" not in json.dumps(calls):
        assert PARSERS["mistral"](named) == expected


DEEP = "[" * 100_000
"""What `json` answers with a RecursionError."""


@pytest.mark.parametrize(
    ("parser", "text", "problem"),
    [
        ("hermes", '<tool_call>{"name": "f", </tool_call>', "cannot be read: Expecting property name"),
        ("hermes", '<tool_call>["f"]</tool_call>', 'it needs "name" and "arguments"'),
        ("hermes", '<tool_call>{"name": "f", "arguments": 3}</tool_call>', "are not an object"),
        ("llama3", "<|python_tag|>f(1)", "cannot be read"),
        ("mistral", "[TOOL_CALLS] [{]", "cannot be read"),
        ("mistral", "[TOOL_CALLS] f", "no call"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{x", "cannot be read"),
        ("hermes", "<tool_call>" + DEEP, "nested more than 50 deep"),
        ("llama3", "<|python_tag|>" + DEEP, "nested more than 50 deep"),
        ("mistral", "[TOOL_CALLS] " + DEEP, "nested more than 50 deep"),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"x": ' + "[" * 60 + "]" * 60 + "}", "nested more than 50 deep"),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', 'it needs "name"'),
    ],
)
def test_a_malformed_call_says_what_is_wrong(parser, text, problem) -> None:
    (call,) = PARSERS[parser](text)
    assert problem in str(call.problem)


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize(
    "text",
    [
        *("", "The answer is 42.", '{"answer": 42}', "[1, 2]"),
        *('{"name": "Bob", "age": 3}', '{"name": "Bob", "of": {"parameters": 1}}'),
    ],
)
def test_an_answer_is_no_call(parser, text) -> None:
    assert PARSERS[parser](text) == []


def test_a_call_without_its_end_tag_and_arguments_as_text_are_read() -> None:
    assert PARSERS["hermes"]('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}') == [ToolCall("f", {"x": 1})]


def test_patterns_read_calls_of_ones_own_form() -> None:
    parse = parse_pattern(r"CALL (?P<name>\w+)\((?P<arguments>.*?)\)")
    assert parse('CALL f({"x": 1}) CALL g(hello)') == [ToolCall("f", {"x": 1}), ToolCall("g", "hello")]
    for pattern, message in (("(?P<arguments>", "is not a regular expression"), ("(?P<name>.)", "no group")):
        with pytest.raises(ValueError, match=message):
            parse_pattern(pattern)


RESPONSE_TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "defaults": {"role": "assistant"},
    "fields": {
        "content": {"close": ["<tool_call>", "eos"]},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}


def test_the_parser_is_chosen_by_the_template_unless_it_is_named() -> None:
    for name, parser in (("qwen", "hermes"), ("mistral", "mistral"), ("llama3", "llama3")):
        assert choose_parser(None, make_tokenizer(name)) is PARSERS[parser]
    assert choose_parser("hermes", make_tokenizer("llama3")) is PARSERS["hermes"]
    for parser, message in (
        (None, "does not tell how its model writes tool calls; set parser"),
        ("hermess", "unknown parser 'hermess'"),
        ("tokenizer", "has no response_template"),
    ):
        with pytest.raises(ValueError, match=message):
            choose_parser(parser, make_tokenizer("gemma"))


# ---------------------------------------------------------------------------------------------- the loop


async def _double(text: str) -> str:
    await asyncio.sleep(1)
    if text == "bad":
        raise ValueError("nothing to double")
    if text == "broken":
        raise ToolUnavailableError("the doubler is gone")
    if text == "hang":
        await asyncio.sleep(math.inf)
    return text * 2


DOUBLE = FunctionTool(_double, make_schema("double", "Double a text.", text="the text"))


def call(text: str) -> str:
    return f'<tool_call>\n{{"name": "double", "arguments": {{"text": "{text}"}}}}\n</tool_call>'


class Talk:
    """Plays `turns` one after the other, whatever is asked, and takes up a turn where it was cut."""

    def __init__(self, tokenizer: Any, turns: list[str], end: str = "<|im_end|>") -> None:
        self.tokenizer = tokenizer
        self.turns = [tokenizer.encode(turn + end, add_special_tokens=False) for turn in turns]
        self.num_prompt = 0

    def __call__(self, request: Any) -> list[int]:
        ids = request.input_ids.tolist()
        self.num_prompt = self.num_prompt or len(ids)
        made = request.num_earlier
        for turn in self.turns:
            if made < len(turn):
                return turn[made:]
            made -= len(turn)
        raise AssertionError(f"asked for more turns than there are: {self.tokenizer.decode(ids)}")


def make_loop(turns: list[str], *, family: str = "qwen", tools: Any = (DOUBLE,), **options: Any):
    tokenizer = make_tokenizer(family)
    end = FAMILIES[family].end
    engine = ScriptedEngine(
        Talk(tokenizer, turns, end),
        eos_token_ids=[tokenizer.eos_token_id],
        token_latency_s=options.pop("latency_s", 0.0),
    )
    return ToolAgentLoop(
        RolloutController(engine),
        ExactMatchJudge(),
        tokenizer,
        sample_params=SampleParams(max_tokens=1000),
        tools=list(tools),
        **options,
    )


def make_group(size: int = 1) -> list[RolloutState]:
    return [
        RolloutState(
            [{"role": "user", "content": "Double a."}], rollout_id=f"g/{i}", reward_model={"ground_truth": "aaaa"}
        )
        for i in range(size)
    ]


def play(turns: list[str], **options: Any) -> RolloutState:
    return run(make_loop(turns, **options).generate_group(make_group()))[0]


def test_texts_beside_images_have_the_format_and_the_limit_of_results() -> None:
    def look(what: str) -> Any:
        """Take a look.

        Args:
            what: at what
        """
        return what * 5, b"a file", "behind"

    loop = make_loop([], tools=[look], result_format="Seen: {result}", max_result_characters=8)
    environment, state = loop.turns.environment, make_group()[0]

    async def step() -> Any:
        await environment.reset(state)
        call = '<tool_call>{"name": "look", "arguments": {"what": "ab"}}</tool_call>'
        return await environment.step(state, {}, call + call.replace("what", "who"))

    seen, wrong = (message["content"] for message in run(step()).messages)
    assert seen == [
        {"type": "text", "text": "Seen: "},
        {"type": "text", "text": "abababab... (2 characters left out)"},
        {"type": "image", "image": b"a file"},
        {"type": "text", "text": "behind"},
    ]
    assert wrong.startswith("Seen: Error: l... (")


def test_the_model_calls_until_it_answers() -> None:
    state = play([call("a"), "Again: " + call("aa"), "aaaa"])
    tokenizer = make_tokenizer("qwen")
    assert '"name": "double"' in tokenizer.decode(state.prompt_ids)
    assert tokenizer.decode(state.response_ids) == (
        f"{call('a')}<|im_end|>\n"
        "<|im_start|>user<tool_response>\naa\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        f"Again: {call('aa')}<|im_end|>\n"
        "<|im_start|>user<tool_response>\naaaa\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        "aaaa<|im_end|>"
    )
    mine = tokenizer.decode(state.response_ids[state.response_mask == 1])
    assert mine == f"{call('a')}<|im_end|>Again: {call('aa')}<|im_end|>aaaa<|im_end|>"
    assert (state.response, state.reward, state.finish_reason) == ("aaaa", {"score": 1.0}, "stop")
    counts = {key: state.extra_fields[key] for key in ("turns", "num_tool_calls", "num_tool_errors")}
    assert counts == {"turns": 3, "num_tool_calls": 2, "num_tool_errors": 0}
    conversation = state.extra_fields["conversation"]
    assert [message["role"] for message in conversation] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert conversation[0]["content"] == call("a")


def results_of(state: RolloutState) -> list[str]:
    return [m["content"] for m in state.extra_fields["conversation"] if m["role"] in ("tool", "user")]


def test_calls_of_a_turn_run_at_once_and_answer_in_order() -> None:
    async def main() -> None:
        loop = make_loop([call("a") + call("bad") + call("c"), "aaaa"])
        (state,) = await loop.generate_group(make_group())
        assert asyncio.get_running_loop().time() == 1.0
        assert results_of(state) == ["aa", "Error: ValueError: nothing to double", "cc"]
        ids = [m["tool_call_id"] for m in state.extra_fields["conversation"] if m["role"] == "tool"]
        assert len(set(ids)) == 3

    run(main())


@pytest.mark.parametrize(
    ("turn", "result"),
    [
        (call("hang"), "Error: no result within 10 s"),
        (call("bad"), "Error: ValueError: nothing to double"),
        ('<tool_call>{"name": "halve", "arguments": {}}', "Error: there is no tool 'halve', only double"),
        ('<tool_call>{"name": "double", "arguments": {}}', "missing a required argument: 'text'"),
        ("<tool_call>double a</tool_call>", "Error: the tool call 'double a' cannot be read: Expecting value"),
        (call("x" * 30), "x" * 40 + "... (20 characters left out)"),
        ('<tool_call>{"name": "double", "arguments": [' + "[" * 60 + "]" * 61 + "}", "nested more than 50 deep"),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}', 'it needs "name" and "arguments"'),
        ('<tool_call>{"name": "double", "arguments": {"\\ud800": 1}}', "missing a required argument"),
        (call("bad\\ud800"), "bad\\ud800bad\\ud800"),
    ],
)
def test_what_goes_wrong_with_a_call_is_read_by_the_model(turn, result) -> None:
    state = play([turn, "aaaa"], max_result_characters=40 if "xx" in turn else 4000)
    assert state.status is Status.COMPLETED
    assert result in results_of(state)[0]
    assert state.extra_fields["num_tool_errors"] == ("xx" not in turn and "bad\\" not in turn)


def test_a_tool_whose_schema_names_no_parameters_says_so() -> None:
    tool = FunctionTool(_double, {"type": "function", "function": {"name": "double"}})
    state = play(["=aa=", "aaaa"], tools=[tool], parser="=(?P<arguments>.*?)=")
    assert results_of(state) == ["Error: double takes an object with nothing"]


async def test_the_time_of_a_call_starts_with_its_thread() -> None:
    """Four seconds of work for two threads, and no call takes more than three."""

    def double(text: str) -> str:
        time.sleep(0.05)
        return text * 2

    tool = FunctionTool(double, DOUBLE.schema, num_threads=2)
    loop = make_loop([call("a"), "aaaa"], tools=[tool], tool_timeout_s=3.0)
    group = await loop.generate_group(make_group(160))
    assert [results_of(state) for state in group] == [["aa"]] * 160


async def test_tools_that_hang_block_nobody_else() -> None:
    release = threading.Event()
    tool = FunctionTool(lambda text: str(release.wait()), DOUBLE.schema, num_threads=12)
    loop = make_loop([call("a"), "aaaa"], tools=[tool], tool_timeout_s=0.05)
    try:
        async with asyncio.timeout(300):
            group = await loop.generate_group(make_group(40))
            # Threads of asyncio's own pool are free.
            assert await asyncio.gather(*(asyncio.to_thread(len, "abc") for _ in range(40))) == [3] * 40
    finally:
        release.set()
    hung = [state for state in group if state.status is Status.COMPLETED]
    assert {str(results_of(state)) for state in hung} == {"['Error: no result within 0.05 s']"}
    # A function that hangs again and again is not called for ever; that is nothing the model can do about.
    assert 12 <= len(hung) <= 12 + MAX_OVERRUNNING
    refused = [state.error_msg for state in group if state.status is Status.FAILED]
    assert len(hung) + len(refused) == 40
    assert all("ToolUnavailableError: double: not called" in error for error in refused)


def test_the_calls_of_all_turns_are_kept_as_the_chat_api_writes_them() -> None:
    state = play([call("a"), "<tool_call>x</tool_call>" + call("aa"), "aaaa"])
    made = [(part["function"]["name"], part["function"]["arguments"]) for part in state.tool_calls]
    assert made == [("double", '{"text": "a"}'), (None, ""), ("double", '{"text": "aa"}')]
    assert [part["id"] for part in state.tool_calls] == ["call00000", "call00000", "call00001"]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"tool_choice": "none"}, None),
        ({"tool_choice": "auto"}, None),
        ({"tool_choice": "required"}, "tool_choice 'required' cannot be enforced"),
        ({"tools": [make_schema("halve", "")]}, r"does not have: \['halve'\]; it has double"),
    ],
)
def test_what_the_data_says_of_tools_is_done_or_refused(fields, error) -> None:
    (state,) = make_group()
    for name, value in fields.items():
        setattr(state, name, value)
    loop = make_loop([call("a"), "aaaa"])
    (state,) = run(loop.generate_group([state]))
    prompt = make_tokenizer("qwen").decode(state.prompt_ids)
    if error is not None:
        assert state.status is Status.FAILED
        assert re.search(error, state.error_msg)
    elif fields["tool_choice"] == "none":
        # Neither offered nor called.
        assert ("double" in prompt, state.response, state.tool_calls) == (False, call("a"), None)
    else:
        assert ("double" in prompt, state.response) == (True, "aaaa")


async def test_all_tools_are_closed_and_then_it_is_said_which_could_not_be() -> None:
    closed = []

    class Closing(FunctionTool):
        async def close(self) -> None:
            await asyncio.sleep(0)
            closed.append(self.name)
            if self.name == "a":
                raise OSError("it is stuck")

    tools = [Closing(_double, make_schema(name, "Double.", text="the text")) for name in ("a", "b")]
    with pytest.raises(ExceptionGroup) as raised:
        await make_loop([], tools=tools).close()
    assert closed == ["a", "b"]
    assert raised.value.exceptions[0].__notes__ == ["tool 'a'"]


def test_a_broken_tool_fails_the_rollout() -> None:
    state = play([call("a") + call("broken") + call("hang"), "aaaa"])
    assert state.status is Status.FAILED
    assert state.error_msg == (
        "rollout g/0: ToolAgentLoop: RuntimeError: environment ToolEnvironment, turn 1: "
        "ToolUnavailableError: the doubler is gone"
    )


@pytest.mark.parametrize("family", ["llama3", "mistral"])
def test_other_dialects_play_as_well(family) -> None:
    write = {
        "llama3": '{"name": "double", "parameters": {"text": "aa"}}',
        "mistral": '[TOOL_CALLS] [{"name": "double", "arguments": {"text": "aa"}}]',
    }[family]
    state = play([write, "aaaa"], family=family)
    assert (results_of(state), state.reward) == (["aaaa"], {"score": 1.0})


def test_a_template_without_tools_works_with_a_pattern_and_another_role() -> None:
    state = play(
        ["=aa=", "aaaa"],
        family="gemma",
        parser="=(?P<arguments>.*?)=",
        result_role="user",
        result_format="It is {result}.",
    )
    assert (results_of(state), state.reward) == (["It is aaaa."], {"score": 1.0})


def test_a_response_template_is_followed() -> None:
    tokenizer = make_tokenizer("chatml")

    class Own:
        response_template = RESPONSE_TEMPLATE

        def parse_response(self, text: str, prefix: str) -> Any:
            return tokenizer.parse_response(text, schema=RESPONSE_TEMPLATE, prefix=prefix)

    parse = choose_parser(None, Own())
    assert parse(f"Well. {call('a')}") == [ToolCall("double", {"text": "a"})]
    assert parse("aaaa") == []
    assert parse_by(Own())("<tool_call>{</tool_call>")[0].problem
    for strange in ([], {"tool_calls": ["f"]}, {"tool_calls": [{"function": "f"}]}, json.loads("[" * 60 + "]" * 60)):
        Own.parse_response = lambda self, text, prefix, strange=strange: strange
        assert parse_by(Own())("so")[0].problem


def test_a_pause_ends_tools_and_the_calls_are_made_again() -> None:
    async def main() -> None:
        activities = Activities()
        turns = [call("a"), call("hang") + call("b"), "aaaa"]
        loop = make_loop(turns, tool_timeout_s=None)
        loop.activities = activities
        task = asyncio.create_task(loop.generate_group(make_group()))
        await asyncio.sleep(3)
        assert [a.stage for a in activities.in_flight()] == ["generate", "tool"]
        await loop.pause()
        (state,) = await task
        assert asyncio.get_running_loop().time() == 3.0
        assert (state.status, state.extra_fields["num_tool_calls"]) == (Status.ABORTED, 1)
        assert state.extra_fields["turns"] == 2
        made = state.response_ids.tolist()
        loop = make_loop(turns, tool_timeout_s=5)
        (state,) = await loop.generate_group([state], enable_partial_rollout=True)
        assert state.response_ids.tolist()[: len(made)] == made
        assert results_of(state) == ["aa", "Error: no result within 5 s", "bb"]
        assert (state.reward, state.extra_fields["num_tool_calls"]) == ({"score": 1.0}, 3)

    run(main())


def test_a_run_file_names_tools_and_what_does_not_fit_is_said() -> None:
    def build(family: str = "qwen", **arguments: Any) -> Any:
        return build_agent_loop(
            Component(name="tools", arguments=arguments),
            rollout_controller=RolloutController(ScriptedEngine({})),
            judge=None,
            tokenizer=make_tokenizer(family),
            sample_params=SampleParams(),
        )

    loop = build(tools=["calculator", "python"], max_turns=3, tool_timeout_s=2)
    assert list(loop.turns.environment.tools) == ["calculator", "python"]
    for family, arguments, message in (
        ("qwen", {}, "missing a required argument: 'tools'"),
        ("qwen", {"tools": []}, "at least 1 item"),
        ("qwen", {"tools": ["calculator", "calculator"]}, "different names"),
        ("qwen", {"tools": ["calculator"], "result_format": "so"}, "result_format must hold {result}, where"),
        ("qwen", {"tools": ["calculater"]}, "did you mean 'calculator'"),
        ("qwen", {"tools": ["calculator"], "tool_timeout_s": 0}, "'tool_timeout_s' = 0: .*greater than 0"),
        ("gemma", {"tools": ["calculator"]}, "does not tell how its model writes tool calls"),
        ("gemma", {"tools": ["calculator"], "parser": "hermes"}, "cannot render a message of role 'tool'"),
    ):
        with pytest.raises(ConfigError, match=message):
            build(family, **arguments)
