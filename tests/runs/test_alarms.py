"""A run that learns nothing says so, once, with the key that helps; one that learns says nothing."""

import asyncio
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config import parse_config
from forebay.metrics import read_jsonl
from forebay.runs.config import RunConfig
from forebay.runs.launch import launch
from forebay.runs.show.alarms import REST_STEPS, WINDOW_STEPS, RunAlarms


def table(output="runs", **changes):
    data = {"source": "sorting", "arguments": {"length": 3, "letters": 5}}
    base = {
        "name": "run",
        "steps": 100,
        "batch_size": 4,
        "rollouts_per_prompt": 4,
        "output": str(output),
        "model": {"source": "tiny", "tiny": {"hidden_size": 32, "num_layers": 2, "num_heads": 2}},
        "tasks": [
            {
                "name": "sorting",
                "data": {**data, "size": 60},
                "judge": {"name": "exact_match", "arguments": {"partial_credit": True}},
                "sample": {"max_tokens": 5},
            }
        ],
        "train": {"lr": 1e-3, "token_budget": 512},
    }
    return {**base, **changes}


def alarms(**changes):
    return RunAlarms(parse_config(RunConfig, table(**changes)))


HEALTHY = {
    "reward": 0.5,
    "truncated": 0.1,
    "train/equal_score_groups": 0.3,
    "train/score_std": 0.4,
    "train/entropy": 1.0,
    "dropped/failed": 1.0,
    "failed/judge": 0.0,
}


def row(step, **values):
    return {"train_step": float(step), **HEALTHY, **values}


def rows(count, start=1, **values):
    return [row(step, **values) for step in range(start, start + count)]


def evaluated(step, score):
    return {"train_step": step, "eval/score": score}


def said(watching, some_rows):
    """The messages, by alarm and train step."""
    return {
        (name, int(values["train_step"])): message
        for values in some_rows
        for name, message in watching.see(values).items()
    }


def failing(step):
    return {"dropped/failed": 2.0 * step}


SEQUENCES = {
    "no_signal": (rows(10, reward=0.0, **{"train/equal_score_groups": 1.0}), "every score was 0"),
    "no_signal, scores differ by prompt": (
        [row(step, reward=step / 20, **{"train/equal_score_groups": 1.0}) for step in range(1, 11)],
        r"tasks\.sample\.temperature \(now 1\)",
    ),
    "truncated": (rows(10, truncated=0.7), r"70% .* tasks\.sample\.max_tokens \(now 5\)"),
    "judge": (
        [*rows(2, **{"failed/judge": 0.2}), row(3), *rows(3, 4, **{"failed/judge": 0.1})],
        r"failed in 10% of the groups of the 3 steps up to 6; .*tasks\.judge\.timeout_s",
    ),
    "failed": (
        [row(step, **failing(step)) for step in range(1, 11)],
        r"18 groups failed for good beside 36 .* produce\.max_retries",
    ),
    "entropy": (
        [*rows(5), *rows(5, 6, **{"train/entropy": 0.001})],
        r"from 1 to 0\.001 nats .* train\.entropy_coef \(now 0\)",
    ),
    "held_out": (
        [
            *[evaluated(0, 0.5), *rows(5, reward=0.4), evaluated(5, 0.6), *rows(5, 6, reward=0.6)],
            *[evaluated(10, 0.5), *rows(5, 11, reward=0.8), evaluated(15, 0.45)],
        ],
        r"from 0\.6 to 0\.45 while .* rose from 0\.4 to 0\.7: the model learns .*train\.kl_coef",
    ),
    "no_signal, lost": (
        [*rows(2), *rows(10, 3, reward=0.0, **{"train/equal_score_groups": 1.0})],
        r"every score was 0, .* better before: first lower train\.lr \(now 0\.001\)",
    ),
    "truncated, lost": ([row(1, truncated=0.0), *rows(9, 2, truncated=1.0)], r"90% .* train\.lr .* Raise"),
    "held_out, lost": (
        [
            *[evaluated(0, 0.6), *rows(5, reward=0.5), evaluated(5, 0.3)],
            *[*rows(5, 6, reward=0.2), evaluated(10, 0.1)],
        ],
        r"from 0\.6 to 0\.1 while the reward of training fell from 0\.5 to 0\.35: training .* train\.lr",
    ),
    "drops_long": (
        rows(3, **{"dropped/expired": 4.0, "dropped/tokens_over_trained": 3.25}),
        r"3\.2 times the tokens .*\(4 groups, .*produce\.staleness_rule",
    ),
}


@pytest.mark.parametrize("case", SEQUENCES)
def test_each_alarm_names_its_numbers_and_the_key_that_helps(case):
    sequence, pattern = SEQUENCES[case]
    found = said(alarms(), sequence)
    ((name, _),) = found
    assert name == case.partition(",")[0]
    (message,) = found.values()
    assert re.search(pattern, message), message


@pytest.mark.parametrize("case", SEQUENCES)
def test_an_alarm_comes_once_and_again_only_after_it_was_gone(case):
    sequence, _ = SEQUENCES[case]
    name, last = case.partition(",")[0], sequence[-1]
    watching = alarms()
    assert len(said(watching, sequence)) == 1
    end = int(last["train_step"])
    if name == "held_out":
        # It goes away when the held-out score comes back.
        assert said(watching, [evaluated(end, 0.45), evaluated(end, 0.7)]) == {}
        assert said(watching, rows(REST_STEPS, end + 1, reward=0.9)) == {}
        assert watching.held == {}
        start = end + REST_STEPS + 1
        again = [*rows(10, start, reward=0.95), evaluated(start, 0.5), evaluated(start, 0.4)]
    else:
        lasting = {**last, **(failing(10**6) if name == "failed" else {})}
        assert said(watching, [{**lasting, "train_step": end + i} for i in range(1, 6)]) == {}
        assert watching.held == {f"alarm/{name}": 1.0}
        quiet = {"dropped/failed": 2e6} if name == "failed" else {}
        # Short of the rest that makes it news again.
        assert said(watching, rows(REST_STEPS - 1, end + 6, **quiet)) == {}
        start = end + 5 + REST_STEPS
        assert said(watching, rows(WINDOW_STEPS + REST_STEPS, start, **quiet)) == {}
        assert watching.held == {}
        again = [{**values, "train_step": values["train_step"] + start + 100} for values in sequence]
        if name == "failed":
            again = [{**values, "dropped/failed": values["dropped/failed"] + 2e6} for values in again]
    assert [key[0] for key in said(watching, again)] == [name]


def test_a_resumed_run_does_not_repeat_its_alarms():
    watching = alarms()
    history = rows(12, truncated=0.9)
    watching.catch_up(history, [evaluated(0, 0.5)])
    assert said(watching, rows(5, 13, truncated=0.9)) == {}
    assert watching.held == {"alarm/truncated": 1.0}


@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "reward": st.floats(0, 1),
                "truncated": st.floats(0, 0.5),
                "train/equal_score_groups": st.floats(0, 0.99),
                "train/entropy": st.floats(0.02, 5),
                "eval/score": st.floats(0.95, 1),
            },
        ),
        max_size=60,
    )
)
def test_within_the_bounds_nothing_is_said_whatever_is_missing(sequence):
    watching = alarms()
    for step, values in enumerate(sequence, start=1):
        assert watching.see({"train_step": float(step), **values}) == {}


def test_an_evaluation_of_which_every_rollout_failed_is_not_the_one_that_was_better():
    watching, found = alarms(), {}
    for step, score in enumerate([float("nan"), 0.5, 0.6, 0.7]):
        rising = rows(5, 5 * step + 1, reward=0.5 + 0.1 * step)
        found |= said(watching, [*rising, evaluated(5 * step + 5, score)])
    assert found == {}


def test_a_critic_compares_nothing_within_groups():
    train = {"lr": 1e-3, "advantage": "gae", "critic_lr": 1e-3}
    equal = {"train/equal_score_groups": 1.0}
    assert said(alarms(train=train), rows(20, **equal)) == {}
    assert said(alarms(train=train), rows(20, **equal, **{"train/score_std": 0.0}))


def test_the_demo_raises_no_alarm():
    # `forebay train recipes/demo_tiny.toml steps=150 evaluate.every=10`, seed 0: its greedy held-out score
    # falls by an eighth at first, while its samples get better.
    recorded = read_jsonl(Path(__file__).parent / "demo_metrics.jsonl")
    assert len(recorded) == 151
    assert recorded[-1]["eval/score"] > 0.8
    assert said(alarms(), recorded) == {}


def never(state):
    """A judge that finds everything wrong; the run's judge below."""
    return {"score": 0.0, "tries": 2, "is_long": True, "why": "no", "rate": float("nan")}


def test_a_run_that_cannot_learn_says_so_in_the_terminal_the_metrics_and_its_replay(tmp_path, capsys, monkeypatch):
    from typer.testing import CliRunner

    from forebay.cli.commands import app

    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    task = {**table()["tasks"][0], "judge": {"name": "test_alarms:never"}, "sample": {"max_tokens": 1}}
    changes = {"tasks": [task], "steps": 11, "record": True, "rollouts_per_prompt": 2, "batch_size": 2}
    asyncio.run(launch(parse_config(RunConfig, table(tmp_path, **changes))))
    shown = capsys.readouterr().out
    logged = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    for name, words in (("no_signal", "every score was 0"), ("truncated", "% of the responses were cut off")):
        assert shown.count(words) == 1
        assert [values["train_step"] for values in logged if values.get(f"alarm/{name}")] == [10, 11]
    assert logged[-1]["produce/judge/tries"] == 2
    assert logged[-1]["produce/judge/is_long"] == 1
    assert {key for key in logged[-1] if "judge/" in key} == {"produce/judge/tries", "produce/judge/is_long"}
    replayed = CliRunner().invoke(app, ["replay", str(tmp_path / "run"), "--batches-only"])
    assert replayed.exit_code == 0, replayed.output
    assert replayed.output.count("warning: train steps 1 to 10: every score was 0") == 1
