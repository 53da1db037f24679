"""Train steps of models with random weights: tokens per second, MFU, peak memory; and what each key is worth.

A step is `TrainController.fit` on groups of 8 rollouts (prompts of 256 tokens on average, responses of 512
and at most 2,048): packing, forward and backward passes, one optimizer step. Weights and moments are float32,
passes bfloat16. MFU is 6 x parameters x tokens of the batch / seconds over the data sheet's dense bfloat16
arithmetic (`forebay.plan.hardware`): padding, recomputed activations and attention count as nothing gained.
With LoRA a step needs a third less arithmetic than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from accelerator import Bench, Row, Unavailable, make_groups
from torch.utils.checkpoint import checkpoint

from forebay.config import ConfigError
from forebay.plan import this_machine
from forebay.train import TrainConfig, TrainController
from forebay.train.collate import MicroBatch
from forebay.train.model.forward import Cells, TokenOutputs, output_head, run_passes

PACKED = {"layout": "packed", "dtype": "bfloat16", "token_budget": 8192}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train."""

    name: str
    keys: Mapping[str, Any] = field(default_factory=lambda: PACKED)
    """Of ``[train]``."""
    needs_s: float = 15.0
    num_groups: int = 12
    old_head: bool = False
    """Compute log probabilities as version 0.1 did."""
    goal: str | None = None
    """The target that the MFU is for: the best of the cases that name it."""


SMALL = (
    Case(name="packed"),
    Case(name="padded", keys={**PACKED, "layout": "padded"}),
    Case(name="shared prompts", keys={**PACKED, "layout": "shared_prompt"}),
    Case(name="packed, LoRA 16", keys={**PACKED, "lora_rank": 16}),
    Case(name="packed, moments in the host's memory", keys={**PACKED, "moments": "cpu"}),
    Case(name="packed, moments of 8 bits", keys={**PACKED, "moments": "8bit"}),
)
MFU = "MFU of a step, 1.5 B, packed, bfloat16, compiled or not"
MIDDLE = (
    Case(name="packed", goal=MFU, num_groups=16),
    Case(name="packed, compiled", keys={**PACKED, "compile": True}, goal=MFU, num_groups=16, needs_s=60),
    # The same programs; each micro-batch casts all weights and adds to all gradients, and here there are half as many.
    Case(
        name="packed, compiled, 16k tokens",
        keys={**PACKED, "compile": True, "token_budget": 16384},
        goal=MFU,
        num_groups=16,
        needs_s=25,
    ),
    Case(name="packed, sdpa", keys={**PACKED, "attention": "sdpa"}),
    Case(name="padded", keys={**PACKED, "layout": "padded"}),
    Case(name="packed, head as in 0.1", old_head=True),
    Case(name="packed, checkpointing", keys={**PACKED, "gradient_checkpointing": True}),
    Case(name="packed, flex_attention", keys={**PACKED, "attention": "flex_attention"}, needs_s=30),
)
LARGE = (
    Case(
        name="packed, LoRA 16, checkpointing",
        keys={**PACKED, "lora_rank": 16, "gradient_checkpointing": True},
        num_groups=6,
        needs_s=25,
    ),
)


def train_small(bench: Bench) -> None:
    """0.5 B, whole weights."""
    _train(bench, "0.5b", SMALL)


def peaks(bench: Bench) -> None:
    """The memory of 16,384 tokens beside version 0.1."""
    for keys in ({"gradient_checkpointing": True}, {}):
        _peaks(bench, keys)


def train_middle(bench: Bench) -> None:
    """1.5 B, whole weights."""
    _train(bench, "1.5b", MIDDLE)


def train_large(bench: Bench) -> None:
    """8 B, LoRA."""
    _train(bench, "8b", LARGE)


def _train(bench: Bench, size: str, cases: tuple[Case, ...]) -> None:
    best = 0.0
    for case in cases:
        row = bench.attempt(f"{size}, {case.name}", case.needs_s, partial(_measure, bench, size, case))
        if row is not None and case.goal is not None:
            best = max(row["MFU"], best)
            bench.goal(case.goal, best)


def _measure(bench: Bench, size: str, case: Case) -> Row:
    keys = dict(case.keys)
    if unknown := sorted(keys.keys() - TrainConfig.model_fields.keys()):
        raise Unavailable(f"this version has no key train.{unknown[0]}")
    if bench.tiny:
        if keys.get("compile"):
            raise Unavailable("compiling for a CPU takes longer than all the rest")
        keys["token_budget"] = 256
    try:
        trainer = make_trainer(bench, size, TrainConfig(lr=1e-6, **keys))
    except ConfigError as error:
        raise Unavailable(str(error)) from error
    shape = {"prompt": 8, "response": 12} if bench.tiny else {"prompt": 256, "response": 512}
    vocabulary = bench.config(size).vocab_size
    groups = make_groups(2 if bench.tiny else case.num_groups, 8, vocabulary=vocabulary, **shape)
    batches = []
    with version_01_head() if case.old_head else _nothing():
        seconds = bench.seconds(lambda: batches.append(trainer.fit(groups)))
    batch = batches[-1]
    num_parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    return {
        "parameters (B)": num_parameters / 1e9,
        "tokens": batch.num_tokens,
        "micro-batches": sum(len(packs) for ranks in batch.packs for packs in ranks),
        "padding": batch.metrics["train/padding"],
        "seconds": seconds,
        "tokens/s": batch.num_tokens / seconds,
        "MFU": 6 * num_parameters * batch.num_tokens / seconds / peak_flop_per_s(bench),
        "peak GiB": bench.peak_gib(),
    }


def make_trainer(bench: Bench, size: str, config: TrainConfig, **settings: Any) -> TrainController:
    """A controller of a model with random weights, which with LoRA are bfloat16."""
    dtype = torch.bfloat16 if config.lora_rank else torch.float32
    # The base's fingerprint is for engines that take adapters, and reads every weight: 20 s at 8 B.
    with patch("forebay.train.learner.fingerprint", lambda weights: ""):
        return TrainController(bench.model(size, dtype), config, pad_token_id=0, device=bench.device, **settings)


def peak_flop_per_s(bench: Bench) -> float:
    """Of the data sheet; not a number where that is not known."""
    known = this_machine("cuda").flop_per_s if bench.device.type == "cuda" else None
    return known or float("nan")


def _peaks(bench: Bench, keys: Mapping[str, Any]) -> None:
    """One micro-batch of 16,384 tokens, by this version and with the head of 0.1."""
    length = 12 if bench.tiny else 768
    groups = make_groups(
        2, 8, prompt=length // 3, response=length, vocabulary=bench.config("0.5b").vocab_size, equal=True
    )
    config = TrainConfig(lr=1e-6, dtype="bfloat16", **keys)

    def step(old_head: bool) -> Row:
        trainer = make_trainer(bench, "0.5b", config)
        with version_01_head() if old_head else _nothing():
            # The first step makes the moments.
            for _ in range(2):
                batch = trainer.fit(groups)
        return {"tokens": batch.num_tokens, "peak GiB": bench.peak_gib()}

    kind = "16k tokens, checkpointing" if keys else "16k tokens"
    new, old = (
        bench.attempt(f"0.5b, {kind}, head {which}", 10, partial(step, old_head))
        for which, old_head in (("of this version", False), ("as in 0.1", True))
    )
    if new is not None and old is not None:
        bench.goal(f"peak of {kind}, over version 0.1's", new["peak GiB"] / old["peak GiB"])


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def version_01_head() -> Iterator[None]:
    """While open, log probabilities and entropies are computed as version 0.1 did.

    The logits of all trained tokens exist at once; only their softmax goes by chunks, which are slices of
    them and are computed again in the backward pass.
    """
    with patch("forebay.train.learner.response_logprobs", _version_01_logprobs):
        yield


def _version_01_logprobs(model: Any, micro: MicroBatch, *, entropy: str = "none", **unused: Any) -> TokenOutputs:
    """As `response_logprobs`; the models measured here have neither experts nor teachers."""
    head = output_head(model)

    def logits_at(place: slice, cells: Cells, **inputs: Any) -> tuple[torch.Tensor, Any]:
        def select(module: Any, states: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            hidden_BLH, *others = states
            return (hidden_BLH.flatten(0, 1).index_select(0, cells.positions)[None], *others)

        with head.register_forward_pre_hook(select):
            output = model(cells.input_ids, **inputs)
        return output.logits.squeeze(0), output.get("past_key_values")

    logits_NV = run_passes(logits_at, micro)

    def softmax(logits_nV: torch.Tensor, targets_n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs_nV = torch.log_softmax(logits_nV.float(), dim=-1)
        with torch.no_grad():
            entropy_n = -(logprobs_nV.exp() * logprobs_nV).sum(-1)
        return logprobs_nV.gather(1, targets_n[:, None]).squeeze(1), entropy_n

    rows = max(1, (1 << 26) // logits_NV.shape[-1])
    parts = [slice(start, start + rows) for start in range(0, len(logits_NV), rows)]
    chunks = [checkpoint(softmax, logits_NV[part], micro.targets[part], use_reentrant=False) for part in parts]
    logprobs, entropies = zip(*chunks, strict=True)
    return TokenOutputs(torch.cat(logprobs), None if entropy == "none" else torch.cat(entropies))
