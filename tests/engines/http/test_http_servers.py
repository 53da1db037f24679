"""Servers that are started, watched and stopped; the servers are small programs of the standard library."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import ClientError, request
from safetensors.torch import load_file, save_file

from forebay.config import Component, ConfigError
from forebay.engines import EngineSurroundings, RolloutController, build_engines
from forebay.engines.base import EngineLost, Seat
from forebay.engines.servers import guard as server_guard
from forebay.engines.servers.dialects import RETURN_EXPERTS, Dialect, SGLang
from forebay.engines.servers.engine import HTTPEngine
from forebay.engines.servers.launch import LocalServer, log_tail
from forebay.engines.weights.files import WeightFiles, shared_weights, write_untied
from forebay.models import ModelConfig, load_model, load_tokenizer
from forebay.models.config import TinyConfig
from forebay.models.tiny import write_tiny
from warm_python import stand_in

# Answers every GET, has a child that outlives it unless it is ended, and prints that child's id.
SERVER = """
import http.server, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, os.environ.get("COLOR"), flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def local_server(tmp_path: Path, program: str = SERVER, **arguments) -> LocalServer:
    return LocalServer(
        lambda port: [sys.executable, "-c", program, str(port)], log=tmp_path / "logs/server.log", **arguments
    )


async def answers(server: LocalServer) -> bool:
    try:
        async with request("GET", server.url) as response:
            return response.status == 200
    except ClientError:
        return False


def child_of(log: Path) -> int:
    return int(log.read_text().split("child ")[-1].split()[0])


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def is_gone(pid: int) -> None:
    async with asyncio.timeout(300):
        while is_alive(pid):
            await asyncio.sleep(0.01)


async def test_a_server_starts_answers_and_ends_with_all_its_children(tmp_path):
    server = local_server(tmp_path, environment={"COLOR": "green"})
    await server.start(lambda: answers(server))
    first, child = server.url, child_of(tmp_path / "logs/server.log")
    assert server.is_running
    assert is_alive(child)
    assert "green" in log_tail(server.log)
    await server.stop()
    assert not server.is_running
    await is_gone(child)
    await server.start(lambda: answers(server))
    assert server.url != first
    os.kill(child_of(tmp_path / "logs/server.log"), signal.SIGKILL)
    await server.stop()
    await server.stop()


async def test_a_server_that_ends_at_once_is_quoted(tmp_path):
    server = local_server(tmp_path, "print('no GPU here'); raise SystemExit(3)")
    with pytest.raises(EngineLost, match=r"exit code 3 after \d+ s; the end of (?s:.*)no GPU here"):
        await server.start(lambda: answers(server))
    assert not server.is_running


async def test_a_server_that_is_never_ready_is_stopped(tmp_path):
    server = local_server(tmp_path, "import time; time.sleep(600)", start_limit_s=0.2)

    async def never() -> bool:
        return False

    with pytest.raises(EngineLost, match="not ready after 0 s"):
        await server.start(never)
    assert not server.is_running


async def test_a_server_ends_with_the_process_that_started_it_however_that_ends(tmp_path):
    program = f"""
import asyncio, sys
from pathlib import Path
from typing import Any
from forebay.engines.servers.launch import LocalServer, log_tail
log = Path({str(tmp_path)!r}) / "logs/server.log"
async def main():
    server = LocalServer(lambda port: [sys.executable, "-c", {SERVER!r}, str(port)], log=log)
    async def ready():
        return log.exists() and "child" in log_tail(log)
    await server.start(ready)
    print("ready", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert await asyncio.to_thread(owner.stdout.readline) == b"ready\n"
    child = child_of(tmp_path / "logs/server.log")
    assert is_alive(child)
    owner.kill()
    owner.communicate()
    await is_gone(child)


def test_a_guard_that_is_ended_while_it_starts_leaves_no_child(monkeypatch):
    real, started = subprocess.Popen, []

    def signal_first(*arguments, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        started.append(real(*arguments, **options))
        return started[0]

    before = signal.getsignal(signal.SIGTERM)
    reader, writer = os.pipe()
    monkeypatch.setattr(server_guard.subprocess, "Popen", signal_first)
    with os.fdopen(reader) as held_open:
        monkeypatch.setattr(server_guard.sys, "stdin", held_open)
        try:
            # Without a handler this would be the end of the tests; such a one would not be heard here.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            code = server_guard.main([sys.executable, "-c", "import time; time.sleep(600)"])
        finally:
            signal.signal(signal.SIGTERM, before)
            os.close(writer)
    assert code == 128 + signal.SIGTERM
    assert not is_alive(started[0].pid)


# A server of the real kind as far as an engine can see: the fake one in a process of its own.
FAKE = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from conftest import FakeVLLM
async def main():
    server = FakeVLLM()
    server.port = int(sys.argv[2])
    await server.start()
    await asyncio.Event().wait()
asyncio.run(main())
"""


def fake_engine(tmp_path: Path, program: str = FAKE) -> HTTPEngine:
    server = LocalServer(
        lambda port: stand_in(["-c", program, Path(__file__).parent, port]),
        log=tmp_path / "server.log",
    )
    return HTTPEngine(server, model="policy", max_context_tokens=64, files=WeightFiles(tmp_path / "weights", tmp_path))


async def test_an_engine_starts_its_server_and_starts_it_again(tmp_path, ask):
    engine = fake_engine(tmp_path)
    with pytest.raises(EngineLost, match="has not been brought up"):
        await engine.load_weights([("w", torch.ones(1))], 3)
    await engine.bring_up()
    assert (await engine.generate(ask())).response_ids.tolist() == [13] * 4
    assert engine._server is not None
    await engine._server.stop()
    assert (await engine.generate(ask())).lost
    await engine.bring_up()
    completion = await engine.generate(ask())
    assert completion.response_ids.tolist() == [13] * 4
    assert completion.model_steps.tolist() == [3] * 4
    await engine.close()
    assert not engine._server.is_running


async def test_a_server_that_dies_at_work_is_noticed_at_once_and_quoted(tmp_path, ask):
    # A prompt of 9s is worked on without end.
    program = FAKE.replace(
        "    await server.start()",
        "    import os; print('process', os.getpid(), flush=True); make = server._make_one\n"
        "    server._make_one = lambda job: None if job.prompt[0] == 9 else make(job)\n"
        "    await server.start()",
    )
    engine = fake_engine(tmp_path, program)
    await engine.bring_up()
    running = asyncio.create_task(engine.generate(ask([9])))
    await asyncio.sleep(0)
    os.kill(int((tmp_path / "server.log").read_text().split()[1]), signal.SIGKILL)
    completion = await running
    assert completion.lost
    assert (await engine.generate(ask())).lost
    await engine.bring_up()
    assert (await engine.generate(ask())).finish_reason == "length"
    await engine.close()


async def test_a_server_that_cannot_answer_its_first_request_is_given_up(tmp_path):
    program = FAKE.replace(
        "    await server.start()",
        "    import os; server.job = lambda body: (print('out of memory', flush=True), os._exit(9))\n"
        "    await server.start()",
    )
    engine = fake_engine(tmp_path, program)
    with pytest.raises(EngineLost, match="its log: "):
        await engine.bring_up()
    assert "out of memory" in (tmp_path / "server.log").read_text()
    await engine.close()


# From a run file


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder, TinyConfig(hidden_size=16, num_layers=1, num_heads=2), max_context=64, seed=0)
    return folder


def build(tiny: Path, scratch: Path, name: str = "vllm", around: Any = None, **arguments):
    return build_engines(
        Component(name=name, arguments=arguments),
        EngineSurroundings(
            model_folder=tiny,
            model=ModelConfig(source=str(tiny), max_context=48),
            tokenizer=load_tokenizer(tiny),
            scratch=scratch,
            **(around or {}),
        ),
    )


def test_an_option_has_requests_go_where_experts_are_stated(tiny, tmp_path):
    (plain,) = build(tiny, tmp_path, servers=1)
    (stating,) = build(tiny, tmp_path, servers=1, options=[RETURN_EXPERTS])
    assert not plain._dialect.by_token
    assert stating._dialect.by_token
    assert {RETURN_EXPERTS, "--enable-scale-out"} <= set(stating._server.command(1))


@pytest.mark.parametrize("visible", [None, "GPU-a,GPU-b,7,6"])
def test_servers_see_their_own_gpus_and_only_those_that_share_one_are_started_to_sleep(
    tiny, tmp_path, monkeypatch, visible
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    seats = [Seat((0, 1), is_shared=True), Seat((2, 3)), Seat((3,)), Seat((1,), is_shared=True)]
    engines = build(tiny, tmp_path, servers=2, memory_share=0.4, around={"seat": seats.__getitem__})
    commands = [engine._server.command(8123) for engine in engines]
    assert ["--enable-sleep-mode" in command for command in commands] == [True, False]
    # What is planned beside the trainer is no limit elsewhere.
    assert ["--gpu-memory-utilization" in command for command in commands] == [True, False]
    assert [engine.sleeps for engine in engines] == [True, False]
    seen = [engine._server.environment["CUDA_VISIBLE_DEVICES"] for engine in engines]
    assert seen == (["GPU-a,GPU-b", "7,6"] if visible else ["0,1", "2,3"])
    joining = engines[0].another("")
    assert joining._server.environment["CUDA_VISIBLE_DEVICES"] == ("6" if visible else "3")
    with pytest.raises(ValueError, match="has no GPU for another"):
        engines[0].another("")
    (alone,) = build(tiny, tmp_path, servers=1, memory_share=0.4)
    assert "--gpu-memory-utilization" in alone._server.command(8123)


async def test_the_gpus_of_a_server_that_left_are_those_of_the_next_that_joins(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    seats = [Seat((0,), is_shared=True), Seat((1,))]
    options = ["--seed", "{server}"]
    engines = build(tiny, tmp_path, servers=2, options=options, memory_share=0.4, around={"seat": seats.__getitem__})
    await engines[0].close()
    again = engines[0].another("")
    assert again._server.environment["CUDA_VISIBLE_DEVICES"] == "4"
    # All that follows from its number, or from its place beside a rank, is as it was.
    assert again._server.command(8123) == engines[0]._server.command(8123)
    assert again.sleeps
    with pytest.raises(IndexError):
        engines[0].another("")
    await again.close()


def test_gpus_that_the_run_does_not_see_are_refused(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    with pytest.raises(ConfigError, match="gpus names GPU 2, from 0 on, and CUDA_VISIBLE_DEVICES is '5,6' here"):
        build(tiny, tmp_path, servers=1, around={"seat": lambda number: Seat((0, 2))})


def test_sglang_shares_the_first_gpu_only(tiny, tmp_path):
    around = {"shared_gpu": 1, "seat": lambda number: Seat((1,), is_shared=True)}
    with pytest.raises(ConfigError, match=r"device is 'cuda:1': choose it by CUDA_VISIBLE_DEVICES"):
        build(tiny, tmp_path, "sglang", servers=1, around=around)
    build(tiny, tmp_path, servers=1, around=around)


async def test_engines_for_running_servers_know_what_they_serve(tiny, tmp_path, start_fake, ask):
    server = await start_fake()
    engines = await asyncio.to_thread(build, tiny, tmp_path, urls=[server.url + "/", server.url])
    assert [engine.max_context_tokens for engine in engines] == [48, 48]
    for engine in engines:
        await engine.bring_up()
    weights = [("model.embed_tokens.weight", torch.ones(1))]
    await asyncio.gather(*(engine.load_weights(weights, 1) for engine in engines))
    assert len(set(server.loaded)) == 1
    assert server.loaded[0].is_relative_to(tmp_path / "weights")
    assert (server.loaded[0] / "config.json").is_file()
    assert (await engines[0].generate(ask())).model_steps.tolist() == [1] * 4
    # Another joins by its address, with the weights of now; then the first leaves.
    another = await start_fake()
    controller = RolloutController(engines[:1])
    await controller.complete(ask())
    with pytest.raises(ValueError, match="is here already"):
        await controller.scale("engines", f"+{server.url}")
    with pytest.raises(ValueError, match="by their address"):
        await controller.scale("engines", "+1")
    assert await controller.scale("engines", f"+{another.url}/") == "2 now, 1 of them up"
    while len(controller.engines_up) < 2:
        await asyncio.sleep(0.01)
    assert another.loaded == server.loaded[:1]
    assert await controller.scale("engines", f"-{server.url}") == "1 now, 1 of them up"
    assert (await controller.complete(ask())).model_steps.tolist() == [1] * 4
    for engine in (*controller.engines, engines[1]):
        await engine.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give either urls .* or servers"),
        ({"urls": ["http://127.0.0.1:1"], "servers": 1}, "give either urls"),
        ({"urls": ["http://127.0.0.1:1"]}, "no server to use at 'http://127.0.0.1:1'"),
        ({"urls": ["localhost:8000"]}, "which is no address"),
        ({"urls": ["http://me:pass@127.0.0.1:1"]}, r"user name or password for '127.0.0.1'.*api_key_env"),
        ({"servers": 1, "api_key_env": "FOREBAY_NO_SUCH_KEY"}, "FOREBAY_NO_SUCH_KEY is not set"),
        ({"servers": 2, "gpus": [[0]]}, r"gpus names GPUs for each of the servers = 2 to start, got \[\[0\]\]"),
        ({"servers": 1, "gpus": [[]]}, "gpus names GPUs for each"),
        ({"servers": 1, "gpus": [[1, 1]]}, r"gpus names GPUs for each .* got \[\[1, 1\]\]"),
        ({"servers": 1, "gpus": [[-1]]}, "gpus.* = -1: .*greater than or equal to 0"),
        ({"urls": ["http://127.0.0.1:1"], "gpus": [[0]]}, "gpus names GPUs for each of the servers = 0"),
        ({"servers": 1, "gpus": [[0, 1, 2]]}, r"3 GPUs, of which it would use 1: options = \['--tensor-parallel-"),
        ({"servers": 2, "gpus": [[0], [1, 2, 3, 4]], "options": ["-tp=2"]}, "4 GPUs, of which it would use 2: "),
        ({"servers": 1, "environment": {"CUDA_VISIBLE_DEVICES": "0"}}, r"use gpus, as \[\[0\], \[1\]\]"),
        ({"servers": 1, "start_limit_s": 0}, "'start_limit_s' = 0: .*greater than 0"),
        ({"server": 1}, "did you mean 'servers'"),
    ],
)
def test_arguments_that_do_not_fit_are_named(tiny, tmp_path, arguments, message):
    with pytest.raises(ConfigError, match=message):
        build(tiny, tmp_path, **arguments)


@pytest.mark.parametrize(
    "options",
    [
        ["--tensor-parallel-size", "4"],
        ["-tp", "2", "--pipeline-parallel-size=2"],
        ["--tp-size=2", "--dp", "2"],
        ["--data-parallel-size=4"],
        ["--config", "vllm.yaml"],
        ["--config=vllm.yaml"],
    ],
)
def test_options_by_which_a_server_uses_all_gpus_that_it_is_given_are_known(tiny, tmp_path, options):
    build(tiny, tmp_path, servers=1, gpus=[[0, 1, 2, 3]], options=options)


async def test_an_address_at_which_something_else_answers_is_named(tiny, tmp_path):
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ready\r\n")
        await writer.drain()
        writer.close()

    other = await asyncio.start_server(greet, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}"
    with pytest.raises(ConfigError, match=f"no server to use at '{url}'"):
        await asyncio.to_thread(build, tiny, tmp_path, urls=[url])
    other.close()
    await other.wait_closed()


async def test_the_key_of_running_servers_comes_from_the_environment(tiny, tmp_path, start_fake, ask, monkeypatch):
    server = await start_fake()
    server.key = "secret"
    with pytest.raises(ConfigError, match=r"answered 401 .*: wrong or missing key, see api_key_env"):
        await asyncio.to_thread(build, tiny, tmp_path, urls=[server.url])
    monkeypatch.setenv("SERVERS_KEY", "secret\n")
    # What is asked later uses no proxy either.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    [engine] = await asyncio.to_thread(build, tiny, tmp_path, urls=[server.url], api_key_env="SERVERS_KEY")
    await engine.bring_up()
    assert (await engine.generate(ask())).finish_reason == "length"
    await engine.close()


async def test_a_server_that_takes_too_little_is_refused(tiny, tmp_path, start_fake):
    server = await start_fake()
    with pytest.raises(ConfigError, match=r"takes 64 tokens, but model.max_context is 100"):
        await asyncio.to_thread(
            build_engines,
            Component(name="sglang", arguments={"urls": [server.url]}),
            EngineSurroundings(
                model_folder=tiny,
                model=ModelConfig(source=str(tiny), max_context=100),
                tokenizer=None,
                scratch=tmp_path,
            ),
        )


def test_command_lines_state_what_the_contract_needs():
    command = Dialect().command("/models/m", 8123, 4096, "float32")
    assert command[:2] == ["-m", "vllm.entrypoints.openai.api_server"]
    for option, value in {
        "--model": "/models/m",
        "--port": "8123",
        "--host": "127.0.0.1",
        "--max-model-len": "4096",
        "--dtype": "float32",
        "--logprobs-mode": "processed_logprobs",
    }.items():
        assert command[command.index(option) + 1] == value
    assert Dialect().environment["VLLM_SERVER_DEV_MODE"] == "1"
    other = SGLang().command("/models/m", 8123, 4096, "bfloat16")
    assert other[other.index("--context-length") + 1] == "4096"


async def test_options_and_environment_reach_each_server(tiny, tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text(
        '#!/bin/sh\necho "$VLLM_API_KEY$PYTORCH_ALLOC_CONF$PYTORCH_CUDA_ALLOC_CONF'
        '$PLACE $VLLM_SERVER_DEV_MODE $*"\nexit 5\n'
    )
    script.chmod(0o755)
    # Of other servers; it would lock the run out of its own.
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    # The trainer's, with which a server cannot sleep.
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "secret")
    engines = build(
        tiny,
        tmp_path / "scratch",
        servers=2,
        python=str(script),
        options=["--seed", "{server}"],
        environment={"PLACE": "{server}"},
    )
    for number, engine in enumerate(engines):
        with pytest.raises(EngineLost, match="exit code 5") as error:
            await engine.bring_up()
        assert f"{number} 1 -m vllm.entrypoints.openai.api_server" in str(error.value)
        assert f"--seed {number}" in str(error.value)
        assert "secret" not in str(error.value)
        await engine.close()


# Shared weights


def test_shared_weights_are_written_out(tiny, tmp_path):
    shared = shared_weights(tiny)
    assert shared == {"lm_head.weight": "model.embed_tokens.weight"}
    (tiny / "model.safetensors.index.json").unlink(missing_ok=True)
    untied = write_untied(tiny, tmp_path / "untied", shared)
    assert shared_weights(untied) == {}
    assert json.loads((untied / "config.json").read_text())["tie_word_embeddings"] is False
    ids = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(load_model(untied)(ids).logits, load_model(tiny)(ids).logits)


async def test_servers_of_others_are_given_the_output_layer_that_they_may_have_untied(tiny, tmp_path, start_fake):
    server = await start_fake()
    [engine] = await asyncio.to_thread(build, tiny, tmp_path, urls=[server.url])
    await engine.bring_up()
    await engine.load_weights(list(load_model(tiny).named_parameters()), 1)
    stored = load_file(server.loaded[0] / "model.safetensors")
    assert torch.equal(stored["lm_head.weight"], stored["model.embed_tokens.weight"])
    await engine.close()


async def test_written_weights_leave_out_or_write_out_what_is_shared(tiny, tmp_path):
    weights = load_model(tiny).state_dict()
    assert "lm_head.weight" in weights
    plain = await WeightFiles(tmp_path / "plain", tmp_path).write(weights.items(), 1)
    assert "lm_head.weight" not in load_file(plain.folder / "model.safetensors")
    (tmp_path / "model").mkdir()
    save_file({}, tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "model.safetensors.index.json").write_text("{}")
    (tmp_path / "model" / "config.json").write_text("{}")
    files = WeightFiles(tmp_path / "full", tmp_path / "model", written_out=shared_weights(tiny))
    full = await files.write(weights.items(), 1)
    stored = load_file(full.folder / "model.safetensors")
    assert torch.equal(stored["lm_head.weight"], stored["model.embed_tokens.weight"])
    assert {file.name for file in full.folder.iterdir()} == {"model.safetensors", "config.json"}
    assert files.current == full
    assert plain.version != full.version
