"""A train step reads from its device as often with many micro-batches as with few."""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from forebay.train import RankWorker, TrainConfig, TrainController
from forebay.train.model import forward

T = torch.Tensor
READS = {T.cpu, T.numpy, T.item, T.tolist, T.__bool__, T.__float__, T.__int__, T.__index__, T.__array__}
"""Calls that wait for a device. On a CPU they find their tensor there, and few are dispatched."""
SIZED_BY_CONTENT = ("nonzero", "bincount", "unique", "masked_select", "repeat_interleave")
"""Operations that wait inside: the size of their result is in the data."""


class Reads(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in READS:
            self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


class SizedByContent(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        indices = args[1] if name.startswith("index") and isinstance(args[1], list | tuple) else ()
        if name.startswith(SIZED_BY_CONTENT) or any(i is not None and i.dtype == torch.bool for i in indices):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def reads(model, groups, budget, ranks=None, **settings):
    """The reads of one train step, and its micro-batches."""
    config = TrainConfig(token_budget=budget, **settings)
    trainer = TrainController(model, config, pad_token_id=0, ranks=ranks)
    with Reads() as asked, SizedByContent() as sized:
        batch = trainer.fit(groups)
    return sorted(asked.names + sized.names), sum(len(micros) for ranks in batch.packs for micros in ranks)


CASES = [
    {},
    {"loss": "gspo", "layout": "packed"},
    {"loss": "cispo", "layout": "shared_prompt", "kl_coef": 0.1, "entropy_coef": 0.01},
    {"correction": "geometric_tis", "epochs": 2, "mini_batches": 2},
    {"correction": "sequence_tis"},
    {"correction": "token_mask"},
    {"advantage": "gae", "critic_lr": 1e-3, "lora_rank": 2, "gradient_checkpointing": True},
]


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_the_reads_of_a_step_do_not_depend_on_its_micro_batches(make_model, make_groups, settings, monkeypatch):
    # So that large micro-batches go through the head by chunks.
    monkeypatch.setattr(forward, "CHUNK_ELEMENTS", 300)
    few, num_few = reads(make_model(), make_groups(), 1000, **settings)
    many, num_many = reads(make_model(), make_groups(), 14, **settings)
    assert num_many > num_few + 4
    assert many == few
    assert few


class OneRank:
    """The only rank, in this process, where its calls can be counted."""

    num_ranks = 1

    def __init__(self, folder):
        self.worker = RankWorker(0, 1, f"file://{folder}/meet")

    def call(self, method, arguments):
        return [self.worker.call(method, *arguments[0])]


@pytest.mark.parametrize("settings", [{"correction": "token_tis", "layout": "packed"}, CASES[3]], ids=str)
def test_nor_do_those_of_a_rank_with_sharded_weights(make_model, make_groups, tmp_path, settings):
    rank = OneRank(tmp_path)
    few, _ = reads(make_model(), make_groups(), 1000, rank, **settings)
    many, _ = reads(make_model(), make_groups(), 14, rank, **settings)
    rank.worker.close()
    assert many == few
    assert few
