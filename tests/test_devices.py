"""Where a run computes: the device that its file names, and the precision that ``auto`` stands for."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from forebay.config import ConfigError, parse_config
from forebay.models import find_device, precision_on
from forebay.runs.build import _trainer_device
from forebay.runs.config import RunConfig
from forebay.runs.placement import (
    base_precision,
    device_fact,
    engine_seat,
    engine_seats,
    idle_gpus,
    rank_gpus,
    takes_turns,
    yields_memory,
)
from forebay.runs.rollouts import build_run_engines, engine_precision
from forebay.train.parallel.place import Place


@pytest.fixture(name="gpus")
def visible_gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """torch sees so many CUDA devices, of which nothing is asked but names."""
    count: int = request.param
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=0: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=0: "NVIDIA L4")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    return count


TASK = {"name": "sorting", "data": {"source": "sorting", "size": 50}, "judge": "exact_match"}


def config(**changes: Any) -> RunConfig:
    table = {
        "name": "placed",
        "steps": 1,
        "batch_size": 2,
        "rollouts_per_prompt": 2,
        "model": {"source": "tiny"},
        "tasks": [TASK],
    }
    return parse_config(RunConfig, table | changes, source="test")


@pytest.mark.parametrize(("gpus", "found"), [(0, "cpu"), (1, "cuda"), (8, "cuda")], indirect=["gpus"])
def test_auto_is_a_gpu_where_there_is_one(gpus: int, found: str) -> None:
    assert find_device("auto") == torch.device(found)
    wanted = "bfloat16" if gpus else "float32"
    assert precision_on(find_device("auto"), "auto") == wanted
    assert engine_precision(config()) == wanted
    assert engine_precision(config(engine={"dtype": "float32"})) == "float32"
    assert engine_precision(config(device="cpu")) == "float32"


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_weights_below_adapters_are_held_as_they_are_computed_with(ranks: int) -> None:
    adapted, whole = (config(train={"lora_rank": rank, "ranks": ranks}) for rank in (2, 0))
    assert base_precision(adapted, "bfloat16") is None
    assert base_precision(adapted, "float32") == base_precision(whole, "bfloat16") == "float32"


@pytest.mark.parametrize("gpus", [0, 2], indirect=True)
def test_a_device_that_is_not_there_is_refused(gpus: int) -> None:
    with pytest.raises(ConfigError, match=f"device = 'cuda:{gpus}': .* sees .*; set device = 'auto'"):
        find_device(f"cuda:{gpus}")
    with pytest.raises(ConfigError, match="device = 'mps'"):
        find_device("mps")


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "CPU"])
def test_a_device_of_another_name_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="device"):
        config(device=device)


@pytest.mark.parametrize(
    ("gpus", "places"),
    [
        (0, ["cpu"] * 3),
        (1, ["cuda:0"] * 3),
        # The trainer is on the first: engines get the others, and share them when there are more engines.
        (4, ["cuda:1", "cuda:2", "cuda:3"]),
        (2, ["cuda:1", "cuda:0", "cuda:1"]),
    ],
    indirect=["gpus"],
)
def test_engines_in_processes_get_a_gpu_each(gpus: int, places: list[str], monkeypatch, tmp_path) -> None:
    class Process:
        max_context_tokens, takes_adapters, is_closed = 1, False, False

        def __init__(self, recipe: Any, *_: Any, **__: Any) -> None:
            self.device = recipe.device

        def wait_until_ready(self) -> None:
            pass

    monkeypatch.setattr("forebay.engines.process.engine.ProcessEngine", Process)

    def devices(engines: int, **changes: Any) -> list[str]:
        table = config(engine={"name": "process", "arguments": {"engines": engines}}, **changes)
        return [engine.device for engine in build_run_engines(table, tmp_path, None)]

    assert devices(3) == places
    if gpus == 4:
        assert devices(2, train={"ranks": 2}) == ["cuda:2", "cuda:3"]
        table = config(engine={"name": "process", "arguments": {"engines": 3}})
        engines = build_run_engines(table, tmp_path, None)
        engines[0].is_closed = True
        assert [engines[0].another("").device for _ in range(2)] == ["cuda:1", "cuda:0"], "what is free comes first"
    if gpus > 1:
        assert devices(3, device="cuda:1") == ["cuda:1"] * 3


def servers(number: int, *, ranks: int = 1, device: str = "auto", split: int = 1, **arguments: Any) -> RunConfig:
    options = ["--tensor-parallel-size", str(split)]
    return config(engine=vllm(number, **{"options": options, **arguments}), train={"ranks": ranks}, device=device)


def vllm(number: int, **arguments: Any) -> dict[str, Any]:
    return {"name": "vllm", "arguments": {"servers": number, **arguments}}


TWICE = {"name": "ray", "arguments": {"num_engines": 2}}


@pytest.mark.parametrize(
    ("gpus", "run", "places", "shared"),
    [
        (8, servers(2, ranks=4, split=2), [(4, 5), (6, 7)], []),
        (8, servers(2, ranks=4), [(4,), (5,)], []),
        # As many GPUs as both together need are not there: servers go round.
        (8, servers(3, ranks=4, split=2), [(4, 5), (6, 7), (0, 1)], [2]),
        (4, servers(2, ranks=4, split=2), [(0, 1), (2, 3)], [0, 1]),
        # As docs/scale.md says it.
        (8, servers(2, ranks=8, split=4), [(0, 1, 2, 3), (4, 5, 6, 7)], [0, 1]),
        (1, servers(1), [(0,)], [0]),
        (2, servers(1), [(1,)], []),
        (2, servers(2, device="cuda:1"), [(1,), (1,)], [0, 1]),
        (4, servers(2, ranks=2, split=2, gpus=[[0, 1], [1, 2]]), [(0, 1), (1, 2)], [0, 1]),
        (4, servers(2, ranks=2, gpus=[[1], [3]]), [(1,), (3,)], [0]),
        (4, servers(1, device="cpu"), [()], []),
        (4, servers(1, device="cpu", gpus=[[0]]), [(0,)], []),
        (0, servers(2), [(), ()], []),
        (4, config(engine={"name": "vllm", "arguments": {"urls": ["http://127.0.0.1:1"]}}), [()], []),
        (4, config(cluster="ray", engine={"name": "vllm", "arguments": {"servers": 1}}), [()], []),
        # Each engine there starts its own, on the GPUs that it has, which may be more than are here.
        (1, config(cluster=TWICE, engine=vllm(2, gpus=[[0], [1]])), [(0,), (1,), (0,), (1,)], []),
    ],
    indirect=["gpus"],
)
def test_servers_get_gpus_without_a_rank_and_else_share_some(gpus: int, run: RunConfig, places: Any, shared: Any):
    seats = engine_seats(run)
    assert [seat.gpus for seat in seats] == places
    assert [number for number, seat in enumerate(seats) if seat.is_shared] == shared
    assert takes_turns(run) is yields_memory(run) is bool(shared) or run.cluster is not None
    if run.device == "auto":
        assert engine_seats(run, gpus) == seats, "as a plan has it"


@pytest.mark.parametrize("gpus", [4], indirect=True)
def test_ranks_that_torchrun_started_on_several_machines_have_gpus_here_by_their_number(gpus: int, monkeypatch):
    place = Place(rank=0, size=8, gpu=0, num_here=2, port=1, host="127.0.0.1", has_store=True)
    monkeypatch.setattr("forebay.runs.placement.find_place", lambda: place)
    run = servers(2, ranks=8)
    assert rank_gpus(run) == [0, 1]
    assert [seat.gpus for seat in engine_seats(run)] == [(2,), (3,)]


@pytest.mark.parametrize("gpus", [2], indirect=True)
def test_layouts_that_cannot_be_are_refused_in_a_sentence(gpus: int) -> None:
    with pytest.raises(ConfigError, match=r"gpus names GPU 2, and there are 2, from 0 on"):
        engine_seats(servers(1, split=2, gpus=[[1, 2]]))
    with pytest.raises(ConfigError, match="give each server 4 GPUs, and there are 2"):
        engine_seats(servers(1, options=["-tp", "2", "--pipeline-parallel-size=2"]))
    with pytest.raises(ConfigError, match="names GPUs for 1 servers, and none for another"):
        engine_seat(servers(1, gpus=[[1]]), 1)
    for changes in ({"train": {"ranks": 2}}, {"verify_weights": True}):
        engine = {"name": "vllm", "arguments": {"servers": 2, "offload": "all"}}
        with pytest.raises(ConfigError, match="set it to 'moments'"):
            takes_turns(config(engine=engine, **changes))
    tried = [TASK | {"eval_data": {"source": "sorting", "size": 50}}]
    beside: dict[str, Any] = {"tasks": tried, "evaluate": {"mode": "beside"}, "produce": {"mode": "separate"}}
    for gpu, refused in ((0, True), (1, False)):
        engine = {"name": "vllm", "arguments": {"servers": 2, "gpus": [[0], [gpu]]}}
        with pytest.raises(ConfigError, match="for a server that does not sleep") if refused else nullcontext():
            assert takes_turns(config(engine=engine, **beside))


@pytest.mark.parametrize("gpus", [4], indirect=True)
def test_idle_gpus_are_told_with_the_keys_that_use_them(gpus: int) -> None:
    told = idle_gpus(config())
    assert told is not None
    assert told.startswith("3 of 4 GPUs are idle: ")
    assert "engine.arguments.engines" in told
    assert (idle_gpus(config(device="cpu")) or "").startswith("4 GPUs are idle: device = 'cpu'")
    assert idle_gpus(config(engine={"name": "process", "arguments": {"engines": 3}})) is None
    assert idle_gpus(config(train={"ranks": 4})) is None
    split = config(train={"ranks": 2}, engine={"name": "process", "arguments": {"engines": 2}})
    assert idle_gpus(split) is None
    crowded = config(device="cuda:1", engine={"name": "process", "arguments": {"engines": 3}})
    assert (idle_gpus(crowded) or "").startswith("3 of 4 GPUs are idle")
    # Servers of others and Ray share out GPUs by themselves.
    elsewhere = {"name": "vllm", "arguments": {"urls": ["http://127.0.0.1:8000"]}}
    assert idle_gpus(config(engine=elsewhere)) is None
    assert idle_gpus(servers(3)) is None
    assert idle_gpus(servers(1, device="cpu")) is None
    with_servers = "GPUs are idle: engine.arguments.servers = N generates on more, train.ranks = N trains on N"
    assert idle_gpus(servers(1)) == f"2 of 4 {with_servers}"
    assert idle_gpus(servers(1, gpus=[[1]])) == f"2 of 4 {with_servers}"
    assert idle_gpus(servers(1, ranks=2, split=4), 7) == f"1 of 7 {with_servers}"
    assert idle_gpus(servers(2, ranks=4), 8) == f"2 of 8 {with_servers}"
    assert idle_gpus(config(cluster="ray")) is None


@pytest.mark.parametrize("gpus", [4], indirect=True)
def test_memory_is_given_back_where_an_engine_in_another_process_has_the_gpu_next(gpus: int) -> None:
    def processes(engines: int, **changes: Any) -> bool:
        engine = {"name": "process", "arguments": {"engines": engines}}
        return yields_memory(config(engine=engine, **changes))

    assert not yields_memory(config())
    assert not yields_memory(config(produce={"mode": "separate"}))
    # Three engines have GPUs of their own, a fourth is on the trainer's.
    assert (processes(3), processes(4)) == (False, True)
    assert (processes(2, train={"ranks": 2}), processes(3, train={"ranks": 2})) == (False, True)
    assert processes(1, device="cuda:1")
    judge = {"name": "composed", "arguments": {"parts": [{"name": "reward_model", "arguments": {"model": "m"}}]}}
    assert yields_memory(config(tasks=[TASK | {"judge": judge}]))
    assert yields_memory(config(engine="forebay.engines.build:_processes"))
    assert (yields_memory(servers(3)), yields_memory(servers(4))) == (False, True)
    # Ray places the parts later.
    assert yields_memory(config(cluster="ray"))


@pytest.mark.parametrize("gpus", [1], indirect=True)
def test_the_header_says_where_a_run_computes(gpus: int) -> None:
    assert device_fact(config()) == "cuda (NVIDIA L4), bfloat16, sdpa attention"
    assert device_fact(config(train={"layout": "packed"})) == "cuda (NVIDIA L4), bfloat16, varlen attention"
    assert device_fact(config(train={"dtype": "float32"})) == "cuda (NVIDIA L4), float32, sdpa attention"
    assert device_fact(config(device="cpu", train={"layout": "packed"})) == "cpu, float32, sdpa attention"
    assert device_fact(config(cluster="ray")) == "placed by ray"


@pytest.mark.parametrize("gpus", [0], indirect=True)
def test_on_a_cluster_the_engines_have_the_precision_of_their_gpus(gpus: int) -> None:
    with_gpus = {"name": "ray", "arguments": {"gpus_per_engine": 1}}
    assert engine_precision(config(cluster=with_gpus)) == "bfloat16"
    assert engine_precision(config(cluster="ray")) == "float32"


@pytest.mark.parametrize("gpus", [1], indirect=True)
def test_ranks_need_a_gpu_each(gpus: int) -> None:
    for changes in ({}, {"device": "cuda:0"}):
        with pytest.raises(ConfigError, match="needs as many GPUs, from the first on, and torch sees 1"):
            _trainer_device(config(train={"ranks": 2}, **changes))
    assert _trainer_device(config(train={"ranks": 2}, device="cpu")) == "cpu"
    assert _trainer_device(config()) == "cuda"


@pytest.mark.parametrize("gpus", [1], indirect=True)
def test_a_gpu_without_bfloat16_computes_in_float32(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=0: (7, 5))
    assert engine_precision(config()) == "float32"


def test_an_engine_says_which_devices_there_are() -> None:
    with pytest.raises(ConfigError, match="device"):
        config(engine={"arguments": {"device": "xpu"}})
