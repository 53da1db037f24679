"""Adapters train alone, switch off for the reference, and merge without a trace."""

import asyncio
import logging

import numpy as np
import pytest
import torch

from forebay.models.starting_weights import BASE_FINGERPRINT, AdaptersRefusedError, BaseDiffersError, fingerprint
from forebay.train import TrainConfig, TrainController
from forebay.train.model.lora import add_lora, is_lora, model_weights, named_parts, own_blocks


def trainer_for(model, **settings):
    config = TrainConfig(**{"lr": 1e-2, "lora_rank": 2, **settings})
    return TrainController(model, config, pad_token_id=0)


def trained(make_model, make_groups, steps=3, **settings):
    trainer = trainer_for(make_model(), **settings)
    for seed in range(steps):
        trainer.fit(make_groups(seed=seed))
    return trainer


def test_only_adapters_are_trained_and_the_output_head_has_none(make_model, make_groups):
    trainer = trained(make_model, make_groups)
    base = dict(make_model().named_parameters())
    trainable = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert trainable
    assert all(".lora_" in name and "lm_head" not in name for name in trainable)
    for name, parameter in trainer.model.get_base_model().named_parameters():
        if ".lora_" not in name:
            assert torch.equal(parameter, base[name.replace(".base_layer", "")])


def test_the_reference_is_the_model_without_its_adapters(make_model, make_groups):
    trainer = trained(make_model, make_groups, kl_coef=0.1)
    assert trainer.learner.ref_model is None
    batch = trainer.compute_ref_logprobs(trainer.pack(make_groups()))
    fresh = TrainController(make_model(), TrainConfig(), pad_token_id=0)
    expected = fresh.compute_old_logprobs(fresh.pack(make_groups())).old_logprobs
    np.testing.assert_allclose(batch.ref_logprobs, expected, atol=1e-6)
    assert not np.allclose(trainer.compute_old_logprobs(batch).old_logprobs, expected, atol=1e-3)


def test_merged_weights_have_the_plain_models_names_and_compute_the_same(make_model, make_groups):
    trainer = trained(make_model, make_groups)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    plain = make_model(seed=5)
    plain.load_state_dict(dict(model_weights(trainer.model)), strict=False)
    assert {name for name, _ in model_weights(trainer.model)} == {name for name, _ in plain.named_parameters()}
    ids = torch.tensor([[3, 4, 5, 6]])
    expected = trainer.model(input_ids=ids).logits
    torch.testing.assert_close(plain(ids).logits, expected, atol=1e-5, rtol=1e-5)
    after = trainer.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_rank_whose_memory_takes_nothing_merges_nothing(make_model, monkeypatch):
    model = add_lora(make_model(), rank=2, alpha=2.0, targets="all-linear")
    parts = list(named_parts(model))
    asked = [layer for _, _, layer in parts if layer is not None]
    for layer in asked:
        monkeypatch.setattr(layer, "get_delta_weight", lambda _: pytest.fail("a delta that no memory takes"))
    places = {name: parameter.to("meta") for name, parameter, _ in parts}
    assert asked
    assert [name for name, *_ in own_blocks(parts, merged=True, only=places, are_whole=True)] == list(places)


def test_an_engine_gets_merged_weights(make_model, make_groups):
    trainer = trained(make_model, make_groups, steps=1)
    received = {}

    class Receiver:
        async def update_weights(self, weights, model_step):
            received.update(weights)

    asyncio.run(trainer.sync_weights(Receiver()))
    assert set(received) == {name for name, _ in make_model().named_parameters()}
    assert not any(value.requires_grad for value in received.values())


def test_the_weights_below_the_adapters_are_those_that_training_began_with(make_model, make_groups):
    trainer = trained(make_model, make_groups)
    below = dict(model_weights(trainer.model, merged=False))
    began = dict(make_model().named_parameters())
    assert below.keys() == began.keys()
    assert all(torch.equal(below[name], value) for name, value in began.items())


class AdapterReceiver:
    """Wants the starting weights first, or other weights altogether."""

    takes_adapters = True

    def __init__(self, base=None, *, refuses=False):
        self.base, self.refuses, self.given = base, refuses, []

    async def update_weights(self, weights, model_step):
        weights = list(weights)
        self.base = fingerprint(weights)
        self.given.append(("weights", model_step, sum(tensor.nbytes for _, tensor in weights)))

    async def update_adapters(self, adapters, model_step, *, config):
        if self.refuses:
            raise AdaptersRefusedError("not of this kind")
        if config[BASE_FINGERPRINT] != self.base:
            raise BaseDiffersError("others")
        self.given.append(("adapters", model_step, sum(tensor.nbytes for _, tensor in adapters)))


def test_a_receiver_gets_the_starting_weights_before_its_first_adapters(make_model, make_groups):
    trainer = trained(make_model, make_groups, steps=2)
    receiver = AdapterReceiver()
    for _ in range(2):
        asyncio.run(trainer.sync_weights(receiver))
    assert [what[:2] for what in receiver.given] == [("weights", 0), ("adapters", 2), ("adapters", 2)]
    assert receiver.base == fingerprint(make_model().named_parameters())


def test_a_receiver_that_began_as_the_trainer_gets_adapters_alone(make_model, make_groups, tmp_path):
    trained(make_model, make_groups, steps=2).save(tmp_path / "c")
    resumed = trainer_for(make_model())
    resumed.resume(tmp_path / "c")
    receiver = AdapterReceiver(fingerprint(make_model().named_parameters()))
    asyncio.run(resumed.sync_weights(receiver))
    assert [what[:2] for what in receiver.given] == [("adapters", 2)]


def test_a_receiver_that_refuses_the_adapters_gets_merged_weights(make_model, make_groups, caplog):
    trainer = trained(make_model, make_groups, steps=1)
    receiver = AdapterReceiver(refuses=True)
    asyncio.run(trainer.sync_weights(receiver))
    assert [what[:2] for what in receiver.given] == [("weights", 1)]
    assert receiver.base == fingerprint(model_weights(trainer.model))
    assert "not of this kind" in caplog.text


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_a_weight_that_two_layers_share_cannot_have_an_adapter(make_model, target):
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight and lm_head.weight are one weight"):
        trainer_for(make_model(), lora_targets=(target,))
    assert trainer_for(make_model(tie_word_embeddings=False), lora_targets=(target,))


def test_rank_alpha_and_targets_are_the_configs(make_model):
    adapted = add_lora(make_model(), rank=3, alpha=12.0, targets=("q_proj",))
    names = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert all("q_proj" in name for name in names)
    layer = adapted.get_base_model().model.layers[0].self_attn.q_proj
    assert layer.lora_A["default"].weight.shape == (3, 16)
    assert layer.scaling["default"] == 4.0


def test_what_peft_loads_warns_of_no_kernel_that_is_not_used():
    # It does so once a process, on CPUs with AVX-512 BF16 where bitsandbytes is installed.
    assert not logging.getLogger("bitsandbytes.backends.cpu.ops").isEnabledFor(logging.WARNING)
    assert logging.getLogger("bitsandbytes").isEnabledFor(logging.WARNING)


def test_targets_that_are_not_in_the_model_are_an_error(make_model):
    with pytest.raises(ValueError, match="no_such_layer"):
        trainer_for(make_model(), lora_targets=("no_such_layer",))


def test_the_weights_of_a_plain_model_are_its_own_and_no_copies(model):
    assert not is_lora(model)
    own = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    assert {name: value.data_ptr() for name, value in model_weights(model)} == own
