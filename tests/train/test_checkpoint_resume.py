"""A resumed trainer goes on to the same bits; a checkpoint is whole or absent, and free of pickle."""

import json
import threading
import time

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from forebay.io.safe_files import publish, unfinished
from forebay.train import TrainConfig, TrainController
from forebay.train import checkpoint as checkpoint_module
from forebay.train.checkpoint import ADAPTER_FILE

KINDS = [
    {},
    {"mini_batches": 2, "epochs": 2, "schedule": "cosine", "weight_decay": 0.1},
    {"kl_coef": 0.1},
    {"advantage": "gae", "critic_lr": 1e-2, "gradient_checkpointing": True},
    {"lora_rank": 2, "kl_coef": 0.1},
]


def trainer_for(model, **settings):
    return TrainController(model, TrainConfig(**{"lr": 1e-2, **settings}), pad_token_id=0, total_steps=4, seed=7)


def fit(trainer, make_groups, steps):
    """Fresh groups at each train step; their clock-free metrics."""
    history = []
    for _ in range(steps):
        metrics = trainer.fit(make_groups(seed=trainer.train_step)).metrics
        history.append({name: value for name, value in metrics.items() if not name.endswith("_s")})
    return history


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_four_steps_are_two_and_two_bit_for_bit(make_model, make_groups, tmp_path, settings):
    whole = trainer_for(make_model(), **settings)
    expected = fit(whole, make_groups, 4)
    first = trainer_for(make_model(), **settings)
    fit(first, make_groups, 2)
    first.save(tmp_path / "checkpoint")
    second = trainer_for(make_model(), **settings)
    torch.rand(3)
    second.resume(tmp_path / "checkpoint")
    assert second.train_step == 2
    assert fit(second, make_groups, 2) == expected[2:]
    for one, other in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_checkpoint_before_the_first_step_resumes(make_model, make_groups, tmp_path):
    trainer_for(make_model()).save(tmp_path / "c")
    resumed = trainer_for(make_model(seed=4))
    resumed.resume(tmp_path / "c")
    assert fit(resumed, make_groups, 1) == fit(trainer_for(make_model()), make_groups, 1)


def test_a_resume_reads_in_one_order_however_the_files_are_listed(make_model, make_groups, tmp_path, monkeypatch):
    """Ranks gather slices one by one, so each has to ask for the same one at a time."""
    first, orders = trainer_for(make_model()), []
    fit(first, make_groups, 1)
    first.save(tmp_path / "c")
    load = checkpoint_module.load

    class Backwards(checkpoint_module.HuggingFaceStorageReader):
        def read_metadata(self):
            found = super().read_metadata()
            found.state_dict_metadata = dict(reversed(found.state_dict_metadata.items()))
            return found

    def noted(blocks, **settings):
        orders.append(list(blocks))
        load(blocks, **settings)

    monkeypatch.setattr(checkpoint_module, "load", noted)
    trainer_for(make_model()).resume(tmp_path / "c")
    monkeypatch.setattr(checkpoint_module, "HuggingFaceStorageReader", Backwards)
    trainer_for(make_model()).resume(tmp_path / "c")
    assert orders[0] == orders[1]
    assert any(name.startswith("optimizer.") for name in orders[0])


def test_the_random_state_is_saved(make_model, tmp_path):
    trainer = trainer_for(make_model())
    torch.manual_seed(3)
    trainer.save(tmp_path / "c")
    expected = torch.rand(4)
    torch.manual_seed(8)
    trainer.resume(tmp_path / "c")
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 2}], ids=str)
def test_the_model_folder_loads_anywhere_with_adapters_merged(make_model, make_groups, tmp_path, settings):
    trainer = trainer_for(make_model(), **settings)
    fit(trainer, make_groups, 1)
    trainer.save(tmp_path / "c")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "c" / "model")
    ids = torch.tensor([[3, 4, 5]])
    torch.testing.assert_close(loaded(ids).logits, trainer.model(input_ids=ids).logits, atol=1e-5, rtol=1e-5)


def test_only_open_formats_are_written(make_model, make_groups, tmp_path):
    trainer = trainer_for(make_model(), lora_rank=2, advantage="gae", critic_lr=1e-2)
    fit(trainer, make_groups, 1)
    trainer.save(tmp_path / "c")
    files = {str(p.relative_to(tmp_path / "c")) for p in (tmp_path / "c").rglob("*") if p.is_file()}
    assert {
        "trainer.json", "state/shard-00000.safetensors",
        "random.safetensors", "model/config.json", "model/model.safetensors",
        "adapter/adapter_config.json", "adapter/adapter_model.safetensors",
    } <= files  # fmt: skip
    assert {name.rpartition(".")[2] for name in files} <= {"json", "safetensors", "md"}


def test_saving_again_replaces_the_folder(make_model, make_groups, tmp_path):
    trainer = trainer_for(make_model())
    trainer.save(tmp_path / "c")
    (tmp_path / "c" / "stale").write_text("old")
    fit(trainer, make_groups, 1)
    trainer.save(tmp_path / "c")
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    assert not (tmp_path / "c" / "stale").exists()
    assert json.loads((tmp_path / "c" / "trainer.json").read_text())["train_step"] == 1


def test_a_save_that_fails_leaves_the_old_checkpoint(make_model, make_groups, tmp_path, monkeypatch):
    trainer = trainer_for(make_model())
    trainer.save(tmp_path / "c")
    fit(trainer, make_groups, 1)
    monkeypatch.setattr(checkpoint_module, "save_json", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        trainer.save(tmp_path / "c")
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    trainer_for(make_model()).resume(tmp_path / "c")


def test_a_save_that_fails_leaves_no_thread_at_work(make_model, tmp_path, monkeypatch):
    """One that writes the model would make the deleted folder again."""
    write_model, save_tensors = checkpoint_module._write_model, checkpoint_module.save_tensors
    failed = threading.Event()

    def full(tensors, path, **metadata):
        if path.parent.name == checkpoint_module.STATE:
            failed.set()
            raise OSError("disk full")
        save_tensors(tensors, path, **metadata)

    def late(*args):
        failed.wait(300)
        # The error has time to reach the caller.
        time.sleep(0.2)
        write_model(*args)

    monkeypatch.setattr(checkpoint_module, "save_tensors", full)
    monkeypatch.setattr(checkpoint_module, "_write_model", late)
    with pytest.raises(OSError, match="disk full"):
        trainer_for(make_model()).save(tmp_path / "c")
    for thread in threading.enumerate():
        if thread.name.startswith("forebay-checkpoint"):
            thread.join()
    assert not list(tmp_path.iterdir())


def test_adapters_are_written_beside_training_as_they_were(make_model, make_groups, tmp_path, monkeypatch):
    """Ranks wait for each other in `begin_save`: no disk may hold up one of them."""
    save_tensors, goes_on = checkpoint_module.save_tensors, threading.Event()

    def late(tensors, path, **metadata):
        if path.parent.name == "adapter":
            assert threading.current_thread() is not threading.main_thread()
            assert goes_on.wait(300)
        save_tensors(tensors, path, **metadata)

    trainer = trainer_for(make_model(), lora_rank=2)
    fit(trainer, make_groups, 1)
    trainer.save(tmp_path / "before")
    monkeypatch.setattr(checkpoint_module, "save_tensors", late)
    trainer.begin_save(tmp_path / "c")
    fit(trainer, make_groups, 1)
    goes_on.set()
    trainer.finish_save()
    before, saved = (load_file(tmp_path / name / "adapter" / ADAPTER_FILE) for name in ("before", "c"))
    assert all(torch.equal(before[name], value) for name, value in saved.items())
    trainer.save(tmp_path / "after")
    after = load_file(tmp_path / "after" / "adapter" / ADAPTER_FILE)
    assert not all(torch.equal(after[name], value) for name, value in saved.items())


def test_weights_held_in_another_dtype_are_named(make_model, tmp_path):
    trainer_for(make_model().bfloat16(), lora_rank=2).save(tmp_path / "c")
    with pytest.raises(ValueError, match="weights held in bfloat16 and in float32"):
        trainer_for(make_model(), lora_rank=2).resume(tmp_path / "c")


def test_leftovers_of_a_crash_are_cleared(tmp_path):
    for name in ("c.tmp", "c.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_text("x")
    with unfinished(tmp_path / "c") as folder:
        (folder / "file").write_text("new")
        publish(folder, tmp_path / "c")
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    assert (tmp_path / "c" / "file").read_text() == "new"


def test_no_checkpoint_is_one_clear_error(make_model, tmp_path):
    with pytest.raises(ValueError, match=r"no checkpoint at .*nowhere.*trainer\.json is missing"):
        trainer_for(make_model()).resume(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("saved", "mine", "named"),
    [
        ({}, {"lora_rank": 2}, "adapters = False"),
        ({"advantage": "gae", "critic_lr": 1e-2}, {}, "critic = True"),
        ({"lora_rank": 2, "seed": 1}, {"lora_rank": 2}, "starting_weights"),
        ({"kl_coef": 0.1, "seed": 1}, {"kl_coef": 0.1}, "starting_weights"),
    ],
    ids=str,
)
def test_a_checkpoint_of_another_kind_is_refused(make_model, tmp_path, saved, mine, named):
    saved = dict(saved)
    trainer_for(make_model(seed=saved.pop("seed", 0)), **saved).save(tmp_path / "c")
    with pytest.raises(ValueError, match=f"has {named}.*same starting model"):
        trainer_for(make_model(), **mine).resume(tmp_path / "c")


def test_a_checkpoint_of_a_model_with_other_weights_is_refused(make_model, make_groups, tmp_path):
    trainer = trainer_for(make_model(num_hidden_layers=1))
    trainer.fit(make_groups())
    trainer.save(tmp_path / "c")
    with pytest.raises(ValueError, match=r"weights are of another model; names that differ: .*layers\.1"):
        trainer_for(make_model()).resume(tmp_path / "c")


def test_the_tokenizer_is_saved_with_the_model(make_model, tmp_path):
    class Tokenizer:
        def save_pretrained(self, folder):
            (folder / "tokenizer.json").write_text("{}")

    trainer = TrainController(make_model(), TrainConfig(), pad_token_id=0, tokenizer=Tokenizer())
    trainer.save(tmp_path / "c")
    assert (tmp_path / "c" / "model" / "tokenizer.json").exists()
