"""Kernels for logits give what torch's own operations give: on a GPU, or by Triton's interpreter.

TRITON_INTERPRET=1 pytest tests/train/test_logit_kernels.py
"""

from __future__ import annotations

import contextlib
import os

import pytest
import torch

from forebay.train.batch import TrainBatch
from forebay.train.collate import collate
from forebay.train.model import forward as forward_module
from forebay.train.model import logit_kernels
from forebay.train.model.forward import response_logprobs
from forebay.train.packing import Packer
from train.conftest import build_groups, build_model

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
computes = pytest.mark.usefixtures("interpreted") if DEVICE == "cpu" else pytest.mark.gpu


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


def test_without_triton_or_its_compiler_torch_computes(monkeypatch, caplog):
    class Logits:
        device, dtype = torch.device("cuda"), torch.bfloat16

    class Exact(Logits):
        dtype = torch.float64

    def fail(*given):
        raise RuntimeError("Failed to find C compiler")

    real = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device: real(*size))
    monkeypatch.setattr(logit_kernels.TargetLogprobs, "apply", fail)
    logit_kernels._can_launch.cache_clear()
    assert not any(logit_kernels.has_kernels(Logits) for _ in range(3))
    assert [record.getMessage() for record in caplog.records] == [
        "the output head takes longer: its kernels cannot be built here: Failed to find C compiler"
    ]
    monkeypatch.setattr(logit_kernels, "_can_launch", lambda device: True)
    assert logit_kernels.has_kernels(Logits)
    assert not logit_kernels.has_kernels(Exact)
    assert not logit_kernels.has_kernels(real(1))


@pytest.fixture(autouse=True)
def forget():
    yield
    getattr(logit_kernels._can_launch, "cache_clear", int)()


def of_torch(logits, targets, scale):
    logprobs = torch.log_softmax(logits.double() * scale[:, None], -1)
    entropy = -torch.where(logprobs > -torch.inf, logprobs.exp() * logprobs, 0.0).sum(-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), entropy


@computes
@pytest.mark.parametrize("size", [5, 199, 2 * logit_kernels.BLOCK + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_they_give_what_log_softmax_gives(size, dtype):
    torch.manual_seed(0)
    logits = (8 * torch.randn(4, size, device=DEVICE)).to(dtype)
    # A model may rule words out, and be very sure of others.
    logits[0, 1], logits[1, 2], logits[2] = -torch.inf, 1e4, 0.0
    targets = torch.tensor([0, 2, size - 1, 3], device=DEVICE)
    scale = torch.tensor([1.0, 0.5, 2.0, 1.5], device=DEVICE)
    exact = logits.double().requires_grad_()
    expected, entropy = of_torch(exact, targets, scale)
    logits.requires_grad_()
    found = logit_kernels.TargetLogprobs.apply(logits, targets, scale, [])
    torch.testing.assert_close(found.double(), torch.stack([expected, entropy], 1), rtol=1e-5, atol=1e-4)
    weights = torch.tensor([0.7, -1.0, 3.0, 0.0], device=DEVICE)
    (found[:, 0] * weights).sum().backward()
    (expected * weights).sum().backward()
    rounding = 1e-5 if dtype is torch.float32 else 1e-2
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=rounding, atol=1e-6)


@computes
@pytest.mark.parametrize("elements", [1 << 27, 64])
@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prompt"])
def test_a_step_has_the_gradients_that_it_has_without_them(layout, elements, monkeypatch):
    model = build_model().to(DEVICE)
    batch = Packer(10**6, layout=layout).pack_pad_dispatch(TrainBatch.from_groups(build_groups(), temperature=0.7))
    micro = collate(batch, batch.packs[0][0][0], pad_token_id=0, device=torch.device(DEVICE))
    monkeypatch.setattr(forward_module, "KERNEL_ELEMENTS", elements)
    found = []
    for has_kernels in (True, False):
        monkeypatch.setattr(forward_module, "has_kernels", lambda logits, it=has_kernels: it)
        model.zero_grad()
        output = response_logprobs(model, micro, entropy="measure")
        (output.logprobs * torch.arange(len(output.logprobs), device=DEVICE)).sum().backward()
        assert not output.entropy.requires_grad
        found.append([output.logprobs, output.entropy, *(weight.grad for weight in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=5e-4)
