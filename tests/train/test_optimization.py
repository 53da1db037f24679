import math
import sys

import pytest
import torch
from torch import nn

from forebay.models.devices import ONE_RECORDING
from forebay.train import TrainConfig
from forebay.train.optimization import Optimizer, schedule_factor


def factors(schedule, total, warmup=0):
    return [schedule_factor(schedule, step, warmup_steps=warmup, total_steps=total) for step in range(total + 1)]


def test_schedules_by_hand():
    assert factors("constant", 3, warmup=2) == [0.5, 1.0, 1.0, 1.0]
    assert factors("linear", 4) == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert factors("cosine", 4, warmup=2) == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0])
    assert schedule_factor("linear", 9, warmup_steps=0, total_steps=4) == 0.0


def test_no_graph_is_recorded_while_an_optimizer_may_wait_for_the_whole_device(monkeypatch):
    """As that of bitsandbytes does after each weight."""
    optimizer = Optimizer(nn.Linear(1, 1), TrainConfig())
    seen = []
    monkeypatch.setattr(optimizer._adamw, "step", lambda: seen.append(ONE_RECORDING.locked()))
    optimizer.step(0)
    assert seen == [True]
    assert not ONE_RECORDING.locked()


@pytest.mark.parametrize("key", ["lr", "weight_decay", "critic_lr", "entropy_coef"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_rate_that_no_weight_survives_is_refused(key, value):
    with pytest.raises(ValueError, match=rf"{key}[\s\S]*finite number"):
        TrainConfig(**{key: value})


def test_a_falling_schedule_needs_its_end():
    with pytest.raises(ValueError, match="'cosine' needs total_steps"):
        Optimizer(nn.Linear(1, 1), TrainConfig(lr=1.0, schedule="cosine"))


def test_a_step_is_adamw_with_clipped_gradients_at_the_scheduled_rate():
    torch.manual_seed(0)
    ours, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    plain.load_state_dict(ours.state_dict())
    optimizer = Optimizer(
        ours, TrainConfig(lr=0.1, schedule="linear", weight_decay=0.5, max_grad_norm=0.5), total_steps=4
    )
    groups = [{"params": [plain.weight], "weight_decay": 0.5}, {"params": [plain.bias], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.1)
    for step in range(3):
        inputs = torch.randn(4, 3)
        for layer in (ours, plain):
            layer(inputs).square().sum().backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in plain.parameters()))
        for parameter in plain.parameters():
            parameter.grad *= min(1.0, 0.5 / (norm + 1e-6))
        for group in reference.param_groups:
            group["lr"] = 0.1 * (1 - step / 4)
        reference.step()
        reference.zero_grad()
        assert optimizer.step(step) == pytest.approx(norm, rel=1e-5)
        assert all(p.grad is None for p in ours.parameters())
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_gradient_that_is_not_finite_changes_nothing():
    layer = nn.Linear(2, 1)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    optimizer = Optimizer(layer, TrainConfig(lr=0.1))
    (layer(torch.ones(1, 2)).sum() * float("nan")).backward()
    with pytest.raises(FloatingPointError, match="after train step 7 is nan; no weight was changed"):
        optimizer.step(7)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert layer.weight.grad is None


def test_only_weights_that_require_a_gradient_are_trained():
    layer = nn.Linear(2, 1).requires_grad_(False)
    with pytest.raises(ValueError, match="Linear has no weights that require a gradient"):
        Optimizer(layer, TrainConfig(lr=0.1))


def trained(moments, steps, resume_after=None, resumed_moments=None):
    """The weights after `steps`; after `resume_after` of them another optimizer goes on from the state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
    settings = {"lr": 1e-2, "adam": (0.8, 0.95, 1e-6), "weight_decay": 0.1}
    optimizer = Optimizer(model, TrainConfig(moments=moments, **settings))
    for step in range(steps):
        if step == resume_after:
            state = {key: value.clone() for key, value in optimizer.state_tensors()}
            optimizer = Optimizer(model, TrainConfig(moments=resumed_moments or moments, **settings))
            optimizer.load_state_tensors(state)
        inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        model(inputs).square().sum().backward()
        optimizer.step(step)
    return model, optimizer


def test_moments_in_the_memory_of_the_cpu_change_no_weight():
    plain, optimizer = trained("float32", 5)
    group = optimizer._adamw.param_groups[0]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.95), 1e-6, 0.1)
    for resumed in (("cpu", 5), ("cpu", 5, 2), ("cpu", 5, 3, "float32"), ("float32", 5, 3, "cpu")):
        model, _ = trained(*resumed)
        torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(("moments", "where"), [("float32", "meta"), ("cpu", "cpu")])
def test_moments_are_read_to_where_they_stay(moments, where):
    """Not to the device first, and not twice there: a run that fits only so has to resume, too."""
    layer = nn.Linear(2, 3, device="meta")
    optimizer = Optimizer(layer, TrainConfig(lr=0.1, moments=moments))
    sizes = {"weight|exp_avg": (3, 2), "weight|exp_avg_sq": (3, 2), "weight|step": ()}
    places = {key: optimizer.place_for(key, torch.Size(size), torch.float32) for key, size in sizes.items()}
    assert {place.device.type for place in places.values()} == {where}
    optimizer.load_state_tensors(places)
    assert {id(moment) for _, moment, _ in optimizer.places()} == {id(place) for place in places.values()}
    assert optimizer.place_for("other|exp_avg", torch.Size((3, 2)), torch.float32) is None


def test_moments_of_eight_bits_are_saved_and_take_a_quarter():
    pytest.importorskip("bitsandbytes")
    plain, full = trained("float32", 5)
    model, optimizer = trained("8bit", 5)
    resumed, _ = trained("8bit", 5, 2)
    torch.testing.assert_close(resumed.state_dict(), model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0.03)

    def size(optimizer):
        return sum({tensor.data_ptr(): tensor.nbytes for _, tensor, _ in optimizer.places()}.values())

    # The tables, which all weights share, and the biases are short beside the rest of a real model.
    assert size(optimizer) < 0.27 * size(full) + 2 * 1024 + 8 * (96 + 64)
    for kinds in (("8bit", "cpu"), ("float32", "8bit")):
        with pytest.raises(ValueError, match="the saved moments do not go with moments = "):
            trained(kinds[0], 2, 1, kinds[1])


def test_eight_bits_without_their_library_are_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs bitsandbytes, .* pip install 'forebay\[8bit\]'"):
        Optimizer(nn.Linear(2, 1), TrainConfig(lr=1.0, moments="8bit"))
