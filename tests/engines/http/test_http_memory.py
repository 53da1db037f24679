"""A server beside a trainer: it sleeps, takes weights from the trainer's memory, holds requests meanwhile."""

from __future__ import annotations

import asyncio
import base64
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.aio.time_limits import time_limit
from forebay.engines import RolloutController
from forebay.engines.base import EngineLost
from forebay.engines.servers.dialects import Dialect, SGLang
from forebay.engines.weights import buckets as bucket_module
from forebay.engines.weights.buckets import Buckets
from forebay.io.shared import views
from forebay.models.live_weights import LiveWeights
from forebay.types import RolloutState, SampleParams


class Source:
    """Some weights, as a trainer has them."""

    def __init__(self, read: Any) -> None:
        self.read = self.sizes = read

    def copy_weights(self, layout: Any, memory: Any) -> None:
        weights = dict(self.read())
        for name, place in views(layout, memory.data):
            place.copy_(weights[name])


class Weights:
    """A trainer's: every weight is the number of its step."""

    def __init__(self, step: int = 0) -> None:
        self.step, self.turn = step, threading.Lock()
        self.live = LiveWeights(Source(self.read), "bfloat16", self.turn, lambda: self.step)

    def read(self) -> Any:
        for name, shape in {"w": (3,), "wide": (5, 7), "last": (2, 2)}.items():
            yield name, torch.full(shape, float(self.step))


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr("forebay.engines.pool._TRY_AGAIN_S", 0.01)


@pytest.fixture(params=["FakeVLLM", "FakeSGLang"])
async def server(request, start_fake, fake_kinds) -> Any:
    return await start_fake(fake_kinds[request.param])


@pytest.fixture
async def vllm(start_fake, fake_kinds) -> Any:
    return await start_fake(fake_kinds["FakeVLLM"])


async def test_buckets_hold_everything_in_order_and_no_more_than_they_may(monkeypatch) -> None:
    monkeypatch.setattr(bucket_module, "BUCKET_BYTES", 32)
    given_weights = [(str(i), torch.randn(size)) for i, size in enumerate((5, 0, 1, 40, 3, 3))]
    given_weights += [("ids", torch.arange(6)), ("after", torch.randn(2))]
    live = LiveWeights(Source(lambda: given_weights), "bfloat16", threading.Lock(), int)
    buckets, found = Buckets(live, "cpu", written_out={"again": "3"}), []
    for number in range(len(buckets)):
        async with buckets.reading(number) as bucket:
            sizes = [stop - start for *_, start, stop in bucket.layout]
            assert len({dtype for _, dtype, *_ in bucket.layout}) == 1
            assert sum(sizes) <= max(32, sizes[0])
            data = torch.from_file(bucket.handle["path"], shared=True, size=sum(sizes), dtype=torch.uint8)
            for (name, dtype, *_), part in zip(bucket.layout, data.split(sizes), strict=True):
                found.append((name, part.clone().view(getattr(torch, dtype))))
    expected = [*given_weights, ("again", given_weights[3][1])]
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (_, got), (_, wanted) in zip(found, expected, strict=True):
        assert torch.equal(got, wanted.bfloat16() if wanted.is_floating_point() else wanted)


def test_a_bucket_on_a_gpu_is_told_by_one_handle_under_the_gpu_s_name(monkeypatch) -> None:
    class Properties:
        uuid = "GPU-7"

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.multiprocessing.reductions, "reduce_tensor", lambda data: (None, (1, data.nbytes)))
    handle = bucket_module.GPUMemory(8, "cpu").handle
    assert pickle.loads(base64.b64decode(handle["ipc_handles_pickled"])) == {"GPU-7": (1, 8)}


async def test_weights_come_in_buckets_and_the_server_confirms_them(vllm, connect, ask, monkeypatch):
    monkeypatch.setattr(bucket_module, "BUCKET_BYTES", 80)
    engine, weights = connect(vllm, bucket_device="cpu"), Weights(step=4)
    await engine.bring_up()
    assert engine.takes_live_weights
    await engine.load_weights(weights.live, 4)
    assert {name: tensor.tolist() for name, tensor in vllm.received.items()} == {
        name: tensor.tolist() for name, tensor in weights.read()
    }
    assert vllm.calls.count("POST /update_weights") == 2
    assert not vllm.loaded, "nothing went over the disk"
    completion = await engine.generate(ask())
    assert (completion.response_ids.tolist(), completion.model_steps.tolist()) == ([14] * 4, [4] * 4)


_PATHS = ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/update_weight_version")


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        *((path, fault) for path in _PATHS for fault in ("refuses", "dies", "hangs")),
        ("/update_weight_version", "lies"),
    ],
)
async def test_an_update_that_fails_is_told_and_no_token_is_made_by_half_of_it(vllm, connect, ask, path, fault):
    engine, weights = connect(vllm, bucket_device="cpu"), Weights()
    await engine.bring_up()
    await engine.load_weights(weights.live, 0)
    weights.step, vllm.failing[path] = 3, fault
    with pytest.raises((EngineLost, TimeoutError)):
        async with asyncio.timeout(0.3):
            await engine.load_weights(weights.live, 3)
    ended = await engine.generate(ask())
    assert (ended.lost, len(ended.response_ids)) == (True, 0)
    vllm.failing.clear()
    await engine.bring_up()
    completion = await engine.generate(ask())
    assert (completion.response_ids.tolist(), completion.model_steps.tolist()) == ([13] * 4, [3] * 4)


async def test_a_server_that_comes_back_while_the_trainer_trains_gets_the_newer_weights(vllm, connect, ask):
    engine, weights = connect(vllm, bucket_device="cpu"), Weights(step=1)
    await engine.bring_up()
    await engine.load_weights(weights.live, 1)
    await vllm.kill()
    await vllm.start()
    engine._lose("it was killed")
    weights.turn.acquire()
    coming = asyncio.create_task(engine.bring_up())
    await asyncio.sleep(0.05)
    assert not coming.done(), "weights were read in the middle of a train step"
    weights.step = 2
    weights.turn.release()
    await coming
    assert (await engine.generate(ask())).model_steps.tolist() == [2] * 4
    assert engine.model_step == 2


async def test_the_wait_for_a_train_step_is_no_part_of_the_time_to_come_back_in(vllm, connect, ask, monkeypatch):
    engine, weights = connect(vllm, bucket_device="cpu", start_limit_s=60.0), Weights(step=1)
    loop, ended = asyncio.get_running_loop(), threading.Event()

    class Turn:
        """A train step ends an hour after somebody begins to wait for it."""

        def acquire(self) -> None:
            if not ended.is_set():
                loop.call_soon_threadsafe(an_hour_later)
                ended.wait()

        def release(self) -> None:
            pass

    def an_hour_later() -> None:
        now = loop.time
        monkeypatch.setattr(loop, "time", lambda: now() + 3600)
        # After what is due by then.
        loop.call_soon(loop.call_soon, ended.set)

    await engine.bring_up()
    await engine.load_weights(weights.live, 1)
    await vllm.kill()
    await vllm.start()
    engine._lose("it was killed")
    monkeypatch.setattr(weights.live, "_turn", Turn())
    await engine.bring_up()
    assert vllm.calls.count("POST /start_weight_update") == 2, "it was given up, and tried again"
    assert (await engine.generate(ask())).model_steps.tolist() == [1] * 4


@pytest.mark.parametrize("wait", ["reading", "held"])
async def test_no_clock_runs_while_a_transfer_waits_for_a_train_step(wait):
    weights = Weights()
    buckets = Buckets(weights.live, "cpu")
    weights.turn.acquire()
    asyncio.get_running_loop().call_later(0.2, weights.turn.release)
    async with time_limit(0.1), buckets.reading(0) if wait == "reading" else buckets.held():
        pass


async def test_a_transfer_that_train_steps_interrupt_is_through_at_its_second_try(vllm, connect, ask, monkeypatch):
    """Each step is shorter than a bucket takes; it cannot be made while the transfer holds it up."""
    monkeypatch.setattr(bucket_module, "BUCKET_BYTES", 8)
    engine, weights = connect(vllm, bucket_device="cpu"), Weights(step=1)
    receive = vllm._receive

    def train(info: dict[str, Any]) -> None:
        receive(info)
        if weights.turn.acquire(blocking=False):
            weights.step += 1
            weights.turn.release()

    monkeypatch.setattr(vllm, "_receive", train)
    await engine.bring_up()
    async with asyncio.timeout(60):
        await engine.load_weights(weights.live, 1)
    assert vllm.calls.count("POST /start_weight_update") == 2
    received = {name: set(tensor.flatten().tolist()) for name, tensor in vllm.received.items()}
    assert received == {name: {float(weights.step)} for name in ("w", "wide", "last")}
    completion = await engine.generate(ask())
    assert completion.model_steps.tolist() == [weights.step] * 4
    assert weights.turn.acquire(timeout=60), "the next step goes on"


async def test_a_transfer_that_is_given_up_over_its_wait_for_a_train_step_holds_up_no_later_one(vllm):
    weights = Weights(step=1)
    buckets = Buckets(weights.live, "cpu")
    weights.turn.acquire()
    waiting = asyncio.create_task(buckets.held().__aenter__())
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.wait([waiting])
    weights.turn.release()
    assert await asyncio.to_thread(weights.turn.acquire, timeout=60)
    # The transfer that was given up may wait behind it.
    weights.turn.release()


async def test_transfers_that_hold_up_train_steps_leave_the_threads_to_those_that_fill_buckets(vllm):
    """As many servers as threads may come back at once, each with a transfer that was interrupted."""
    weights = Weights(step=1)
    buckets = Buckets(weights.live, "cpu")
    with ThreadPoolExecutor(1) as executor:
        asyncio.get_running_loop().set_default_executor(executor)

        async def transfer() -> None:
            async with buckets.held(), buckets.reading(0) as bucket:
                assert bucket.step == 1

        async with asyncio.timeout(60):
            await asyncio.gather(transfer(), transfer())
        assert weights.turn.acquire(timeout=60)


@pytest.mark.parametrize("keep_weights", [True, False])
async def test_sleeps_wakes_in_parts_and_no_request_reaches_it(server, connect, ask, keep_weights):
    engine = connect(server)
    await engine.bring_up()
    await engine.load_weights([("w", torch.ones(2))], 1)
    await engine.sleep(keep_weights=keep_weights)
    assert server.asleep == {"weights", "kv_cache"}
    num_bodies = len(server.bodies)
    assert (await engine.generate(ask())).finish_reason == "abort"
    await engine.load_weights([("w", torch.ones(2))], 2)
    assert server.asleep == {"kv_cache"}
    assert len(server.bodies) == num_bodies
    await engine.resume()
    assert not server.asleep
    assert (await engine.generate(ask())).model_steps.tolist() == [2] * 4


async def test_a_server_that_is_lost_is_ended_when_it_is_to_sleep(vllm, connect):
    class Process:
        num_stops = 0

        async def stop(self) -> None:
            self.num_stops += 1

    engine = connect(vllm)
    await engine.bring_up()
    await engine.sleep()
    engine._lose("it answered late when it was woken up")
    engine._server = Process()
    with pytest.raises(EngineLost, match="it answered late"):
        await engine.sleep()
    assert engine._server.num_stops == 1


async def test_a_server_without_weights_does_not_serve(vllm, connect, ask):
    engine = connect(vllm)
    await engine.bring_up()
    await engine.load_weights([("w", torch.ones(2))], 1)
    await engine.sleep(keep_weights=False)
    with pytest.raises(EngineLost, match="slept without its weights"):
        await engine.resume()
    await engine.bring_up()
    assert (await engine.generate(ask())).response_ids.tolist() == [11] * 4


async def test_held_requests_go_on_with_their_cache_and_say_which_weights_made_which_token(server, connect, ask):
    server.dialect = type(server.dialect)(keeps=True)
    server.auto = False
    engine = connect(server, dialect=server.dialect)
    await engine.bring_up()
    running = asyncio.create_task(engine.generate(ask(max_tokens=40)))
    await server.has_jobs(1)
    server.make(5)
    await engine.load_weights([("w", torch.ones(2))], 1)
    server.make(20)
    await engine.load_weights([("w", torch.ones(2))], 2)
    num_requests = len(server.bodies)
    server.make(15)
    completion = await running
    assert completion.response_ids.tolist() == [10] * 5 + [11] * 20 + [12] * 15
    assert completion.model_steps.tolist() == [0] * 5 + [1] * 20 + [2] * 15
    assert len(server.bodies) == num_requests, "it was asked again"
    # A new request must not meet what older weights have cached of the same prompt.
    asked = [asyncio.create_task(engine.generate(ask(max_tokens=1))) for _ in range(2)]
    await asyncio.gather(*asked)
    salts = [body.get("cache_salt") or body.get("extra_key") for body in server.bodies]
    assert len(set(salts[-2:])) == 1
    assert salts[-1] != salts[-3]


async def test_a_held_request_that_is_cut_counts_as_of_the_oldest_weights(vllm, connect, ask):
    vllm.dialect = Dialect(keeps=True)
    vllm.auto = False
    engine = connect(vllm, dialect=vllm.dialect)
    await engine.bring_up()
    request = ask(max_tokens=40)
    running = asyncio.create_task(engine.generate(request))
    await vllm.has_jobs(1)
    vllm.make(1)
    await engine.load_weights([("w", torch.ones(2))], 1)
    vllm.make(20)
    while engine.num_made(request.request_id) < 17:
        await asyncio.sleep(0.001)
    await vllm.kill()
    completion = await running
    assert completion.lost
    assert set(completion.model_steps.tolist()) == {0}


def test_sglang_is_given_tensors_as_torch_shares_them(monkeypatch) -> None:
    pickled: list[Any] = []
    monkeypatch.setattr(bucket_module.ForkingPickler, "dump", lambda self, tensors: pickled.append(tensors))
    buckets = Buckets(Weights(2).live, "cpu")
    assert len(buckets) == 1
    call = SGLang().bucket(buckets.fill(0))
    assert (call.path, call.body["flush_cache"]) == ("/update_weights_from_tensor", False)
    assert [(name, tensor.tolist()) for name, tensor in pickled[0]] == [
        (name, tensor.tolist()) for name, tensor in Weights(2).read()
    ]
    assert SGLang().end("v")[-1].body["new_version"] == "v"


STEPS = st.lists(st.sampled_from(["sleep", "drop", "sync", "resume", "pause", "generate", "fault"]), max_size=12)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(doings=STEPS)
async def test_whatever_is_done_versions_grow_and_every_path_ends_awake_or_closed(
    doings, start_fake, fake_kinds, connect
):
    """The scripted server fails its test where a request or weights come while it sleeps."""
    vllm = await start_fake(fake_kinds["FakeVLLM"])
    engine, weights = connect(vllm, bucket_device="cpu"), Weights()
    engine.sleeps = True
    controller = RolloutController(engine)
    await controller.update_weights(weights.live, 0)
    seen, number = [0], 0

    async def generate() -> None:
        nonlocal number
        number += 1
        state = RolloutState([], rollout_id=number, prompt_ids=[1], sample_params=SampleParams(max_tokens=3))
        await controller.generate_sample(state)
        seen.extend(state.response_model_steps.tolist())
        assert [token - 10 for token in state.response_ids] == state.response_model_steps.tolist()

    for doing in doings:
        if doing in ("sleep", "drop"):
            # Paused: else what comes would wait until it wakes.
            await controller.pause_generation()
            await controller.sleep(keep_weights=doing == "sleep")
            assert vllm.asleep
        elif doing == "fault":
            vllm.failing["/update_weights"], vllm.fails_once = "dies", True
            weights.step += 1
            await controller.update_weights(weights.live, weights.step)
            assert not vllm.failing
        elif doing == "sync":
            weights.step += 1
            await controller.update_weights(weights.live, weights.step)
        elif doing == "pause":
            await controller.pause_generation()
        else:
            if doing == "resume":
                await controller.wake()
                await controller.continue_generation()
            await generate()
    await controller.wake()
    await controller.continue_generation()
    await generate()
    assert seen == sorted(seen)
    assert seen[-1] == weights.step
    assert (vllm.asleep, vllm.state) == (set(), "running")
    await vllm.stop()
