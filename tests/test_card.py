"""A model's card is made from its run, and goes to the hub with the model; offline the folder stays."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub.errors import HFValidationError, HTTPError
from typer.testing import CliRunner

from forebay.cli.commands import app
from forebay.ledger import Ledger

RUN = """
name = "sums"
steps = 3
batch_size = 2
rollouts_per_prompt = 4
search_path = ["/secret/place"]
model = { source = "tiny" }

[[tasks]]
name = "sums"
data = { source = "addition", where = "answer != '4'", size = 20 }
judge = "exact_match"
sampler = "difficulty"
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "sums"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "model.safetensors").write_bytes(b"weights")
    adapter = folder / "checkpoints" / "step_3" / "trainer" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    (folder / "run.toml").write_text(RUN)
    rows: list[dict[str, float]] = [{"train_step": 0, "eval/score": 0.125}]
    rows += [{"train_step": step, "reward": step / 4} for step in (1, 2, 3)]
    rows += [{"train_step": 3, "eval/score": 0.75}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ledger = Ledger(folder / "ledger.jsonl")
    for number in range(6):
        tokens = 20 if number < 4 else 200
        ledger.record(f"g{number}", "sums", "produced", num_tokens=tokens, latency_s=1.0, score=number / 5)
        if number < 4:
            ledger.record(f"g{number}", "sums", "trained", train_step=1)
        else:
            ledger.record(f"g{number}", "sums", "dropped", reason="expired")
    ledger.close()
    return folder


def forebay(*arguments: object) -> str:
    return CliRunner().invoke(app, [str(argument) for argument in arguments]).output


def test_a_card_tells_of_data_curve_evaluation_books_and_recipe(run: Path) -> None:
    forebay("card", run)
    card = (run / "card" / "README.md").read_text()
    assert "trained by reinforcement learning for 3 steps of 2 prompts x 4 responses" in card
    assert "where = \"answer != '4'\"" in card
    curve = card[card.index("## Curve") : card.index("## Evaluation")]
    assert "*" in curve
    assert "o" in "".join(line for line in curve.splitlines() if "|" in line)
    assert "| eval/score | 0.125 | 0.75 |" in card
    generated = next(line for line in card.splitlines() if line.startswith("sums"))
    assert generated.split() == ["sums", "6", "4", "2", *"00000"]
    # Dropped for its age, and ten times as long as what was trained; and solved more often at first.
    assert "expired" in card
    assert [line.split()[-2:] for line in card.splitlines() if "+180.00" in line]
    assert 'sampler = "difficulty"' in card or 'name = "difficulty"' in card
    assert "/secret/place" not in card
    assert {path.name for path in (run / "card").iterdir()} == {"README.md", "adapter", "model.safetensors"}


def test_an_evaluation_of_which_every_rollout_failed_is_not_in_the_card(run: Path) -> None:
    row = {"train_step": 4, "eval/score": None, "eval/failed": 1.0}
    with (run / "metrics.jsonl").open("a") as rows:
        rows.write(json.dumps(row) + "\n")
    forebay("card", run)
    assert "| eval/score | 0.125 | 0.75 |" in (run / "card" / "README.md").read_text()


def test_a_run_without_a_model_has_no_card(run: Path) -> None:
    (run / "model" / "model.safetensors").unlink()
    (run / "model").rmdir()
    assert "no trained model in" in forebay("card", run)


class FakeHub:
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, object]]] = []

    def create_repo(self, name: str, **options: object) -> SimpleNamespace:
        self.calls.append((name, options))
        return SimpleNamespace(repo_id=name if "/" in name else f"me/{name}")

    def upload_folder(self, *, repo_id: str, folder_path: Path) -> None:
        self.calls.append((repo_id, {"files": sorted(path.name for path in folder_path.iterdir())}))


def test_a_push_makes_a_private_repository_and_uploads_the_folder(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    forebay("push", run)
    forebay("push", run, "acme/sums", "--public")
    files = ["README.md", "adapter", "model.safetensors"]
    assert hub.calls == [
        ("sums", {"private": True, "exist_ok": True}),
        ("me/sums", {"files": files}),
        ("acme/sums", {"private": False, "exist_ok": True}),
        ("acme/sums", {"files": files}),
    ]


def test_offline_the_folder_is_written_and_the_command_to_push_it_said(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    said = " ".join(forebay("push", run, "acme/sums").split())
    assert "not pushed: HF_HUB_OFFLINE is set" in said
    assert f"hf upload acme/sums {run / 'card'}" in said
    assert (run / "card" / "README.md").is_file()


# The library's own HTTP client, which is another package in each of its versions.
LOST = importlib.import_module(HTTPError.__module__.partition(".")[0]).ConnectError("Connection refused")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LOST, "not pushed: Connection refused. The folder is written; where the hub can be reached"),
        (HFValidationError("Repo id is wrong"), "not pushed: Repo id is wrong. Name it: forebay push"),
    ],
)
def test_a_push_that_fails_is_one_clear_error(
    run: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    hub = FakeHub()
    monkeypatch.setattr(hub, "create_repo", Mock(side_effect=error))
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    assert message in " ".join(forebay("push", run).split())
