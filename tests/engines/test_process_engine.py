"""An engine in a child process behaves as one in this process, and its end loses nothing."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from test_engine_adapters import Source

from forebay.config import Component, ConfigError
from forebay.engines import EngineSurroundings, GenerateRequest, TransformersEngine, build_engines
from forebay.engines.base import Completion, EngineLost
from forebay.engines.pool import EnginePool
from forebay.engines.process import engine as process
from forebay.engines.process.engine import ProcessEngine
from forebay.engines.process.host import INLINE_BYTES, EngineRecipe, as_plain, from_plain
from forebay.engines.weights.between_processes import SharedMemoryHandOver
from forebay.models import ModelConfig, TinyConfig, load_model, load_tokenizer, resolve_model
from forebay.models.starting_weights import BASE_FINGERPRINT, AdaptersRefusedError, BaseDiffersError
from forebay.types import SampleParams

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("warm")]

TINY = ModelConfig(source="tiny", tiny=TinyConfig(hidden_size=32, num_layers=2, num_heads=2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    os.environ["FOREBAY_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    return resolve_model(TINY, seed=0)


def surroundings(folder: Path, scratch: Path) -> EngineSurroundings:
    return EngineSurroundings(model_folder=folder, model=TINY, tokenizer=load_tokenizer(folder), scratch=scratch)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def child(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    scratch = tmp_path_factory.mktemp("engine")
    (engine,) = build_engines(Component(name="process"), surroundings(folder, scratch))
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(child: Any, folder: Path) -> Any:
    """The one child of this module, which takes seconds to start, with the weights it began with."""
    weights = [(name, value.detach()) for name, value in load_model(folder).named_parameters()]
    await child.load_weights(weights, 0)
    return child


def request(number: int = 0, **changes: Any) -> GenerateRequest:
    made = GenerateRequest(
        request_id=f"r{number}",
        input_ids=np.array([5, 6, 7 + number], np.int32),
        params=SampleParams(max_tokens=12),
        max_tokens=12,
        seed=number,
    )
    return replace(made, **changes)


async def test_it_makes_what_an_engine_here_makes_also_with_new_weights(engine: Any, folder: Path) -> None:
    model = load_model(folder)
    here = TransformersEngine(model, load_tokenizer(folder), max_context_tokens=TINY.max_context)
    assert engine.max_context_tokens == here.max_context_tokens
    weights = [(name, torch.randn_like(value) * 0.3) for name, value in model.named_parameters()]
    for step in range(2):
        theirs = await asyncio.gather(*(engine.generate(request(n)) for n in range(4)))
        ours = await asyncio.gather(*(here.generate(request(n)) for n in range(4)))
        for their, our in zip(theirs, ours, strict=True):
            assert their.response_ids.tolist() == our.response_ids.tolist()
            np.testing.assert_allclose(their.logprobs, our.logprobs, rtol=1e-5)
            assert set(their.model_steps.tolist()) == {step}
        await engine.load_weights(weights, step + 1)
        await here.load_weights(weights, step + 1)
        assert engine.model_step == step + 1
    await here.close()


async def test_several_engines_share_one_hand_over(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = EngineRecipe(model_folder=folder, model=TINY, engine=Component(name="transformers"))
    hand_over = SharedMemoryHandOver()
    engines = [ProcessEngine(recipe, hand_over, log=tmp_path / f"{n}.log") for n in range(2)]
    for engine in engines:
        engine.wait_until_ready()
    before = [await engine.generate(request()) for engine in engines]
    weights = [(name, torch.randn_like(value)) for name, value in load_model(folder).named_parameters()]
    await asyncio.gather(*(engine.load_weights(weights, 3) for engine in engines))
    after = [await engine.generate(request()) for engine in engines]
    assert after[0].response_ids.tolist() == after[1].response_ids.tolist()
    assert after[0].response_ids.tolist() != before[0].response_ids.tolist()
    assert set(after[0].model_steps.tolist()) == {3}
    # One that answers no more does not outlive its owner.
    monkeypatch.setattr(process, "CLOSE_LIMIT_S", 0.2)
    os.kill(engines[0].pid or 0, signal.SIGSTOP)
    pids = [engine.pid for engine in engines]
    for engine in engines:
        await engine.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


async def test_pause_aborts_and_resume_goes_on(engine: Any) -> None:
    await engine.pause()
    assert (await engine.generate(request())).finish_reason == "abort"
    await engine.resume()
    assert len((await engine.generate(request())).response_ids)
    assert (await engine.health()).ok


async def test_every_request_ends_in_a_storm_of_pauses_aborts_and_cancellations(engine: Any) -> None:
    random, running = np.random.default_rng(0), []
    for number in range(0, 80, 4):
        running += [asyncio.create_task(engine.generate(request(number + n))) for n in range(4)]
        await asyncio.sleep(float(random.random()) * 0.02)
        match int(random.integers(4)):
            case 0:
                await asyncio.gather(engine.pause(), engine.abort([f"r{n}" for n in range(number)]))
            case 1:
                await engine.abort([f"r{number}", f"r{number + 1}", "unknown"])
            case 2:
                await asyncio.gather(engine.pause(), engine.resume(), engine.pause())
            case 3:
                running[-1].cancel()
        await engine.resume()
    results = await asyncio.gather(*running, return_exceptions=True)
    for result in results:
        if not isinstance(result, asyncio.CancelledError):
            assert result.finish_reason in ("stop", "length", "abort")
            assert len(result.response_ids) == len(result.logprobs) == len(result.model_steps)
    health = await engine.health()
    assert (health.ok, health.num_running, health.num_waiting) == (True, 0, 0)


async def test_an_impossible_request_and_impossible_weights_are_value_errors(engine: Any) -> None:
    with pytest.raises(ValueError, match="no input tokens"):
        await engine.generate(request(input_ids=np.empty(0, np.int32)))
    with pytest.raises(ValueError, match="no weights were given"):
        await engine.load_weights([("lm_head.weight", torch.zeros(1))][:0], 1)
    assert engine.model_step == 0


async def test_a_killed_child_is_told_at_once_and_comes_back_with_its_weights(engine: Any, folder: Path) -> None:
    weights = [(name, value * 0.5) for name, value in load_model(folder).named_parameters()]
    await engine.load_weights(weights, 7)
    expected = await engine.generate(request())
    pid = engine.pid
    running = asyncio.create_task(engine.generate(request(max_tokens=400)))
    loading = asyncio.create_task(engine.load_weights(list(weights), 7))
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    lost = await running
    assert lost.lost or lost.finish_reason in ("stop", "length")
    with contextlib.suppress(EngineLost):
        await loading
    with pytest.raises(EngineLost, match=f"{pid} ended with code -9|not started again"):
        await engine.health()
    # Weights that come while it starts, even one start is given up, are those that it begins with.
    given_up = asyncio.create_task(engine.bring_up())
    await asyncio.sleep(0.1)
    given_up.cancel()
    await asyncio.wait([given_up])
    bringing_up = asyncio.create_task(engine.bring_up())
    await asyncio.sleep(0)
    # Refused while it starts; the start that was given up may have been done already.
    with contextlib.suppress(EngineLost):
        await engine.load_weights(weights, 7)
    await bringing_up
    assert engine.pid != pid
    again = await engine.generate(request())
    assert again.response_ids.tolist() == expected.response_ids.tolist()
    assert set(again.model_steps.tolist()) == {7}


async def test_a_child_whose_successors_die_while_they_start_is_tried_three_times(
    engine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("forebay.engines.pool._TRY_AGAIN_S", 0.01)
    expected, pool = await engine.generate(request()), EnginePool([engine])

    async def answer(*, num_killed: int) -> Completion:
        """That to a request over which the child is killed, and so many children that are started then."""
        asked, killed = asyncio.create_task(pool.complete(request())), set[int]()
        while not asked.done():
            if engine.pid not in killed and len(killed) <= num_killed:
                killed.add(engine.pid)
                os.kill(engine.pid, signal.SIGKILL)
            await asyncio.sleep(0.001)
        assert len(killed) == 1 + num_killed
        return await asked

    assert (await pool.complete(request())).response_ids.tolist() == expected.response_ids.tolist()
    assert (await answer(num_killed=2)).response_ids.tolist() == expected.response_ids.tolist()
    assert pool.counts()["engine_restarts"] == 1
    assert caplog.text.count("is brought up once more: engine process") == 2
    with pytest.raises(EngineLost, match=r"no engine is left: engine 0 .* ended with code -9"):
        await answer(num_killed=3)
    assert caplog.text.count("is given up: engine process") == 1
    await engine.bring_up()


async def test_a_frozen_child_is_lost_and_replaced(monkeypatch: Any, engine: Any) -> None:
    # Of the child that is started next.
    monkeypatch.setattr(process, "SILENCE_LIMIT_S", 1.0)
    os.kill(engine.pid, signal.SIGKILL)
    with contextlib.suppress(EngineLost):
        await engine.health()
    await engine.bring_up()
    pid = engine.pid
    os.kill(pid, signal.SIGSTOP)
    lost = await engine.generate(request())
    assert lost.lost
    assert f"engine process {pid} has been silent for 1 s" in lost.error_msg
    monkeypatch.undo()
    await engine.bring_up()
    assert (await engine.generate(request())).finish_reason in ("stop", "length")


async def test_a_child_killed_between_two_syncs_comes_back_with_its_adapters(engine: Any, folder: Path) -> None:
    here = TransformersEngine(load_model(folder), load_tokenizer(folder))
    source = Source(load_model(folder))

    async def makes_what_one_here_makes(step: int) -> tuple[float, ...]:
        theirs, ours = await engine.generate(request()), await here.generate(request())
        assert theirs.response_ids.tolist() == ours.response_ids.tolist()
        np.testing.assert_allclose(theirs.logprobs, ours.logprobs, rtol=1e-5)
        assert set(theirs.model_steps.tolist()) == set(ours.model_steps.tolist()) == {step}
        return tuple(ours.logprobs.tolist())

    async def sync(engines: list[Any], step: int) -> None:
        source.step(step)
        for each in engines:
            await each.load_adapters(source.adapters(), step, config=source.adapter_config)

    assert engine.takes_adapters
    made = [await makes_what_one_here_makes(0)]
    await sync([here, engine], 1)
    made.append(await makes_what_one_here_makes(1))
    os.kill(engine.pid, signal.SIGKILL)
    assert (await engine.generate(request())).lost
    # Lost, it keeps what it is told.
    with pytest.raises(EngineLost):
        await sync([here, engine], 2)
    await engine.bring_up()
    made.append(await makes_what_one_here_makes(2))
    await sync([here, engine], 3)
    made.append(await makes_what_one_here_makes(3))
    assert len(set(made)) == 4
    # What an engine refuses, it refuses across the border too, by name, and changes nothing.
    with pytest.raises(AdaptersRefusedError, match="use_dora"):
        await engine.load_adapters(source.adapters(), 4, config=source.adapter_config | {"use_dora": True})
    with pytest.raises(BaseDiffersError, match="give it those first"):
        await engine.load_adapters(source.adapters(), 4, config=source.adapter_config | {BASE_FINGERPRINT: "?"})
    await makes_what_one_here_makes(3)
    await here.close()


async def test_a_hand_over_that_was_given_up_is_made_good_before_the_next_request(
    engine: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = [(name, value * 0.5) for name, value in load_model(folder).named_parameters()]
    pid = engine.pid
    loading = asyncio.create_task(engine.load_weights(weights, 8))
    await asyncio.sleep(0)
    # Before anything was sent: the child would go on with what it has.
    loading.cancel()
    await asyncio.wait([loading])
    assert engine.model_step == 0
    await engine.bring_up()
    assert engine.pid == pid
    made = await engine.generate(request())
    assert set(made.model_steps.tolist()) == {engine.model_step} == {8}
    # One that does not take them over is ended, and the next one has them.
    monkeypatch.setattr(process, "CATCH_UP_LIMIT_S", 0.2)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await engine.load_weights([(name, value * 2) for name, value in weights], 9)
    await engine.bring_up()
    assert engine.pid != pid
    assert not Path(f"/proc/{pid}").exists()
    assert set((await engine.generate(request())).model_steps.tolist()) == {9}


async def test_a_cancelled_request_frees_its_place(engine: Any) -> None:
    # Again, where a machine is so fast that a request is done before it is seen.
    for number in itertools.count():
        running = asyncio.create_task(engine.generate(request(number, max_tokens=400)))
        while not (await engine.health()).num_running and not running.done():
            pass
        if not running.done():
            break
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    # The abort is on its way before this question, and calls are begun in order.
    while (await engine.health()).num_running:
        await asyncio.sleep(0.01)


@pytest.mark.filterwarnings("ignore:.*is not an async function")
def test_a_child_that_cannot_start_says_why(folder: Path, tmp_path: Path) -> None:
    config = Component(name="process", arguments={"device": "cuda:99"})
    with pytest.raises(ConfigError, match=r"device = 'cuda:99': torch .* sees "):
        build_engines(config, surroundings(folder, tmp_path))


@pytest.mark.filterwarnings("ignore:.*is not an async function")
def test_the_child_ends_with_its_parent(folder: Path, tmp_path: Path) -> None:
    code = (
        "import os, signal; from pathlib import Path; from forebay.models import *; "
        "from forebay.engines import *; from forebay.config import Component; "
        f"folder = Path({str(folder)!r}); "
        f"config = ModelConfig.model_validate_json({TINY.model_dump_json()!r})\n"
        "engine, = build_engines(Component(name='process'), EngineSurroundings(model_folder=folder, "
        f"model=config, tokenizer=None, scratch=Path({str(tmp_path)!r})))\n"
        "print(engine.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    pid = int(output.stdout)
    handle = None
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([handle], [], [], 20)[0], "the child outlived its parent"
    os.close(handle)


async def test_arrays_of_any_size_come_back_as_they_were_and_can_be_written() -> None:
    large = np.arange(INLINE_BYTES, dtype=np.int32)
    experts = np.arange(24, dtype=np.int8).reshape(4, 3, 2)
    completion = Completion(
        response_ids=large,
        logprobs=np.array([-0.5, -1.5], np.float32),
        model_steps=np.empty(0, np.int32),
        routed_experts=experts,
        finish_reason="stop",
    )
    value, buffers = as_plain(completion)
    assert [len(buffer) for buffer in buffers] == [large.nbytes]
    again = from_plain(value, [np.frombuffer(bytearray(buffer), np.uint8) for buffer in buffers], Completion)
    for name in ("response_ids", "logprobs", "model_steps", "routed_experts"):
        np.testing.assert_array_equal(getattr(again, name), getattr(completion, name), strict=True)
        assert getattr(again, name).flags.writeable
    assert again.finish_reason == "stop"
