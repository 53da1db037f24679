"""Presets resolve to what their papers state, and keys of the run file win over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from forebay.cli.commands import app
from forebay.config import parse_config
from forebay.runs.config import RunConfig
from forebay.train import TrainConfig
from forebay.train.presets import PRESETS, differences

PAPER_TABLES: dict[str, dict[str, Any]] = {
    # Yu et al. 2025, equations 8-13 and section 4.1. The penalty: 4,096 of 20,480 tokens.
    "dapo": {
        "advantage": "grpo", "loss": "clipped", "clip": (0.2, 0.28), "normalization": "token-mean",
        "kl_coef": 0.0, "overlong": 4096 / 20480, "mini_batches": 16, "epochs": 1,
        "schedule": ("constant", 20), "entropy_coef": 0.0, "credit": "rollout",
    },
    # Liu et al. 2025, section 3.2; the constant is the budget of 48 tokens of the run below.
    "dr_grpo": {
        "advantage": "dr_grpo", "loss": "clipped", "clip": 0.2, "normalization": 48, "kl_coef": 0.0,
        "overlong": "train", "mini_batches": 1,
    },
    # Zheng et al. 2025, equations 5-7 and section 5.1.
    "gspo": {
        "advantage": "grpo", "loss": "gspo", "clip": (3e-4, 4e-4), "normalization": "sequence-mean",
        "kl_coef": 0.0, "mini_batches": 4, "overlong": "train",
    },
    # Chen et al. 2025 (MiniMax-M1), section 3.1.
    "cispo": {
        "advantage": "grpo", "loss": "cispo", "clip": (1.0, 4.0), "normalization": "token-mean",
        "kl_coef": 0.0, "mini_batches": 16, "overlong": 0.2,
    },
    # Hu et al. 2025, equations 8-10 (version 3 and later).
    "reinforce_pp": {
        "advantage": "reinforce_pp", "credit": "token", "loss": "clipped", "clip": 0.2,
        "discount": (1.0, 1.0), "normalization": "token-mean", "kl_estimator": "reward", "kl_coef": 0.01,
    },
    # Ahmadian et al. 2024, section 3: a sum over the tokens of a response, a mean over responses.
    "rloo": {
        "advantage": "rloo", "normalization": 1, "kl_estimator": "reward", "kl_coef": 0.03,
        "mini_batches": 1, "epochs": 1,
    },
    # Ouyang et al. 2022, appendix C.4; lambda: Schulman et al. 2017, table 3.
    "ppo": {
        "advantage": "gae", "loss": "clipped", "clip": 0.2, "kl_estimator": "reward", "kl_coef": 0.02,
        "critic_lr": 9e-6, "discount": (1.0, 0.95), "mini_batches": 8, "epochs": 1,
        "schedule": ("constant", 10), "normalization": "token-mean",
    },
}  # fmt: skip


def table_of(**train: Any) -> dict[str, Any]:
    task = {"name": "a", "data": {"source": "d.jsonl"}, "judge": "exact_match", "sample": {"max_tokens": 48}}
    return {
        "name": "r", "steps": 1, "batch_size": 4, "rollouts_per_prompt": 4, "model": {"source": "tiny"},
        "tasks": [task], "train": train,
    }  # fmt: skip


@pytest.mark.parametrize("preset", PAPER_TABLES)
def test_a_preset_is_what_its_paper_says(preset: str) -> None:
    config = parse_config(RunConfig, table_of(preset=preset))
    assert {key: getattr(config.train, key) for key in PAPER_TABLES[preset]} == PAPER_TABLES[preset]
    assert config.produce.filter == ("reward_variance" if preset in ("dapo", "cispo") else "none")
    assert not list(differences(config.train))
    # As ranks and resumed runs read it, with every key set.
    assert TrainConfig.model_validate(config.train.model_dump()) == config.train


def test_every_preset_has_a_table_and_no_unknown_key() -> None:
    assert set(PAPER_TABLES) == set(PRESETS)
    assert all(set(table) <= set(TrainConfig.model_fields) for table in PRESETS.values())


def test_keys_of_the_run_file_win_over_the_preset() -> None:
    table = table_of(preset="dapo", clip=0.3, mini_batches=2) | {"produce": {"filter": "none"}}
    config = parse_config(RunConfig, table)
    assert (config.train.clip, config.train.mini_batches) == (0.3, 2)
    assert config.train.overlong == 0.2
    assert config.produce.filter == "none"


def test_a_dry_run_says_where_each_value_is_from(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'name = "r"\nsteps = 1\nbatch_size = 4\nrollouts_per_prompt = 4\nmodel = { source = "tiny" }\n'
        '[train]\npreset = "dapo"\nclip = 0.3\n[[tasks]]\nname = "a"\ndata = { source = "d.jsonl" }\n'
        'judge = "exact_match"\n'
    )
    said = CliRunner().invoke(app, ["train", str(path), "--dry-run"])
    assert said.exit_code == 0
    assert "# train.overlong = 0.2: preset 'dapo'\n" in said.stdout
    assert "# train.clip = 0.3: not (0.2, 0.28) of preset 'dapo'\n" in said.stdout
    # What is printed is a run file all the same, and means the same.
    again = tmp_path / "again.toml"
    again.write_text(said.stdout)
    assert CliRunner().invoke(app, ["train", str(again), "--dry-run"]).stdout == said.stdout
