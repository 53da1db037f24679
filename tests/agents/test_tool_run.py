"""Whole runs with tools: warm-up on conversations, real engine, pauses of a separate run, trainer."""

from __future__ import annotations

import asyncio
import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from chat_families import make_tokenizer

from forebay.agents import Environment, ToolAgentLoop
from forebay.agents.build import prompt_tools
from forebay.agents.chat.rendering import render_prompt
from forebay.config import Component, ConfigError, load_config
from forebay.engines import RolloutController, ScriptedEngine
from forebay.metrics import read_jsonl
from forebay.models.tiny import character_tokenizer
from forebay.produce import DataConfig, Prompt, Sampler, load_prompts
from forebay.produce.prompts.conversations import Demonstrations
from forebay.produce.prompts.dataset import check_prompt_lengths
from forebay.replay import SyncReplayBufferConfig
from forebay.runs.config import RunConfig
from forebay.runs.launch import launch
from forebay.runs.record.history import ROLLOUTS, list_parts
from forebay.runs.rollouts import task_agent
from forebay.tools.calculator import calculate
from forebay.tools.contract import make_schema
from forebay.types import RolloutState, SampleParams, Status

RECIPE = Path(__file__).parents[2] / "recipes" / "tool_calc"
TASK = runpy.run_path(str(RECIPE / "chained_sums.py"))
SMALL = [
    "steps=2",
    "batch_size=2",
    "rollouts_per_prompt=4",
    "checkpoint_every=0",
    "warmup.steps=4",
    "warmup.batch_size=16",
    "tasks.0.data.size=60",
    "tasks.0.eval_data.start=60",
    "tasks.0.eval_data.size=6",
    "evaluate.every=0",
    "model.tiny.hidden_size=32",
    "model.tiny.num_layers=1",
]


def recipe(output: Path, *overrides: str) -> RunConfig:
    return load_config(RunConfig, RECIPE / "run.toml", [*SMALL, f"output={output}", *overrides])


@pytest.mark.parametrize(
    "overrides",
    [(), ("produce.mode=separate", "produce.max_staleness=1", "produce.enable_partial_rollout=true")],
    ids=["colocated", "separate"],
)
def test_the_recipe_runs(tmp_path, overrides) -> None:
    assert asyncio.run(launch(recipe(tmp_path, *overrides))) is not None
    rows = list(read_jsonl(tmp_path / "tool_calc" / "metrics.jsonl"))
    steps = [row for row in rows if "produce/turns" in row]
    assert len(steps) == 2
    assert all(1 <= row["produce/turns"] <= 4 and row["produce/tool_calls"] >= 0 for row in steps)
    assert [row["eval/turns"] >= 1 for row in rows if "eval/turns" in row] == [True, True]


def long_result(x: str) -> str:
    """Say much.

    Args:
        x: anything
    """
    return "0" * 20


LONG = [
    f"tasks.0.agent.arguments={{tools=['{__name__}:long_result'], parser='^(?P<arguments>.)',"
    "result_role='user', result_format='={result};', max_turns=4, max_turn_tokens=2%s}",
    "model.max_context=128",
    "train.token_budget=48",
]
"""Every turn is a call; four of them and their results are more than a trainer with this budget takes."""


def test_episodes_end_where_the_trainer_could_not_take_them(tmp_path) -> None:
    config = recipe(tmp_path, LONG[0] % "", *LONG[1:])
    assert asyncio.run(launch(config)) is not None
    rows = [
        row
        for part in list_parts(tmp_path / "tool_calc", ROLLOUTS)
        for row in pq.read_table(part.path).to_pylist()
        if row["conversation"]
    ]
    assert {json.loads(row["facts"]).get("ended_by") for row in rows} >= {"context"}
    messages = [message for row in rows for message in json.loads(row["conversation"])]
    assert any(message["content"] == "=" + "0" * 20 + ";" for message in messages)


@pytest.mark.parametrize(
    ("given", "message"),
    [("49", "max_context = 49 is more than train.token_budget = 48"), ("'48'", "'max_context' = '48'")],
)
def test_a_limit_of_ones_own_that_does_not_fit_is_refused(tmp_path, given, message) -> None:
    def read() -> None:
        config = recipe(tmp_path, LONG[0] % f", max_context={given}", *LONG[1:])
        task_agent(config, config.tasks[0])

    with pytest.raises(ConfigError, match=f"task 'calc': agent 'tools': {message}"):
        read()


def test_prompts_are_measured_with_the_tools_of_their_agent() -> None:
    tokenizer = make_tokenizer("qwen")
    search = {"name": "search", "arguments": {"corpus": "missing"}}
    tools = prompt_tools(Component(name="tools", arguments={"tools": ["calculator", search]}))
    assert [tool["function"]["name"] for tool in tools] == ["calculator", "search"]
    asked = [{"role": "user", "content": "1+2?"}]
    limit = len(render_prompt(tokenizer, asked, tools))
    prompt = Prompt(message=asked)
    assert check_prompt_lengths([prompt], tokenizer, limit, tools=tools) == [prompt]
    with pytest.raises(ConfigError, match=f"prompt 0 has {limit} tokens"):
        check_prompt_lengths([prompt], tokenizer, limit - 1, tools=tools)
    # Its own come first, and "none" is none.
    for own in ({"tools": tools[:1]}, {"tool_choice": "none"}):
        check_prompt_lengths([Prompt(message=asked, **own)], tokenizer, limit - 1, tools=tools)
    assert prompt_tools(Component(name="single_turn")) is None
    own_environment = Component(name="multi_turn", arguments={"environment": f"{__name__}:Telling"})
    assert prompt_tools(own_environment) == [*Telling.prompt_tools]


class Telling(Environment):
    prompt_tools = (make_schema("look", "Look."),)


async def test_a_warm_up_shows_what_rollouts_see() -> None:
    """Schemas in the prompt, and replies as increments although the template rewrites history."""
    tokenizer = make_tokenizer("qwen")
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+2"}}\n</tool_call>'
    turns = [f"<think>\nx\n</think>\n\n{call}", "3"]
    asked = [{"role": "user", "content": "1+2?"}]

    def script(request: Any) -> list[int]:
        text = tokenizer.decode(request.input_ids.tolist())
        return [*tokenizer.encode(turns["<tool_response>" in text]), tokenizer.eos_token_id]

    loop = ToolAgentLoop(
        RolloutController(ScriptedEngine(script)),
        None,
        tokenizer,
        sample_params=SampleParams(max_tokens=500),
        tools=["calculator"],
    )
    (state,) = await loop.generate_group([RolloutState(asked, rollout_id="r")])
    assert state.status is Status.COMPLETED, state.error_msg
    shown = [
        {"role": "assistant", "content": turns[0]},
        {"role": "tool", "name": "calculator", "content": "3"},
        {"role": "assistant", "content": turns[1]},
    ]
    plain = Prompt(message=asked, extra={"demonstration": shown})
    tools = prompt_tools(Component(name="tools", arguments={"tools": ["calculator"]}))
    prompt_ids, ids, mask, _ = Demonstrations(tokenizer).example(plain, tools)
    assert [*prompt_ids, *ids] == state.tokens.tolist()
    assert mask.tolist() == state.response_mask.tolist()
    with pytest.raises(ConfigError, match="one of the assistant after one that is not"):
        Demonstrations(tokenizer).example(replace(plain, extra={"demonstration": shown[::2]}))


def test_problems_are_distinct_and_their_demonstrations_right() -> None:
    rows = TASK["chained_sums"](size=500)
    assert len({row["prompt"] for row in rows}) == 500
    gives_up = [len(row["demonstration"]) == 1 for row in rows]
    assert 0.5 < np.mean(gives_up) < 0.9
    for row, gave_up in zip(rows, gives_up, strict=True):
        rest, first = row["prompt"].removesuffix(";").split(",")
        result = row["answer"]
        assert int(result) == calculate(f"({first}){rest}")
        half = f"{calculate(first):05}"
        calls = [f"[{first}]", f"={half};", f"[{half}{rest}]", f"={result};", f"#{result}"]
        texts = [message["content"] for message in row["demonstration"]]
        assert texts == (["?"] if gave_up else calls)


async def test_the_small_calculator_answers_in_its_alphabet() -> None:
    for expression, answer in (("00095*4", "00380"), ("1+", "?"), ("9*99999", "?"), ("5*[", "?"), ("0", "00000")):
        assert await TASK["small_calculator"](expression) == answer


def test_every_turn_of_a_demonstration_is_learned() -> None:
    config = recipe(Path("unused"))
    tokenizer = character_tokenizer(config.model.tiny.alphabet)
    data = config.tasks[0].data.model_copy(update={"arguments": {"giving_up": 0.0}})
    prompt = load_prompts(data)[0]
    prompt_ids, ids, mask, _ = Demonstrations(tokenizer).example(prompt)
    asked = prompt.message[0]["content"]
    called, result, again, told, answer = (part["content"] for part in prompt.extra["demonstration"])
    end = "<eos>"
    assert tokenizer.decode(prompt_ids) == f"<bos>{asked}"
    parts = np.split(ids, np.flatnonzero(np.diff(mask)) + 1)
    assert [*map(tokenizer.decode, parts)] == [called + end, result, again + end, told, answer + end]
    assert mask[0] == 1


def rows() -> list[dict[str, Any]]:
    return [{"prompt": "1", "answer": "", "tool_choice": choice} for choice in ("none", '{"type": "function"}')]


async def test_rollouts_have_the_tool_choice_of_their_row() -> None:
    prompts = load_prompts(DataConfig(source=f"{__name__}:rows"))
    assert [prompt.extra for prompt in prompts] == [{}, {}]
    sampler = Sampler(prompts, SyncReplayBufferConfig().build(), task_name="t", prompt_repeat_k=1, shuffle=False)
    choices = [(await sampler.sample("t"))[0].tool_choice for _ in prompts]
    assert choices == ["none", {"type": "function"}]
