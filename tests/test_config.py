"""Run files and overrides: what is read, and what a person is told when it is wrong."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, model_validator

from forebay.config import (
    ConfigError,
    StrictModel,
    apply_overrides,
    import_object,
    load_config,
    look_up,
    parse_config,
    read_toml,
)
from forebay.runs.config import FIXED, RunConfig
from forebay.types import SampleParams


class Optimizer(StrictModel):
    lr: float = Field(default=1e-4, gt=0)
    betas: tuple[float, ...] = (0.9, 0.999)


class Task(StrictModel):
    name: str
    weight: float = 1.0
    sample: SampleParams = SampleParams()


class Run(StrictModel):
    steps: int
    optimizer: Optimizer = Optimizer()
    warmup: Optimizer | None = None
    tasks: list[Task] = Field(default_factory=list)
    by_name: dict[str, Task] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Run:
        if self.steps == 13:
            raise ValueError("steps must not be 13")
        return self


RUN_FILE = """
steps = 3
[optimizer]
lr = 0.1
[[tasks]]
name = "add"
[tasks.sample]
max_tokens = 8
stop = ["."]
"""


def problem(data: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(Run, data, source="run.toml")
    return str(caught.value)


def test_a_file_and_overrides_become_one_config(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE)
    run = load_config(Run, path, ["steps=5", "tasks.0.sample.temperature=0", "warmup.lr=1e-3"])
    assert run == Run(
        steps=5,
        optimizer=Optimizer(lr=0.1),
        warmup=Optimizer(lr=1e-3),
        tasks=[Task(name="add", sample=SampleParams(max_tokens=8, stop=(".",), temperature=0.0))],
    )


def test_a_config_does_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Run(steps=1).steps = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"steps": 1, "stepps": 2}, "unknown key 'stepps'; did you mean 'steps'?"),
        ({"steps": 1, "optimizer": {"lrr": 1}}, "unknown key 'optimizer.lrr'; did you mean 'lr'?"),
        ({"steps": 1, "warmup": {"beta": []}}, "unknown key 'warmup.beta'; did you mean 'betas'?"),
        (
            {"steps": 1, "tasks": [{"name": "a"}, {"name": "b", "wieght": 2}]},
            "unknown key 'tasks.1.wieght'; did you mean 'weight'?",
        ),
        (
            {"steps": 1, "by_name": {"a": {"name": "a", "nam": "b"}}},
            "unknown key 'by_name.a.nam'; did you mean 'name'?",
        ),
        (
            {"steps": 1, "tasks": [{"name": "a", "sample": {"max_token": 2}}]},
            "unknown key 'tasks.0.sample.max_token'; did you mean 'max_tokens'?",
        ),
        ({"steps": 1, "lr": 2}, "unknown key 'lr'; did you mean 'optimizer.lr' or 'warmup.lr'?"),
        ({"steps": 1, "weight": 2}, "unknown key 'weight'; did you mean 'tasks.0.weight'"),
        ({"steps": 1, "zzz": 2}, "unknown key 'zzz'; known keys: by_name, optimizer, steps, tasks, warmup"),
        ({}, "'steps' is missing"),
        ({"steps": 1, "tasks": [{}]}, "'tasks.0.name' is missing"),
        ({"steps": "x"}, "'steps' = 'x': Input should be a valid integer"),
        ({"steps": 1, "optimizer": {"lr": -1}}, "'optimizer.lr' = -1: Input should be greater than 0"),
        (
            {"steps": 1, "tasks": [{"name": "a", "sample": {"top_p": 2}}]},
            "'tasks.0.sample': top_p must be in (0, 1], got 2",
        ),
        ({"steps": 13}, "run.toml: steps must not be 13"),
    ],
)
def test_what_is_wrong_is_named_with_its_place_and_the_fix(data: dict[str, Any], message: str) -> None:
    assert message in problem(data)


def test_all_problems_are_told_at_once() -> None:
    lines = problem({"stepps": 1, "optimizer": {"lr": 0}}).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("run.toml: ")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-4", 1e-4),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ('["a", "b"]', ["a", "b"]),
        ('"3"', "3"),
        ("{lr = 1}", {"lr": 1}),
        ("plain text", "plain text"),
        ("True", "True"),
        ("a=b", "a=b"),
        ("", ""),
    ],
)
def test_an_override_is_toml_where_it_can_be_and_text_elsewhere(text: str, value: object) -> None:
    result = apply_overrides({}, [f"key={text}"])["key"]
    assert result == value
    assert type(result) is type(value)


@given(st.recursive(st.integers() | st.booleans(), lambda inner: st.lists(inner, max_size=3), max_leaves=6))
def test_an_override_reads_back_any_value_that_json_and_toml_share(value: object) -> None:
    assert apply_overrides({}, [f"a.b={json.dumps(value)}"]) == {"a": {"b": value}}


def test_overrides_come_in_order_and_make_missing_tables() -> None:
    assert apply_overrides({"a": 1}, ["a=2", "b.c.d=3", "b.c.e=4", "a=5"]) == {"a": 5, "b": {"c": {"d": 3, "e": 4}}}


def test_overrides_leave_what_they_were_given_as_it_was() -> None:
    data = {"tasks": [{"name": "a"}], "optimizer": {"lr": 1}}
    changed = apply_overrides(data, ["tasks.0.name=b", "optimizer.lr=2"])
    assert data == {"tasks": [{"name": "a"}], "optimizer": {"lr": 1}}
    assert changed == {"tasks": [{"name": "b"}], "optimizer": {"lr": 2}}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "'steps' is not of the form key=value"),
        ("=3", "'=3' is not of the form key=value"),
        ("steps.a=1", "steps is a value, not a table"),
        ("tasks.1.name=b", "tasks is a list of 1; name an entry by its position, counted from 0, not '1'"),
        ("tasks.a=b", "not 'a'"),
        ("tasks.-1=b", "not '-1'"),
        ("tasks.0.name.first=b", "tasks.0.name is a value, not a table"),
    ],
)
def test_an_override_that_fits_nowhere_is_an_error(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_overrides({"steps": 1, "tasks": [{"name": "a"}]}, [override])
    assert override in str(caught.value)
    assert message in str(caught.value)


def test_a_missing_file_names_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "arithmetic.toml").touch()
    with pytest.raises(ConfigError, match=r"no file at '.*arithmetik.toml'; did you mean '.*arithmetic.toml'"):
        read_toml(tmp_path / "arithmetik.toml")
    with pytest.raises(ConfigError, match=r"no file at '.*elsewhere.*'$"):
        read_toml(tmp_path / "elsewhere" / "run.toml")


@pytest.mark.parametrize("content", [b"steps = = 3", b"\xff\xfe"])
def test_a_file_that_is_not_toml_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"run.toml' is not (valid|a) TOML"):
        read_toml(path)


def test_a_folder_is_not_a_run_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a TOML file"):
        read_toml(tmp_path)


def test_look_up_prefers_the_table_and_imports_what_has_a_colon() -> None:
    assert look_up("codec", "json", {"json": 1}) == 1
    assert look_up("codec", "json:dumps", {"json": 1}) is json.dumps


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("jsn", "unknown codec 'jsn'; did you mean 'json'? known: json, yaml, or 'package.module:Name'"),
        ("nothing like it", "unknown codec 'nothing like it'; known: json, yaml"),
        ("no_such_module:x", "codec 'no_such_module:x': cannot import 'no_such_module'"),
        ("json:dump_s", "'json' has no 'dump_s'; did you mean 'dumps'?"),
        (":dumps", "codec ':dumps' is not of the form 'package.module:Name'"),
        ("json:", "codec 'json:' is not of the form"),
        (".json:dumps", "codec '.json:dumps' is not of the form"),
    ],
)
def test_an_unknown_name_gets_the_nearest_one(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        look_up("codec", name, {"json": 1, "yaml": 2})
    assert message in str(caught.value)


def test_an_import_error_inside_the_module_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_judge.py").write_text("import a_library_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="cannot import 'broken_judge': No module named 'a_library_nobody_has'"):
        import_object("judge", "broken_judge:judge")


@pytest.mark.parametrize(
    "overrides", [["engine=vllm", "engine.arguments.servers=2"], ["engine.arguments.servers=2", "engine=vllm"]]
)
def test_the_order_of_overrides_of_different_keys_does_not_matter(overrides: list[str]) -> None:
    assert apply_overrides({}, overrides) == {"engine": {"name": "vllm", "arguments": {"servers": 2}}}
    given = {"engine": {"name": "process", "arguments": {"engines": 2}}}
    assert apply_overrides(given, overrides) == {"engine": {"name": "vllm", "arguments": {"servers": 2}}}


def test_an_override_adds_to_a_component_that_the_file_only_names() -> None:
    given = {"tasks": [{"judge": "reasoning_gym"}]}
    expected = {"tasks": [{"judge": {"name": "reasoning_gym", "shuffle_seed": 0}}]}
    assert apply_overrides(given, ["tasks.0.judge.shuffle_seed=0"]) == expected


def test_keys_of_an_earlier_version_are_refused_with_what_to_write_now() -> None:
    table = {
        "name": "a",
        "steps": 1,
        "batch_size": 1,
        "rollouts_per_prompt": 2,
        "model": {"source": "tiny"},
        "tasks": [{"name": "a", "data": {"source": "sorting"}, "judge": {"name": "exact_match"}}],
    }
    for key, now in RunConfig.removed_keys.items():
        with pytest.raises(ConfigError, match=re.escape(f"unknown key '{key}', of an earlier version: {now}")):
            parse_config(RunConfig, apply_overrides(table, [f"{key}=1"]))


def keys_below(annotation: Any, key: str = "") -> set[str]:
    """Every key below a model, with ``*`` for the place in a list."""
    parts = typing.get_args(annotation)
    fields: dict[str, Any]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = {name: field.annotation for name, field in annotation.model_fields.items()}
    elif annotation is SampleParams:
        fields = {field.name: None for field in dataclasses.fields(SampleParams)}
    elif any(isinstance(part, type) and issubclass(part, BaseModel) for part in parts):
        (model,) = [part for part in parts if part is not type(None)]
        is_list = typing.get_origin(annotation) is list
        return keys_below(model, f"{key}.*" if is_list else key)
    else:
        return {key}
    return set().union(*(keys_below(inner, f"{key}.{name}".lstrip(".")) for name, inner in fields.items()))


_FREE_WORDS = """
    steps batch_size check_memory device search_path threads checkpoint_every keep_checkpoints
    history_gb board
    verify_weights model.max_context engine.name engine.arguments engine.dtype engine.attention
    cluster.name cluster.arguments tasks.*.data.source tasks.*.data.arguments
    tasks.*.data.columns tasks.*.data.system_prompt
    tasks.*.eval_data.source tasks.*.eval_data.arguments tasks.*.eval_data.where
    tasks.*.eval_data.columns tasks.*.eval_data.system_prompt tasks.*.eval_data.shuffle_seed
    tasks.*.eval_data.start tasks.*.eval_data.size tasks.*.judge.name tasks.*.judge.arguments
    tasks.*.judge.timeout_s tasks.*.judge.shuffle_seed tasks.*.agent.name tasks.*.agent.arguments
    tasks.*.sample.max_tokens tasks.*.sample.temperature tasks.*.sample.top_p tasks.*.sample.top_k
    tasks.*.sample.stop tasks.*.sample.stop_token_ids tasks.*.sample.seed tasks.*.weight
    tasks.*.overlong_prompts tasks.*.max_staleness replay.limit replay.reuse.times replay.reuse.share
    replay.reuse.order replay.reuse.max_staleness replay.store replay.policy produce.mode
    produce.filter produce.sync_weights_interval produce.max_staleness
    produce.staleness_rule produce.over_sample_threshold produce.enable_partial_rollout
    produce.tail_batch_trigger_size produce.tail_batch_max_tries produce.max_retries
    produce.in_flight_update produce.stall_after_s produce.min_members produce.max_failed_groups
    produce.save_partial_every_s
    train.lr train.schedule train.weight_decay train.max_grad_norm
    train.mini_batches train.epochs train.token_budget train.layout train.dtype train.attention train.ranks
    train.adam train.frozen train.preset train.credit train.discount train.overlong
    train.moments train.offload_activations train.compile
    train.parallel.tensor train.parallel.replicas train.parallel.context train.parallel.offload
    train.gradient_checkpointing train.advantage train.loss train.clip train.kl_coef
    train.kl_estimator train.entropy_coef train.normalization train.correction train.correction_band
    train.guard train.guard_bands train.critic_lr evaluate.every
    evaluate.rollouts_per_prompt evaluate.temperature evaluate.mode evaluate.best
    tasks.*.evaluate.every tasks.*.evaluate.rollouts_per_prompt tasks.*.evaluate.temperature
    metrics.sinks metrics.project
"""
FREE = frozenset(_FREE_WORDS.split())
"""Keys that may change when a run goes on: a new key is put here, or into `FIXED`, on purpose."""


def test_every_key_says_whether_it_may_change_when_a_run_goes_on() -> None:
    everything = keys_below(RunConfig)
    assert everything - FREE - set(FIXED) == set(), "put new keys into FREE here, or into FIXED in forebay.runs.config"
    assert (FREE | set(FIXED)) - everything == set(), "keys that are gone"
    assert FREE & set(FIXED) == set()
