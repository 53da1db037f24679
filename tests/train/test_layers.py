"""Layers that are recomputed, moved or compiled: the same gradients, less memory, one program."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import Qwen3Config

from forebay.config import ConfigError
from forebay.plan.memory import step_memory
from forebay.train import Packer, TrainBatch, TrainConfig
from forebay.train.learner import Learner
from forebay.train.model import layers

NUM_LAYERS = 6


def update(make_model, make_groups, **settings):
    """Gradient norms and logprobs of a step over micro-batches of different lengths, and the weights."""
    config = TrainConfig(lr=1e-3, token_budget=24, **settings)
    learner = Learner(make_model(num_hidden_layers=NUM_LAYERS), config, pad_token_id=0)
    batch = Packer(24, layout=config.layout).pack_pad_dispatch(TrainBatch.from_groups(make_groups()))
    batch.advantages = np.linspace(-1, 1, batch.num_response_tokens, dtype=np.float32)
    batch.token_weights = np.full(batch.num_response_tokens, 0.1, np.float32)
    if config.kl_coef:
        batch.ref_logprobs = learner.token_values("ref_logprobs", batch)
    done = learner.update(batch, 0)
    return np.concatenate([done.norms, done.columns["logprob"]]), dict(learner.model.state_dict())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_layers_give_the_same_numbers_by_few_programs(make_model, make_groups, monkeypatch):
    settings = {"layout": "packed", "gradient_checkpointing": 0.5}
    torch.manual_seed(0)
    expected, weights = update(make_model, make_groups, **settings)
    programs = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(layers, "COMPILER", programs)
    torch._dynamo.reset()
    torch.manual_seed(0)
    found, compiled = update(make_model, make_groups, compile=True, **settings)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert compiled.keys() == weights.keys()
    torch.testing.assert_close(compiled, weights, rtol=1e-5, atol=1e-5)
    # Two for the recomputed layers and two for the others, with and without an attention mask.
    assert 1 <= programs.frame_count <= 4 < NUM_LAYERS


def test_compiling_without_a_compiler_is_one_sentence(make_model, monkeypatch):
    monkeypatch.setattr(layers.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler"):
        Learner(make_model(), TrainConfig(compile=True), pad_token_id=0)


def test_recomputed_and_moved_activations_change_nothing(make_model, make_groups):
    expected, weights = update(make_model, make_groups)
    for share in (0.25, 0.5, True):
        for offload in (False, True):
            settings = {"gradient_checkpointing": share, "offload_activations": offload}
            found, other = update(make_model, make_groups, **settings)
            np.testing.assert_allclose(found, expected, rtol=1e-6)
            torch.testing.assert_close(other, weights, rtol=1e-6, atol=1e-6)


def test_steps_with_recomputed_layers_add_nothing_to_the_model(make_model, make_groups):
    """Switched on by transformers' own call, which every step makes anew, the embeddings got a hook each time."""
    learner = Learner(make_model(), TrainConfig(token_budget=24, gradient_checkpointing=True), pad_token_id=0)
    batch = Packer(24).pack_pad_dispatch(TrainBatch.from_groups(make_groups()))
    batch.advantages = batch.token_weights = np.full(batch.num_response_tokens, 0.1, np.float32)
    for step in range(3):
        learner.update(batch, step)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in learner.model.modules())
    with pytest.raises(ValueError, match="no layer of Linear can be recomputed"):
        layers.checkpoint_activations(torch.nn.Linear(1, 1))


def test_memory_falls_with_every_layer_that_is_recomputed():
    sizes = Qwen3Config(
        vocab_size=100, hidden_size=64, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    batch = TrainBatch.from_examples([([1] * 32, [2] * 96)] * 8)

    def activations(share, **settings):
        config = TrainConfig(token_budget=512, gradient_checkpointing=share, **settings)
        return step_memory(sizes, config, batch).parts["activations"]

    # Of the last layer nothing is gained: when it is recomputed, all that the others keep is still there.
    kept = [activations(share) for share in (False, 0.5, 0.75)]
    assert kept[0] - kept[1] == pytest.approx(2 * (kept[1] - kept[2]), rel=0.02)
    assert kept[1] > kept[2]
    # When the last layer is recomputed, the inputs of the others wait elsewhere.
    assert activations(True) - activations(True, offload_activations=True) == 3 * 4 * 127 * 64 * 4
