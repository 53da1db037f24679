"""``forebay warmup``: the supervised phase alone, on conversations, and the run that goes on from it."""

import json

import pytest
import tomli_w
import torch
from safetensors.torch import load_file
from test_colocated_run import losses, run_table
from typer.testing import CliRunner

from forebay.cli.commands import app
from forebay.metrics import read_jsonl


def chat(number):
    turns = [("user", f"{number}+1="), ("assistant", str(number + 1)), ("user", "and?"), ("assistant", "no")]
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def forebay(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture
def run_file(tmp_path):
    rows = [*map(chat, range(60)), {"messages": [*chat(1)["messages"], *chat(2)["messages"] * 50]}]
    (tmp_path / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    table = run_table(tmp_path, steps=2, threads=1)
    table["warmup"] = {"steps": "2 epochs", "batch_size": 16, "lr": 3e-3, "data": {"source": "chats.jsonl"}}
    (tmp_path / "run.toml").write_text(tomli_w.dumps(table))
    return tmp_path / "run.toml"


def test_a_run_goes_on_from_the_command_as_if_it_had_never_stopped(run_file, tmp_path):
    code, said = forebay("warmup", run_file, "train.layout=packed")
    assert code == 0, said
    assert "1 conversations are left out, longer than 512 tokens" in said
    assert "warm-up: 8 supervised steps" in said
    assert "of 3 held-out conversations" in said
    folder = tmp_path / "run"
    found = json.loads((folder / "warmup" / "losses.json").read_bytes())
    assert len(found["loss"]) == 8
    before, _, after = found["held_out_loss"]
    assert after < before
    (row,) = read_jsonl(folder / "metrics.jsonl")
    assert row["warmup/held_out_loss"] == after
    assert row["eval/score"] >= 0
    warm, kept = (load_file(folder / name / "model.safetensors") for name in ("warmup", "model"))
    assert warm.keys() <= kept.keys()
    assert all(torch.equal(weight, kept[name]) for name, weight in warm.items())
    assert losses(folder) == {}
    assert forebay("train", "--resume", folder, "steps=2")[0] == 0
    assert forebay("train", run_file, "name=whole", "train.layout=packed")[0] == 0
    assert sorted(losses(folder)) == [1, 2]
    assert losses(folder) == losses(tmp_path / "whole")


def test_what_does_not_fit_is_one_sentence(run_file, tmp_path):
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "1"}]}')
    code, said = forebay("warmup", run_file)
    assert code == 2
    assert "chats.jsonl, line 1: a conversation has messages of" in said
    assert not (tmp_path / "run").exists()
    plain = tmp_path / "plain.toml"
    plain.write_text(run_file.read_text().partition("[warmup]")[0])
    code, said = forebay("warmup", plain)
    assert code == 2
    assert "has no [warmup]: add one" in said
    code, said = forebay("warmup", run_file, "warmup.steps=epochs")
    assert code == 2
    assert "'warmup.steps' = 'epochs': String should match" in said
