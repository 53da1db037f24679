"""Which engine gets a request and which request waits: the cost of the choice, room, order, slow engines."""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import replace

import pytest

from forebay.aio import virtual_time
from forebay.engines import Completion, GenerateRequest, RolloutController, pool
from forebay.engines.base import request_seed
from forebay.engines.call import Call
from forebay.engines.members import Members
from forebay.testing import ScriptedEngine
from forebay.types import RolloutState, SampleParams, Status
from forebay.watching.activity import QUEUED, Activities


def ten_tokens(request: GenerateRequest) -> list[int]:
    return list(range(10))


def rollout(name: object, max_tokens: int = 10) -> RolloutState:
    params = SampleParams(max_tokens=max_tokens)
    return RolloutState([], rollout_id=name, prompt_ids=[5], sample_params=params)


def test_the_least_busy_is_found_without_asking_all_of_them(monkeypatch):
    visited = 0
    plain = Members.__iter__

    def counted(self):
        nonlocal visited
        for member in plain(self):
            visited += 1
            yield member

    monkeypatch.setattr(Members, "__iter__", counted)

    async def main(num_engines: int) -> float:
        nonlocal visited
        engines = [ScriptedEngine(ten_tokens, token_latency_s=0.1) for _ in range(num_engines)]
        controller, num = RolloutController(engines), 12 * num_engines
        running = [asyncio.create_task(controller.generate_sample(rollout(i))) for i in range(num)]
        await asyncio.sleep(0.5)
        assert {len(engine.requests) for engine in engines} == {12}
        await asyncio.gather(*running)
        visited = 0
        for _ in range(3):
            await asyncio.gather(*(controller.generate_sample(rollout(i)) for i in range(num)))
        return visited / (3 * num)

    few, many = virtual_time.run(main(10)), virtual_time.run(main(100))
    assert many < 1.5, "a request asks every engine"
    assert many < 1.5 * few + 0.5


def test_a_choice_is_always_the_first_of_the_least_loaded():
    async def main() -> None:
        draw, members = random.Random(3), Members()
        all_of_them = [members.add(ScriptedEngine(ten_tokens)) for _ in range(7)]
        running = []
        for turn in range(3000):
            if draw.random() < 0.05:
                member = draw.choice(all_of_them)
                member.is_up = not member.is_up
                member.slowness = draw.choice([1.0, 1.0, 20.0])
                members.note_load(member)
            up = [member for member in all_of_them if member.is_up]
            wanted = min(up, key=lambda member: (member.load, member.number), default=None)
            assert members.least_busy() is wanted
            if running and draw.random() < 0.5:
                members.end(*running.pop(draw.randrange(len(running))), 0)
            elif wanted is not None:
                # Two requests may have one id.
                running.append((wanted, members.begin(wanted, str(turn % 10))))
        assert len(members._loads) < 200

    virtual_time.run(main())


def test_a_straggler_is_named_gets_less_and_is_forgiven(caplog):
    async def main() -> None:
        engines = [ScriptedEngine(ten_tokens, token_latency_s=0.1) for _ in range(6)]
        engines[2].token_latency_s = 1.5
        controller = RolloutController(engines)

        async def keep_busy(lane: int, until_s: float) -> None:
            number = 0
            while asyncio.get_running_loop().time() < until_s:
                number += 1
                await controller.generate_sample(rollout(f"{lane}/{number}"))

        await asyncio.gather(*(keep_busy(lane, 40.0) for lane in range(96)))
        warnings = [record.message for record in caplog.records]
        assert len(warnings) == 1
        assert "engine 2 (ScriptedEngine) is a straggler: 0.667 tokens/s a request" in warnings[0]
        assert "the median of 6 engines is " in warnings[0]
        assert len(engines[2]._running) <= 1
        # It recovers; what it still gets is enough to see that.
        engines[2].token_latency_s = 0.1
        before = len(engines[2].requests)
        await asyncio.gather(*(keep_busy(lane, 100.0) for lane in range(96)))
        assert "engine 2 (ScriptedEngine) is no straggler any more" in caplog.messages[-1]
        assert len(engines[2].requests) - before > 0.5 * 16 * 100

    with caplog.at_level(logging.WARNING, logger="forebay"):
        virtual_time.run(main())


def test_one_very_long_request_makes_no_straggler(caplog):
    async def main() -> None:
        loop = asyncio.get_running_loop()
        engines = [
            ScriptedEngine(lambda request: list(range(request.max_tokens)), token_latency_s=0.02) for _ in range(2)
        ]
        controller = RolloutController(engines)
        long = asyncio.create_task(controller.generate_sample(rollout("long", 10_000)))

        async def keep_busy(lane: int) -> None:
            number = 0
            while loop.time() < 150.0:
                number += 1
                await controller.generate_sample(rollout(f"{lane}/{number}", 20))

        await asyncio.gather(*(keep_busy(lane) for lane in range(8)))
        assert not long.done()
        few, many = sorted(len(engine.requests) for engine in engines)
        assert few > 0.6 * many
        await long

    with caplog.at_level(logging.WARNING, logger="forebay"):
        virtual_time.run(main())
    assert not caplog.records


def count_on(request: GenerateRequest) -> list[int]:
    """Each token is one more than the one before it; how many in all depends on the rollout."""
    last, made = int(request.input_ids[-1]), request.num_earlier
    length = 1 + request_seed(request.request_id.split(":")[0]) % 30
    return list(range(last + 1, last + 1 + length - made))


class Lossy(ScriptedEngine):
    """It takes no more than it has room for; it can be lost, and comes back after some seconds."""

    away = True

    def __init__(self, start_s: float, **arguments) -> None:
        super().__init__(count_on, token_latency_s=0.1, **arguments)
        self.start_s, self.at_once, self.most = start_s, 0, self.max_running

    async def bring_up(self) -> None:
        await asyncio.sleep(self.start_s)
        await super().resume()
        self.away = False

    async def lose(self) -> None:
        if not self.away:
            self.away = True
            await super().pause()

    async def generate(self, request: GenerateRequest) -> Completion:
        if self.away:
            return Completion(finish_reason="error", error_msg="it is away", lost=True)
        self.at_once += 1
        assert self.at_once <= (self.most or 1_000), "more than it has room for"
        try:
            completion = await super().generate(request)
        finally:
            self.at_once -= 1
        if self.away and completion.finish_reason == "abort":
            return replace(completion, finish_reason="error", error_msg="it is away", lost=True)
        return completion


@pytest.mark.parametrize("seed", range(12))
def test_no_engine_has_more_than_it_has_room_for_and_none_is_overtaken_starved_or_lost(seed, monkeypatch):
    monkeypatch.setattr(pool, "MAX_RETRIES", 1_000)

    async def main() -> None:
        draw, loop = random.Random(seed), asyncio.get_running_loop()
        engines = [Lossy(draw.uniform(0, 3), max_running=draw.choice([1, 2, 5])) for _ in range(3)]
        activities = Activities()
        controller = RolloutController(engines, activities=activities)
        waiting: dict[bool, list[Call]] = {False: [], True: []}
        enter = Members.enter

        async def noted(members, call, ends):
            is_new = not (call.request.num_earlier or call.parts)
            if call.request.session_id is not None:
                # It may wait for an engine of its own.
                return await enter(members, call, ends)
            waiting[is_new].append(call)
            try:
                if (entered := await enter(members, call, ends)) is not None:
                    assert waiting[is_new][0] is call, "it has overtaken another"
                    assert not (is_new and waiting[False]), "a continued one waits"
                return entered
            finally:
                waiting[is_new].remove(call)

        monkeypatch.setattr(Members, "enter", noted)

        async def produce(number: int) -> RolloutState:
            await asyncio.sleep(draw.uniform(0, 20))
            state = rollout(number, 30)
            state.session_id = number % 7 if number % 2 else None
            while state.status is not Status.COMPLETED:
                assert state.status in (Status.INIT, Status.ABORTED), state.error_msg
                await controller.generate_sample(state)
                await asyncio.sleep(0.1)
            return state

        async def disturb() -> None:
            for _ in range(25):
                await asyncio.sleep(draw.uniform(0.5, 3.0))
                match draw.randrange(4):
                    case 0:
                        await draw.choice(engines).lose()
                    case 1:
                        queued = [one for one in activities.in_flight() if one.stage == QUEUED]
                        before_s = loop.time()
                        await controller.pause_generation()
                        assert loop.time() == before_s
                        await virtual_turns(4 * len(queued) + 20)
                        assert not [one for one in activities.in_flight() if one.stage == QUEUED]
                        await asyncio.sleep(draw.uniform(0, 2))
                        await controller.continue_generation()
                    case 2:
                        engines.append(Lossy(draw.uniform(0, 3), max_running=draw.choice([1, 3])))
                        controller.add(engines[-1])
                    case 3 if len(controller.engines_up) > 1:
                        await controller.remove(next(iter(controller.engines_up.values())))

        async def cancel_some() -> None:
            for task in draw.sample(tasks, 15):
                await asyncio.sleep(draw.uniform(0, 2))
                task.cancel()

        tasks = [asyncio.create_task(produce(number)) for number in range(80)]
        disturbing = asyncio.gather(disturb(), cancel_some())
        async with asyncio.timeout(3600):
            states = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(state, asyncio.CancelledError) for state in states) <= 15
        for number, state in enumerate(states):
            if isinstance(state, asyncio.CancelledError):
                continue
            assert state.response_ids.tolist() == list(range(6, 7 + request_seed(str(number)) % 30))
        await disturbing
        await controller.close()

    virtual_time.run(main())


async def virtual_turns(count: int) -> None:
    """Let what is ready run, at one moment of the clock."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_new_requests_go_in_order_of_arrival_behind_those_that_have_tokens():
    order: list[str] = []

    def script(request: GenerateRequest) -> list[int]:
        order.append(request.request_id.split(":")[0])
        return list(range(request.max_tokens))

    async def main() -> None:
        activities = Activities()
        engine = ScriptedEngine(script, token_latency_s=0.1, max_running=2)
        controller = RolloutController(engine, activities=activities)
        half_done = rollout("half done")
        half_done.append([1, 2, 3], logprobs=[-1.0] * 3)
        states = [rollout(str(number)) for number in range(6)]
        running = [asyncio.create_task(controller.generate_sample(state)) for state in [*states, half_done]]
        await asyncio.sleep(0.05)
        queued = [one for one in activities.in_flight() if one.stage == QUEUED]
        assert [one.name for one in queued] == ["2", "3", "4", "5", "half done"]
        assert controller.describe(queued[0]) == "queued, 0 tokens"
        assert controller.describe(queued[-1]) == "queued, 3 tokens"
        running[3].cancel()
        await asyncio.gather(*running, return_exceptions=True)
        assert order == ["0", "1", "half done", "2", "4", "5"]
        assert not activities.in_flight()

    virtual_time.run(main())


def test_a_cache_has_room_for_as_many_as_it_holds_on_average():
    async def main() -> None:
        length, at_once = 100, []

        def script(request: GenerateRequest) -> list[int]:
            at_once.append(len(engine._running))
            return list(range(length))

        engine = ScriptedEngine(script, token_latency_s=0.1, max_running=64)
        engine.cache_tokens = 500
        controller = RolloutController(engine)

        async def keep_busy(lane: int) -> None:
            for number in range(10):
                await controller.generate_sample(rollout(f"{lane}/{number}", 100))

        await asyncio.gather(*(keep_busy(lane) for lane in range(40)))
        # Half of 100 tokens on average: ten fit. The first came before any had ended.
        assert max(at_once[:40]) == 40
        assert max(at_once[40:]) == 10
        # Another kind of request: what is past is forgotten.
        length = 50
        await asyncio.gather(*(keep_busy(lane) for lane in range(40)))
        assert max(at_once[-100:]) in (19, 20)
        # In blocks of 25 each takes twice as much: its last block is half full, and so is its prompt's last.
        engine.cache_block = 25
        await asyncio.gather(*(keep_busy(lane) for lane in range(40)))
        assert max(at_once[-100:]) in (9, 10)

    virtual_time.run(main())


def test_a_newcomer_takes_what_is_queued_at_once_and_a_lost_engine_s_queue_goes_elsewhere():
    async def main() -> None:
        first, second = (Lossy(0.0, max_running=4) for _ in range(2))
        controller = RolloutController(first)
        running = [asyncio.create_task(controller.generate_sample(rollout(i, 30))) for i in range(12)]
        await asyncio.sleep(0.01)
        assert (len(first.requests), len(second.requests)) == (4, 0)
        controller.add(second)
        await asyncio.sleep(0.01)
        assert (len(first.requests), len(second.requests)) == (4, 4)
        first.start_s = 1_000.0
        await first.lose()
        await asyncio.gather(*running)
        # Four had never been anywhere, and those that were lost went before them.
        assert len(first.requests) == 4
        assert asyncio.get_running_loop().time() < 20.0
        await controller.close()

    virtual_time.run(main())


def test_a_session_waits_for_its_engine_and_one_that_is_cancelled_leaves_the_room_to_others(monkeypatch):
    async def main() -> None:
        engines = [ScriptedEngine(ten_tokens, token_latency_s=0.1, max_running=1) for _ in range(2)]
        controller = RolloutController(engines)

        def ask(name: str, session: str | None = None) -> asyncio.Task[RolloutState]:
            state = rollout(name)
            state.session_id = session
            return asyncio.create_task(controller.generate_sample(state))

        await ask("first", "s")
        running = [ask("a"), ask("b")]
        await asyncio.sleep(0.5)
        later, stays = ask("later", "s"), [ask("c"), ask("d")]
        await asyncio.gather(*running)
        await asyncio.sleep(0.5)
        # The first engine was kept for the session, and the second took the next.
        assert [[r.request_id for r in engine.requests] for engine in engines] == [
            ["first:0:0", "a:0:0", "later:0:0"],
            ["b:0:0", "c:0:0"],
        ]
        await asyncio.gather(later, *stays)
        # With one engine, nothing else ends that would wake the others.
        controller = RolloutController(engines[:1])
        await ask("first", "s")
        running = ask("e")
        await asyncio.sleep(0.5)
        cancelled, left = ask("cancelled", "s"), [ask("g"), ask("h")]
        await asyncio.sleep(0)
        end = Members.end

        def end_and_cancel(members, *arguments) -> None:
            end(members, *arguments)
            # It was woken, and has not run yet.
            cancelled.cancel()

        monkeypatch.setattr(Members, "end", end_and_cancel)
        await asyncio.gather(running, *left)
        assert cancelled.cancelled()

    virtual_time.run(main())


def test_an_abort_ends_what_is_queued_too_and_no_engine_makes_it():
    async def main() -> None:
        engine = ScriptedEngine(ten_tokens, token_latency_s=0.1, max_running=1)
        controller = RolloutController(engine)
        running = [asyncio.create_task(controller.generate_sample(rollout(name))) for name in "abc"]
        await asyncio.sleep(0.15)
        await controller.abort(["b:0:0", "c:0:0", "unknown"])
        await asyncio.gather(*running[1:])
        assert asyncio.get_running_loop().time() < 1.0
        assert [state.status for state in await asyncio.gather(*running)] == [
            *(Status.COMPLETED, Status.ABORTED, Status.ABORTED)
        ]
        assert [request.request_id for request in engine.requests] == ["a:0:0"]
        # It was no word about the next call.
        assert (await controller.generate_sample(await running[1])).status is Status.COMPLETED

    virtual_time.run(main())


def test_a_straggler_gets_less_also_where_requests_are_queued():
    async def main() -> None:
        engines = [ScriptedEngine(ten_tokens, token_latency_s=0.1, max_running=16) for _ in range(6)]
        engines[2].token_latency_s = 1.5
        controller = RolloutController(engines)

        async def keep_busy(lane: int) -> None:
            number = 0
            while asyncio.get_running_loop().time() < 60.0:
                number += 1
                await controller.generate_sample(rollout(f"{lane}/{number}"))

        busy = [asyncio.create_task(keep_busy(lane)) for lane in range(200)]
        await asyncio.sleep(55.05)
        assert [len(engine._running) for engine in engines] == [16, 16, 2, 16, 16, 16]
        await asyncio.gather(*busy)

    virtual_time.run(main())


def test_a_session_does_not_wait_for_an_engine_that_turns_out_to_be_a_straggler():
    async def main() -> None:
        engines = [ScriptedEngine(ten_tokens, token_latency_s=0.1, max_running=1) for _ in range(3)]
        controller = RolloutController(engines)

        def ask(name: str) -> asyncio.Task[RolloutState]:
            state = rollout(name)
            state.session_id = "s"
            return asyncio.create_task(controller.generate_sample(state))

        await ask("first")
        engines[0].token_latency_s = 15.0
        slow = ask("slow")
        await asyncio.sleep(0)
        waiting = [ask("later"), ask("last")]
        others = [asyncio.create_task(controller.generate_sample(rollout(number))) for number in range(200)]
        await asyncio.gather(*waiting)
        assert not slow.done()
        assert [request.request_id for request in engines[0].requests] == ["first:0:0", "slow:0:0"]
        await asyncio.gather(slow, *others)

    virtual_time.run(main())
