"""The engine contract over scripted servers of each kind; `test_http_real_vllm.py` has the real one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from forebay.engines.base import EngineLost
from forebay.engines.servers.dialects import TOKENS_PER_PIECE
from forebay.models.tiny import character_tokenizer

WEIGHTS = [("w", torch.ones(2)), ("also_w", torch.zeros(3))]


@pytest.fixture(params=["FakeVLLM", "FakeSGLang", "IncrementalSGLang"])
async def server(request, start_fake, fake_kinds) -> Any:
    return await start_fake(fake_kinds[request.param])


@pytest.fixture
async def vllm(start_fake, fake_kinds) -> Any:
    return await start_fake(fake_kinds["FakeVLLM"])


@pytest.fixture
async def engine(server, connect) -> Any:
    engine = connect(server)
    await engine.bring_up()
    return engine


def seed_of(body: dict[str, Any]) -> int:
    return body["seed"] if "seed" in body else body["sampling_params"]["sampling_seed"]


def prompt_of(body: dict[str, Any]) -> list[int]:
    return body["prompt"] if "prompt" in body else body["input_ids"]


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def test_tokens_log_probabilities_and_labels_come_back(engine, ask):
    completion = await engine.generate(ask(max_tokens=40))
    assert completion.response_ids.tolist() == [10] * 40
    assert completion.response_ids.dtype == np.int32
    assert completion.logprobs.tolist() == [-0.5] * 40
    assert completion.model_steps.tolist() == [0] * 40
    assert (completion.finish_reason, completion.error_msg) == ("length", None)


async def test_a_stop_id_ends_a_request_and_stays(engine, server, ask):
    server.token = lambda job: 20 + len(job.made)
    completion = await engine.generate(ask(max_tokens=10, stop_token_ids=(23,)))
    assert completion.response_ids.tolist() == [20, 21, 22, 23]
    assert completion.finish_reason == "stop"


async def test_many_at_once(engine, server, ask):
    server.token = lambda job: sum(job.prompt) + len(job.made)
    completions = await asyncio.gather(*(engine.generate(ask([i], max_tokens=20)) for i in range(1, 41)))
    assert [c.response_ids.tolist() for c in completions] == [list(range(i, i + 20)) for i in range(1, 41)]


async def test_the_response_ends_with_the_context(engine, ask):
    completion = await engine.generate(ask(range(60), max_tokens=10))
    assert (len(completion.response_ids), completion.finish_reason) == (4, "length")


@pytest.mark.parametrize(
    ("ids", "max_tokens", "message"),
    [([], 4, "has no input tokens"), (range(64), 4, "has 64 input tokens"), ([1], 0, "may add 0 tokens")],
)
async def test_what_can_never_run_is_refused(engine, ask, ids, max_tokens, message):
    with pytest.raises(ValueError, match=message):
        await engine.generate(ask(ids, max_tokens=max_tokens, earlier=1))


async def test_a_continuation_draws_other_numbers_and_the_same_request_the_same(engine, server, ask):
    for earlier in (0, 0, 5):
        await engine.generate(ask(earlier=earlier))
    first, again, later = (seed_of(body) for body in server.bodies[-3:])
    assert first == again != later
    assert 0 <= first < 2**63


async def test_no_default_of_the_server_changes_the_distribution(vllm, connect, ask):
    engine = connect(vllm)
    await engine.bring_up()
    await engine.generate(ask(temperature=0.7, top_p=0.9, top_k=5))
    sent = vllm.bodies[-1]
    assert (sent["temperature"], sent["top_p"], sent["top_k"]) == (0.7, 0.9, 5)
    assert (sent["min_p"], sent["repetition_penalty"]) == (0.0, 1.0)
    assert (sent["presence_penalty"], sent["frequency_penalty"]) == (0.0, 0.0)
    assert not sent["skip_special_tokens"]


async def test_sglang_refuses_what_it_would_report_wrongly(start_fake, fake_kinds, connect, ask):
    engine = connect(await start_fake(fake_kinds["FakeSGLang"]))
    await engine.bring_up()
    with pytest.raises(ValueError, match="SGLang reports log probabilities before both"):
        await engine.generate(ask(top_k=3))


# Ending requests


async def test_abort_gives_what_is_made_and_the_server_is_told(engine, server, ask):
    server.auto = False
    requests = [ask(max_tokens=50) for _ in range(3)]
    running = [asyncio.create_task(engine.generate(request)) for request in requests]
    await server.has_jobs(3)
    server.make(1)
    await until(lambda: engine.num_made(requests[0].request_id))
    await engine.abort([requests[0].request_id, requests[2].request_id, "unknown"])
    first, last = await running[0], await running[2]
    assert (first.finish_reason, first.response_ids.tolist()) == ("abort", [10])
    assert last.finish_reason == "abort"
    await until(lambda: len(server.jobs) == 1)
    server.make(50)
    assert (await running[1]).finish_reason == "length"


class ComparedId(str):
    """The id of a request, which counts how often it is compared with another."""

    num_compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        ComparedId.num_compared += 1
        return str(self) == str(other)


async def test_a_request_s_tokens_are_counted_without_a_look_at_all_the_others(engine, server, ask):
    server.auto = False
    requests = [ask(max_tokens=3, request_id=ComparedId(f"r{number}")) for number in range(30)]
    # Ids need not differ: the tokens of both count.
    requests += [ask(max_tokens=3, request_id="twice") for _ in range(2)]
    running = [asyncio.create_task(engine.generate(request)) for request in requests]
    await server.has_jobs(len(requests))
    server.make(1)
    await until(lambda: engine.num_made("twice") == 2)
    await until(lambda: all(engine.num_made(request.request_id) for request in requests))
    ComparedId.num_compared = 0
    assert [engine.num_made(request.request_id) for request in requests] == [1] * 30 + [2] * 2
    assert ComparedId.num_compared < 5 * len(requests)
    server.make(2)
    await asyncio.gather(*running)
    assert [engine.num_made(request.request_id) for request in requests] == [0] * 32


async def test_a_pause_ends_all_with_their_tokens_and_nothing_starts_until_resumed(engine, server, ask):
    server.auto = False
    request = ask(max_tokens=50)
    running = [asyncio.create_task(engine.generate(r)) for r in (request, ask(max_tokens=50))]
    await server.has_jobs(2)
    server.make(1 + TOKENS_PER_PIECE // 2)
    await until(lambda: engine.num_made(request.request_id))
    await engine.pause()
    for completion in await asyncio.gather(*running):
        # Those since the last piece are not lost either.
        assert completion.response_ids.tolist() == [10] * (1 + TOKENS_PER_PIECE // 2)
        assert completion.finish_reason == "abort"
    assert (await engine.health()).num_running == 0
    paused = await engine.generate(ask())
    assert (paused.finish_reason, len(paused.response_ids)) == ("abort", 0)
    server.auto = True
    await engine.resume()
    assert (await engine.generate(ask())).finish_reason == "length"


async def test_a_request_that_waits_for_its_turn_is_paused_too(engine, server, ask):
    server.auto = False
    waiting = asyncio.create_task(engine.generate(ask()))
    await server.has_jobs(1)
    assert (await engine.health()).num_waiting == 1
    await engine.pause()
    assert (await waiting).finish_reason == "abort"


async def test_a_time_limit_counts_from_the_first_token(engine, server, ask):
    server.auto = False
    slow, fast = ask(max_tokens=50, limit_s=0.05), ask(max_tokens=2, limit_s=60.0)
    running = [asyncio.create_task(engine.generate(request)) for request in (slow, fast)]
    await server.has_jobs(2)
    await asyncio.sleep(0.1)
    server.make(2)
    overdue, done = await asyncio.gather(*running)
    assert (overdue.finish_reason, len(overdue.response_ids)) == ("abort", 1)
    assert overdue.error_msg == "aborted after its time limit of 0.05 s"
    assert (done.finish_reason, done.error_msg) == ("length", None)


async def test_cancelling_frees_the_place(engine, server, ask):
    server.auto = False
    running = asyncio.create_task(engine.generate(ask()))
    await server.has_jobs(1)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert running.cancelled()
    await until(lambda: not server.jobs)
    assert (await engine.health()).num_waiting == 0


async def test_what_the_server_has_ended_is_never_continued(engine, server, ask):
    server.auto = False
    request = ask(max_tokens=3)
    running = asyncio.create_task(engine.generate(request))
    await server.has_jobs(1)
    server.make(3)
    aborting = asyncio.create_task(engine.abort([request.request_id]))
    completion = await running
    await aborting
    assert completion.finish_reason in ("length", "abort")
    assert (completion.finish_reason == "length") == (len(completion.response_ids) == 3)


async def test_a_closed_engine_says_so(server, connect, ask):
    engine = connect(server)
    await engine.bring_up()
    server.auto = False
    running = asyncio.create_task(engine.generate(ask()))
    await server.has_jobs(1)
    await engine.close()
    assert (await running).finish_reason == "abort"
    after = await engine.generate(ask())
    assert (after.finish_reason, after.error_msg) == ("error", "the engine is closed")
    with pytest.raises(RuntimeError, match="the engine is closed"):
        await engine.load_weights(WEIGHTS, 1)


# Weights


async def test_each_token_carries_the_step_of_the_weights_that_made_it(engine, server, ask):
    server.auto = False
    running = [asyncio.create_task(engine.generate(ask(max_tokens=60))) for _ in range(4)]
    for step in (1, 2, 3):
        await server.has_jobs(4)
        # What is on its way when the weights change is not taken for the new ones' work.
        server.make(5 * step + 1)
        await engine.load_weights(WEIGHTS, step)
    await server.has_jobs(4)
    server.make(60)
    for completion in await asyncio.gather(*running):
        assert completion.model_steps.tolist() == [0] * 6 + [1] * 11 + [2] * 16 + [3] * 27
        assert completion.response_ids.tolist() == (10 + completion.model_steps).tolist()
        assert completion.finish_reason == "length"
    assert engine.model_step == 3
    # Each part of a rollout draws numbers of its own, as a continued one does.
    assert len({seed_of(body) for body in server.bodies[-16:]}) == 4
    assert [len(prompt_of(body)) for body in server.bodies[-16::4]] == [3, 9, 20, 36]


async def test_a_rollout_ends_while_weights_change_as_it_would_otherwise(engine, server, ask):
    server.auto = False
    aborted, overdue, paused = ask(max_tokens=50), ask(max_tokens=50, limit_s=0.5), ask(max_tokens=50)
    running = [asyncio.create_task(engine.generate(r)) for r in (aborted, overdue, paused)]
    await server.has_jobs(3)
    server.make(2)
    await until(lambda: all(engine.num_made(r.request_id) for r in (aborted, overdue, paused)))
    server.stuck = asyncio.Event()
    loading = asyncio.create_task(engine.load_weights(WEIGHTS, 1))
    await until(lambda: server.state == "paused")
    await asyncio.sleep(0.51)
    await engine.abort([aborted.request_id])
    pausing = asyncio.create_task(engine.pause())
    server.stuck.set()
    await asyncio.gather(loading, pausing)
    ends = await asyncio.gather(*running)
    assert [end.finish_reason for end in ends] == ["abort"] * 3
    assert [end.response_ids.tolist() for end in ends] == [[10, 10]] * 3
    assert [end.error_msg for end in ends] == [None, "aborted after its time limit of 0.5 s", None]
    assert server.state == "paused"


async def test_a_request_that_comes_while_weights_change_waits_for_the_new_ones(engine, server, ask):
    server.stuck = asyncio.Event()
    loading = asyncio.create_task(engine.load_weights(WEIGHTS, 5))
    await until(lambda: server.state == "paused")
    coming = asyncio.create_task(engine.generate(ask()))
    await asyncio.sleep(0)
    server.stuck.set()
    completion = await coming
    await loading
    assert completion.response_ids.tolist() == [15] * 4
    assert completion.model_steps.tolist() == [5] * 4


async def test_weights_for_a_paused_engine_leave_it_paused(engine, server, ask):
    await engine.pause()
    await engine.load_weights(WEIGHTS, 2)
    assert server.state == "paused"
    await engine.resume()
    assert (await engine.generate(ask())).model_steps.tolist() == [2] * 4


async def test_the_folder_is_a_whole_model_written_once_for_all(tmp_path, server, connect):
    engines = [connect(server), connect(server)]
    await asyncio.gather(*(engine.bring_up() for engine in engines))
    folders = set()
    for step in range(1, 5):
        await asyncio.gather(*(engine.load_weights(WEIGHTS, step) for engine in engines))
        assert server.loaded[-1] == server.loaded[-2]
        folders.add(server.loaded[-1])
    assert len(folders) == 4
    assert set((tmp_path / "weights").glob("run-*/step_*")) == set(server.loaded[-4:])
    stored = load_file(server.loaded[-1] / "model.safetensors")
    assert {name: value.tolist() for name, value in stored.items()} == {"w": [1, 1], "also_w": [0, 0, 0]}
    for engine in engines:
        await engine.close()
    assert not list((tmp_path / "weights").iterdir())


async def test_a_server_that_refuses_weights_is_lost_and_quoted(engine, server):
    server.load_error = "shape mismatch in lm_head"
    with pytest.raises(EngineLost, match="shape mismatch in lm_head"):
        await engine.load_weights(WEIGHTS, 1)
    # It may have loaded half of them.
    assert not (await engine.health()).ok


# Servers that fail


async def test_a_server_killed_in_the_middle_gives_the_tokens_so_far(engine, server, ask):
    server.auto = False
    request = ask(max_tokens=50)
    running = asyncio.create_task(engine.generate(request))
    await server.has_jobs(1)
    server.make(1 + TOKENS_PER_PIECE)
    await until(lambda: engine.num_made(request.request_id) == 1 + TOKENS_PER_PIECE)
    await server.kill()
    completion = await running
    assert (completion.finish_reason, completion.lost) == ("error", True)
    assert completion.response_ids.tolist() == [10] * (1 + TOKENS_PER_PIECE)
    assert server.url in completion.error_msg
    assert not (await engine.health()).ok
    with pytest.raises(EngineLost):
        await engine.pause()


EVENT = json.dumps({"choices": [{"token_ids": [1], "finish_reason": None, "logprobs": {"token_logprobs": [-1]}}]})


@pytest.mark.parametrize(
    ("status", "text", "lost", "message"),
    [
        (400, "the prompt is odd", False, "answered 400: the prompt is odd"),
        (404, "no such model", False, "answered 404"),
        (500, "engine core died", True, "answered 500: engine core died"),
        (403, "no", True, r"answered 403 (the API key is wrong or missing: see api_key_env): no"),
        (200, f"data: {EVENT}\n\n", True, "the answer ended early"),
        (200, f'data: {EVENT}\n\ndata: {{"error": "out of memory"}}\n\n', True, "out of memory"),
        (200, f"data: {EVENT}\n\ndata: rubbish\n\n", True, "not an event"),
        (200, f'data: {EVENT}\n\ndata: {{"choices": [{{"text": "a"}}]}}\n\n', True, "no token ids"),
    ],
)
async def test_whose_fault_an_error_is(vllm, connect, ask, status, text, lost, message):
    engine = connect(vllm)
    await engine.bring_up()
    vllm.answers = [(status, text)]
    completion = await engine.generate(ask())
    assert (completion.finish_reason, completion.lost) == ("error", lost)
    assert message in completion.error_msg
    assert completion.response_ids.tolist() == ([1] if EVENT in text else [])
    assert (await engine.generate(ask())).finish_reason == "length"


async def test_a_server_that_stops_answering_loses_what_runs(engine, server, ask, monkeypatch):
    monkeypatch.setattr("forebay.engines.servers.link._HEALTH_EVERY_S", 0.02)
    server.auto = False
    running = asyncio.create_task(engine.generate(ask()))
    await server.has_jobs(1)
    server.make(1)
    server.healthy = False
    completion = await running
    assert (completion.finish_reason, completion.lost) == ("error", True)
    assert "does not answer any more" in completion.error_msg
    assert (await engine.generate(ask())).lost


async def test_a_server_that_comes_back_gets_the_current_weights(engine, server, ask):
    await engine.load_weights(WEIGHTS, 4)
    await server.kill()
    assert (await engine.generate(ask())).lost
    with pytest.raises(EngineLost):
        await engine.load_weights(WEIGHTS, 5)
    assert engine.model_step == 5
    await server.start()
    await engine.bring_up()
    completion = await engine.generate(ask())
    assert completion.response_ids.tolist() == [15] * 4
    assert completion.model_steps.tolist() == [5] * 4


async def test_a_server_that_comes_back_after_a_pause_is_not_paused(engine, server, ask):
    await engine.load_weights(WEIGHTS, 4)
    await engine.pause()
    await server.kill()
    await server.start()
    await engine.bring_up()
    assert (await engine.generate(ask())).response_ids.tolist() == [14] * 4


async def test_a_server_that_only_stumbled_keeps_its_weights_and_requests(engine, server, ask):
    await engine.load_weights(WEIGHTS, 4)
    server.auto = False
    running = asyncio.create_task(engine.generate(ask()))
    await server.has_jobs(1)
    await engine.bring_up()
    assert len(server.loaded) == 1
    server.make(4)
    assert (await running).response_ids.tolist() == [14] * 4


async def test_a_server_that_is_set_up_wrongly_is_refused_with_what_to_do(vllm, connect, ask):
    vllm.processed_logprobs = False
    with pytest.raises(EngineLost, match=r"not 0.*--logprobs-mode processed_logprobs"):
        await connect(vllm).bring_up()
    vllm.processed_logprobs, vllm.knows_control = True, False
    with pytest.raises(EngineLost, match=r"knows no /resume; vLLM must be started with.*VLLM_SERVER_DEV_MODE=1"):
        await connect(vllm).bring_up()


async def test_waits_for_a_server_that_others_start(vllm, connect, ask, monkeypatch):
    monkeypatch.setattr("forebay.engines.servers.link._ASK_EVERY_S", 0.01)
    await vllm.kill()
    engine = connect(vllm)
    assert (await engine.generate(ask())).lost
    coming = asyncio.create_task(engine.bring_up())
    await asyncio.sleep(0.03)
    await vllm.start()
    await coming
    assert (await engine.health()).ok
    await vllm.kill()
    with pytest.raises(EngineLost, match="no server there that answers, for 0 s"):
        await connect(vllm, start_limit_s=0.02).bring_up()


async def test_a_stop_text_that_began_before_the_call_is_found(vllm, connect, ask):
    tokenizer = character_tokenizer("abcEND")
    engine = connect(vllm, tokenizer=tokenizer)
    await engine.bring_up()
    prompt, made = tokenizer.encode("ab"), tokenizer.encode("abE")
    rest = tokenizer.encode("NDabc")
    vllm.token = lambda job: rest[len(job.made)]
    completion = await engine.generate(ask(prompt + made, max_tokens=5, earlier=3, stop=("END",)))
    assert tokenizer.decode(completion.response_ids) == "ND"
    assert len(completion.logprobs) == len(completion.model_steps) == 2
    assert completion.finish_reason == "stop"
    # What stood in the prompt is not the rollout's own.
    other = await engine.generate(ask(prompt + made, max_tokens=5, earlier=0, stop=("END",)))
    assert len(other.response_ids) == 5


async def test_the_server_says_how_many_requests_it_runs_and_what_its_cache_holds(server, connect):
    engine = connect(server)
    await engine.bring_up()
    assert (engine.max_running, engine.cache_tokens, engine.cache_block) == (None, None, 1)
    # One that comes back may have been started in another way.
    server.capacity = (64, 3200)
    await engine.bring_up()
    assert (engine.max_running, engine.cache_tokens, engine.cache_block) == (64, 3200, 16)
