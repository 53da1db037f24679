"""Packing loses nothing, respects the budget and is fair to the ranks."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.train import Packer, TrainBatch
from forebay.train.packing import num_cells

LAYOUTS = ["padded", "packed", "shared_prompt"]
shapes = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 12)), min_size=1, max_size=30)


def batch_of(sizes):
    """Equal prompt lengths are equal prompts, so that some are shared."""
    return TrainBatch.from_examples([(range(1, 1 + prompt), range(response)) for prompt, response in sizes])


@pytest.mark.parametrize("layout", LAYOUTS)
@given(
    sizes=shapes,
    spare=st.integers(0, 40),
    num_ranks=st.integers(1, 4),
    mini_batches=st.integers(1, 3),
    even_length=st.sampled_from([math.inf, 20.0, 1.0]),
)
def test_every_sequence_goes_to_one_rank_once_and_within_the_budget(
    layout, sizes, spare, num_ranks, mini_batches, even_length
):
    batch = batch_of(sizes)
    mini_batches = min(mini_batches, batch.num_sequences)
    budget = int(batch.lengths.max()) + spare
    packer = Packer(budget, num_ranks, layout, mini_batches=mini_batches, even_length=even_length)
    batch = packer.pack_pad_dispatch(batch, seed=(1, 2))
    assert len(batch.packs) == mini_batches
    packs = [pack for ranks in batch.packs for micros in ranks for pack in micros]
    assert sorted(np.concatenate(packs).tolist()) == list(range(batch.num_sequences))
    assert sum(batch.lengths[pack].sum() for pack in packs) == batch.num_tokens
    assert all(num_cells(batch, pack, layout) <= budget for pack in packs)
    sizes_of_minis = [sum(len(pack) for micros in ranks for pack in micros) for ranks in batch.packs]
    assert max(sizes_of_minis) - min(sizes_of_minis) <= 1
    for ranks in batch.packs:
        assert len(ranks) == num_ranks
        assert len({len(micros) for micros in ranks}) == 1
        costs = [[num_cells(batch, pack, layout, even_length) for pack in micros] for micros in ranks]
        loads = [sum(micros) for micros in costs]
        assert max(loads) - min(loads) <= max(max(micros) for micros in costs)
        # In every round all costs are at least those of the next round.
        for costs_now, costs_next in pairwise(zip(*costs, strict=True)):
            assert min(costs_now) >= max(costs_next)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_wait_less_where_attention_is_counted(layout):
    """Long-tailed responses on 4 ranks: the time of the slowest rank in every round, over an even share."""
    lengths = np.random.default_rng(0).lognormal(np.log(300), 1.0, 192).astype(int).clip(1, 3000)
    sizes = [(20 + number // 8, length) for number, length in enumerate(lengths)]

    def waiting(counted):
        packs = Packer(4096, 4, layout, even_length=counted).pack_pad_dispatch(batch := batch_of(sizes)).packs
        costs = np.array([[num_cells(batch, pack, layout, 2000.0) for pack in rank] for rank in packs[0]])
        return costs.max(axis=0).sum() / costs.sum() * 4

    assert waiting(2000.0) < 1.1
    if layout == "packed":
        assert waiting(2000.0) < waiting(math.inf)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_batch_and_seed_give_the_same_packs(layout):
    def packs(seed):
        batch = Packer(40, 2, layout, mini_batches=2).pack_pad_dispatch(batch_of(sizes), seed=seed)
        return [[[pack.tolist() for pack in micros] for micros in ranks] for ranks in batch.packs]

    random = np.random.default_rng(0)
    sizes = list(zip(random.integers(1, 6, 30), random.integers(1, 12, 30), strict=True))
    assert packs((0, 1)) == packs((0, 1))
    assert packs((0, 1)) != packs((0, 2))


def test_padded_rows_of_like_length_stand_together():
    batch = Packer(20).pack_pad_dispatch(batch_of([(1, 1), (1, 8), (1, 1), (1, 9), (1, 1), (1, 1)]))
    assert [pack.tolist() for pack in batch.packs[0][0]] == [[3, 1], [0, 2, 4, 5]]


def test_packed_bins_are_evenly_full():
    batch = Packer(30, layout="packed").pack_pad_dispatch(batch_of([(1, 9)] * 4))
    assert [len(pack) for pack in batch.packs[0][0]] == [2, 2]


def test_shared_prompts_keep_a_prompt_together_and_split_it_only_if_they_must():
    sizes = [(4, 3)] * 3 + [(5, 3)] * 3
    batch = Packer(15, layout="shared_prompt").pack_pad_dispatch(batch_of(sizes))
    assert [sorted(pack.tolist()) for pack in batch.packs[0][0]] == [[3, 4, 5], [0, 1, 2]]
    batch = Packer(11, layout="shared_prompt").pack_pad_dispatch(batch_of(sizes))
    assert all(len(set(batch.prompt_index[pack])) == 1 for pack in batch.packs[0][0])


def test_a_sequence_over_the_budget_is_named_with_the_fix():
    with pytest.raises(ValueError, match=r"rollout 1 has 12 tokens, more than the token budget of 11; raise"):
        Packer(11).pack_pad_dispatch(batch_of([(1, 1), (2, 10)]))


def test_more_mini_batches_than_sequences_is_an_error():
    with pytest.raises(ValueError, match="2 sequences cannot be split into 3 mini-batches"):
        Packer(99, mini_batches=3).pack_pad_dispatch(batch_of([(1, 1), (1, 1)]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_budget": 0}, "token_budget must be at least 1, got 0"),
        ({"num_ranks": 0}, "num_ranks must be at least 1, got 0"),
        ({"mini_batches": -1}, "mini_batches must be at least 1, got -1"),
        ({"layout": "square"}, "layout must be one of padded, packed, shared_prompt, got 'square'"),
    ],
)
def test_settings_that_cannot_work_are_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        Packer(**{"token_budget": 10, **changes})
