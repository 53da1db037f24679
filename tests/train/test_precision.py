"""Which numbers are kept in which precision: float32 where training adds them up, others where asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from forebay.config import load_config
from forebay.engines import RolloutController, TransformersEngine
from forebay.models import live_weights
from forebay.models.starting_weights import BASE_FINGERPRINT, fingerprint
from forebay.runs.config import RunConfig, to_toml
from forebay.train import TrainConfig, TrainController, weight_sync


class Receiver:
    """Keeps the weights that it is given."""

    async def update_weights(self, weights, model_step: int) -> None:
        self.dtypes = {name: value.dtype for name, value in weights}


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
def test_a_small_learning_rate_moves_nearly_every_weight(make_model, make_groups, given, tmp_path: Path):
    model = make_model().to(given)
    trainer = TrainController(model, TrainConfig(lr=1e-6, dtype="bfloat16"), pad_token_id=0)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    trainer.fit(make_groups(num_groups=8))
    moved = [(value != before[name]).flatten() for name, value in model.named_parameters()]
    assert torch.cat(moved).float().mean() > 0.99
    trainer.save(tmp_path / "saved")
    for file in ("model/model", "state/shard-00000"):
        kept = load_file(tmp_path / "saved" / f"{file}.safetensors")
        assert {value.dtype for value in kept.values()} == {torch.float32}
    assert json.loads((tmp_path / "saved/trainer.json").read_text())["dtype"] == "float32"
    assert json.loads((tmp_path / "saved/model/config.json").read_text())["dtype"] == "float32"


def test_adapters_are_float32_on_whatever_they_lie(make_model, make_groups):
    config = TrainConfig(lr=1e-6, lora_rank=2, dtype="bfloat16", critic_lr=1e-6, advantage="gae")
    trainer = TrainController(make_model().bfloat16(), config, pad_token_id=0)
    trainer.fit(make_groups())
    dtypes = {name: value.dtype for name, value in trainer.model.named_parameters()}
    assert {dtype for name, dtype in dtypes.items() if "lora_" in name} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if "lora_" not in name} == {torch.bfloat16}
    assert trainer.learner.critic is not None
    assert {value.dtype for value in trainer.learner.critic.parameters()} == {torch.float32}


async def test_engines_get_their_own_dtype_and_know_it_by_its_bits(make_model):
    receiver = Receiver()
    trainer = TrainController(make_model(), TrainConfig(), pad_token_id=0, engine_dtype="bfloat16")
    await trainer.sync_weights(receiver)
    assert set(receiver.dtypes.values()) == {torch.bfloat16}
    assert trainer.model.dtype == torch.float32
    held = make_model().bfloat16().named_parameters()
    adapted = TrainController(make_model(), TrainConfig(lora_rank=2), pad_token_id=0, engine_dtype="bfloat16")
    assert adapted.learner.adapter_config is not None
    assert adapted.learner.adapter_config[BASE_FINGERPRINT] == fingerprint(held)


@pytest.mark.parametrize("keys", [{}, {"lora_rank": 2}], ids=str)
async def test_an_engine_of_this_process_casts_on_the_way_into_its_model(make_model, monkeypatch, keys):
    """A whole copy in its dtype would be read and written once more, and take memory."""
    engine = TransformersEngine(make_model(seed=1).bfloat16(), takes_adapters=False)
    trainer = TrainController(make_model(), TrainConfig(**keys), pad_token_id=0, engine_dtype="bfloat16")
    for module in (weight_sync, live_weights):
        monkeypatch.setattr(module, "cast", lambda weights, dtype: pytest.fail("it was copied") if dtype else weights)
    num_bytes = await trainer.sync_weights(RolloutController(engine))
    assert num_bytes == 2 * sum(weight.numel() for weight in make_model().parameters())
    for name, weight in make_model().named_parameters():
        assert torch.equal(engine._model.get_parameter(name), weight.bfloat16())
    await engine.close()


def run_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(
        'name = "r"\nsteps = 1\nbatch_size = 1\nrollouts_per_prompt = 2\n' + text
        + '[[tasks]]\nname = "t"\ndata = { source = "d.jsonl" }\njudge = { name = "exact_match" }\n'
    )  # fmt: skip
    return path


@pytest.mark.parametrize(
    ("text", "engine", "train"),
    [
        ('[model]\nsource = "tiny"\n', "auto", "auto"),
        (
            'engine = { name = "process", dtype = "bfloat16" }\n[model]\nsource = "tiny"\n'
            '[train]\ndtype = "float32"\n',
            "bfloat16",
            "float32",
        ),
        ('[model]\nsource = "tiny"\n[engine]\ndtype = "bfloat16"\n', "bfloat16", "auto"),
    ],
)
def test_run_files_have_a_key_for_engines_and_one_for_passes(tmp_path, caplog, text, engine, train):
    config: Any = load_config(RunConfig, run_file(tmp_path, text))
    assert (config.engine.dtype, config.train.dtype) == (engine, train)
    path = tmp_path / "again.toml"
    path.write_text(to_toml(config))
    assert load_config(RunConfig, path) == config
    assert not caplog.records
