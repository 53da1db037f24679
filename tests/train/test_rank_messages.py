"""What goes between a trainer and its ranks: messages, models, shards of a batch."""

import multiprocessing

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.train import Critic, Packer, TrainBatch
from forebay.train.parallel.frames import receive, send
from forebay.train.parallel.model_parts import from_parts, to_parts
from forebay.train.parallel.shards import from_arrays, join_columns, join_tokens, take_shard, to_arrays


def passed_on(value):
    """`value` as the other end of a pipe gets it."""
    here, there = multiprocessing.Pipe()
    with here, there:
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


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_is_built_again_with_its_ties_dtype_and_frozen_weights(make_model, tied):
    model = make_model(tie_word_embeddings=tied).bfloat16()
    model.model.norm.requires_grad_(False)
    model.generation_config.temperature = 0.5
    built = from_parts(passed_on(to_parts(model)))
    assert type(built) is type(model)
    assert built.config.to_dict() == model.config.to_dict()
    assert built.generation_config.temperature == 0.5
    assert (built.lm_head.weight is built.model.embed_tokens.weight) == tied
    assert not built.model.norm.weight.requires_grad
    assert not built.training
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(built(ids).logits, model(ids).logits)


def test_a_critic_is_built_again(make_model):
    critic = Critic.from_policy(make_model())
    torch.nn.init.normal_(critic.head.weight)
    built = from_parts(passed_on(to_parts(critic)))
    expected = critic.state_dict()
    assert built.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in built.state_dict().items())


def test_a_model_that_is_not_of_transformers_is_refused():
    with pytest.raises(ValueError, match=r"Linear cannot be sent to several ranks.*ranks = 1"):
        to_parts(torch.nn.Linear(2, 2))


@given(
    sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=3, max_size=20),
    num_ranks=st.integers(1, 4),
    mini_batches=st.integers(1, 3),
)
@settings(max_examples=40, deadline=None)
def test_shards_put_together_are_the_batch(sizes, num_ranks, mini_batches):
    batch = TrainBatch.from_examples([([1] * prompt, range(2, 2 + length)) for prompt, length in sizes])
    batch.advantages = np.arange(batch.num_response_tokens, dtype=np.float32)
    Packer(24, num_ranks, "packed", mini_batches=mini_batches).pack_pad_dispatch(batch)
    shards = [take_shard(batch, rank) for rank in range(num_ranks)]
    received = [from_arrays(passed_on(to_arrays(shard.batch))) for shard in shards]
    joined = join_tokens(shards, [shard.advantages for shard in received], batch.num_response_tokens)
    assert np.array_equal(joined, batch.advantages)
    for rank, shard in enumerate(received):
        for theirs, mine in zip(shard.packs, batch.packs, strict=True):
            for one, other in zip(theirs[0], mine[rank], strict=True):
                assert np.array_equal(shard.lengths[one], batch.lengths[other])
                starts, ends = batch.token_starts[other], (batch.token_starts + batch.lengths)[other]
                expected = [batch.input_ids[a:b].tolist() for a, b in zip(starts, ends, strict=True)]
                cut = np.split(shard.input_ids, shard.token_starts[1:])
                assert [cut[number].tolist() for number in one] == expected


def test_columns_are_joined_epoch_by_epoch():
    batch = TrainBatch.from_examples([([1], [2, 3]), ([1], [4])])
    batch.packs = [[[np.array([1])], [np.array([0])]]]
    shards = [take_shard(batch, rank) for rank in range(2)]
    parts = [
        {"token_index": np.array([0, 0]), "loss": np.array([1.0, 2.0])},
        {"token_index": np.array([0, 1, 1, 0]), "loss": np.array([3.0, 4.0, 5.0, 6.0])},
    ]
    joined = join_columns(shards, parts, num_epochs=2)
    assert joined["token_index"].tolist() == [2, 0, 1, 2, 1, 0]
    assert joined["loss"].tolist() == [1.0, 3.0, 4.0, 2.0, 5.0, 6.0]
