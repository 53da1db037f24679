"""Orders that learn: what an epoch has of the prompts, and that a resumed sampler goes on exactly."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sampler import Shelf, make_prompts

from forebay.config import Component, ConfigError
from forebay.produce.prompts.orders import Difficulty, Order, Prioritized, Tried, build_order
from forebay.produce.sampler import Sampler

ORDERS = [
    {"name": "shuffled"},
    {"name": "curriculum", "arguments": {"by": "-(level % 5)"}},
    {"name": "difficulty", "arguments": {"band": [0.2, 0.8], "share": 0.2}},
    {"name": "prioritized", "arguments": {"share": 0.4}},
    {"name": "prioritized", "arguments": {"by": "recency", "share": 0.4}},
]


def order_of(given: dict[str, Any]) -> Order | None:
    return build_order(Component.model_validate(given))


class Run:
    """A sampler, the books that its groups are entered into, and groups that are still in flight."""

    def __init__(self, size: int, order: dict[str, Any], *, seed: int, in_flight: int) -> None:
        self.books: dict[str, float] = {}
        self.in_flight: list[str] = []
        self.num_in_flight = in_flight
        self.sampler = Sampler(
            make_prompts(size),
            Shelf(),
            task_name="math",
            prompt_repeat_k=2,
            seed=seed,
            order=order_of(order),
            score_of=self.books.get,
        )

    def draw(self, count: int) -> list[str]:
        return asyncio.run(self._draw(count))

    async def _draw(self, count: int) -> list[str]:
        names = []
        for _ in range(count):
            name = str((await self.sampler.sample("math"))[0].group_id)
            names.append(name)
            self.in_flight.append(name)
            while len(self.in_flight) > self.num_in_flight:
                done = self.in_flight.pop(0)
                # A pass rate of the prompt, that changes a little from epoch to epoch.
                self.books[done] = hashlib.blake2b(done.encode()).digest()[0] / 255
        return names


@settings(max_examples=50, deadline=None)
@given(
    size=st.integers(1, 12),
    order=st.sampled_from(ORDERS),
    seed=st.integers(0, 3),
    in_flight=st.integers(0, 4),
    before=st.integers(0, 30),
    after=st.integers(1, 30),
)
def test_a_resumed_sampler_goes_on_with_the_same_prompts(size, order, seed, in_flight, before, after) -> None:
    whole = Run(size, order, seed=seed, in_flight=in_flight)
    whole.draw(before)
    resumed = Run(size, order, seed=seed, in_flight=in_flight)
    # The ledger is part of the checkpoint.
    resumed.books.update(whole.books)
    resumed.in_flight = list(whole.in_flight)
    resumed.sampler.load_state_dict(whole.sampler.state_dict())
    assert resumed.draw(after) == whole.draw(after)


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 12), order=st.sampled_from(ORDERS), count=st.integers(1, 60))
def test_an_epoch_has_each_of_its_prompts_once_and_no_id_comes_twice(size, order, count) -> None:
    names = Run(size, order, seed=1, in_flight=2).draw(count)
    assert max(Counter(names).values()) == 1
    epochs = Counter(name.split("/")[2] for name in names)
    # All epochs but the last are whole; those of two orders always have every prompt.
    if order["name"] in ("shuffled", "curriculum"):
        assert set(list(epochs.values())[:-1]) <= {size}
    assert set(map(int, epochs)) == set(range(len(epochs)))


def plan_of(order: Order, scores: dict[int, Tried], size: int = 6) -> list[int]:
    return order.plan(range(size), make_prompts(size), scores.get)


SCORES = {0: Tried(3, 0.0), 1: Tried(1, 1.0), 2: Tried(2, 0.5), 3: Tried(3, 0.7), 4: Tried(0, 0.1)}


def test_difficulty_keeps_the_band_what_was_never_tried_and_a_share_of_the_others() -> None:
    assert plan_of(Difficulty(band=(0.2, 0.8), share=0.0), SCORES) == [2, 3, 5]
    # Two thirds of the three others: those not tried for longest.
    assert plan_of(Difficulty(band=(0.2, 0.8), share=0.6), SCORES) == [1, 2, 3, 4, 5]
    solved = {index: Tried(0, 1.0) for index in range(6)}
    assert plan_of(Difficulty(share=0.0), solved) == list(range(6))


def test_prioritized_takes_what_promises_most_first() -> None:
    assert plan_of(Prioritized(share=0.5), SCORES) == [5, 2, 3]
    assert plan_of(Prioritized(by="recency", share=0.5), SCORES) == [5, 4, 1]
    assert plan_of(Prioritized(share=0.01), SCORES) == [5]


def test_a_sampler_of_another_order_is_refused() -> None:
    state = Run(4, ORDERS[2], seed=0, in_flight=0).sampler.state_dict()
    with pytest.raises(ValueError, match=r"order was 'Difficulty.*' and is None"):
        Run(4, ORDERS[0], seed=0, in_flight=0).sampler.load_state_dict(state)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": "difficult"}, "unknown sampler 'difficult'; did you mean 'difficulty'"),
        ({"name": "prioritized", "arguments": {"share": 0}}, "'share' = 0"),
        ({"name": "curriculum"}, "missing a required argument: 'by'"),
    ],
)
def test_a_sampler_that_does_not_fit_is_one_sentence(given, said) -> None:
    with pytest.raises(ConfigError, match=said):
        order_of(given)


class Planned:
    """An order of one's own, which has no repr of its own."""

    def __init__(self, indices: list[int]) -> None:
        self.indices = np.array(indices)

    def plan(self, shuffled: Any, prompts: Any, latest: Any) -> Any:
        return self.indices


def planned(indices: list[int]) -> Sampler:
    given = Component(name=f"{__name__}:Planned", arguments={"indices": indices})
    return Sampler(
        make_prompts(3), Shelf(), task_name="math", prompt_repeat_k=2, order=build_order(given), order_name=str(given)
    )


def test_an_order_of_ones_own_is_saved_and_resumed_by_its_name_and_arguments(tmp_path) -> None:
    planned([2, 0]).save(tmp_path / "sampler.json")
    resumed = planned([2, 0])
    resumed.resume(tmp_path / "sampler.json")
    assert asyncio.run(resumed.sample("math"))[0].group_id == "math/0/0/2"
    with pytest.raises(ValueError, match=r"order was .*\[2, 0\].* and is .*\[1\]"):
        planned([1]).resume(tmp_path / "sampler.json")


@pytest.mark.parametrize("indices", [[], [3], [-1], [1, 1], [0.5]])
def test_a_plan_that_is_none_is_one_clear_error(indices) -> None:
    with pytest.raises(ConfigError, match="distinct indices under 3, not "):
        planned(indices)


class Slow(Planned):
    """Plans an epoch after the first when it is told to."""

    def __init__(self, indices: list[int]) -> None:
        super().__init__(indices)
        self.go_on, self.num_plans = threading.Event(), 0

    def plan(self, shuffled: Any, prompts: Any, latest: Any) -> Any:
        self.num_plans += 1
        assert self.num_plans == 1 or self.go_on.wait(300)
        return self.indices


async def test_the_next_epoch_is_planned_once_beside_the_event_loop() -> None:
    sampler = Sampler(make_prompts(3), Shelf(), task_name="math", prompt_repeat_k=2, order=Slow([2, 0]))
    whole = [(await sampler.sample("math"))[0].group_id for _ in range(2)]
    waiting = [asyncio.create_task(sampler.sample("math")) for _ in range(3)]
    # What else the loop has to do is done meanwhile: here, to let the plan be made.
    await asyncio.sleep(0)
    assert sampler.state_dict() == {**sampler.state_dict(), "epoch": 0, "position": 2}
    sampler.order.go_on.set()
    names = [group[0].group_id for group in await asyncio.gather(*waiting)]
    assert whole + names == [f"math/0/{place}" for place in ("0/2", "0/0", "1/2", "1/0", "2/2")]
    assert sampler.order.num_plans == 3


@pytest.mark.parametrize("raised", [StopIteration("spent"), SystemExit("bye")])
async def test_what_an_order_raises_in_a_later_epoch_ends_the_call_that_waits_for_the_plan(raised) -> None:
    class Ends(Planned):
        def plan(self, shuffled: Any, prompts: Any, latest: Any) -> Any:
            if not len(self.indices):
                raise raised
            indices, self.indices = self.indices, self.indices[:0]
            return indices

    sampler = Sampler(make_prompts(3), Shelf(), task_name="math", prompt_repeat_k=2, order=Ends([0]))
    await sampler.sample("math")
    with pytest.raises(RuntimeError, match=f"raised {type(raised).__name__}: {raised}"):
        async with asyncio.timeout(20):
            await sampler.sample("math")


async def test_a_caller_that_leaves_while_an_epoch_is_planned_costs_no_prompt() -> None:
    sampler = Sampler(make_prompts(3), Shelf(), task_name="math", prompt_repeat_k=2, order=Slow([1]))
    await sampler.sample("math")
    leaving = asyncio.create_task(sampler.sample("math"))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    sampler.order.go_on.set()
    assert (await sampler.sample("math"))[0].group_id == "math/0/1/1"
