"""A name of a loss or an advantage brings its paper's settings, and what differs from them is said once."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from forebay.cli.commands import app
from forebay.train import TrainConfig, TrainController
from forebay.train.presets import PAPERS, differences


@pytest.mark.parametrize(
    ("given", "resolved"),
    [
        ({}, {"clip": 0.2, "normalization": "token-mean", "kl_estimator": "k3"}),
        ({"loss": "gspo"}, {"clip": (3e-4, 4e-4), "normalization": "sequence-mean"}),
        ({"loss": "gspo", "clip": 1e-3}, {"clip": 1e-3, "normalization": "sequence-mean"}),
        ({"loss": "gspo", "normalization": 512}, {"clip": (3e-4, 4e-4), "normalization": 512}),
        ({"loss": "cispo"}, {"clip": (1.0, 4.0), "normalization": "token-mean"}),
        ({"advantage": "reinforce_pp_baseline"}, {"kl_estimator": "k2", "clip": 0.2}),
        ({"advantage": "reinforce_pp_baseline", "loss": "gspo"}, {"kl_estimator": "k2", "clip": (3e-4, 4e-4)}),
    ],
)
def test_names_fill_in_what_is_left_out(given: dict[str, Any], resolved: dict[str, Any]):
    config = TrainConfig(**given)
    assert {key: getattr(config, key) for key in resolved} == resolved
    # As ranks and resumed runs read it, with every key set.
    assert TrainConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"loss": "gspo", "clip": 0.2}, "loss 'gspo' with clip = 0.2"),
        ({"loss": "gspo", "normalization": "token-mean"}, "loss 'gspo' with normalization = 'token-mean'"),
        (
            {"loss": "gspo", "advantage": "gae", "critic_lr": 1e-5},
            "with critic_lr = 1e-05: after its paper it is None",
        ),
        ({"loss": "cispo", "clip": 0.2}, "loss 'cispo' with clip = 0.2"),
        ({"advantage": "dr_grpo"}, "advantage 'dr_grpo' with normalization = 'token-mean'"),
        ({"advantage": "opo", "epochs": 2}, "advantage 'opo' with epochs = 2: after its paper it is 1"),
        ({"advantage": "opo", "kl_coef": 0.1}, "advantage 'opo' with kl_coef"),
        ({"advantage": "rloo", "mini_batches": 4}, "advantage 'rloo' with mini_batches = 4"),
        ({"advantage": "reinforce_pp_baseline", "kl_coef": 0.1, "kl_estimator": "k3"}, "with kl_estimator = 'k3'"),
    ],
)
def test_what_differs_from_a_paper_is_said_once(given, said, model, caplog):
    TrainController(model, TrainConfig(**given), pad_token_id=0)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert said in warnings[0]


def test_names_alone_differ_from_nothing():
    names = [{"loss": name} for name in ("clipped", "gspo", "cispo")]
    names += [{"advantage": name} for name in ("grpo", "rloo", "opo", "reinforce_pp_baseline", "pass_at_4")]
    names += [{"advantage": "dr_grpo", "normalization": 64}, {"advantage": "dr_grpo", "loss": "gspo"}]
    names += [{"advantage": "gae", "critic_lr": 1e-5}, {"advantage": "reinforce_pp_baseline", "kl_coef": 0.1}]
    assert not [said for given in names for said in differences(TrainConfig(**given))]
    assert all(key in TrainConfig.model_fields for table in PAPERS.values() for key in table)


def dry_run(tmp_path: Path, train: str) -> Any:
    table = 'data = { source = "d.jsonl" }\njudge = { name = "exact_match" }\n'
    tasks = f'[[tasks]]\nname = "a"\nsample = {{ max_tokens = 48 }}\n{table}[[tasks]]\nname = "b"\n{table}'
    path = tmp_path / "run.toml"
    path.write_text(
        'name = "r"\nsteps = 1\nbatch_size = 1\nrollouts_per_prompt = 2\nmodel = { source = "tiny" }\n'
        f"train = {{ {train} }}\n{tasks}"
    )
    return CliRunner().invoke(app, ["train", str(path), "--dry-run"])


@pytest.mark.parametrize(
    ("train", "shown", "warned"),
    [
        ('advantage = "dr_grpo"', "normalization = 256", False),
        ('advantage = "dr_grpo", normalization = "token-mean"', 'normalization = "token-mean"', True),
        ('advantage = "dr_grpo", loss = "gspo"', 'normalization = "sequence-mean"', False),
        ('loss = "gspo"', "    0.0003,\n    0.0004,\n", False),
        ('loss = "gspo", clip = 0.2', "clip = 0.2", True),
    ],
)
def test_a_dry_run_shows_what_a_name_brings_and_what_differs(tmp_path, train, shown, warned):
    result = dry_run(tmp_path, train)
    assert result.exit_code == 0
    assert shown in result.stdout
    assert result.stderr.startswith("warning: train: ") == warned
