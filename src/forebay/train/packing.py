"""`Packer`: which sequences share a forward pass, and which rank runs it.

It moves no tokens: it decides on sequence numbers; `collate` builds the tensors.

::

    sequences --shuffle--> mini-batches --cut by token budget--> micro-batches --balance--> packs[mini][rank]

A micro-batch takes memory for the cells that its tensors hold, of which the budget is:

* ``padded``: rows x longest sequence;
* ``packed``: the sum of the lengths;
* ``shared_prompt``: distinct prompts x longest prompt + rows x longest response.

It takes time for each cell, and in attention for each cell that a cell sees. All ranks pass their first
micro-batch together, then their second, and wait for the slowest: each round has micro-batches of like cost.

In a pass with images all ranks gather the slices of a tower that a pass without them leaves alone. So in each
round either all have images or none has; one without work passes a sequence of another, and trains nothing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.train.batch import Layout, Pack, TrainBatch, passed

Lengths = NDArray[np.int64]


@dataclass(eq=False)
class Packer:
    """Groups a batch's sequences into micro-batches of at most `token_budget` cells.

    Invariants: every sequence is in exactly one micro-batch of one rank; all ranks get equally many (so that
    collective operations meet), some with nothing to train; the costs of the ranks differ by less than one
    micro-batch; the same lengths and seed give the same packs.

    >>> pairs = [([1], [2, 3]), ([1], [2, 3, 4]), ([1, 2], [3])]
    >>> batch = Packer(token_budget=8).pack_pad_dispatch(TrainBatch.from_examples(pairs))
    >>> [pack.tolist() for pack in batch.packs[0][0]]
    [[0, 2], [1]]
    """

    token_budget: int
    num_ranks: int = 1
    layout: Layout = "padded"
    _: KW_ONLY
    mini_batches: int = 1
    even_length: float = math.inf
    """Tokens of a sequence for which attention takes as long as all else; infinite: it takes no time."""

    def __post_init__(self) -> None:
        for name in ("token_budget", "num_ranks", "mini_batches"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.layout not in CUTS:
            raise ValueError(f"layout must be one of {', '.join(CUTS)}, got {self.layout!r}")

    def pack_pad_dispatch(self, batch: TrainBatch, *, seed: Sequence[int] = (0,)) -> TrainBatch:
        """Fill ``batch.packs``; several mini-batches draw their sequences by `seed`, one has them all.

        Raises:
            ValueError: a sequence is longer than the budget, or there are fewer sequences than mini-batches.
        """
        longest = int(np.argmax(batch.lengths))
        if batch.lengths[longest] > self.token_budget:
            raise ValueError(
                f"rollout {batch.rollout_ids[longest]!r} has {batch.lengths[longest]} tokens, more than the "
                f"token budget of {self.token_budget}; raise token_budget or shorten prompts and responses"
            )
        if batch.num_sequences < self.mini_batches:
            raise ValueError(
                f"{batch.num_sequences} sequences cannot be split into {self.mini_batches} mini-batches; "
                f"lower mini_batches or train on more rollouts"
            )
        order = np.arange(batch.num_sequences)
        if self.mini_batches > 1:
            order = np.random.default_rng(seed).permutation(order)
        batch.layout = self.layout
        batch.mini_batches = [np.sort(part) for part in np.array_split(order, self.mini_batches)]
        batch.packs = self.cut(batch, np.ones(batch.num_sequences, bool))
        return batch

    def cut(self, batch: TrainBatch, kept_S: NDArray[np.bool_]) -> list[list[list[Pack]]]:
        """The packs of those sequences of the batch's mini-batches that are kept.

        A mini-batch of which nothing is left gets an empty pack: its gradient is 0, and not missing.
        """
        costs = partial(num_cells, batch, layout=self.layout, even_length=self.even_length)
        by_mini_batch = []
        for sequences in batch.mini_batches:
            kept = sequences[kept_S[sequences]]
            shares: list[list[Pack]] = [[] for _ in range(self.num_ranks)]
            for alike in self._by_images(batch, kept):
                packs, idle = [alike], alike[:0]
                if len(alike):
                    packs = CUTS[self.layout](batch, alike, self.token_budget, self.num_ranks, self.even_length)
                    if batch.image_kinds[alike[0]]:
                        idle = ~alike[[np.argmin(batch.lengths[alike])]]
                _balance(shares, _split_until_divisible(packs, self.num_ranks, idle), costs)
            by_mini_batch.append(shares)
        return by_mini_batch

    def _by_images(self, batch: TrainBatch, kept: Pack) -> list[Pack]:
        """Sequences that may be in one round: a pass over any of them has images, or over none."""
        if self.num_ranks == 1:
            return [kept]
        # Prompts that are shared have a pass of their own.
        kinds = batch.image_kinds[kept] if self.layout == "shared_prompt" else batch.image_kinds[kept] > 0
        return [kept[kinds == kind] for kind in np.unique(kinds)] or [kept]


def num_cells(batch: TrainBatch, pack: Pack, layout: Layout, even_length: float = math.inf) -> int:
    """The cells of a micro-batch of these sequences; with an `even_length` the time that they take.

    That is in cells without attention: each takes ``seen / even_length`` more, for the cells that it sees.
    """
    if len(pack) == 0:
        return 0
    pack = passed(pack)
    prompts, responses = batch.prompt_lengths[pack], batch.response_lengths[pack]
    if layout == "packed":
        return int(_passes(prompts + responses, even_length).sum())
    if layout == "padded":
        return int(len(pack) * _passes((prompts + responses).max(), even_length))
    num_prompts, before = len(np.unique(batch.prompt_index[pack])), prompts.max()
    own = _passes(before, even_length)
    return int(num_prompts * own + len(pack) * (_passes(before + responses.max(), even_length) - own))


def _passes(lengths: Any, even_length: float) -> Any:
    """The time of passes over sequences, in cells without attention."""
    return lengths * (1 + lengths / even_length)


def cut_sorted(batch: TrainBatch, sequences: Pack, budget: int, ranks: int = 1, *_: float) -> list[Pack]:
    """Rows of like length together (padded layout): little padding."""
    order = _longest_first(sequences, batch.lengths)
    return _fewest_even(lambda limit: _cut_rows(order, batch.lengths[order], limit), budget, ranks)


def fill_bins(batch: TrainBatch, sequences: Pack, budget: int, ranks: int, even: float) -> list[Pack]:
    """Longest first, each sequence into the cheapest of as few bins as that takes (packed layout)."""
    order = _longest_first(sequences, batch.lengths)
    lengths = batch.lengths[order]
    # Fewer cannot hold all, and every rank is to get as many.
    num_bins = -(-int(lengths.sum()) // budget // ranks) * ranks
    while (bins := _fill(lengths, budget, num_bins, even)) is None:
        num_bins += ranks
    return [order[members] for members in bins]


def cut_prompts(batch: TrainBatch, sequences: Pack, budget: int, ranks: int, *_: float) -> list[Pack]:
    """The sequences of a prompt together, if they fit (shared-prompt layout); like lengths in one pack."""
    by_prompt = sequences[np.argsort(batch.prompt_index[sequences], kind="stable")]
    borders = np.flatnonzero(np.diff(batch.prompt_index[by_prompt])) + 1
    blocks = [_longest_first(block, batch.response_lengths) for block in np.split(by_prompt, borders)]
    blocks.sort(key=lambda block: (-batch.response_lengths[block[0]], -batch.prompt_lengths[block[0]]))
    return _fewest_even(lambda limit: _cut_blocks(batch, blocks, limit), budget, ranks)


CUTS: Mapping[Layout, Callable[[TrainBatch, Pack, int, int, float], list[Pack]]] = {
    "padded": cut_sorted,
    "packed": fill_bins,
    "shared_prompt": cut_prompts,
}


def _longest_first(sequences: Pack, lengths: Lengths) -> Pack:
    return sequences[np.argsort(-lengths[sequences], kind="stable")]


def _fewest_even(cut: Callable[[int], list[Pack] | None], budget: int, num_ranks: int) -> list[Pack]:
    """The cut at the lowest limit that costs no rank more parts than the budget does: few, evenly full."""
    best = cut(budget)
    assert best is not None, "no sequence is longer than the budget"
    # A round in which ranks have nothing to do takes as long as a full one.
    most = -(-len(best) // num_ranks) * num_ranks
    low, high = 1, budget
    while low < high:
        middle = (low + high) // 2
        tried = cut(middle)
        if tried is None or len(tried) > most:
            low = middle + 1
        else:
            best, high = tried, middle
    return best


def _cut_rows(order: Pack, lengths: Lengths, limit: int) -> list[Pack] | None:
    """Runs of descending lengths with rows x longest <= limit; None if one sequence alone is longer."""
    if lengths.max(initial=0) > limit:
        return None
    starts, start = [], 0
    while start < len(order):
        starts.append(start)
        # The first row of a run is its longest, and so decides how many there are.
        start += limit // int(lengths[start])
    return np.split(order, starts[1:])


def _cut_blocks(batch: TrainBatch, blocks: Sequence[Pack], limit: int) -> list[Pack] | None:
    """Whole blocks while they fit; a block that is too large is split, its prompt repeated in each part."""
    packs: list[list[Pack]] = []
    rows = prompts = longest_prompt = longest_response = 0
    for block in blocks:
        prompt, response = int(batch.prompt_lengths[block[0]]), int(batch.response_lengths[block[0]])
        if prompt + response > limit:
            return None
        wider_prompt, wider_response = max(longest_prompt, prompt), max(longest_response, response)
        cells = (prompts + 1) * wider_prompt + (rows + len(block)) * wider_response
        if packs and cells <= limit:
            packs[-1].append(block)
            rows, prompts = rows + len(block), prompts + 1
            longest_prompt, longest_response = wider_prompt, wider_response
            continue
        # As many as fit beside one copy of the prompt; a single row does, by the check above.
        per_part = max(1, min(len(block), (limit - prompt) // max(1, response)))
        parts = np.split(block, range(per_part, len(block), per_part))
        packs += [[part] for part in parts]
        # Only the last part may have room for another block.
        rows, prompts, longest_prompt, longest_response = len(parts[-1]), 1, prompt, response
    return [np.concatenate(pack) for pack in packs]


def _fill(lengths: Lengths, budget: int, num_bins: int, even_length: float) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads, costs = np.zeros(num_bins, np.int64), np.zeros(num_bins)
    for index, (length, cost) in enumerate(zip(lengths, _passes(lengths, even_length), strict=True)):
        # Where no bin has room this is the first one, which the next line finds too full.
        number = int(np.argmin(np.where(loads + length <= budget, costs, np.inf)))
        if loads[number] + length > budget:
            return None
        bins[number].append(index)
        loads[number] += length
        costs[number] += cost
    return [members for members in bins if members]


def _split_until_divisible(packs: list[Pack], num_ranks: int, idle: Pack) -> list[Pack]:
    """Halve the packs with most sequences until every rank can get equally many; else add `idle` ones."""
    while len(packs) % num_ranks:
        widest = max(range(len(packs)), key=lambda index: len(packs[index]))
        pack = packs[widest]
        if len(pack) < 2:
            return packs + [idle] * (-len(packs) % num_ranks)
        packs = [*packs[:widest], *np.array_split(pack, 2), *packs[widest + 1 :]]
    return packs


def _balance(shares: list[list[Pack]], packs: list[Pack], costs: Callable[[Pack], int]) -> None:
    """Deal packs to the shares of the ranks in rounds, dearest first: the least loaded gets a round's dearest.

    Then the loads never differ by more than the dearest and the cheapest pack of one round do. All ranks pass
    the packs of a round at the same time, and wait for the one whose pack takes longest.
    """
    packs, num_ranks = sorted(packs, key=costs, reverse=True), len(shares)
    loads = [sum(map(costs, share)) for share in shares]
    for start in range(0, len(packs), num_ranks):
        by_load = sorted(range(num_ranks), key=loads.__getitem__)
        for rank, pack in zip(by_load, packs[start : start + num_ranks], strict=True):
            shares[rank].append(pack)
            loads[rank] += costs(pack)
