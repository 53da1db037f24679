"""Log probabilities by chunks of the head: the numbers of one piece, in bounded memory and linear work."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from forebay.plan.memory import step_memory
from forebay.train import Packer, TrainBatch, TrainConfig, TrainController
from forebay.train.collate import collate
from forebay.train.learner import Learner
from forebay.train.model import forward as forward_module
from forebay.train.model import head as head_module
from forebay.train.model.forward import _LogProbabilities, response_logprobs
from forebay.train.model.lora import add_lora
from forebay.train.parallel.learner import source_of
from forebay.train.parallel.worker import RankWorker

VOCABULARY = 23

SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3, "pad_token_id": 0,
}  # fmt: skip
KINDS = {
    "tied": lambda make_model: make_model(),
    "untied": lambda make_model: make_model(tie_word_embeddings=False),
    "adapted head": lambda make_model: add_lora(
        make_model(tie_word_embeddings=False), rank=2, alpha=4, targets=("lm_head", "q_proj")
    ),
    "frozen head": lambda make_model: add_lora(make_model(), rank=2, alpha=4, targets="all-linear"),
    "soft cap": lambda _: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=1.0, attn_implementation="eager")
    ),
    "multiplied": lambda _: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.3)),
    "divided": lambda _: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=3.0)),
    "bias": lambda _: PhiForCausalLM(PhiConfig(**SIZES | {"num_key_value_heads": 2})),
    "experts": lambda _: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SIZES,
            head_dim=8,
            experts_implementation="eager",
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
        )
    ),
}


def micro_batch(groups, layout: str = "padded"):
    batch = TrainBatch.from_groups(groups, temperature=0.7)
    batch = Packer(10**6, layout=layout).pack_pad_dispatch(batch)
    return collate(batch, batch.packs[0][0][0], pad_token_id=0, device=torch.device("cpu"))


def results(model, micro, entropy: str):
    """Outputs, and the gradients of a loss that weighs every token differently, added up over two passes."""
    model.zero_grad()
    # The second pass finds gradients that are there, to which the head adds in place.
    for sign in (1, -0.5):
        output = response_logprobs(model, micro, entropy=entropy)
        weights = sign * torch.linspace(-1, 2, len(output.logprobs), dtype=output.logprobs.dtype)
        loss = (weights * output.logprobs).sum()
        if output.entropy is not None:
            loss = loss + (weights.flip(0) * output.entropy).sum()
        loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return output, gradients


LAYOUTS = ("padded", "packed", "shared_prompt")


def cells(kinds, short):
    """Kinds and layouts; all but the first layout, and these, are left to the long suite."""
    return [
        pytest.param(kind, layout, marks=() if layout == LAYOUTS[0] or (kind, layout) in short else pytest.mark.soak)
        for kind in kinds
        for layout in LAYOUTS
    ]


SHORT = [
    *(("tied", "packed"), ("soft cap", "packed"), ("experts", "packed")),
    *(("untied", "shared_prompt"), ("adapted head", "shared_prompt"), ("frozen head", "shared_prompt")),
]


@pytest.mark.parametrize(("kind", "layout"), cells(KINDS, SHORT))
def test_chunks_change_nothing(kind, layout, make_model, make_groups, monkeypatch):
    if kind == "soft cap" and layout == "shared_prompt":
        pytest.skip("a sliding window keeps no plain cache")
    torch.manual_seed(0)
    # Exact numbers: what differs beyond rounding in float64 is an error.
    model = KINDS[kind](make_model).double().eval()
    micro = micro_batch(make_groups(masked=True), layout)
    for entropy in ("none", "measure", "train"):
        whole, expected = results(model, micro, entropy)
        monkeypatch.setattr(forward_module, "CHUNK_ELEMENTS", VOCABULARY * 7)
        chunked, gradients = results(model, micro, entropy)
        monkeypatch.undo()
        torch.testing.assert_close(chunked.logprobs, whole.logprobs, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(chunked.entropy, whole.entropy, rtol=1e-12, atol=1e-12)
        assert gradients.keys() == expected.keys()
        torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-12)
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"gradient_checkpointing": True}])
def test_train_steps_are_those_of_one_piece(settings, make_model, make_groups, monkeypatch):
    def trained():
        config = TrainConfig(lr=1e-3, kl_coef=0.1, entropy_coef=0.01, mini_batches=2, **settings)
        trainer = TrainController(make_model(), config, pad_token_id=0)
        return trainer.fit(make_groups(same_prompt_length=True)).metrics

    whole = trained()
    monkeypatch.setattr(forward_module, "CHUNK_ELEMENTS", VOCABULARY * 5)
    chunked, rough = trained(), "dtype" in settings
    for name in ("train/loss", "train/grad_norm", "train/entropy", "train/kl"):
        assert chunked[name] == pytest.approx(whole[name], rel=2e-2 if rough else 1e-5, abs=1e-4 if rough else 1e-7)


class Allocations(TorchDispatchMode):
    """The largest result of any operation that has the size of the vocabulary in its shape, and their sum.

    Attention masks, which grow with the square of a packed row, are not what is asked about.
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.largest, self.total = vocabulary, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        is_new = isinstance(result, torch.Tensor) and not function.is_view
        if is_new and self.vocabulary in result.shape:
            self.total += result.numel()
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize(("kind", "layout"), cells(["tied", "untied", "adapted head", "frozen head"], SHORT))
def test_memory_is_bounded_and_work_linear(kind, layout, make_model, make_groups, monkeypatch):
    vocabulary, chunk = 997, 997 * 9
    changes = {"vocab_size": vocabulary, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = make_model(**changes, tie_word_embeddings=kind == "tied")
    if kind == "adapted head":
        model = add_lora(model, rank=2, alpha=4, targets=("lm_head",))
    elif kind == "frozen head":
        model = add_lora(model, rank=2, alpha=4, targets=("q_proj",))
    monkeypatch.setattr(forward_module, "CHUNK_ELEMENTS", chunk)
    work, elements = [], []
    for copies in (1, 2):
        groups = make_groups(num_groups=10, size=3, same_prompt_length=True)
        # Equal sequences twice: nothing but the number of tokens is different.
        micro = micro_batch([group * copies for group in groups], layout)
        num_tokens = len(micro.targets)
        counter, allocations = FlopCounterMode(display=False), Allocations(vocabulary)
        with counter, allocations:
            response_logprobs(model, micro, entropy="train").logprobs.sum().backward()
        work.append(counter.get_total_flops() / num_tokens)
        elements.append(allocations.total / num_tokens)
        assert num_tokens * vocabulary > 8 * chunk
        assert allocations.largest <= chunk
    if layout != "packed":
        assert work[1] <= work[0] * 1.01
    assert elements[1] <= elements[0] * 1.01


def test_what_the_chunks_give_is_not_what_a_model_without_its_head_would(make_model, make_groups, monkeypatch):
    model = make_model()
    other = make_model()
    model.get_output_embeddings = lambda: other.lm_head
    monkeypatch.setattr(forward_module, "CHUNK_ELEMENTS", VOCABULARY)
    with pytest.raises(ValueError, match="computes its logits without its output embeddings"):
        response_logprobs(model, micro_batch(make_groups()))


def test_the_size_of_chunks_is_a_number_of_rows(make_model, make_groups, monkeypatch):
    seen: list[int] = []
    original = forward_module._token_outputs
    monkeypatch.setattr(forward_module, "CHUNK_ELEMENTS", VOCABULARY * 7 + 3)
    monkeypatch.setattr(
        forward_module, "_token_outputs", lambda logits, *rest: seen.append(len(logits)) or original(logits, *rest)
    )
    micro = micro_batch(make_groups())
    with torch.no_grad():
        response_logprobs(make_model(), micro)
    assert seen[:-1] == [7] * (math.ceil(len(micro.targets) / 7) - 1)
    assert int(np.sum(seen)) == len(micro.targets)


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 2, "lora_targets": ("q_proj", "lm_head")}], ids=str)
def test_a_sharded_head_is_whole_where_its_chunks_need_it(settings, make_model, make_groups, monkeypatch, tmp_path):
    """One rank, whose weights are slices (the whole of them) all the same."""

    def norms(method):
        batch = Packer(40).pack_pad_dispatch(TrainBatch.from_groups(make_groups()))
        batch.advantages = np.ones(batch.num_response_tokens, np.float32)
        batch.token_weights = np.where(batch.response_mask, np.float32(1), np.float32(0))
        if method is None:
            learner = Learner(make_model(tie_word_embeddings=False), config, pad_token_id=0)
            return learner.update(batch, 0).norms
        return method(batch.to_plain(), 0)["norms"]

    config = TrainConfig(lr=1e-3, **settings)
    torch.manual_seed(0)
    expected = norms(None)
    monkeypatch.setattr(forward_module, "CHUNK_ELEMENTS", VOCABULARY * 3)
    worker = RankWorker(0, 1, f"file://{tmp_path / 'meet'}")
    try:
        torch.manual_seed(0)
        model = source_of(make_model(tie_word_embeddings=False), tmp_path / "model")
        worker.meet(config.model_dump())
        worker.load({"model": model}, torch.get_rng_state())
        worker.build({"pad_token_id": 0})
        assert norms(worker.update) == pytest.approx(expected, rel=1e-5)
    finally:
        worker.close()


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_of_a_16_bit_pass_adds_to_gradients_that_are_there(tied, make_groups, monkeypatch):
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=tied, **shape))
    micro = micro_batch(make_groups(masked=True), "padded")
    with torch.autocast("cpu", torch.bfloat16):
        _, expected = results(model, micro, "train")
        monkeypatch.setattr(forward_module, "CHUNK_ELEMENTS", VOCABULARY * 7)
        monkeypatch.setattr(head_module, "WEIGHT_ROWS", 5)
        _, found = results(model, micro, "train")
    for name, gradient in expected.items():
        # Relative to the largest: products in 16 bits round otherwise where they are added in another order.
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=0.02 * float(gradient.abs().max()))


def test_a_16_bit_pass_adds_several_chunks_at_once_to_the_gradient_of_the_weight(make_groups, monkeypatch):
    """Each time all of that gradient is read and written, on a GPU a tenth of a step."""
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=False, **shape))
    micro = micro_batch(make_groups(masked=True), "padded")
    rows = 1 + len(micro.targets) // 8
    monkeypatch.setattr(forward_module, "CHUNK_ELEMENTS", VOCABULARY * rows)
    model.lm_head.weight.grad = torch.zeros_like(model.lm_head.weight)
    for at_once, expected in [(1, 8), (4, 2), (3, 3)]:
        monkeypatch.setattr(head_module, "JOINED_ELEMENTS", at_once * VOCABULARY * rows)
        with torch.autocast("cpu", torch.bfloat16):
            logprobs = response_logprobs(model, micro).logprobs
        with Products(VOCABULARY) as made:
            logprobs.sum().backward()
        assert made.num == expected


class Products(TorchDispatchMode):
    """Counts matrix products with as many rows as the vocabulary."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.num = vocabulary, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.num += function is torch.ops.aten.mm.default and args[0].shape[0] == self.vocabulary
        return function(*args, **(kwargs or {}))


class Looks(TorchDispatchMode):
    """Counts, by name, the operations that read or write tensors as wide as the vocabulary."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.names = vocabulary, Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        seen = [t.shape[-1] for t in tree_leaves((args, result)) if isinstance(t, torch.Tensor) and t.ndim == 2]
        if self.vocabulary in seen and not function.is_view:
            self.names[function.overloadpacket.__name__] += 1
        return result


@pytest.mark.parametrize("kind", ["untied", "adapted head"])
def test_the_backward_pass_sums_nothing_over_the_vocabulary_again(kind, make_model, make_groups, monkeypatch):
    """On a GPU each look at a chunk's logits takes about as long as the product that makes them."""
    model, micro = KINDS[kind](make_model), micro_batch(make_groups())
    monkeypatch.setattr(forward_module, "CHUNK_ELEMENTS", VOCABULARY * 7)
    num_chunks = math.ceil(len(micro.targets) / 7)
    with torch.autocast("cpu", torch.bfloat16), Looks(VOCABULARY) as forward:
        output = response_logprobs(model, micro, entropy="measure")
    with Looks(VOCABULARY) as backward:
        output.logprobs.sum().backward()
    assert forward.names["amax"] == num_chunks
    assert forward.names["exp_"] == num_chunks
    assert not {"amax", "sum", "logsumexp"} & backward.names.keys()
    assert backward.names["exp_"] == num_chunks


def test_a_slice_of_the_gradient_is_not_copied_onto_itself(make_groups, monkeypatch):
    """As ``gradient[rows] += product`` does."""
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=False, **shape))
    micro = micro_batch(make_groups())
    monkeypatch.setattr(forward_module, "CHUNK_ELEMENTS", VOCABULARY * 7)
    weight = model.lm_head.weight
    weight.grad = torch.zeros_like(weight)
    with torch.autocast("cpu", torch.bfloat16):
        logprobs = response_logprobs(model, micro).logprobs
    with Copies(weight.grad) as copies:
        logprobs.sum().backward()
    assert copies.num == 0
    assert weight.grad.abs().sum() > 0


class Copies(TorchDispatchMode):
    """Counts copies into the memory of a tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self.place, self.num = target.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default:
            self.num += args[0].untyped_storage().data_ptr() == self.place
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("entropy", ["none", "measure", "train"])
def test_log_probabilities_and_entropies_have_the_gradients_of_torch(entropy):
    generator = torch.Generator().manual_seed(0)
    logits_NV = torch.randn(5, 7, dtype=torch.float64, generator=generator).requires_grad_()
    # The second row has one twice.
    targets_NT = torch.tensor([[0, 1], [6, 6], [3, 0], [3, 2], [1, 5]])
    results_NK = _LogProbabilities.apply(logits_NV, targets_NT, entropy, [])
    every_NV = logits_NV.log_softmax(-1)
    expected = [*every_NV.gather(1, targets_NT).unbind(1)]
    if entropy != "none":
        entropy_N = -(every_NV.exp() * every_NV).sum(-1)
        expected.append(entropy_N if entropy == "train" else entropy_N.detach())
    expected_NK = torch.stack(expected, 1)
    torch.testing.assert_close(results_NK, expected_NK)
    weights_NK = torch.randn(expected_NK.shape, dtype=torch.float64, generator=generator)
    (found_NV,) = torch.autograd.grad((results_NK * weights_NK).sum(), logits_NV)
    (wanted_NV,) = torch.autograd.grad((expected_NK * weights_NK).sum(), logits_NV)
    torch.testing.assert_close(found_NV, wanted_NV)


def test_a_large_vocabulary_takes_little_memory_beyond_the_model():
    """16,384 tokens. What a head of 256 words takes too is subtracted: a small layer's activations; so are weights,
    gradients and moments of either."""

    def beyond(vocabulary):
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=1536,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=12,
            num_key_value_heads=1,
        )
        settings = TrainConfig(token_budget=16384, dtype="bfloat16", layout="padded")
        # Two micro-batches: the second finds gradients that are there.
        examples = [(np.zeros(1, np.int64), np.zeros(16383, np.int64))] * 2
        memory = step_memory(config, settings, TrainBatch.from_examples(examples))
        return sum(memory.parts.get(kind, 0) for kind in ("logits", "activations"))

    assert beyond(152_000) - beyond(256) <= 1.5 * 2**30
