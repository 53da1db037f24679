"""Kernels of attention against `eager` on padded rows: packed and shared prompts, windows, grouped heads.

Flash attention needs a GPU. Here a plain implementation with the signature of torch's kernel stands in for
it, and flex attention runs uncompiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.functional import scaled_dot_product_attention

from forebay.models import varlen as varlen_module
from forebay.models.attention import VARIABLE_LENGTH, attention_of, use_attention
from forebay.plan.memory import step_memory
from forebay.train import TrainConfig, TrainController
from forebay.train.batch import TrainBatch
from forebay.train.collate import collate
from forebay.train.model import trial
from forebay.train.model.forward import response_logprobs
from forebay.train.model.trial import check_layout
from forebay.train.packing import Packer

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 23, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 32, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, **GROUPED)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, **GROUPED)),
    "gpt_neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SIZES)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SIZES, **GROUPED, sliding_window=3)),
    "gemma3_text": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**SIZES, **GROUPED, sliding_window=3, sliding_window_pattern=2)
    ),
}


def plain_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    """What `torch.nn.attention.varlen.varlen_attn` documents, one sequence at a time."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert int(cu_seq_q[-1]) == len(query)
    assert int(cu_seq_k[-1]) == len(key) == len(value)
    assert int(cu_seq_q.diff().max()) == max_q
    assert int(cu_seq_k.diff().max()) <= max_k
    parts = []
    borders = zip(*(cu.tolist() for cu in (cu_seq_q[:-1], cu_seq_q[1:], cu_seq_k[:-1], cu_seq_k[1:])), strict=True)
    for q0, q1, k0, k1 in borders:
        # The last query is at the last key.
        behind = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0) - torch.arange(k1 - k0)
        left, right = (limit if limit >= 0 else len(key) for limit in window_size)
        q, k, v = (part.transpose(0, 1) for part in (query[q0:q1], key[k0:k1], value[k0:k1]))
        seen = (behind <= left) & (behind >= -right)
        parts.append(scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=enable_gqa).transpose(0, 1))
    return torch.cat(parts)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`varlen` computes on this machine, and flex attention is not compiled."""
    monkeypatch.setattr(varlen_module.varlen, "varlen_attn", plain_varlen)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *states: None)
    with torch.compiler.set_stance("force_eager"):
        yield


def build(kind: str) -> Any:
    torch.manual_seed(0)
    return MODELS[kind]().eval()


def gradients(model: Any, batch: TrainBatch, layout: Any, kernel: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Log probabilities by response token, and the gradients of a weighted sum of them."""
    use_attention(model, kernel)
    batch = Packer(40, layout=layout).pack_pad_dispatch(batch)
    logprobs = np.zeros(batch.num_response_tokens, np.float32)
    weights_R = np.random.default_rng(0).normal(size=batch.num_response_tokens).astype(np.float32)
    model.zero_grad()
    for pack in batch.packs[0][0]:
        micro = collate(batch, pack, pad_token_id=0, device=CPU, with_borders=kernel in VARIABLE_LENGTH)
        output = response_logprobs(model, micro).logprobs
        (output * micro.gather(weights_R)).sum().backward()
        logprobs[micro.token_index] = output.detach().numpy()
    return logprobs, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Up to 1e-5 of each tensor's largest number."""
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        difference = (gradient - expected[name]).abs().max() / expected[name].abs().max()
        assert difference < 1e-5, name


# The short suite has each kernel with grouped heads and with a window, and each model.
SHORT = [*((kind, "varlen") for kind in MODELS), ("qwen3", "sdpa"), ("mistral", "sdpa"), ("llama", "flex_attention")]
SHORT += [("gemma3_text", "flex_attention")]


@pytest.mark.parametrize(
    ("kind", "kernel"),
    [
        pytest.param(kind, kernel, marks=() if (kind, kernel) in SHORT else pytest.mark.soak)
        for kind in MODELS
        for kernel in ("sdpa", "flex_attention", "varlen")
    ],
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_packed_rows_have_the_gradients_of_padded_ones(kind, kernel, make_groups, kernels):
    model, batch = build(kind), TrainBatch.from_groups(make_groups())
    expected, expected_gradients = gradients(model, batch, "padded", "eager")
    for layout in ("padded", "packed"):
        logprobs, found = gradients(model, batch, layout, kernel)
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)
        assert_same(found, expected_gradients)


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
@pytest.mark.parametrize("same_prompt_length", [True, False])
def test_shared_prompts_without_a_mask(kind, same_prompt_length, make_groups, kernels):
    model, batch = build(kind), TrainBatch.from_groups(make_groups(same_prompt_length=same_prompt_length))
    expected, expected_gradients = gradients(model, batch, "padded", "eager")
    logprobs, found = gradients(model, batch, "shared_prompt", "varlen")
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)
    assert_same(found, expected_gradients)


@pytest.mark.parametrize("layout", ["packed", "shared_prompt"])
def test_under_autocast_the_kernel_gets_one_precision(layout, make_groups, kernels, monkeypatch):
    seen = set()

    def spy(query, key, value, *arguments, **settings):
        seen.update({query.dtype, key.dtype, value.dtype})
        return plain_varlen(query, key, value, *arguments, **settings)

    monkeypatch.setattr(varlen_module.varlen, "varlen_attn", spy)
    with torch.autocast("cpu", torch.bfloat16):
        gradients(build("qwen3"), TrainBatch.from_groups(make_groups()), layout, "varlen")
    assert seen == {torch.bfloat16}


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("half", [False, True])
def test_the_trial_takes_a_kernel_that_computes_right(kind, layout, half, kernels):
    model = build(kind)
    for kernel in ("sdpa", "varlen"):
        use_attention(model, kernel)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            check_layout(model, layout, CPU)
        assert attention_of(model) == kernel
    assert model.config.sliding_window == (3 if kind == "mistral" else None) if kind == "mistral" else True


def whole_row(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **settings):
    """Ignores the borders between sequences."""
    ends = (torch.tensor([0, len(states)], dtype=torch.int32) for states in (query, key))
    return plain_varlen(query, key, value, *ends, len(query), len(key), **settings)


def without_window(*arguments, window_size, **settings):
    return plain_varlen(*arguments, window_size=(-1, 0), **settings)


def both_ways(*arguments, window_size, **settings):
    return plain_varlen(*arguments, window_size=(-1, -1), **settings)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2))])
@pytest.mark.parametrize("logits", [15, 30, 60])
def test_the_trial_takes_weights_of_16_bits_whose_logits_are_those_of_large_models(logits, seed, kernels):
    """Numbers between 16 and 32 lie 1/8 apart there, so kernels may differ by over 0.2 nats at a token."""
    sizes = SIZES | {"vocab_size": 2000, "hidden_size": 128, "num_hidden_layers": 8, "initializer_range": 0.1}
    torch.manual_seed(seed)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes)).eval().requires_grad_(False)
    model.lm_head.weight.normal_(std=0.02 * logits)
    model.bfloat16().requires_grad_(True)
    use_attention(model, "varlen")
    check_layout(model, "packed", CPU)


@pytest.mark.parametrize("half", ["no", "passes", "weights"])
@pytest.mark.parametrize(("kind", "broken"), [("llama", whole_row), ("mistral", without_window), ("llama", both_ways)])
def test_the_trial_refuses_a_kernel_that_ignores_what_it_is_told(kind, broken, half, kernels, monkeypatch):
    model = build(kind)
    if half == "weights":
        model.bfloat16()
    use_attention(model, "varlen")
    monkeypatch.setattr(varlen_module.varlen, "varlen_attn", broken)
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=half == "passes"),
        pytest.raises(ValueError, match=f"layout 'packed' with attention 'varlen' is wrong for .*'{kind}'"),
    ):
        check_layout(model, "packed", CPU)


def test_a_mask_of_prompts_that_a_kernel_ignores_is_noticed(kernels, monkeypatch):
    """With `shared_prompt`, prompts of different lengths have pads behind them."""
    collated = trial.collate

    def without_pads_hidden(*arguments, **settings):
        micro = collated(*arguments, **settings)
        micro.borders.pop("key_cells", None) if isinstance(micro.borders, dict) else None
        return micro

    model = build("llama")
    use_attention(model, "varlen")
    check_layout(model, "shared_prompt", CPU)
    monkeypatch.setattr(trial, "collate", lambda *a, **k: collated(*a, **{**k, "with_borders": False}))
    with pytest.raises(ValueError, match="layout 'shared_prompt' with attention 'varlen' is wrong"):
        check_layout(model, "shared_prompt", CPU)


def test_auto_goes_on_to_the_next_kernel_where_one_fails(make_groups, kernels, monkeypatch, caplog):
    def choices(*arguments, **settings):
        return ["varlen", "sdpa", "eager"]

    def fails(*arguments, **settings):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(trial, "attention_choices", choices)
    trainer = TrainController(build("llama"), TrainConfig(layout="packed"), pad_token_id=0)
    assert trainer.train_step == 0
    assert not caplog.records
    monkeypatch.setattr(varlen_module.varlen, "varlen_attn", fails)
    model = build("llama")
    trainer = TrainController(model, TrainConfig(layout="packed"), pad_token_id=0)
    assert attention_of(model) == "sdpa"
    (record,) = [record for record in caplog.records if record.name == trial.__name__]
    assert "no kernel image is available" in record.getMessage()


def test_reference_and_critic_follow_the_trainer(make_groups, kernels, monkeypatch):
    monkeypatch.setattr(trial, "attention_choices", lambda *arguments, **settings: ["varlen"])
    config = TrainConfig(layout="packed", kl_coef=0.1, advantage="gae", critic_lr=1e-3)
    padded = TrainConfig(kl_coef=0.1, advantage="gae", critic_lr=1e-3, attention="eager")
    trained = {}
    for name, settings in (("varlen", config), ("eager", padded)):
        if name == "eager":
            monkeypatch.undo()
        trainer = TrainController(build("llama"), settings, pad_token_id=0)
        for part in (trainer._learner.model, trainer._learner.ref_model, trainer._learner.critic.body):
            assert attention_of(part) == name
        for _ in range(2):
            trainer.fit(make_groups())
        trained[name] = dict(trainer._learner.model.named_parameters())
    for name, weight in trained["varlen"].items():
        torch.testing.assert_close(weight, trained["eager"][name], atol=1e-5, rtol=1e-5)


def test_a_trainer_takes_cudnn_out_of_torch_s_choices():
    torch.backends.cuda.enable_cudnn_sdp(True)
    TrainController(build("llama"), TrainConfig(), pad_token_id=0)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_a_packed_row_of_16k_tokens_costs_no_mask():
    sizes = hf.Qwen3Config(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    tokens = 16_384
    config = TrainConfig(layout="packed", token_budget=tokens, dtype="bfloat16")
    batch = TrainBatch.from_examples(([1] * 100, [2] * (tokens // 8 - 100)) for _ in range(16))
    without, masked = (
        step_memory(sizes, config, batch, attention=kernel).parts["activations"] for kernel in ("varlen", "sdpa")
    )
    mask = tokens**2
    assert masked > mask
    assert without < mask / 2
    short = TrainBatch.from_examples(([1] * 100, [2] * (tokens // 16 - 100)) for _ in range(16))
    half = step_memory(
        sizes, config.model_copy(update={"token_budget": tokens // 2}), short, attention="varlen"
    ).parts["activations"]
    assert without == pytest.approx(2 * half, rel=0.05)
