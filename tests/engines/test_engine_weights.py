from __future__ import annotations

import pytest
import torch

from forebay.engines.weights.takeover import take_weights
from forebay.io.shared import LentTensors


def snapshot(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def changed(model) -> dict[str, torch.Tensor]:
    return {name: tensor + 1 for name, tensor in model.named_parameters()}


def test_copies_into_the_models_own_parameters(llama):
    before = {name: parameter.data_ptr() for name, parameter in llama.named_parameters()}
    new = changed(llama)
    take_weights(llama.state_dict(keep_vars=True), ((name, tensor) for name, tensor in new.items()))
    for name, parameter in llama.named_parameters():
        assert torch.equal(parameter, new[name])
        assert parameter.data_ptr() == before[name]
    assert torch.equal(llama.lm_head.weight, new["model.embed_tokens.weight"])


def test_a_tied_parameter_may_come_under_either_name_or_both(llama):
    full = {name: tensor + 1 for name, tensor in llama.state_dict().items()}
    assert "lm_head.weight" in full
    expected = full["lm_head.weight"].clone()
    take_weights(llama.state_dict(keep_vars=True), full.items())
    assert torch.equal(llama.model.embed_tokens.weight, expected)
    head_only = {name: tensor + 1 for name, tensor in full.items() if name != "model.embed_tokens.weight"}
    take_weights(llama.state_dict(keep_vars=True), head_only.items())
    assert torch.equal(llama.model.embed_tokens.weight, expected + 1)


def test_another_dtype_is_converted(llama):
    take_weights(
        llama.state_dict(keep_vars=True), {name: tensor.bfloat16() for name, tensor in changed(llama).items()}.items()
    )
    assert llama.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda new: new.pop("model.norm.weight"), "no weights were given for 'model.norm.weight'"),
        (lambda new: new.update({"model.nrom.weight": torch.zeros(2)}), "the model has no 'model.nrom.weight'"),
        (
            lambda new: new.update({"model.norm.weight": torch.zeros(3)}),
            r"model.norm.weight has shape \(3,\), but the model's is \(32,\)",
        ),
        (lambda new: new.clear(), r"no weights were given for .* and \d+ more"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(llama, change, message):
    before = snapshot(llama)
    new = changed(llama)
    change(new)
    with pytest.raises(ValueError, match=message):
        take_weights(llama.state_dict(keep_vars=True), new.items())
    for name, tensor in llama.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_lent_tensors_are_used_where_they_lie_and_never_written_to(llama):
    llama.register_buffer("extra", torch.zeros(3))
    own = llama.state_dict(keep_vars=True)
    first = LentTensors([*changed(llama).items(), ("extra", torch.ones(3))])
    assert take_weights(own, first)
    assert first.are_in_use
    assert all(own[name].data_ptr() == tensor.data_ptr() for name, tensor in first)
    assert llama.lm_head.weight.data_ptr() == llama.model.embed_tokens.weight.data_ptr()
    # The next ones lack the buffer, which must not stay in memory that changes now.
    second = LentTensors([(name, tensor + 1) for name, tensor in first if name != "extra"])
    assert take_weights(own, second, are_lent=True)
    kept = {name: tensor.clone() for name, tensor in second}
    for _, tensor in first:
        tensor.fill_(-1.0)
    assert llama.extra.tolist() == [1.0] * 3
    # Of another dtype: copied, and not into memory of others.
    third = LentTensors([(name, tensor.bfloat16()) for name, tensor in second])
    assert not take_weights(own, third, are_lent=True)
    assert not third.are_in_use
    assert all(torch.equal(own[name], tensor.float()) for name, tensor in third)
    assert all(torch.equal(kept[name], tensor) for name, tensor in second)
