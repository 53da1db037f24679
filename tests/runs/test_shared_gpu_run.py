"""A colocated run whose server sleeps while it trains: a real run and trainer, a scripted server process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import textwrap
from pathlib import Path

import pytest

from forebay.config import ConfigError, parse_config
from forebay.engines.servers.build import HTTPArguments
from forebay.runs.config import RunConfig
from forebay.runs.launch import launch
from forebay.runs.placement import shares_gpu
from forebay.train import TrainController

HTTP_TESTS = Path(__file__).parents[1] / "engines/http"

SERVER = f"""
import asyncio, json, os, sys
from pathlib import Path
sys.path.insert(0, {str(HTTP_TESTS)!r})
from conftest import FakeVLLM

class Server(FakeVLLM):
    def _control(self, path, query, body):
        answer = super()._control(path, query, body)
        self.note(path)
        return answer

    async def _generate(self, body, reader, writer):
        assert not self.asleep, "a request came while it sleeps"
        return await super()._generate(body, reader, writer)

    def note(self, path):
        state = {{"pid": os.getpid(), "asleep": sorted(self.asleep), "lacks_weights": self.lacks_weights}}
        target = Path(os.environ["STATE"])
        target.with_suffix(".new").write_text(json.dumps(state))
        target.with_suffix(".new").rename(target)
        if path not in ("/health", "/v1/models"):
            with target.with_suffix(".calls").open("a") as file:
                print(path, file=file)

async def main():
    server = Server()
    server.port = int(sys.argv[sys.argv.index("--port") + 1])
    assert "--enable-sleep-mode" in sys.argv
    await server.start()
    server.note("started")
    await asyncio.Event().wait()

asyncio.run(main())
"""


def config(tmp_path: Path, **changes) -> RunConfig:
    package = tmp_path / "lib/vllm/entrypoints/openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(textwrap.dedent(SERVER))
    environment = {"PYTHONPATH": f"{tmp_path / 'lib'}:{os.environ.get('PYTHONPATH', '')}"}
    environment["STATE"] = str(tmp_path / "state.json")
    arguments = {"servers": 1, "python": sys.executable, "shares_gpu": True, "environment": environment}
    task = {
        "name": "sorting",
        "data": {"source": "sorting", "arguments": {"length": 3, "letters": 5}, "size": 60},
        "judge": "exact_match",
        "sample": {"max_tokens": 3},
    }
    table = {
        "name": "run",
        "device": "cpu",
        "steps": 4,
        "batch_size": 2,
        "rollouts_per_prompt": 2,
        "output": str(tmp_path),
        "model": {"source": "tiny", "max_context": 40, "tiny": {"hidden_size": 16, "num_layers": 1, "num_heads": 1}},
        "engine": {"name": "vllm", "arguments": arguments},
        "tasks": [task],
        "train": {"lr": 1e-3, "token_budget": 256},
    }
    return parse_config(RunConfig, {**table, **changes})


@pytest.mark.parametrize("interval", [1, 2])
def test_the_server_sleeps_while_the_trainer_trains_and_is_not_started_then(tmp_path, monkeypatch, interval):
    state_file = tmp_path / "state.json"
    seen: list[str] = []
    train, offload, onload = TrainController._train, TrainController.offload, TrainController.onload

    def watched_train(self, batch):
        state = json.loads(state_file.read_text())
        assert state["asleep"] == ["kv_cache", "weights"]
        # Only weights that are replaced before the next rollout are let go.
        assert state["lacks_weights"] is ((self.train_step + 1) % interval == 0)
        if self.train_step == 1:
            # It sleeps, and is lost: it must not come back before the trainer has left.
            os.kill(state["pid"], signal.SIGKILL)
            state_file.unlink()
        result = train(self, batch)
        assert self.train_step != 2 or not state_file.exists()
        seen.append("train")
        return result

    def watched_offload(self, *, weights):
        assert weights is False
        seen.append("offload")
        offload(self, weights=weights)

    def watched_onload(self):
        seen.append("onload")
        onload(self)

    monkeypatch.setattr(TrainController, "_train", watched_train)
    monkeypatch.setattr(TrainController, "offload", watched_offload)
    monkeypatch.setattr(TrainController, "onload", watched_onload)
    asyncio.run(launch(config(tmp_path, produce={"sync_weights_interval": interval})))
    assert seen == ["offload", *["onload", "train", "offload"] * 4][: len(seen)]
    assert seen.count("train") == 4
    calls = state_file.with_suffix(".calls").read_text().split()
    assert calls.count("started") == 2
    assert calls.count("/sleep") == 4
    last = json.loads(state_file.read_text())["pid"]
    with pytest.raises(ProcessLookupError):
        os.kill(last, 0)


def test_a_gpu_is_shared_where_there_is_one_for_both(tmp_path):
    arguments = {"servers": 1}
    shared = config(tmp_path, engine={"name": "vllm", "arguments": arguments})
    assert [shares_gpu(shared, count) for count in (0, 1, 2)] == [False, True, False]
    (tmp_path / "separate").mkdir()
    separate = config(tmp_path / "separate", produce={"mode": "separate"})
    assert shares_gpu(separate, 2)
    ranked = separate.model_copy(update={"train": separate.train.model_copy(update={"ranks": 2})})
    with pytest.raises(ConfigError, match="for a trainer on one rank"):
        shares_gpu(ranked)
    for way in ({"shares_gpu": True}, {}):
        engine = {"name": "vllm", "arguments": {"servers": 1, "offload": "all", **way}}
        (place := tmp_path / str(len(way))).mkdir()
        checked = config(place, engine=engine, verify_weights=True)
        with pytest.raises(ConfigError, match="or leave verify_weights out"):
            shares_gpu(checked, 1)
    with pytest.raises(ValueError, match="shares_gpu is for one server"):
        HTTPArguments(urls=["http://127.0.0.1:8000"], shares_gpu=True)
