"""Logprobs against a plain forward pass of one sequence at a time, in every layout."""

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM

from forebay.train import Packer, TrainBatch
from forebay.train.collate import collate
from forebay.train.model import forward as forward_module
from forebay.train.model.forward import output_head, response_logprobs
from forebay.train.model.layers import checkpoint_activations
from forebay.train.parallel.context import Context
from forebay.types import SampleParams

LAYOUTS = ["padded", "packed", "shared_prompt"]


def reference(model, batch):
    """Logprobs and entropies by response token, masked tokens 0, one unpadded sequence at a time."""
    logprobs, entropies = [], []
    for i, start in enumerate(batch.token_starts):
        ids = torch.from_numpy(batch.input_ids[start : start + batch.lengths[i]]).long()
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0] / float(batch.temperatures[i])
        table = logits.log_softmax(-1)[batch.prompt_lengths[i] - 1 : -1]
        logprobs.append(table.gather(1, ids[batch.prompt_lengths[i] :, None])[:, 0])
        entropies.append(-(table.exp() * table).sum(-1))
    mask = torch.from_numpy(batch.response_mask)
    return (torch.where(mask, torch.cat(parts), 0).numpy() for parts in (logprobs, entropies))


def run(model, batch, layout, token_budget=30):
    """The same through the micro-batches of a layout."""
    batch = Packer(token_budget, layout=layout).pack_pad_dispatch(batch)
    logprobs, entropies = np.zeros((2, batch.num_response_tokens), np.float32)
    with torch.no_grad():
        for pack in batch.packs[0][0]:
            micro = collate(batch, pack, pad_token_id=0, device=torch.device("cpu"))
            output = response_logprobs(model, micro, entropy="measure")
            logprobs[micro.token_index] = output.logprobs
            entropies[micro.token_index] = output.entropy
    return logprobs, entropies


def assert_same(got, expected):
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("token_budget", [14, 30, 500])
def test_every_layout_gives_the_logprobs_of_a_plain_pass(model, make_groups, layout, token_budget):
    batch = TrainBatch.from_groups(make_groups(masked=True))
    assert_same(run(model, batch, layout, token_budget), reference(model, batch))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_divided_by_each_rollouts_temperature(model, make_groups, layout):
    groups = make_groups()
    for state in groups[1]:
        state.sample_params = SampleParams(temperature=0.5)
    batch = TrainBatch.from_groups(groups, temperature=2.0)
    assert_same(run(model, batch, layout), reference(model, batch))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_equal_prompt_lengths_and_eager_attention(make_model, make_groups, layout, attention):
    model = make_model(attn_implementation=attention)
    batch = TrainBatch.from_groups(make_groups(same_prompt_length=True))
    assert_same(run(model, batch, layout), reference(model, batch))


def soft_capped():
    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=23, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, final_logit_softcapping=1.0, sliding_window=64,
            attn_implementation="eager", initializer_range=0.3,
        )
    )  # fmt: skip


def learned_positions():
    return GPT2LMHeadModel(GPT2Config(vocab_size=23, n_embd=16, n_layer=2, n_head=2, n_positions=64))


@pytest.mark.parametrize("build", [soft_capped, learned_positions])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_other_architectures_keep_what_they_do_to_their_logits(build, layout, make_groups):
    torch.manual_seed(0)
    model = build().eval()
    batch = TrainBatch.from_groups(make_groups())
    assert_same(run(model, batch, layout), reference(model, batch))


def test_shared_prompts_with_learned_positions(make_groups):
    torch.manual_seed(0)
    model = learned_positions().eval()
    batch = TrainBatch.from_groups(make_groups())
    assert_same(run(model, batch, "shared_prompt"), reference(model, batch))


def test_shared_prompts_refuse_a_model_without_plain_keys_and_values(make_groups):
    config = MambaConfig(vocab_size=23, hidden_size=16, num_hidden_layers=1, state_size=4)
    batch = TrainBatch.from_groups(make_groups())
    with pytest.raises(ValueError, match="layout 'shared_prompt' needs full attention"):
        run(MambaForCausalLM(config).eval(), batch, "shared_prompt")


def test_only_the_positions_that_predict_reach_the_head(model, make_groups):
    batch = Packer(500).pack_pad_dispatch(TrainBatch.from_groups(make_groups(masked=True)))
    micro = collate(batch, batch.packs[0][0][0], pad_token_id=0, device=torch.device("cpu"))
    seen = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(tuple(output.shape)))
    response_logprobs(model, micro)
    assert seen == [(1, batch.response_mask.sum(), 23)]
    assert len(model.lm_head._forward_pre_hooks) == 0


@pytest.mark.parametrize("entropy", ["none", "measure", "train"])
def test_chunks_of_the_softmax_change_nothing(model, make_groups, monkeypatch, entropy):
    batch = Packer(500).pack_pad_dispatch(TrainBatch.from_groups(make_groups(), temperature=0.7))
    micro = collate(batch, batch.packs[0][0][0], pad_token_id=0, device=torch.device("cpu"))

    def gradient():
        model.zero_grad()
        output = response_logprobs(model, micro, entropy=entropy)
        loss = output.logprobs.sum()
        if output.entropy is not None:
            loss = loss + output.entropy.sum()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    whole = gradient()
    monkeypatch.setattr(forward_module, "CHUNK_ELEMENTS", 23 * 7)
    torch.testing.assert_close(gradient(), whole)


def test_measured_entropy_has_no_gradient_and_trained_entropy_has(model, make_groups):
    batch = Packer(500).pack_pad_dispatch(TrainBatch.from_groups(make_groups()))
    micro = collate(batch, batch.packs[0][0][0], pad_token_id=0, device=torch.device("cpu"))
    assert not response_logprobs(model, micro, entropy="measure").entropy.requires_grad
    assert response_logprobs(model, micro, entropy="train").entropy.requires_grad


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_empty_pack_runs_and_trains_nothing(model, make_groups, layout):
    batch = Packer(500, layout=layout).pack_pad_dispatch(TrainBatch.from_groups(make_groups()))
    micro = collate(batch, np.empty(0, np.int64), pad_token_id=0, device=torch.device("cpu"))
    logprobs = response_logprobs(model, micro).logprobs
    assert len(logprobs) == 0
    logprobs.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_an_empty_pack_over_several_ranks_has_all_its_columns_within_borders(make_groups):
    batch = TrainBatch.from_groups(make_groups())
    Packer(30, layout="packed").pack_pad_dispatch(batch)
    whole, context = np.zeros(0, np.int64), Context.__new__(Context)
    context.size, context.index = 4, 1
    micro = collate(batch, whole, pad_token_id=0, device=torch.device("cpu"), with_borders=True, context=context)
    assert micro.input_ids.shape == (1, 1)
    # Of all ranks together; kernels leave what is outside of the borders unwritten.
    assert micro.borders["cu_seq_lens_q"][-1] == context.size


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sequences_with_nothing_to_predict_are_harmless(model, layout):
    batch = TrainBatch.from_examples([([5], []), ([5], [6]), ([5, 7], [8, 9])])
    assert_same(run(model, batch, layout), reference(model, batch))
    batch = TrainBatch.from_examples([([5], [])])
    assert run(model, batch, layout)[0].tolist() == []


def test_checkpointed_activations_give_the_same_gradient_without_dropout(make_model, make_groups):
    batch = Packer(500).pack_pad_dispatch(TrainBatch.from_groups(make_groups()))
    micro = collate(batch, batch.packs[0][0][0], pad_token_id=0, device=torch.device("cpu"))
    gradients, num_saved = [], []
    for checkpointed in (False, True):
        model = make_model(attention_dropout=0.5)
        if checkpointed:
            checkpoint_activations(model)
        saved = CountingHooks()
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
            loss = response_logprobs(model, micro).logprobs.sum()
        num_saved.append(saved.count)
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(*gradients)
    assert num_saved[1] < num_saved[0] / 2


class CountingHooks:
    """Counts the tensors that the forward pass keeps for the backward pass."""

    def __init__(self):
        self.count = 0

    def pack(self, tensor):
        self.count += 1
        return tensor

    def unpack(self, tensor):
        return tensor


def test_a_model_without_a_head_is_an_error(model):
    with pytest.raises(ValueError, match="LlamaModel has no output embeddings"):
        output_head(model.model)
