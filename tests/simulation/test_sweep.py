import json

import pytest
from simulated_runs import cluster, run_table
from typer.testing import CliRunner

from forebay.cli.commands import app
from forebay.config import ConfigError
from forebay.simulation.sweep import combine, parse_axis, rank, run_cases


def cases_of(*sweeps, **changes):
    return list(combine(run_table(**changes), [], cluster(trainers=2), dict(map(parse_axis, sweeps))))


def test_axes_make_every_combination():
    cases = cases_of("max_staleness=0,2", "cluster.engines=1,2", "split=2:1", "batch_size=3")
    assert [(case.config.produce.max_staleness, case.config.batch_size) for case in cases] == [
        (0, 3),
        (0, 3),
        (2, 3),
        (2, 3),
    ]
    assert {(case.cluster.engines, case.cluster.trainers, case.cluster.train_s) for case in cases} == {(2, 1, 10.0)}


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ("max_staleness", "not of the form"),
        ("max_staleness=", "not of the form"),
        ("max_stalenes=1", "unknown key 'max_stalenes'"),
        ("max_staleness=-1", "produce.max_staleness"),
        ("split=3", "not of the form ENGINES:TRAINERS"),
        ("split=0:2", "not of the form ENGINES:TRAINERS"),
        ("cluster.slots=0", "'slots' = 0"),
    ],
)
def test_what_cannot_be_swept_is_said(sweep, message):
    with pytest.raises(ConfigError, match=message):
        cases_of(sweep)


def test_the_best_is_the_fastest_and_of_equals_the_freshest():
    cases = cases_of("max_staleness=0,1,4", "over_sample_threshold=0,1")
    totals = []

    def shown(answers, total):
        totals.append(total)
        return answers

    outcomes = run_cases(cases, 8, jobs=1, shown=shown)
    # The synchronous run of them all is one.
    assert totals == [7]
    ranked = rank(outcomes)
    step_s = [outcome.result.step_s for outcome in ranked]
    assert step_s[0] <= min(step_s) * 1.01
    near = [outcome for outcome in outcomes if outcome.result.step_s <= min(step_s) * 1.01]
    assert ranked[0].result.token_staleness.mean == min(outcome.result.token_staleness.mean for outcome in near)
    assert all(outcome.speed_up > 0.98 for outcome in outcomes)


def test_the_command_writes_what_it_shows(tmp_path):
    import tomli_w

    run_file, cluster_file, out = tmp_path / "run.toml", tmp_path / "cluster.toml", tmp_path / "out"
    run_file.write_text(tomli_w.dumps(run_table()))
    cluster_file.write_text(tomli_w.dumps(cluster().model_dump(mode="json", exclude_none=True)))
    command = ["simulate", str(run_file), "seed=1", "cluster.sync_s=2.0", "--cluster", str(cluster_file)]
    command += ["--sweep", "max_staleness=0,1", "--steps", "4", "--jobs", "1", "--out", str(out)]
    outcome = CliRunner().invoke(app, command)
    assert outcome.exit_code == 0, outcome.output
    assert "best" in outcome.output
    assert "over synchronous" in outcome.output
    numbers = json.loads((out / "simulation.json").read_text())
    assert {tuple(entry["settings"].items()) for entry in numbers} == {
        (("produce.max_staleness", "0"),),
        (("produce.max_staleness", "1"),),
    }
    assert "sync_s = 2.0" in (out / "cluster.toml").read_text()
    assert not (out / "trace.json").exists()
    # Alone, a setting gets its timeline, again and again.
    for _ in range(2):
        outcome = CliRunner().invoke(app, [*command[:6], "--steps", "4", "--out", str(out)])
        assert outcome.exit_code == 0, outcome.output
        assert json.loads((out / "trace.json").read_text())[0]["ph"] == "X"


def test_mistakes_are_one_message(tmp_path):
    outcome = CliRunner().invoke(app, ["simulate", str(tmp_path / "no.toml")])
    assert outcome.exit_code == 2
    outcome = CliRunner().invoke(app, ["simulate", "--calibrate", str(tmp_path)])
    assert outcome.exit_code == 2
    assert isinstance(outcome.exception, SystemExit)
