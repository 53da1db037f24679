"""Every key of the run file says whether it may change when a run goes on."""

import dataclasses
import typing
from pathlib import Path

import pytest
from pydantic import BaseModel

from forebay.config import ConfigError, parse_config
from forebay.runs.changes import FIXED, FREE, changed
from forebay.runs.config import RunConfig
from forebay.types import SampleParams

RUN = {
    "name": "run",
    "steps": 4,
    "batch_size": 4,
    "rollouts_per_prompt": 4,
    "model": {"source": "tiny"},
    "tasks": [{"name": "a", "data": {"source": "sorting", "size": 60}, "judge": {"name": "exact_match"}}],
}


def config(**changes):
    return parse_config(RunConfig, {**RUN, **changes})


def keys(annotation, key=""):
    """Every key below a model, with ``*`` for the place in a list."""
    parts = typing.get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = {name: field.annotation for name, field in annotation.model_fields.items()}
    elif annotation is SampleParams:
        fields = {field.name: None for field in dataclasses.fields(SampleParams)}
    elif any(isinstance(part, type) and issubclass(part, BaseModel) for part in parts):
        (model,) = [part for part in parts if part is not type(None)]
        is_list = typing.get_origin(annotation) is list
        return keys(model, f"{key}.*" if is_list else key)
    else:
        return {key}
    return set().union(*(keys(inner, f"{key}.{name}".lstrip(".")) for name, inner in fields.items()))


def test_every_key_is_classified_once():
    everything = keys(RunConfig)
    assert everything - FREE - set(FIXED) == set(), "put new keys into FIXED or FREE in forebay.runs.changes"
    assert (FREE | set(FIXED)) - everything == set(), "keys that are gone"
    assert FREE & set(FIXED) == set()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"model": {"source": "tiny", "tiny": {"hidden_size": 64}}},
            "model.tiny.hidden_size = 64, it is 128",
        ),
        ({"model": {"source": "other/model"}}, "model.source = 'other/model'"),
        ({"warmup": {"steps": 5}}, "warmup.batch_size = 64, it is None"),
        ({"seed": 7}, "seed = 7, it is 0: the order of the prompts depends on it"),
        ({"tasks": [{**RUN["tasks"][0], "data": {"source": "sorting", "size": 9}}]}, "tasks.0.data.size = 9"),
    ],
)
def test_what_cannot_change_is_refused_with_its_reason(change, said):
    with pytest.raises(ConfigError) as caught:
        changed(config(), config(**change))
    assert said in str(caught.value)
    assert "leave it out" in str(caught.value)


def test_what_changes_is_told():
    after = config(
        steps=9, engine={"name": "transformers", "arguments": {"max_batch": 4}}, output="elsewhere"
    )
    assert changed(config(), config()) == []
    assert changed(config(), after) == [
        "changed: engine.arguments = {'max_batch': 4}, was {}",
        "changed: steps = 9, was 4",
    ]
    assert after.folder == Path("elsewhere/run")
