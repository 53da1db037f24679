"""Servers that hang, refuse, are busy or come back otherwise than they were."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.config import ConfigError
from forebay.engines import RolloutController
from forebay.engines.base import EngineLost
from forebay.engines.pool import EnginePool
from forebay.engines.servers.dialects import TOKENS_PER_PIECE, Dialect, SGLang
from forebay.engines.servers.engine import HTTPEngine, State
from forebay.engines.servers.launch import LocalServer
from forebay.engines.weights.files import WeightFiles
from forebay.types import RolloutState, SampleParams, Status
from warm_python import stand_in

WEIGHTS = [("w", torch.ones(2))]


@pytest.fixture(params=["FakeVLLM", "FakeSGLang"])
async def server(request, start_fake, fake_kinds) -> Any:
    return await start_fake(fake_kinds[request.param])


@pytest.fixture
async def vllm(start_fake, fake_kinds) -> Any:
    return await start_fake(fake_kinds["FakeVLLM"])


@pytest.fixture(autouse=True)
def hurry(monkeypatch) -> None:
    for name, seconds in {
        "pool._TRY_AGAIN_S": 0.01,
        "servers.link._ASK_EVERY_S": 0.01,
        "servers.link._HEALTH_EVERY_S": 0.01,
        "servers.link._BUSY_FIRST_S": 0.01,
        "servers.link._TRY_AGAIN_S": 0.01,
    }.items():
        monkeypatch.setattr(f"forebay.engines.{name}", seconds)


def give_up_soon(monkeypatch) -> None:
    """What is asked from here on is given up after 0.2 s; not before: on a busy machine that is no time."""
    monkeypatch.setattr("forebay.engines.servers.link.CONTROL_LIMIT_S", 0.2)


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def rollout(name: str, max_tokens: int = 40) -> RolloutState:
    return RolloutState([], rollout_id=name, prompt_ids=[1, 2], sample_params=SampleParams(max_tokens=max_tokens))


# Hanging


async def test_a_healthy_server_whose_model_hangs_is_lost(server, connect, ask, monkeypatch):
    monkeypatch.setattr("forebay.engines.servers.link._SILENCE_S", 0.05)
    engine = connect(server)
    await engine.bring_up()
    server.auto = False
    # Slow is not lost: its model's process answers.
    slow = asyncio.create_task(engine.generate(ask()))
    await server.has_jobs(1)
    await asyncio.sleep(0.15)
    server.make(4)
    assert (await slow).finish_reason == "length"
    hung = asyncio.create_task(engine.generate(ask()))
    await server.has_jobs(1)
    server.hangs = True
    give_up_soon(monkeypatch)
    completion = await hung
    assert completion.lost
    assert "it stands still" in completion.error_msg


async def test_a_server_may_be_silent_while_it_loads_under_held_requests(vllm, connect, ask, monkeypatch):
    monkeypatch.setattr("forebay.engines.servers.link._SILENCE_S", 0.05)
    vllm.dialect, vllm.auto = Dialect(keeps=True), False
    engine = connect(vllm, dialect=vllm.dialect)
    await engine.bring_up()
    running = asyncio.create_task(engine.generate(ask()))
    await vllm.has_jobs(1)
    vllm.stuck, vllm.failing["/is_paused"] = asyncio.Event(), "hangs"
    give_up_soon(monkeypatch)
    loading = asyncio.create_task(engine.load_weights(WEIGHTS, 1))
    await asyncio.sleep(0.5)
    assert not running.done(), "it was taken for one that stands still"
    vllm.failing.clear()
    vllm.stuck.set()
    await loading
    vllm.make(4)
    assert (await running).response_ids.tolist() == [11] * 4


async def test_a_control_call_that_is_not_answered_loses_what_runs(server, connect, ask, monkeypatch):
    engine = connect(server)
    await engine.bring_up()
    server.auto = False
    running = asyncio.create_task(engine.generate(ask()))
    await server.has_jobs(1)
    server.hangs = True
    give_up_soon(monkeypatch)
    with pytest.raises(EngineLost, match=r"/pause.* was not answered within 0.2 s"):
        await engine.pause()
    assert (await running).lost


async def test_bringing_up_a_server_that_hangs_ends(server, connect, monkeypatch):
    engine = connect(server)
    await engine.bring_up()
    server.hangs, engine._start_limit_s = True, 0.1
    give_up_soon(monkeypatch)
    with pytest.raises(EngineLost, match="no server there that answers, for 0 s"):
        await engine.bring_up()
    # As does one that answers, but makes no token.
    server.hangs = False
    monkeypatch.setattr(type(server), "_make_one", lambda *_: None)
    with pytest.raises(EngineLost, match=r"it answers, but was not ready within 0 s"):
        await engine.bring_up()


# The fake server in a process of its own; its model hangs as long as there is a file that says so.
PROGRAM = """
import asyncio, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from conftest import FakeVLLM
class Server(FakeVLLM):
    hangs = property(lambda self: Path(sys.argv[3]).exists(), lambda self, value: None)
async def main():
    server = Server()
    server.port = int(sys.argv[2])
    await server.start()
    print("started", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_a_server_of_this_machine_that_hangs_is_started_anew(tmp_path, ask, monkeypatch):
    hangs = tmp_path / "hangs"
    local = LocalServer(
        lambda port: stand_in(["-c", PROGRAM, Path(__file__).parent, port, hangs]),
        log=tmp_path / "log",
    )
    engine = HTTPEngine(
        local, model="policy", max_context_tokens=64, files=WeightFiles(tmp_path / "weights", tmp_path)
    )
    await engine.bring_up()
    hangs.touch()
    start = local.start
    monkeypatch.setattr("forebay.engines.servers.link.CONTROL_LIMIT_S", 0.2)

    async def cure(is_ready) -> None:
        hangs.unlink()
        monkeypatch.setattr("forebay.engines.servers.link.CONTROL_LIMIT_S", 60.0)
        await start(is_ready)

    monkeypatch.setattr(local, "start", cure)
    await engine.bring_up()
    assert (tmp_path / "log").read_text().count("started") == 2
    assert (await engine.generate(ask())).finish_reason == "length"
    await engine.close()


# Loading


async def test_a_load_that_is_given_up_is_not_taken_for_done_or_undone(server, connect, ask):
    engine = connect(server)
    await engine.bring_up()
    server.auto = False
    running = asyncio.create_task(engine.generate(ask()))
    await server.has_jobs(1)
    server.make(1)
    await until(lambda: engine.num_made(running.get_name()) or server.jobs[0].num_sent)
    server.stuck = asyncio.Event()
    loading = asyncio.create_task(engine.load_weights(WEIGHTS, 1))
    await until(lambda: server.state == "paused")
    loading.cancel()
    await asyncio.gather(loading, return_exceptions=True)
    completion = await running
    assert completion.lost
    assert completion.model_steps.tolist() == [0]
    # Nothing is made by what may be half of both weights.
    assert (await engine.generate(ask())).lost
    assert server.state == "paused"
    server.stuck, server.auto = None, True
    calls = len(server.calls)
    await engine.bring_up()
    assert server.step_of_weights == 1
    asked = [call.split("?")[0] for call in server.calls[calls:]]
    load, release = server.dialect.load("", "")[0].path, server.dialect.release[0].path
    assert asked.index(f"POST {load}") < asked.index(f"POST {release}")
    assert (await engine.generate(ask())).model_steps.tolist() == [1] * 4


async def test_a_request_that_is_ended_while_weights_load_returns_at_once(server, connect, ask):
    engine = connect(server)
    await engine.bring_up()
    server.stuck = asyncio.Event()
    loading = asyncio.create_task(engine.load_weights(WEIGHTS, 1))
    await until(lambda: server.state == "paused")
    request = ask()
    running = asyncio.create_task(engine.generate(request))
    await asyncio.sleep(0)
    await engine.abort([request.request_id])
    assert (await running).finish_reason == "abort"
    assert not loading.done()
    server.stuck.set()
    await loading


async def test_a_cache_that_cannot_be_reset_yet_is_reset_later(vllm, connect):
    engine = connect(vllm)
    await engine.bring_up()
    vllm.num_failing_resets = 2
    await engine.load_weights(WEIGHTS, 1)
    assert sum("reset_prefix_cache" in call for call in vllm.calls) == 3
    vllm.num_failing_resets = 99
    with pytest.raises(EngineLost, match="/reset_prefix_cache was answered 200"):
        await engine.load_weights(WEIGHTS, 2)


async def test_weights_that_cannot_be_written_are_an_error_that_says_so(tmp_path, vllm, connect, ask):
    (tmp_path / "file").touch()
    engine = connect(vllm, files=WeightFiles(tmp_path / "file" / "weights", tmp_path))
    await engine.bring_up()
    with pytest.raises(ConfigError, match=r"weights of step 3 cannot be written .* set the engine's weights_folder"):
        await engine.load_weights(WEIGHTS, 3)
    assert (await engine.generate(ask())).model_steps.tolist() == [0] * 4


# Asking again


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_server_is_asked_again_and_not_lost(server, connect, ask, status):
    engine = connect(server)
    await engine.bring_up()
    server.answers = [(status, "busy")] * 3
    first, second = await asyncio.gather(engine.generate(ask()), engine.generate(ask()))
    assert first.finish_reason == second.finish_reason == "length"
    server.answers, server.retry_after = [(status, "busy")], "100"
    begun = len(server.bodies)
    request = ask()
    waiting = asyncio.create_task(engine.generate(request))
    await until(lambda: len(server.bodies) > begun)
    await asyncio.sleep(0.05)
    assert len(server.bodies) == begun + 1
    await engine.abort([request.request_id])
    assert (await waiting).finish_reason == "abort"


async def test_a_server_that_is_busy_for_ever_is_lost(vllm, connect, ask, monkeypatch):
    monkeypatch.setattr("forebay.engines.servers.link._BUSY_LIMIT_S", 0.02)
    engine = connect(vllm)
    await engine.bring_up()
    vllm.answers = [(503, "too many requests")] * 1000
    completion = await engine.generate(ask())
    assert completion.lost
    assert "answered 503: too many requests" in completion.error_msg


# Other people's servers


async def test_a_server_that_comes_back_with_other_flags_is_refused(vllm, connect):
    engine = connect(vllm)
    await engine.bring_up()
    vllm.processed_logprobs = False
    with pytest.raises(EngineLost, match="--logprobs-mode processed_logprobs"):
        await engine.bring_up()
    vllm.processed_logprobs, vllm.context = True, 32
    with pytest.raises(EngineLost, match="takes 32 tokens, but the run needs 64"):
        await engine.bring_up()
    vllm.context = 64
    await engine.bring_up()


async def test_a_paused_server_is_found_and_one_that_is_left_is_not_paused(server, connect, ask):
    server.state = "paused"
    engine = connect(server, start_limit_s=300.0)
    await engine.bring_up()
    assert (await engine.generate(ask())).finish_reason == "length"
    await engine.pause()
    assert (await engine.health()).ok
    await engine.close()
    assert server.state == "running"


def test_what_sglang_is_started_with():
    assert SGLang().environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "false"
    assert "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=false" in SGLang().help


async def test_a_key_goes_with_every_request(server, connect, ask):
    server.key = "secret"
    engine = connect(server, api_key="secret")
    await engine.bring_up()
    await engine.load_weights(WEIGHTS, 1)
    assert (await engine.generate(ask())).model_steps.tolist() == [1] * 4
    with pytest.raises(EngineLost, match=r"401 \(the API key is wrong or missing: see api_key_env\)") as error:
        await connect(server, api_key="another").bring_up()
    assert "another" not in str(error.value)


async def test_a_reason_names_the_server_once(vllm, connect, ask):
    engine = connect(vllm)
    await engine.bring_up()
    await vllm.kill()
    for _ in range(2):
        assert (await engine.generate(ask())).error_msg.count(vllm.url) == 1
        with pytest.raises(EngineLost) as error:
            await engine.load_weights(WEIGHTS, 1)
        assert str(error.value).count(vllm.url) == 1


# Two of them


async def test_a_server_s_rollouts_are_finished_by_the_other(start_fake, fake_kinds, connect):
    servers = [await start_fake(fake_kinds["FakeVLLM"]) for _ in range(2)]
    controller = RolloutController([connect(server) for server in servers])
    await controller.update_weights(WEIGHTS, 2)
    await until(lambda: len(controller.engines_up) == 2)
    for server in servers:
        server.auto = False
    running = [asyncio.create_task(controller.generate_sample(rollout(f"r{i}"))) for i in range(4)]
    for server in servers:
        await server.has_jobs(2)
        server.make(1 + TOKENS_PER_PIECE)
    await until(lambda: controller.count_tokens_made() == 4 * (1 + TOKENS_PER_PIECE))
    await servers[0].kill()
    await servers[1].has_jobs(4)
    assert list(controller.engines_up) == [1]
    assert controller.away().startswith("engine 0 (")
    servers[1].make(40)
    for state in await asyncio.gather(*running):
        assert state.status is Status.COMPLETED
        assert state.response_ids.tolist() == [12] * 40
        assert state.response_model_steps.tolist() == [2] * 40
    assert sorted(len(body["prompt"]) for body in servers[1].bodies[-2:]) == [2 + 17] * 2
    assert controller.counts()["retries"] == 2
    await servers[0].start()
    await until(lambda: len(controller.engines_up) == 2)
    assert servers[0].step_of_weights == 2
    await controller.close()


async def test_a_server_that_comes_back_takes_the_newest_weights_of_many_hand_overs(start_fake, fake_kinds, connect):
    servers = [await start_fake(fake_kinds["FakeVLLM"]) for _ in range(2)]
    pool = EnginePool([connect(server) for server in servers])
    await pool.update_weights(WEIGHTS, 1)
    await until(lambda: len(pool.engines_up) == 2)
    await servers[1].kill()
    servers[1].stuck = asyncio.Event()
    await servers[1].start()
    pool._lose(list(pool._members)[1], "killed")
    await asyncio.sleep(0.1)
    for step in range(2, 6):
        await pool.update_weights([("w", torch.ones(2))], step)
    servers[1].stuck.set()
    await until(lambda: len(pool.engines_up) == 2)
    assert servers[1].step_of_weights == 5
    assert pool.engines[1]._state is State.UP
    await pool.close()


async def test_one_server_that_refuses_weights_is_brought_up_again(start_fake, fake_kinds, connect):
    servers = [await start_fake(fake_kinds["FakeVLLM"]) for _ in range(2)]
    pool = EnginePool([connect(server) for server in servers])
    await pool.update_weights(WEIGHTS, 1)
    await until(lambda: len(pool.engines_up) == 2)
    servers[0].load_error = "out of memory"
    await pool.update_weights(WEIGHTS, 2)
    assert list(pool.engines_up) == [1]
    assert pool.model_step == 2
    servers[0].load_error = None
    await until(lambda: len(pool.engines_up) == 2)
    assert [server.step_of_weights for server in servers] == [2, 2]
    for server in servers:
        server.load_error = "shape mismatch"
    with pytest.raises(EngineLost, match=r"no engine is left: .*shape mismatch"):
        await pool.update_weights(WEIGHTS, 3)
    await pool.close()
