"""The typed arguments of named components: they are what constructors take, and typos in them are found."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import pytest
from pydantic import ValidationError

from forebay.agents.build import AGENTS, GIVEN
from forebay.agents.environments import ENVIRONMENTS
from forebay.config import ConfigError, StrictModel, apply_overrides, parse_config
from forebay.engines import TransformersEngine
from forebay.engines.build import TransformersArguments
from forebay.judges.build import JUDGE_ARGUMENTS, JUDGES
from forebay.produce.prompts.sources import GENERATORS, SOURCE_ARGUMENTS
from forebay.runs.config import RunConfig
from forebay.tools.base import TOOLS
from key_reference import models_of

RUN: dict[str, Any] = {
    "name": "try",
    "steps": 1,
    "batch_size": 2,
    "rollouts_per_prompt": 2,
    "model": {"source": "tiny"},
    "tasks": [{"name": "t", "data": {"source": "sorting"}, "judge": {"name": "exact_match"}}],
}

NOT_OF_RUN_FILES = {
    "program": {"name"},
    "python": {"sandbox"},
    "transformers": {"model", "tokenizer", "max_context_tokens", "model_step"},
}
"""Of a constructor: for programs."""


def named() -> list[tuple[str, Any, type[StrictModel], tuple[str, ...]]]:
    tables: list[tuple[Mapping[str, Any], Mapping[str, type[StrictModel]], tuple[str, ...]]] = [
        (AGENTS, models_of(AGENTS), GIVEN),
        (ENVIRONMENTS, models_of(ENVIRONMENTS), ()),
        (JUDGES, JUDGE_ARGUMENTS, ("timeout_s",)),
        (TOOLS, models_of(TOOLS), ()),
        (GENERATORS, SOURCE_ARGUMENTS, ()),
        ({"transformers": TransformersEngine}, {"transformers": TransformersArguments}, ()),
    ]
    for makers, models, _ in tables:
        assert set(models) >= set(makers) - {"calculator"}
    return [(name, makers[name], model, given) for makers, models, given in tables for name, model in models.items()]


@pytest.mark.parametrize(("name", "make", "model", "given"), named(), ids=lambda value: str(value)[:20])
def test_a_model_has_what_its_constructor_takes(
    name: str, make: Any, model: type[StrictModel], given: tuple[str, ...]
) -> None:
    if getattr(make, "Arguments", None) is model and name not in ("live", "python", "search"):
        # It takes them by name, whatever they are, and validates them as this model.
        return
    taken = {
        parameter.name: parameter.default
        for parameter in inspect.signature(make).parameters.values()
        if parameter.name not in given and parameter.name not in NOT_OF_RUN_FILES.get(name, ())
    }
    fields = {
        key: inspect.Parameter.empty if field.is_required() else field.get_default(call_default_factory=True)
        for key, field in model.model_fields.items()
    }
    assert fields == taken


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine.name=transformers", "engine.arguments.max_bach=8"], "did you mean 'max_batch'"),
        (["engine.name=transformers", "engine.arguments.max_batch=0"], "'max_batch' = 0"),
        (["engine.name=process", "engine.arguments.engnes=2"], "did you mean 'engines'"),
        (["engine.name=process", "engine.arguments.max_bach=8"], "did you mean 'max_batch'"),
        (["engine.name=process", "engine.arguments.threads=many"], "'threads' = 'many'"),
        (["engine.name=vllm", "engine.arguments.server=2"], "did you mean 'servers'"),
        (["engine.name=sglang"], "give either urls"),
        (["cluster.name=ray", "cluster.arguments.num_engine=2"], "did you mean 'num_engines'"),
        (["cluster.name=ray", "cluster.arguments.cpus=lots"], "'cpus' = 'lots'"),
        (["tasks.0.data.arguments.lenght=4"], "task 't': data source 'sorting': .*did you mean 'length'"),
        (["tasks.0.data.arguments.length=40"], "'length' = 40"),
        (["tasks.0.eval_data.source=addition", "tasks.0.eval_data.arguments.digit=1"], "'digits'"),
        (
            [
                "tasks.0.agent.name=program",
                "tasks.0.agent.arguments.program=math:sqrt",
                "tasks.0.agent.arguments.port=80",
            ],
            "unexpected keyword argument 'port'",
        ),
        (["tasks.0.judge.arguments.partial=true"], "did you mean 'partial_credit'"),
        (["tasks.0.judge.arguments.partial_credit=yes"], "'partial_credit' = 'yes'"),
        (
            ["tasks.0.judge.name=composed", 'tasks.0.judge.arguments.parts=[{name="code", wieght=2}]'],
            "did you mean 'weight'",
        ),
        (["tasks.0.agent.name=multi_turn"], "missing a required argument: 'environment'"),
        (
            ["tasks.0.agent.name=multi_turn", "tasks.0.agent.arguments.environment=life"],
            "did you mean 'live'",
        ),
        (["tasks.0.agent.name=tools", "tasks.0.agent.arguments.tools=[]"], "at least 1 item"),
        (
            [
                "tasks.0.agent.name=tools",
                'tasks.0.agent.arguments.tools=[{name = "search", arguments = {corpora = "x"}}]',
            ],
            "did you mean 'corpus'",
        ),
        (
            [
                "tasks.0.agent.name=tools",
                'tasks.0.agent.arguments.tools=[{name = "python", arguments = {limits = {wal_s = 1}}}]',
            ],
            "did you mean 'wall_s'",
        ),
        (
            ["tasks.0.agent.name=tools", 'tasks.0.agent.arguments={tools = ["calculator"], parser = "hermess"}'],
            "unknown parser 'hermess'",
        ),
        (["tasks.0.agent.name=program", "tasks.0.agent.arguments.program=no_module:f"], "cannot import"),
        (
            ["tasks.0.agent.name=single_turn", "tasks.0.agent.arguments.max_turns=2"],
            "unexpected keyword argument 'max_turns'",
        ),
        (
            ["tasks.0.agent.name=forebay.agents:MultiTurnAgentLoop", "tasks.0.agent.arguments.max_turn=2"],
            "missing a required argument: 'environment'; did you mean 'max_turns'",
        ),
    ],
)
def test_what_does_not_fit_is_found_when_the_run_file_is_read(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(RunConfig, apply_overrides(RUN, overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        ["engine.name=process", "engine.arguments.engines=2", "engine.arguments.max_batch=8"],
        ["engine.name=vllm", 'engine.arguments.urls=["http://127.0.0.1:1"]', "engine.arguments.start_limit_s=5"],
        ["cluster.name=ray", "cluster.arguments.gpus_per_engine=0.5", "cluster.arguments.cpus=1"],
        ["tasks.0.judge.name=code", "tasks.0.judge.arguments.limits.wall_s=2"],
        ["tasks.0.agent.name=tools", 'tasks.0.agent.arguments.tools=["calculator"]'],
        ["tasks.0.agent.name=program", 'tasks.0.agent.arguments.program=["python", "agent.py"]'],
    ],
)
def test_what_fits_stays_as_it_was_written(overrides: list[str]) -> None:
    written = apply_overrides(RUN, overrides)
    config = parse_config(RunConfig, written)
    read = config.model_dump(mode="json", exclude_unset=True)
    for table in ("engine", "cluster", "tasks"):
        assert read.get(table) == written.get(table)


def test_arguments_do_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        TransformersArguments().max_batch = 2  # type: ignore[misc]
