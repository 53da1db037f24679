"""Messages between a trainer and its ranks: arrays, models, batches, and what comes back."""

import socket

import numpy as np
import pytest
import torch

from forebay.train import Packer, TrainBatch, TrainConfig
from forebay.train.parallel.frames import connect, receive, send
from forebay.train.parallel.learner import RankedLearner, source_of


def passed_on(value):
    """`value` as the other end of a socket gets it."""
    ends = socket.socketpair()
    with ends[0], ends[1]:
        here, there = map(connect, ends)
        send(here, value)
        return receive(there)


def test_arrays_and_tensors_arrive_as_they_were():
    sent = {
        "plain": [1, 2.5, None, "text", True, {"deep": []}],
        "arrays": [np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::2], np.array([True]), np.empty((0, 2))],
        "tensors": [torch.tensor(3), torch.arange(4.0).bfloat16()[::2], torch.empty(0, dtype=torch.int64)],
    }
    got = passed_on(sent)
    assert got["plain"] == sent["plain"]
    for kind, equal in (("arrays", np.array_equal), ("tensors", torch.equal)):
        for one, other in zip(sent[kind], got[kind], strict=True):
            assert (type(one), one.dtype, one.shape) == (type(other), other.dtype, other.shape)
            assert equal(one, other)
    got["arrays"][0][:] = 0
    got["tensors"][1][:] = 0


def test_nothing_else_can_be_sent():
    with pytest.raises(TypeError, match="arrays and plain values, got object"):
        passed_on([object()])


def test_a_model_that_is_not_of_transformers_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"Linear cannot be split over several ranks.*ranks = 1"):
        source_of(torch.nn.Linear(2, 2), tmp_path)


def test_a_batch_is_built_again(make_groups):
    batch = TrainBatch.from_groups(make_groups())
    batch.advantages = np.arange(batch.num_response_tokens, dtype=np.float32)
    Packer(24, 3, "packed", mini_batches=2).pack_pad_dispatch(batch)
    built = TrainBatch(**passed_on(batch.to_plain()))
    for name, value in batch.to_plain().items():
        if isinstance(value, np.ndarray):
            assert np.array_equal(getattr(built, name), value, equal_nan=True)
        elif name not in ("mini_batches", "packs"):
            assert getattr(built, name) == value
    assert [part.tolist() for part in built.mini_batches] == [part.tolist() for part in batch.mini_batches]
    for theirs, ours in zip(built.packs, batch.packs, strict=True):
        for one, other in zip(theirs, ours, strict=True):
            assert [pack.tolist() for pack in one] == [pack.tolist() for pack in other]


class TwoRanks:
    """Answers as two ranks would: the first has the second sequence, the other the first."""

    num_ranks = 2

    def call(self, method, arguments):
        columns = [
            {"token_index": np.array([2, 2]), "loss": np.array([1.0, 2.0])},
            {"token_index": np.array([0, 1, 1, 0]), "loss": np.array([3.0, 4.0, 5.0, 6.0])},
        ]
        answers = {
            "build": [(None, [])] * 2,
            "token_values": [np.array([0, 0, 3], np.float32), np.array([1, 2, 0], np.float32)],
            "update": [{"columns": part, "norms": [1.0], "critic_norms": [], "lr": 0.1} for part in columns],
        }
        return answers[method]


def test_results_of_ranks_are_put_together_in_the_order_of_the_batch():
    batch = TrainBatch.from_examples([([1], [2, 3]), ([1], [4])])
    learner = RankedLearner(TwoRanks(), {}, TrainConfig(epochs=2), {})
    assert learner.token_values("old_logprobs", batch).tolist() == [1.0, 2.0, 3.0]
    joined = learner.update(batch, 0).columns
    # Epoch by epoch.
    assert joined["token_index"].tolist() == [2, 0, 1, 2, 1, 0]
    assert joined["loss"].tolist() == [1.0, 3.0, 4.0, 2.0, 5.0, 6.0]
