"""Engines that are lost and come back, under the controller and on virtual time."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest

from forebay.aio import virtual_time
from forebay.engines import Completion, GenerateRequest, RolloutController, pool
from forebay.engines.base import EngineLost
from forebay.engines.pool import MAX_RETRIES, EnginePool
from forebay.testing import ScriptedEngine
from forebay.types import RolloutState, SampleParams, Status

LENGTH = 40


def count_on(request: GenerateRequest) -> list[int]:
    """The script: each token is one more than the one before it."""
    last = int(request.input_ids[-1])
    return list(range(last + 1, last + 1 + request.max_tokens))


class Fallible(ScriptedEngine):
    """A scripted engine that can be lost, and takes a second to come back."""

    def __init__(self, script=count_on, *, start_s: float = 1.0, starts: int = 1_000, **arguments) -> None:
        super().__init__(script, token_latency_s=0.1, **arguments)
        self.start_s, self.starts_left = start_s, starts
        self.away = True
        self.given_step = self.num_starts = 0
        self.is_resting = False

    async def bring_up(self) -> None:
        await asyncio.sleep(self.start_s)
        if not self.starts_left:
            raise EngineLost("it does not start any more")
        self.starts_left -= 1
        self.num_starts += 1
        await super().load_weights([], self.given_step)
        await super().resume()
        self.away = self.is_resting = False

    async def lose(self) -> None:
        """End what runs with its tokens; nothing is answered any more."""
        if not self.away:
            self.away = True
            await super().pause()

    async def generate(self, request: GenerateRequest) -> Completion:
        if not self.away:
            assert self.model_step == self.given_step, "a request before the current weights"
            completion = await super().generate(request)
            if not self.away or completion.finish_reason != "abort":
                return completion
        else:
            completion = Completion(finish_reason="error")
        return replace(completion, finish_reason="error", lost=True, error_msg="the server is gone")

    async def pause(self) -> None:
        self._answer_or_not()
        self.is_resting = True
        await super().pause()

    async def resume(self) -> None:
        self._answer_or_not()
        self.is_resting = False
        await super().resume()

    async def load_weights(self, weights, model_step: int) -> None:
        self.given_step = model_step
        self._answer_or_not()
        await super().load_weights(weights, model_step)

    def _answer_or_not(self) -> None:
        if self.away:
            raise EngineLost("the server is gone")


def rollout(name: object = "r", *, length: int = LENGTH, **fields) -> RolloutState:
    params = SampleParams(max_tokens=length)
    return RolloutState([], rollout_id=name, prompt_ids=[5], sample_params=params, **fields)


def is_whole(state: RolloutState, length: int = LENGTH) -> bool:
    return (
        state.status is Status.COMPLETED
        and state.response_ids.tolist() == list(range(6, 6 + length))
        and len(state.logprobs) == len(state.response_model_steps) == length
    )


def test_a_lost_engine_s_rollouts_go_on_elsewhere_with_their_tokens():
    async def main() -> None:
        engines = [Fallible(), Fallible()]
        controller = RolloutController(engines)
        running = [asyncio.create_task(controller.generate_sample(rollout(i))) for i in range(6)]
        await asyncio.sleep(1.0 + 2.05)
        made = controller.count_tokens_made()
        await engines[0].lose()
        states = await asyncio.gather(*running)
        assert all(is_whole(state) for state in states)
        assert controller.count_tokens_made() == 6 * LENGTH > made > 0
        # Those that went on were given what the first engine had made.
        assert [len(request.input_ids) for request in engines[1].requests[3:]] == [21] * 3
        assert controller.counts() == {"retries": 3.0, "engine_restarts": 1.0}
        await controller.close()

    virtual_time.run(main())


def test_a_single_engine_that_comes_back_loses_nothing_either():
    async def main() -> None:
        engine = Fallible()
        controller = RolloutController(engine)
        running = asyncio.create_task(controller.generate_sample(rollout(session_id="s")))
        await asyncio.sleep(2.0)
        await engine.lose()
        await controller.update_weights([], 3)
        state = await running
        assert is_whole(state)
        assert sorted(set(state.response_model_steps.tolist())) == [0, 3]
        assert controller.model_step == 3
        await controller.close()

    virtual_time.run(main())


def test_a_request_that_brings_down_every_engine_ends():
    async def main() -> None:
        engines = [Fallible(), Fallible()]

        async def poisoned(request):
            return Completion(finish_reason="error", error_msg="segmentation fault", lost=True)

        for engine in engines:
            engine.generate = poisoned
        controller = RolloutController(engines)
        state = await controller.generate_sample(rollout())
        assert state.status is Status.FAILED
        assert state.error_msg.startswith(f"rollout r: given up after {MAX_RETRIES + 1} lost engines: engine ")
        assert "segmentation fault" in state.error_msg
        assert controller.counts()["retries"] == MAX_RETRIES
        await controller.close()

    virtual_time.run(main())


def test_when_no_engine_comes_back_everybody_is_told():
    async def main() -> None:
        controller = RolloutController([Fallible(starts=1), Fallible(starts=0)])
        await controller.update_weights([], 1)
        running = asyncio.create_task(controller.generate_sample(rollout()))
        await asyncio.sleep(1.0)
        health = await controller.health()
        assert not health.ok
        assert "engine 1: it does not start any more" in health.detail
        await controller.engines[0].lose()
        with pytest.raises(EngineLost, match=r"no engine is left: engine 0 .*: it does not start any more; engine 1"):
            await running
        with pytest.raises(EngineLost, match="no engine is left"):
            await controller.update_weights([], 2)
        await controller.close()

    virtual_time.run(main())


def test_an_engine_that_is_away_does_not_hold_back_the_model_step():
    async def main() -> None:
        engines = [Fallible(), Fallible(starts=1)]
        controller = RolloutController(engines)
        await controller.update_weights([], 1)
        await asyncio.sleep(2.0)
        assert list(controller.engines_up) == [0, 1]
        await engines[1].lose()
        await controller.generate_sample(rollout("a", session_id="s"))
        await controller.generate_sample(rollout("b"))
        # Lost for good; then it gets no weights any more.
        await asyncio.gather(*(controller.generate_sample(rollout(i)) for i in range(2)))
        assert engines[1].starts_left == 0
        assert list(controller.engines_up) == [0]
        await controller.update_weights([], 2)
        assert engines[1].model_step == 1
        assert controller.model_step == (await controller.health()).model_step == 2
        # With none that is up it is that of the next tokens.
        await engines[0].lose()
        await controller.update_weights([], 3)
        assert controller.model_step == 3
        await controller.close()

    virtual_time.run(main())


def test_an_engine_that_does_not_follow_a_pause_is_brought_up_once_more():
    async def main() -> None:
        engine = Fallible()
        controller = RolloutController(engine)
        await controller.update_weights([], 1)
        await engine.lose()
        real_pause, num_asked = engine.pause, 0

        async def fail_once() -> None:
            nonlocal num_asked
            num_asked += 1
            if num_asked == 1:
                await asyncio.Event().wait()
            await real_pause()

        running = asyncio.create_task(controller.generate_sample(rollout()))
        await asyncio.sleep(0.5)
        engine.pause = fail_once
        await controller.pause_generation()
        await running
        await asyncio.sleep(100.0)
        assert engine.is_resting
        assert engine.num_starts == 3
        await controller.close()

    virtual_time.run(main())


def test_an_engine_that_did_not_hear_the_end_of_a_pause_is_told_again_when_it_is_back():
    class StaysAsItWas(Fallible):
        """It was alive all the time: coming up changes nothing about it."""

        is_deaf = False

        async def bring_up(self) -> None:
            await asyncio.sleep(self.start_s)
            self.away, self.num_starts = False, self.num_starts + 1

        async def resume(self) -> None:
            if self.is_deaf:
                self.is_deaf = False
                raise EngineLost("no answer")
            await super().resume()

    async def main() -> None:
        engine = StaysAsItWas()
        controller = RolloutController(engine)
        assert is_whole(await controller.generate_sample(rollout("first")))
        await controller.pause_generation()
        engine.is_deaf = True
        await controller.continue_generation()
        assert is_whole(await controller.generate_sample(rollout("second")))
        assert engine.num_starts == 2
        await controller.close()

    virtual_time.run(main())


def test_a_hand_over_that_waits_for_an_engine_ends_when_the_engines_are_closed():
    async def main() -> None:
        controller = RolloutController(Fallible(start_s=50.0))
        giving = asyncio.create_task(controller.update_weights([], 1))
        await asyncio.sleep(1.0)
        await controller.close()
        with pytest.raises(EngineLost, match="the engines were closed"):
            await giving

    virtual_time.run(main())


def test_an_engine_that_comes_up_but_does_not_rest_sleeps_like_the_others():
    async def main() -> None:
        slept: list[int] = []

        class Sleeps(Fallible):
            sleeps = True

            async def pause(self) -> None:
                if self.num_starts == 2:
                    raise EngineLost("it came up and does not rest")
                await super().pause()

            async def sleep(self, *, keep_weights: bool) -> None:
                slept.append(self.num_starts)

        engine = Sleeps()
        controller = RolloutController(engine)
        await controller.update_weights([], 1)
        running = asyncio.create_task(controller.generate_sample(rollout()))
        await asyncio.sleep(0.5)
        await engine.lose()
        await asyncio.sleep(0.5)
        await controller.pause_generation()
        async with asyncio.timeout(10.0):
            await controller.sleep(keep_weights=False)
        assert slept == [2], "it holds memory though it is not up"
        await asyncio.sleep(100.0)
        assert engine.num_starts == 2
        await controller.update_weights([], 2)
        assert engine.num_starts == 3
        await running
        await controller.close()

    virtual_time.run(main())


def test_engines_that_are_given_up_are_closed_too():
    async def main() -> None:
        closed = []

        class Closes(Fallible):
            async def close(self) -> None:
                closed.append(self)
                await super().close()

        engines = [Closes(), Closes(starts=0)]
        controller = RolloutController(engines)
        await controller.update_weights([], 1)
        await asyncio.sleep(2.0)
        await controller.close()
        assert closed == engines

    virtual_time.run(main())


def test_update_weights_waits_for_the_first_engine_to_start():
    async def main() -> None:
        slow, fast = Fallible(start_s=50.0), Fallible(start_s=5.0)
        controller = RolloutController([slow, fast])
        await controller.update_weights([], 7)
        assert asyncio.get_running_loop().time() == pytest.approx(5.0)
        assert is_whole(await controller.generate_sample(rollout()))
        assert not slow.requests
        await asyncio.sleep(60.0)
        assert slow.model_step == 7
        assert controller.counts()["engine_restarts"] == 0
        await controller.close()

    virtual_time.run(main())


def test_an_engine_that_comes_back_during_a_pause_rests():
    async def main() -> None:
        engines = [Fallible(), Fallible()]
        controller = RolloutController(engines)
        running = [asyncio.create_task(controller.generate_sample(rollout(i))) for i in range(4)]
        await asyncio.sleep(2.0)
        await engines[0].lose()
        await controller.pause_generation()
        states = await asyncio.gather(*running)
        assert {state.status for state in states} == {Status.ABORTED}
        assert all(len(state.response_ids) for state in states)
        await asyncio.sleep(5.0)
        assert engines[0].is_resting
        assert (await controller.generate_sample(rollout("late"))).status is Status.ABORTED
        await controller.continue_generation()
        states = await asyncio.gather(*map(controller.generate_sample, states))
        assert all(is_whole(state) for state in states)
        await controller.close()

    virtual_time.run(main())


def test_a_pause_does_not_wait_for_engines_that_are_away():
    async def main() -> None:
        engine = Fallible(start_s=100.0)
        controller = RolloutController(engine)
        running = asyncio.create_task(controller.generate_sample(rollout()))
        await asyncio.sleep(1.0)
        await controller.pause_generation()
        assert (await running).status is Status.ABORTED
        assert asyncio.get_running_loop().time() < 2.0
        await controller.close()

    virtual_time.run(main())


def test_closing_ends_whoever_waits_for_an_engine():
    async def main() -> None:
        controller = RolloutController(Fallible(start_s=100.0))
        running = asyncio.create_task(controller.generate_sample(rollout()))
        await asyncio.sleep(1.0)
        await controller.close()
        assert (await running).status is Status.ABORTED

    virtual_time.run(main())


def test_an_engine_that_does_not_answer_in_time_is_lost_not_an_error():
    async def main() -> None:
        engines = [Fallible(), Fallible()]
        controller = RolloutController(engines)
        await controller.update_weights([], 1)
        await asyncio.sleep(1.0)

        async def hang(*_):
            await asyncio.Event().wait()

        engines[0].pause = hang
        await controller.pause_generation()
        assert engines[1].is_resting
        await asyncio.sleep(0)
        assert engines[0].num_starts == 1
        del engines[0].pause
        await asyncio.sleep(2.0)
        assert engines[0].num_starts == 2
        assert engines[0].is_resting
        await controller.close()

    virtual_time.run(main())


def test_a_rollout_whose_last_token_was_made_by_a_lost_engine_is_complete():
    async def main() -> None:
        class DiesAtTheEnd(Fallible):
            async def generate(self, request):
                completion = await super().generate(request)
                return replace(completion, finish_reason="error", lost=True)

        pool = EnginePool([DiesAtTheEnd()])
        request = GenerateRequest(
            request_id="a", input_ids=np.array([5], np.int32), params=SampleParams(max_tokens=3), max_tokens=3, seed=0
        )
        completion = await pool.complete(request)
        assert (completion.finish_reason, completion.response_ids.tolist()) == ("length", [6, 7, 8])
        await pool.close()

    virtual_time.run(main())


@pytest.mark.parametrize("seed", range(8))
def test_whoever_is_lost_whenever_no_rollout_is_lost_or_doubled(seed, monkeypatch):
    async def main() -> None:
        rng = random.Random(seed)
        engines = [Fallible(start_s=rng.uniform(0, 3), max_running=4) for _ in range(3)]
        controller = RolloutController(engines)

        async def produce(number: int) -> RolloutState:
            state = rollout(number, session_id=number % 5)
            while state.status is not Status.COMPLETED:
                assert state.status in (Status.INIT, Status.ABORTED), state.error_msg
                await controller.generate_sample(state)
                await asyncio.sleep(0.1)
            return state

        async def disturb() -> None:
            for step in range(1, 30):
                await asyncio.sleep(rng.uniform(0.5, 3.0))
                match rng.randrange(3):
                    case 0:
                        await rng.choice(engines).lose()
                    case 1:
                        await controller.pause_generation()
                        await asyncio.sleep(rng.uniform(0, 2))
                        await controller.continue_generation()
                    case 2:
                        await controller.update_weights([], step)

        # An engine fails far more often here than a call may bear.
        monkeypatch.setattr(pool, "MAX_RETRIES", 1_000)
        disturbing = asyncio.create_task(disturb())
        states = await asyncio.gather(*(produce(number) for number in range(40)))
        assert all(is_whole(state) for state in states)
        assert all((np.diff(state.response_model_steps) >= 0).all() for state in states)
        assert controller.count_tokens_made() == 40 * LENGTH
        await disturbing
        await controller.close()

    virtual_time.run(main())


class Newcomer(Fallible):
    """As a server: it takes weights over one after the other, those of its start for a hundred seconds."""

    def __init__(self, **arguments) -> None:
        super().__init__(**arguments)
        self.turn = asyncio.Lock()

    async def bring_up(self) -> None:
        async with self.turn:
            step = self.given_step
            await asyncio.sleep(self.start_s)
            await ScriptedEngine.load_weights(self, [], step)
            await ScriptedEngine.resume(self)
            self.away = False

    async def load_weights(self, weights, model_step: int) -> None:
        self.given_step = model_step
        async with self.turn:
            self._answer_or_not()
            await ScriptedEngine.load_weights(self, weights, model_step)


def test_a_hand_over_waits_for_no_newcomer_which_begins_with_the_newest_weights():
    async def main() -> None:
        loop = asyncio.get_running_loop()
        engines = [Newcomer(), Newcomer(start_s=100.0)]
        controller = RolloutController(engines)
        await controller.update_weights([], 1)
        running = [asyncio.create_task(controller.generate_sample(rollout(i, length=5000))) for i in range(6)]
        for step in range(2, 12):
            await asyncio.sleep(12.0)
            before_s = loop.time()
            await controller.update_weights([], step)
            assert loop.time() == before_s, "the hand-over waited"
        # The engine itself asserts that it gets nothing before it has the newest weights.
        assert controller.engines_up.keys() == {0, 1}
        states = await asyncio.gather(*(controller.generate_sample(rollout(f"n{i}")) for i in range(9)))
        assert engines[1].requests
        assert {step for state in states for step in state.response_model_steps.tolist()} == {11}
        assert all(is_whole(state, 5000) for state in await asyncio.gather(*running))
        await controller.close()

    virtual_time.run(main())


@pytest.mark.parametrize("fails_twice", [False, True])
def test_a_newcomer_that_stalls_over_the_newest_weights_is_brought_up_once_more(fails_twice):
    class Slow(Newcomer):
        """Its loads hang; brought up, it takes them by itself."""

        num_hanging = 1 + fails_twice

        async def load_weights(self, weights, model_step: int) -> None:
            self.given_step = model_step
            async with self.turn:
                pass
            if self.num_hanging:
                self.num_hanging -= 1
                await asyncio.sleep(1e6)
            await super().load_weights(weights, model_step)

    async def main() -> None:
        engines = [Newcomer(), Slow(start_s=100.0)]
        controller = RolloutController(engines)
        await controller.generate_sample(rollout())
        await controller.update_weights([], 2)
        if fails_twice:
            # In the second try.
            await asyncio.sleep(pool.LOAD_LIMIT_S + 50.0)
            await controller.update_weights([], 3)
        await asyncio.sleep(3 * (pool.LOAD_LIMIT_S + 100.0))
        assert controller.engines_up.keys() == {0, 1}
        assert engines[1].model_step == 2 + fails_twice
        assert not engines[1].num_hanging
        await controller.close()

    virtual_time.run(main())


class Joining(Newcomer):
    """Beside it there is room for others."""

    def another(self, url: str) -> Newcomer:
        return Newcomer(start_s=100.0)


def test_engines_join_and_leave_while_rollouts_run_and_a_hand_over_waits_for_no_newcomer():
    async def main() -> None:
        clock = asyncio.get_running_loop().time
        controller = RolloutController([Joining(), Newcomer()])
        await controller.update_weights([], 1)
        running = [asyncio.create_task(controller.generate_sample(rollout(i, length=5000))) for i in range(6)]
        await asyncio.sleep(10.0)
        assert await controller.scale("engines", "+1") == "3 now, 2 of them up"
        newcomer = controller.engines[2]
        for step in range(2, 12):
            await asyncio.sleep(12.0)
            before_s = clock()
            await controller.update_weights([], step)
            assert clock() == before_s, "the hand-over waited"
        # The engine itself asserts that it gets nothing before it has the newest weights.
        assert controller.engines_up.keys() == {0, 1, 2}
        states = await asyncio.gather(*(controller.generate_sample(rollout(f"n{i}")) for i in range(9)))
        assert newcomer.requests
        assert {step for state in states for step in state.response_model_steps.tolist()} == {11}
        # The newest leaves, then another: their rollouts go on elsewhere, with their tokens.
        params = {"length": 500, "session_id": "s"}
        more = [asyncio.create_task(controller.generate_sample(rollout(f"m{i}", **params))) for i in range(6)]
        await asyncio.sleep(20.0)
        assert await controller.scale("engines", "-1") == "2 now, 2 of them up"
        assert newcomer._closed
        assert not newcomer._running
        assert await controller.scale("engines", "1") == "1 now, 1 of them up"
        # One that never comes up can leave, and one that waits for it no longer does.
        assert await controller.scale("engines", "2") == "2 now, 1 of them up"
        await asyncio.sleep(5.0)
        assert await controller.scale("engines", "-1") == "1 now, 1 of them up"
        assert all(is_whole(state, 500) for state in await asyncio.gather(*more))
        assert all(is_whole(state, 5000) for state in await asyncio.gather(*running))
        assert controller.counts()["engine_restarts"] == 0
        await controller.close()

    virtual_time.run(main())


def test_an_engine_that_is_to_join_waits_for_the_end_of_one_that_leaves():
    done = []

    class Slow(Joining):
        def another(self, url: str) -> Newcomer:
            done.append("joins")
            return Slow()

        async def close(self) -> None:
            await asyncio.sleep(30.0)
            await super().close()
            done.append("closed")

    async def main() -> None:
        controller = RolloutController([Slow(), Slow()])
        await controller.update_weights([], 1)
        said = await asyncio.gather(*(controller.scale("engines", change) for change in ("-1", "+1")))
        assert said == ["1 now, 1 of them up", "2 now, 1 of them up"]
        assert done == ["closed", "joins"]
        await controller.close()

    virtual_time.run(main())


def test_an_engine_that_is_to_join_waits_for_the_end_of_one_that_leaves_while_it_starts():
    done = []

    class Starting(Newcomer):
        async def bring_up(self) -> None:
            try:
                await super().bring_up()
            finally:
                # As a server, whose process takes a while to end.
                await asyncio.sleep(30.0)
                done.append("ended")

    class First(Newcomer):
        def another(self, url: str) -> Newcomer:
            done.append("joins")
            return Starting(start_s=1000.0)

    async def main() -> None:
        controller = RolloutController([First()])
        await controller.update_weights([], 1)
        await controller.scale("engines", "+1")
        await asyncio.sleep(1.0)
        await controller.scale("engines", "-1")
        await controller.scale("engines", "+1")
        assert done == ["joins", "ended", "joins"]
        await controller.close()

    virtual_time.run(main())


@pytest.mark.parametrize("change", ["-1", "=4", "0", "two", "", "http://gpu7:8000", "-http://gpu7:8000"])
def test_a_change_that_cannot_be_is_refused_and_changes_nothing(change):
    async def main() -> None:
        controller = RolloutController([Joining()])
        with pytest.raises(ValueError, match=r"would leave none|write \+2"):
            await controller.scale("engines", change)
        assert len(controller.engines) == 1
        await controller.close()

    virtual_time.run(main())


def test_an_engine_of_the_run_s_own_process_has_no_other_beside_it():
    async def main() -> None:
        with pytest.raises(ValueError, match="in the run's own process"):
            await RolloutController(ScriptedEngine(count_on)).scale("engines", "+1")

    virtual_time.run(main())


def test_several_engines_tell_which_of_them_had_a_request_and_when():
    async def spans_with(num_engines):
        engines = EnginePool([ScriptedEngine(count_on, token_latency_s=0.1) for _ in range(num_engines)])
        told = []
        engines.on_request = told.append
        requests = [
            GenerateRequest(
                request_id=f"math/{number}/0:0:0",
                input_ids=np.array([1], np.int32),
                params=SampleParams(),
                max_tokens=10 * (1 + number),
                seed=0,
            )
            for number in range(3)
        ]
        await asyncio.gather(*map(engines.complete, requests))
        return sorted((span.stage, span.name, round(span.end_s - span.start_s, 3)) for span in told)

    assert virtual_time.run(spans_with(1)) == []
    assert virtual_time.run(spans_with(2)) == [
        ("engine 0", "math/0/0", 1.0),
        ("engine 0", "math/2/0", 3.0),
        ("engine 1", "math/1/0", 2.0),
    ]
