"""The engine of simulations: rates, slots, pauses and labels, also against the scripted engine."""

import asyncio
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.aio.virtual_time import run
from forebay.engines.base import GenerateRequest
from forebay.engines.scripted import ScriptedEngine
from forebay.simulation.engine import ModeledEngine
from forebay.types import SampleParams


def request(name, length, *, done=0, max_tokens=1000, time_limit_s=None):
    return GenerateRequest(
        request_id=name,
        input_ids=np.arange(1 + done, dtype=np.int32),
        params=SampleParams(max_tokens=max_tokens),
        max_tokens=max_tokens - done,
        seed=length,
        time_limit_s=time_limit_s,
    )


def engine(**options):
    settings = {"rate": lambda running: 10.0 * running, "slots": 4, "length": lambda r: r.seed - r.num_earlier}
    return ModeledEngine(**{**settings, **options})


async def timed(generating):
    completion = await generating
    return asyncio.get_running_loop().time(), len(completion.response_ids), completion.finish_reason


def test_a_request_takes_its_tokens_over_the_rate():
    assert run(timed(engine().generate(request("a", 20)))) == (2.0, 20, "stop")
    assert run(timed(engine().generate(request("a", 20, max_tokens=5)))) == (0.5, 5, "length")


def test_requests_share_a_rate_that_does_not_grow():
    async def main():
        shared = engine(rate=lambda running: 10.0)
        short, long = shared.generate(request("a", 10)), shared.generate(request("b", 30))
        return await asyncio.gather(timed(short), timed(long))

    # Both at 5 tokens/s until the short one ends, then the long one at 10.
    assert run(main()) == [(2.0, 10, "stop"), (4.0, 30, "stop")]


def test_what_finds_no_slot_waits_and_prefill_keeps_a_slot():
    async def main():
        narrow = engine(slots=1, prefill_s=lambda tokens: 0.5 * tokens)
        return await asyncio.gather(*(timed(narrow.generate(request(name, 10))) for name in "ab"))

    assert run(main()) == [(1.5, 10, "stop"), (3.0, 10, "stop")]


def test_a_pause_gives_back_what_was_made_and_a_continuation_the_rest():
    async def main():
        paused = engine()
        first = asyncio.create_task(timed(paused.generate(request("a", 20))))
        await asyncio.sleep(1.25)
        made = paused.num_made("a")
        await paused.pause()
        refused = await timed(paused.generate(request("b", 5)))
        await paused.resume()
        done = (await first)[1]
        rest = await timed(paused.generate(request("a", 20, done=done)))
        return made, await first, refused, rest

    made, first, refused, rest = run(main())
    assert made == 12
    assert first == (1.25, 12, "abort")
    assert refused == (1.25, 0, "abort")
    assert rest == (pytest.approx(2.05), 8, "stop")


def test_tokens_carry_the_step_of_the_weights_that_made_them():
    async def main():
        updated = engine()
        generating = asyncio.create_task(updated.generate(request("a", 20)))
        await asyncio.sleep(0.55)
        await updated.load_weights([], 3)
        completion = await generating
        return completion.model_steps.tolist(), updated.model_step

    assert run(main()) == ([0] * 5 + [3] * 15, 3)


def test_a_cancelled_caller_frees_its_slot():
    async def main():
        narrow = engine(slots=1)
        cancelled = asyncio.create_task(narrow.generate(request("a", 1000)))
        await asyncio.sleep(1)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        return await timed(narrow.generate(request("b", 10)))

    assert run(main()) == (2.0, 10, "stop")


def test_a_time_limit_ends_a_request_with_what_it_has():
    assert run(timed(engine().generate(request("a", 20, time_limit_s=0.55)))) == (0.55, 5, "abort")


@given(seed=st.integers(0, 10_000))
def test_at_a_fixed_speed_it_does_what_the_scripted_engine_does(seed):
    """Random arrivals, pauses, aborts and weight updates: equal counts, reasons, labels and times."""
    scripted = run(_random_schedule(_scripted, seed))
    modeled = run(_random_schedule(_modeled, seed))
    assert [entry[0] for entry in modeled] == [entry[0] for entry in scripted]
    for one, other in zip(modeled, scripted, strict=True):
        assert one[1:] == (pytest.approx(other[1]), *other[2:])


def _scripted():
    return ScriptedEngine(lambda r: range(r.seed), token_latency_s=0.25, max_running=3)


def _modeled():
    return ModeledEngine(rate=lambda running: 4.0 * running, slots=3, length=lambda r: r.seed)


async def _random_schedule(make, seed):
    rng, tested, log = random.Random(seed), make(), []

    async def ask(name, length, delay_s, max_tokens):
        await asyncio.sleep(delay_s)
        completion = await tested.generate(request(name, length, max_tokens=max_tokens))
        now_s = asyncio.get_running_loop().time()
        log.append((name, now_s, completion.finish_reason, completion.model_steps.tolist()))

    async def disturb():
        for step in range(1, 5):
            # Never at the end of a token: which of two things of one instant is first would be chance.
            await asyncio.sleep(rng.randint(1, 12) * 0.25 + 0.01)
            action = rng.choice(["pause", "abort", "load"])
            if action == "pause":
                await tested.pause()
                await tested.resume()
            elif action == "abort":
                await tested.abort([str(rng.randint(0, 7))])
            else:
                await tested.load_weights([], step)

    async with asyncio.TaskGroup() as group:
        for number in range(8):
            delay_s = number * 0.001 + rng.randint(0, 8) * 0.25 + 0.1
            group.create_task(ask(str(number), rng.randint(1, 20), delay_s, rng.randint(1, 20)))
        group.create_task(disturb())
    return sorted(log)
