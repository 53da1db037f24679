"""Servers and ranks on the same GPUs, or not: who sleeps when, for any layout, on virtual time."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.aio import virtual_time
from forebay.config import parse_config
from forebay.engines import Completion, GenerateRequest, RolloutController
from forebay.engines import pool as pool_module
from forebay.engines.base import EngineLost, Seat
from forebay.runs.config import RunConfig
from forebay.runs.placement import engine_seats, rank_gpus
from forebay.runs.turns import DeviceTurns
from forebay.testing import ScriptedEngine
from forebay.train.parallel.ranks import RankError
from forebay.types import RolloutState, SampleParams, Status

LENGTH = 30
BOTH = {"weights", "cache"}


def count_on(request: GenerateRequest) -> list[int]:
    """Each token is one more than the one before it."""
    last = int(request.input_ids[-1])
    return list(range(last + 1, last + 1 + request.max_tokens))


class Server(ScriptedEngine):
    """A server with memory on its GPUs, which asserts that no rank trains there while it holds any."""

    def __init__(self, world: World, seat: Seat, *, start_s: float = 1.0) -> None:
        super().__init__(count_on, token_latency_s=0.1, max_running=4)
        self.world, self.gpus, self.sleeps, self.start_s = world, set(seat.gpus), seat.is_shared, start_s
        self.holds: set[str] = set()
        self.is_away, self.has_weights = True, False
        self.starts_left = 1_000
        self.given_step = 0

    def take(self, *parts: str) -> None:
        self.holds.update(parts)
        self.world.check()

    async def bring_up(self) -> None:
        await asyncio.sleep(self.start_s)
        if not self.starts_left:
            raise EngineLost("it does not start any more")
        self.starts_left -= 1
        self.is_away, self.has_weights = False, True
        self.take(*BOTH)
        await super().load_weights([], self.given_step)
        await super().resume()

    async def lose(self) -> None:
        if not self.is_away:
            self.is_away, self.has_weights = True, False
            self.holds.clear()
            await super().pause()

    async def _reply(self) -> None:
        if not self.is_away:
            await asyncio.sleep(0.2)
        if self.is_away:
            raise EngineLost("the server is gone")

    async def generate(self, request: GenerateRequest) -> Completion:
        completion = Completion(finish_reason="error")
        if not self.is_away:
            assert self.holds == BOTH, "a request came while it sleeps"
            assert (self.has_weights, self.model_step) == (True, self.given_step), "a request before the weights"
            completion = await super().generate(request)
        if self.is_away and completion.finish_reason in ("abort", "error"):
            return replace(completion, finish_reason="error", lost=True, error_msg="the server is gone")
        return completion

    async def pause(self) -> None:
        await self._reply()
        await super().pause()

    async def resume(self) -> None:
        await self._reply()
        assert self.has_weights, "it wakes without weights"
        self.take(*BOTH)
        await super().resume()

    async def sleep(self, *, keep_weights: bool) -> None:
        assert self.sleeps
        await super().pause()
        await self._reply()
        self.holds.clear()
        self.has_weights &= keep_weights

    async def load_weights(self, weights: Any, model_step: int) -> None:
        self.given_step = model_step
        await self._reply()
        self.take("weights")
        self.has_weights = True
        await super().load_weights(weights, model_step)


async def lose_later(server: Server) -> None:
    await asyncio.sleep(0.1)
    await server.lose()


class Inline(Executor):
    """Does at once what it is given: threads know no virtual time."""

    def submit(self, work: Any, *arguments: Any, **named: Any) -> Future[Any]:  # type: ignore[override]
        done: Future[Any] = Future()
        try:
            done.set_result(work(*arguments, **named))
        except BaseException as error:
            done.set_exception(error)
        return done


class World:
    """GPUs with ranks and servers; it is also the trainer of `DeviceTurns`."""

    def __init__(self, ranks: list[int], seats: list[Seat], starts_s: list[float] | None = None) -> None:
        self.ranks, self.training = set(ranks), set(ranks)
        """The second: where a rank has all of its memory, as from the beginning."""
        self.is_dead = False
        waits = starts_s or [1.0] * len(seats)
        self.servers = [Server(self, seat, start_s=wait) for seat, wait in zip(seats, waits, strict=True)]
        self.pool = RolloutController(self.servers)
        self.turns = DeviceTurns(self.pool, self, Inline(), offload="moments")  # type: ignore[arg-type]
        self.step, self.is_dropped = 0, False

    def check(self) -> None:
        for server in self.servers:
            assert not (server.holds and self.training & server.gpus), "a server is awake where a rank trains"

    def onload(self) -> None:
        self._answer()
        self.training = set(self.ranks)
        self.check()

    def offload(self, *, weights: bool) -> None:
        self._answer()
        self.training = set()

    def _answer(self) -> None:
        if self.is_dead:
            raise RankError("rank 1 died in offload: exit code -9 (SIGKILL)")

    async def fit(self, *, keep_weights: bool) -> None:
        await self.turns.train(keep_weights=keep_weights)
        self.is_dropped = not keep_weights
        await asyncio.sleep(1.0)
        self._answer()
        self.check()
        assert self.training == self.ranks
        self.step += 1

    async def sync(self) -> None:
        await self.turns.leave()
        await self.pool.update_weights([], self.step)
        self.is_dropped = False

    async def generate(self) -> None:
        if self.is_dropped:
            await self.sync()
        await self.turns.generate()

    async def do(self, doing: str) -> None:
        """What the run does that `doing` names; nothing if that is not for the run to do."""
        if doing in ("train", "drop"):
            # What it sleeps without is handed over before it is needed.
            if self.is_dropped:
                await self.sync()
            await self.fit(keep_weights=doing == "train")
        elif doing in ("sync", "generate"):
            await getattr(self, doing)()
        elif doing == "pause":
            await self.pool.pause_generation()
        elif doing == "continue":
            await self.pool.continue_generation()

    async def roll_out(self, number: int, length: int = LENGTH, *, tries: int = 1_000) -> RolloutState:
        """As a producer does: what a pause interrupts goes on."""
        params = SampleParams(max_tokens=length)
        state = RolloutState([], rollout_id=number, session_id=number % 3, prompt_ids=[5], sample_params=params)
        while state.status is not Status.COMPLETED:
            assert tries, f"it was interrupted: {state.status}"
            assert state.status in (Status.INIT, Status.ABORTED), state.error_msg
            tries -= 1
            await self.pool.generate_sample(state)
            await asyncio.sleep(0.1)
        assert state.response_ids.tolist() == list(range(6, 6 + length))
        assert (np.diff(state.response_model_steps) >= 0).all()
        return state


def run_file(ranks: int, servers: int, **arguments: Any) -> RunConfig:
    table = {
        "name": "placed",
        "steps": 1,
        "batch_size": 4,
        "rollouts_per_prompt": 2,
        "device": "auto",
        "model": {"source": "tiny"},
        "engine": {"name": "vllm", "arguments": {"servers": servers, **arguments}},
        "tasks": [{"name": "sorting", "data": {"source": "sorting", "size": 50}, "judge": "exact_match"}],
        "train": {"ranks": ranks},
    }
    return parse_config(RunConfig, table)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], list[Seat]]:
    count = draw(st.integers(1, 6))
    ranks, servers = draw(st.integers(1, count)), draw(st.integers(1, 4))
    each = draw(st.integers(1, min(count, 2)))
    arguments: dict[str, Any] = {"options": [f"--tensor-parallel-size={each}"]}
    if draw(st.booleans()):
        gpus = st.lists(st.integers(0, count - 1), min_size=each, max_size=each, unique=True)
        arguments["gpus"] = draw(st.lists(gpus, min_size=servers, max_size=servers))
    config = run_file(ranks, servers, **arguments)
    return rank_gpus(config, count), engine_seats(config, count)


KINDS = ["train", "drop", "sync", "generate", "request", "pause", "continue", "lose", "lose soon", "wait"]
DOINGS = st.lists(st.sampled_from(KINDS), max_size=20)


@settings(max_examples=150, deadline=None)
@given(layout=layouts(), doings=DOINGS, random=st.randoms(use_true_random=False))
def test_no_rank_trains_where_a_server_is_awake_and_every_rollout_ends(layout: Any, doings: Any, random: Any) -> None:
    ranks, seats = layout

    async def main() -> None:
        world = World(ranks, seats, [random.choice([0.0, 0.5, 3.0]) for _ in seats])
        rollouts, losses = [], []
        await world.sync()
        for doing in doings:
            await world.do(doing)
            if doing == "request":
                rollouts.append(asyncio.create_task(world.roll_out(len(rollouts))))
            elif doing == "lose":
                await random.choice(world.servers).lose()
            elif doing == "lose soon":
                # Maybe in the middle of what it is asked next: to sleep, to wake up, to take weights.
                losses.append(asyncio.create_task(lose_later(random.choice(world.servers))))
            await asyncio.sleep(random.choice([0.0, 0.1, 2.0]) if doing == "wait" else 0)
            world.check()
        await asyncio.gather(*losses)
        await world.generate()
        await world.pool.continue_generation()
        async with asyncio.timeout(1000.0):
            await asyncio.gather(*rollouts)
            await world.pool.close()

    limits, pool_module.MAX_RETRIES = pool_module.MAX_RETRIES, 1_000
    try:
        virtual_time.run(main())
    finally:
        pool_module.MAX_RETRIES = limits


SHARED, APART = Seat((0,), is_shared=True), Seat((2,))


def test_servers_with_gpus_of_their_own_go_on_with_the_requests_of_those_that_sleep() -> None:
    async def main() -> None:
        world = World([0, 1], [SHARED, APART])
        await world.sync()
        await world.turns.generate()
        await asyncio.sleep(2.0)
        rollouts = [asyncio.create_task(world.roll_out(number, 100, tries=1)) for number in range(6)]
        await asyncio.sleep(2.0)
        before = world.pool.count_tokens_made()
        (at_shared, _) = (len(server.requests) for server in world.servers)
        assert at_shared > 1
        for _ in range(3):
            await world.fit(keep_weights=True)
        # Four at a time, on the one that is awake.
        assert world.pool.count_tokens_made() - before >= 3 * 0.9 * 4 / 0.1
        assert len(world.servers[0].requests) == at_shared
        await world.generate()
        states = await asyncio.gather(*rollouts)
        assert len({len(state.response_ids) for state in states}) == 1
        assert world.pool.counts()["retries"] == 0, "none was lost"
        await world.pool.close()

    virtual_time.run(main())


def test_where_all_servers_share_their_requests_wait_for_the_trainer() -> None:
    async def main() -> None:
        world = World([0], [SHARED])
        await world.sync()
        await world.turns.generate()
        rollout = asyncio.create_task(world.roll_out(0, tries=1))
        await asyncio.sleep(1.0)
        await world.fit(keep_weights=False)
        (before,) = (server.requests[:] for server in world.servers)
        await asyncio.sleep(50.0)
        assert world.servers[0].requests == before, "it was asked while it sleeps"
        await world.sync()
        await world.turns.generate()
        state = await rollout
        assert set(state.response_model_steps.tolist()) == {0, 1}
        await world.pool.close()

    virtual_time.run(main())


async def two_steps(world: World) -> None:
    for _ in range(2):
        await world.sync()
        await world.turns.generate()
        await world.fit(keep_weights=True)


@pytest.mark.parametrize("turn", ["training", "syncing", "generating"])
@pytest.mark.parametrize("part", ["server", "rank"])
def test_a_part_that_ends_for_good_is_named_in_whatever_turn_and_nothing_hangs(turn: str, part: str) -> None:
    async def main() -> None:
        world = World([0, 1], [SHARED])
        await world.sync()
        await world.turns.generate()
        rollout = asyncio.create_task(world.roll_out(0, length=1000, tries=1))
        if turn != "generating":
            await world.fit(keep_weights=False)
        if turn == "syncing":
            await world.sync()
        assert world.turns.turn == turn
        if part == "rank":
            world.is_dead = True
        else:
            world.servers[0].starts_left = 0
            await world.servers[0].lose()
        what = {"rank": "rank 1 died", "server": "no engine is left: engine 0 .*: it does not start any more"}[part]
        async with asyncio.timeout(100.0):
            with pytest.raises(RankError if part == "rank" else EngineLost, match=what):
                await two_steps(world)
            await world.pool.close()
            await asyncio.wait([rollout])
            # It was told of the loss, or interrupted by the end of the run.
            assert isinstance(rollout.exception(), EngineLost | AssertionError)

    virtual_time.run(main())
