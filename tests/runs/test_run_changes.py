"""Which changes a resumed run refuses and tells; that every key is in one table: tests/test_config.py."""

from pathlib import Path

import pytest

from forebay.config import ConfigError, parse_config
from forebay.runs.config import RunConfig, changed

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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": {"source": "tiny", "tiny": {"hidden_size": 64}}}, "model.tiny.hidden_size = 64, it is 128"),
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
    after = config(steps=9, engine={"name": "transformers", "arguments": {"max_batch": 4}}, output="elsewhere")
    assert changed(config(), config()) == []
    assert changed(config(), after) == [
        "changed: engine.arguments = {'max_batch': 4}, was {}",
        "changed: steps = 9, was 4",
    ]
    assert after.folder == Path("elsewhere/run")
