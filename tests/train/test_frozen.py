"""Weights that `train.frozen` names stay as they are, and the others train as without it."""

import numpy as np
import pytest
import torch
from test_images import SHAPES, generated, group

from forebay.config import ConfigError
from forebay.models import load_model
from forebay.train import TrainConfig, TrainController, WarmupConfig, supervised_warmup
from forebay.train.model.frozen import freeze

TOWER = ("model.vision_tower",)
LAYER = ("model.layers.0", "*.norm.weight", "lm_head")


def trainer_for(model, **settings):
    return TrainController(model, TrainConfig(**{"lr": 1e-2, **settings}), pad_token_id=0)


def copied(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def is_named(name, frozen):
    """As the patterns of this file are meant; the head shares its weight with the embeddings."""
    parts = {"model.layers.0.", "model.norm.", "model.embed_tokens."} if frozen == LAYER else set(TOWER)
    return any(name.startswith(part) for part in parts)


def first_gradients(trainer, groups):
    """By name, at the first step: its first moments are a tenth of them."""
    trainer.train(trainer.compute_advantages(trainer.pack(groups)))
    optimizer = trainer.learner._optimizer
    return {name.partition("|")[0]: value for name, value in optimizer.state_tensors() if "|exp_avg" in name}


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True, "mini_batches": 2}], ids=str)
def test_frozen_weights_are_equal_to_the_bit_and_all_others_move(make_model, make_groups, settings):
    model = make_model()
    before = copied(model)
    trainer = trainer_for(model, frozen=LAYER, weight_decay=0.1, kl_coef=0.1, **settings)
    for seed in range(2):
        trainer.fit(make_groups(seed=seed))
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name]) == is_named(name, LAYER), name
    received = dict(trainer.learner.weights())
    assert received.keys() == before.keys()
    trained = [weight for name, weight in model.named_parameters() if not is_named(name, LAYER)]
    sizes = [moment.nbytes for moment in trainer.learner.moments() if moment.ndim]
    assert sum(sizes) == 2 * sum(weight.nbytes for weight in trained)


def test_the_others_have_the_gradients_that_they_have_without(make_model, make_groups):
    plain = first_gradients(trainer_for(make_model(), max_grad_norm=0), make_groups())
    some = first_gradients(trainer_for(make_model(), max_grad_norm=0, frozen=LAYER), make_groups())
    assert some.keys() == {name for name in plain if not is_named(name, LAYER)}
    for name, gradient in some.items():
        torch.testing.assert_close(gradient, plain[name], rtol=1e-5, atol=1e-8)


def test_a_frozen_tower_for_images(tmp_path):
    SHAPES["write_model"](tmp_path)
    first, second = (row["image"] for row in SHAPES["questions"](size=2))
    groups = [group("a", "shape?", first), group("b", "color?", second)]
    generated(tmp_path, groups)
    for number, states in enumerate(groups):
        for place, state in enumerate(states):
            state.reward = {"score": float(place == number)}
    gradients, moved = [], []
    for frozen in ((), TOWER):
        model = load_model(tmp_path)
        before = copied(model)
        gradients.append(first_gradients(trainer_for(model, max_grad_norm=0, frozen=frozen), groups))
        moved.append({name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])})
    assert any(is_named(name, TOWER) for name in moved[0])
    assert moved[1] == {name for name in moved[0] if not is_named(name, TOWER)}
    assert gradients[1].keys() == {name for name in gradients[0] if not is_named(name, TOWER)}
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradient, gradients[0][name], rtol=1e-4, atol=1e-8)


def test_frozen_layers_get_no_adapters(make_model, make_groups):
    trainer = trainer_for(make_model(), frozen=("model.layers.1", "*.o_proj.weight"), lora_rank=2)
    trainer.fit(make_groups())
    adapted = {name for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    assert adapted
    assert all("layers.0" in name and "o_proj" not in name and ".lora_" in name for name in adapted)
    with pytest.raises(ValueError, match="exclude"):
        trainer_for(make_model(), frozen=("model.layers",), lora_rank=2)


def test_another_list_in_a_resumed_run(make_model, make_groups, tmp_path):
    trainer = trainer_for(make_model(), frozen=LAYER)
    trainer.fit(make_groups())
    trainer.save(tmp_path / "c")
    other = ("model.layers.1",)
    resumed = trainer_for(make_model(), frozen=other)
    assert resumed.resume(tmp_path / "c") == 1
    before = copied(resumed.model)
    names = {key.partition("|")[0] for key, _ in resumed.learner._optimizer.state_tensors()}
    assert not names
    resumed.fit(make_groups(seed=1))
    for name, weight in resumed.model.named_parameters():
        assert torch.equal(weight, before[name]) == name.startswith(other), name
    adapted = trainer_for(make_model(), lora_rank=2)
    adapted.save(tmp_path / "a")
    with pytest.raises(ValueError, match=r"starting_weights.*build it from the same config"):
        trainer_for(make_model(), lora_rank=2, frozen=other).resume(tmp_path / "a")


def test_a_name_that_nothing_has_is_told_with_the_nearest(model):
    with pytest.raises(ConfigError) as raised:
        freeze(model, ["model.layers.*.mlp", "model.layer.1.*"])
    assert str(raised.value) == (
        "train.frozen: 'model.layer.1.*' is the name of no weight and no module of the model; did you mean "
        "'model.layers.1'? its parts are model, model.embed_tokens, model.layers, model.norm, lm_head"
    )
    with pytest.raises(ValueError, match="no weights that require a gradient"):
        trainer_for(model, frozen=("*",))


def test_weights_stay_through_a_warm_up(make_model):
    model = make_model()
    before = copied(model)
    examples = [(np.array([3, 4]), np.array([5, 6, 2]))] * 4
    supervised_warmup(
        model, examples, WarmupConfig(steps=2), pad_token_id=0, train=TrainConfig(frozen=("model.layers",))
    )
    moved = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert moved == {name for name in before if "layers" not in name}
