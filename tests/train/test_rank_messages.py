"""Messages between a trainer and its ranks: arrays, models, batches, and what comes back."""

import pickle
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import active_children
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from forebay.io.shared import MemoryFile, lay_out, mapped, views
from forebay.train import Packer, TrainBatch, TrainConfig
from forebay.train.learner import Learner
from forebay.train.model.lora import named_parts
from forebay.train.parallel.array_messages import connect, receive, send
from forebay.train.parallel.learner import RankedLearner, source_of
from forebay.train.parallel.ranks import PROCESSES, FailedCall, LocalRanks, RankError, Ranks
from forebay.train.parallel.sharding import own_block
from forebay.train.parallel.worker import RankWorker


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
            "build": [(None, [], 0)] * 2,
            "token_values": [np.array([0, 0, 3], np.float32), np.array([1, 2, 0], np.float32)],
            "update": [{"columns": part, "norms": [1.0], "critic_norms": [], "lr": 0.1} for part in columns],
        }
        return answers.get(method)


class FullDisk(Ranks):
    """A rank fails in its save; another call, which waits meanwhile, sees ranks that were ended."""

    def __init__(self):
        super().__init__(1)
        self.updating, self.ended = threading.Event(), threading.Event()

    def _answer(self, number, method, arguments):
        if method == "finish_save":
            self.updating.wait(300)
            raise FailedCall("OSError", "No space left on device", "its traceback")
        self.updating.set()
        self.ended.wait(300)
        raise RankError("rank 0 died in update: exit code -9")

    def _end(self):
        self.ended.set()


def test_a_call_beside_a_failed_save_tells_of_the_disk():
    ranks = FullDisk()
    with ThreadPoolExecutor(1) as thread:
        saving = thread.submit(ranks.call, "finish_save", [[]])
        with pytest.raises(RankError, match="No space left on device"):
            ranks.call("update", [[]])
        with pytest.raises(RankError, match="No space left on device"):
            saving.result(60)


def test_a_rank_that_cannot_be_started_leaves_none_of_the_others(monkeypatch):
    start = PROCESSES.Process.start

    def refuse_second(process):
        if process.name == "forebay-rank-1":
            raise BlockingIOError("no process is left")
        start(process)

    monkeypatch.setattr(PROCESSES.Process, "start", refuse_second)
    with pytest.raises(BlockingIOError, match="no process is left"):
        LocalRanks(3)
    assert not [child for child in active_children() if child.name.startswith("forebay-rank")]


def test_results_of_ranks_are_put_together_in_the_order_of_the_batch():
    batch = TrainBatch.from_examples([([1], [2, 3]), ([1], [4])])
    learner = RankedLearner(TwoRanks(), {}, TrainConfig(epochs=2), {})
    assert learner.token_values("old_logprobs", batch).tolist() == [1.0, 2.0, 3.0]
    joined = learner.update(batch, 0).columns
    # Epoch by epoch.
    assert joined["token_index"].tolist() == [2, 0, 1, 2, 1, 0]
    assert joined["loss"].tolist() == [1.0, 3.0, 4.0, 2.0, 5.0, 6.0]


def test_a_rank_keeps_no_memory_that_it_wrote_once(make_model):
    """Each copy of the weights has its own, as large as the model."""
    model, kept = make_model(), mapped.cache_info().currsize
    layout, num_bytes = lay_out(model.named_parameters())
    memory = MemoryFile(num_bytes)
    learner = SimpleNamespace(model=model, _named_parts=list(named_parts(model)))
    learner.copy_weights = partial(Learner.copy_weights, learner)
    rank = SimpleNamespace(learner=learner)
    RankWorker.copy_weights(rank, layout, True, False, False, memory.path, memory.inode, num_bytes)
    got = dict(views(layout, memory.data))
    assert all(torch.equal(got[name], weight) for name, weight in model.named_parameters())
    assert mapped.cache_info().currsize == kept


def test_a_rank_that_sends_nothing_of_a_weight_sends_no_bytes_of_it(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    _, block = own_block(torch.ones(1000, 1000))
    assert block.shape == (0, 1000)
    assert len(pickle.dumps(block)) < 10_000
