"""Plans: which parts lie on a device, what is said of it, and the command."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from torch import nn
from transformers import AutoConfig, LlamaConfig, MambaConfig
from typer.testing import CliRunner

from forebay.cli.commands import app
from forebay.config import ConfigError, parse_config
from forebay.models.config import TinyConfig
from forebay.models.tiny import write_tiny
from forebay.plan import estimate, make_plan, parse_devices, this_machine
from forebay.plan.estimate import HOST_BYTES_PER_S, Plan, fit_memory, micro_batch_s, verdict
from forebay.plan.hardware import GIB, Device
from forebay.plan.memory import _no_moves, step_memory
from forebay.plan.report import sentences
from forebay.runs.config import RunConfig
from forebay.train import TrainConfig
from forebay.train.batch import TrainBatch

SIZES = {
    "vocab_size": 2000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    ("reported", "gib", "like"),
    [
        ("NVIDIA L4", 22, "L4-24GB"),
        ("NVIDIA L40", 44, None),
        ("NVIDIA L40S", 44, "L40S-48GB"),
        ("NVIDIA A10", 22, None),
        ("NVIDIA A100-SXM4-40GB", 39, "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", 79, "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", 79, "H100-80GB"),
        ("NVIDIA H200", 139, "H200-141GB"),
        ("NVIDIA GH200 480GB", 95, None),
        ("NVIDIA GeForce RTX 4090", 24, "RTX4090-24GB"),
    ],
)
def test_a_gpu_is_known_by_the_words_of_its_name(reported, gib, like, monkeypatch) -> None:
    properties = SimpleNamespace(name=reported, total_memory=gib * GIB)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    found = this_machine("cuda")
    assert (found.name, found.memory_bytes) == (reported, gib * GIB)
    assert found.flop_per_s == (None if like is None else parse_devices(like).flop_per_s)


@pytest.fixture(name="model", scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which only the config is there."""
    folder = tmp_path_factory.mktemp("model")
    LlamaConfig(**SIZES).save_pretrained(folder)
    return folder


@pytest.fixture(name="thin_model", scope="module")
def thin_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one layer, for tests that ask for many plans."""
    folder = tmp_path_factory.mktemp("thin")
    LlamaConfig(**SIZES | {"num_hidden_layers": 1}).save_pretrained(folder)
    return folder


def run_config(model: Path, **changes: Any) -> RunConfig:
    table = {
        "name": "planned",
        "steps": 10,
        "batch_size": 4,
        "rollouts_per_prompt": 4,
        "model": {"source": str(model)},
        "tasks": [
            {
                "name": "sorting",
                "data": {"source": "sorting", "size": 50},
                "judge": "exact_match",
                "sample": {"max_tokens": 96},
            }
        ],
        "train": {"token_budget": 1024},
    }
    return parse_config(RunConfig, table | changes, source="test")


def device(memory_bytes: int, **facts: Any) -> Device:
    return Device(name="test", memory_bytes=memory_bytes, **facts)


def test_a_run_file_that_names_a_gpu_is_planned_where_there_is_none(thin_model: Path) -> None:
    here, there = (
        make_plan(run_config(thin_model, device=name), parse_devices("H100-80GB"), prompt_tokens=32).times
        for name in ("cpu", "cuda:1")
    )
    assert here is not None
    assert here == there


def test_the_parts_of_a_run_in_one_process(model: Path) -> None:
    plan = make_plan(run_config(model), device(10 * GIB, is_gpu=False), prompt_tokens=32)
    assert plan.longest == 128
    assert plan.parts["engine: weights"] == 4 * plan.num_parameters
    # 16 requests of 128 tokens; keys and values of 2 layers, 2 heads and 64 numbers in float32. They are gone
    # while the trainer of a colocated run trains.
    generating = plan.turns["generating"]
    assert generating["engine: key/value cache"] == 16 * 128 * 2 * 2 * 2 * 64 * 4
    assert "trainer: activations" not in generating
    assert plan.parts == plan.turns["training"]
    assert plan.total == sum(plan.parts.values())
    separate = run_config(model, produce={"mode": "separate"})
    at_once = make_plan(separate, device(10 * GIB, is_gpu=False), prompt_tokens=32)
    assert at_once.total == plan.total + at_once.parts["engine: key/value cache"]
    assert plan.fits
    assert verdict(plan).startswith("It fits: ")
    assert plan.times is None


def test_engines_of_their_own_device_are_not_counted(model: Path) -> None:
    engine = {"name": "process", "arguments": {"engines": 1}}
    two = make_plan(run_config(model, engine=engine), device(10 * GIB, count=2), prompt_tokens=32)
    one = make_plan(run_config(model, engine=engine), device(10 * GIB), prompt_tokens=32)
    assert "engine: weights" not in two.parts
    # In bfloat16, as on any GPU of a plan.
    assert one.parts["engine: weights"] == 2 * one.num_parameters


def test_a_run_that_does_not_fit_is_told_the_first_changes_that_help(model: Path) -> None:
    config = run_config(model, train={"token_budget": 2048})
    free = make_plan(config, device(10 * GIB, is_gpu=False), prompt_tokens=32)
    plan = make_plan(config, device(int(free.total / 1.2), is_gpu=False), prompt_tokens=32)
    assert not plan.fits
    assert plan.advice[0] == "train.dtype=bfloat16"
    assert plan.advised_bytes is not None
    assert plan.advised_bytes <= 0.9 * plan.device.memory_bytes
    said = verdict(plan)
    assert said.startswith("It does not fit: ")
    assert said.endswith("which fits.")
    assert " ".join(plan.advice) in said


def test_a_device_that_is_far_too_small_is_told_so(thin_model: Path) -> None:
    config = run_config(thin_model, train={"token_budget": 512})
    plan = make_plan(config, device(4 * 2**20, is_gpu=False), prompt_tokens=32)
    assert plan.advised_bytes is None
    assert "Take a smaller model or a larger device" in verdict(plan)


def test_times_follow_from_arithmetic_and_bandwidth(model: Path) -> None:
    slow, fast, faster_than_its_process = (
        device(10 * GIB, flop_per_s=1e10 * times, bytes_per_s=1e9 * times) for times in (1, 10, 1e6)
    )
    plan, faster = (make_plan(run_config(model), gpu, prompt_tokens=32) for gpu in (slow, fast))
    in_float32 = run_config(model, train={"token_budget": 1024, "dtype": "float32"})
    assert make_plan(in_float32, fast, prompt_tokens=32).times is None
    times = plan.times
    assert faster.times.training_s == pytest.approx(times.training_s / 10, rel=0.01)
    assert times.step_s == pytest.approx(times.training_s + times.generation_s, rel=0.2)
    assert "tokens/s" in list(sentences(plan))[1]
    # Operation by operation it is slower than its arithmetic, and compiled there are fewer.
    train = {"token_budget": 2048, "dtype": "bfloat16"}
    bound, compiled = (
        make_plan(run_config(model, train=train | keys), faster_than_its_process, prompt_tokens=32)
        for keys in ({}, {"compile": True})
    )
    assert bound.times.training_s > 1e-4 * times.training_s
    assert compiled.times.training_s == pytest.approx(bound.times.training_s / 3, rel=0.05)
    assert "launched one by one" in " ".join(sentences(bound))
    assert "launched one by one" not in " ".join(sentences(plan))


MEASURED = [
    # Seconds of training and of generation on an H200: benchmarks/results/gpu.md.
    ({"layout": "packed"}, 0.916, 2.65),
    ({"gradient_checkpointing": True}, 1.08, 2.85),
]


def qwen2(folder: Path, hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int) -> Any:
    """The config of Qwen2.5 in such a size, in `folder`."""
    found = AutoConfig.for_model(
        "qwen2",
        vocab_size=151936,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=32768,
    )
    found.save_pretrained(folder)
    return found


@pytest.mark.parametrize(("keys", "training_s", "generation_s"), MEASURED)
def test_times_are_near_those_that_were_measured(
    keys: dict[str, Any], training_s: float, generation_s: float, tmp_path: Path
) -> None:
    qwen2(tmp_path, 896, 4864, 24, 14)
    config = run_config(
        tmp_path,
        batch_size=8,
        rollouts_per_prompt=8,
        engine={"name": "transformers", "dtype": "bfloat16"},
        tasks=[
            {"name": "task", "data": {"source": "addition"}, "judge": "exact_match", "sample": {"max_tokens": 512}}
        ],
        train={"dtype": "bfloat16", "token_budget": 8192, **keys},
    )
    times = make_plan(config, parse_devices("H200-141GB"), prompt_tokens=256).times
    assert times.training_s == pytest.approx(training_s, rel=0.2)
    assert times.generation_s == pytest.approx(generation_s, rel=0.2)


def test_rates_of_training_are_near_those_that_were_measured(tmp_path: Path) -> None:
    """Of 1.5 B, whose passes wait for the GPU; in its 13 micro-batches the lengths of rollouts differ."""
    config = TrainConfig(dtype="bfloat16", layout="packed", token_budget=8192)
    batch = TrainBatch.from_examples([([1] * 256, [0] * 512)] * 20)
    step = step_memory(qwen2(tmp_path, 1536, 8960, 28, 12), config, batch, attention="varlen")
    for compiled, tokens_per_s in ((False, 36_067), (True, 49_055)):
        config = config.model_copy(update={"compile": compiled})
        assert step.tokens / max(micro_batch_s(config, step, parse_devices("H200-141GB"))) == pytest.approx(
            tokens_per_s, rel=0.15
        )


def test_what_waits_in_the_host_s_memory_and_ranks_that_share_sequences_take_time(model: Path) -> None:
    gpu = parse_devices("H100-80GB")
    config = AutoConfig.from_pretrained(model)
    batch = TrainBatch.from_examples([([1] * 32, [0] * 96)] * 8)
    keys = {"dtype": "bfloat16", "token_budget": 1024, "gradient_checkpointing": True}
    kept, away = (
        TrainConfig(**keys, offload_activations=is_away, moments="cpu" if is_away else "float32")
        for is_away in (False, True)
    )
    step = step_memory(config, away, batch)
    activations = step.host_bytes - 2 * step.gradient_bytes
    assert activations > 0
    (here_s, launching_s), (there_s, _) = (micro_batch_s(train, step, gpu) for train in (kept, away))
    assert there_s - here_s == pytest.approx(2 * activations / HOST_BYTES_PER_S)
    shared = TrainConfig(**keys, ranks=2, parallel={"context": 2})
    assert micro_batch_s(shared, step, gpu) == (here_s, 2 * launching_s)


@pytest.mark.parametrize("produce", [{}, {"mode": "separate"}, {"mode": "separate", "sync_weights_interval": 3}])
def test_more_simulated_steps_change_no_time(
    model: Path, produce: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = device(10 * GIB, flop_per_s=1e12, bytes_per_s=1e11)
    config = run_config(model, produce=produce)
    few = make_plan(config, gpu, prompt_tokens=32).times
    monkeypatch.setattr(estimate, "SIMULATED_STEPS", 2 * few.steps)
    many = make_plan(config, gpu, prompt_tokens=32).times
    assert few.steps == (12 if "sync_weights_interval" in produce else 6)
    assert few.step_s == pytest.approx(many.step_s, rel=0.01)
    assert few.training_s == pytest.approx(many.training_s)


def test_an_episode_of_several_turns_may_fill_the_context(model: Path) -> None:
    task = run_config(model).tasks[0].model_dump(exclude_unset=True) | {
        "agent": {"name": "tools", "arguments": {"tools": ["calculator"]}}
    }
    plan = make_plan(run_config(model, tasks=[task]), device(10 * GIB, is_gpu=False), prompt_tokens=32)
    assert plan.longest == SIZES["max_position_embeddings"]


@pytest.mark.parametrize("text", ["H100", "0xH100-80GB", "", "3x", "xH100-80GB"])
def test_unknown_devices_are_refused_with_those_that_are_known(text: str) -> None:
    with pytest.raises(ConfigError, match="with one of A100-40GB"):
        parse_devices(text)


def test_the_command_tells_and_its_status_says_whether_the_run_fits(model: Path, tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        f"""
        name = "planned"
        steps = 10
        batch_size = 2
        rollouts_per_prompt = 2
        model = {{ source = "{model}" }}
        train = {{ token_budget = 512 }}
        [[tasks]]
        name = "sorting"
        data = {{ source = "sorting", size = 50 }}
        judge = "exact_match"
        sample = {{ max_tokens = 64 }}
        """
    )
    command = ["plan", str(run_file), "--gpus", "L4-24GB"]
    without = CliRunner().invoke(app, command)
    assert without.exit_code == 2
    assert "--prompt-tokens" in without.stderr
    told = CliRunner().invoke(app, [*command, "--prompt-tokens", "32"])
    assert told.exit_code == 0, told.output
    assert "trainer: activations" in told.stdout
    assert "It fits" in told.stdout
    assert "tokens/s" in told.stdout


@pytest.fixture(name="whole_model", scope="module")
def whole_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer, so that prompts have lengths."""
    folder = tmp_path_factory.mktemp("whole")
    write_tiny(folder, TinyConfig(hidden_size=64, num_layers=2), max_context=256, seed=0)
    return folder


def test_a_run_is_refused_above_its_memory_and_warned_near_it(whole_model: Path) -> None:
    config = run_config(whole_model, train={"token_budget": 2048})
    needed = make_plan(config, device(10 * GIB, is_gpu=False)).total
    assert fit_memory(config, device(needed * 100, is_gpu=False))[1] is None
    assert fit_memory(config, device(needed * 2, is_gpu=False))[1] is None
    _, said = fit_memory(config, device(needed, is_gpu=False))
    assert said is not None
    assert said.startswith("It may not fit: ")
    with pytest.raises(ConfigError, match=r"It does not fit: .* check_memory = false starts the run anyway"):
        fit_memory(config, device(int(needed / 1.2), is_gpu=False))
    unchecked = config.model_copy(update={"check_memory": False})
    assert fit_memory(unchecked, device(needed // 2, is_gpu=False))[1] is None


def test_what_no_plan_knows_does_not_stop_a_run(tmp_path: Path) -> None:
    MambaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2).save_pretrained(tmp_path)
    assert fit_memory(run_config(tmp_path), device(10 * GIB))[1] is None


def test_mini_batches_are_planned_full(model: Path) -> None:
    """The real batch fills every micro-batch of every mini-batch."""
    train = {"token_budget": 1024, "mini_batches": 4, "correction": "ratio"}
    config = run_config(model, batch_size=16, train=train)
    whole = run_config(model, batch_size=16)
    plans = [make_plan(each, device(10 * GIB, is_gpu=False), prompt_tokens=32) for each in (config, whole)]
    assert plans[0].parts["trainer: activations"] == pytest.approx(plans[1].parts["trainer: activations"], rel=0.05)


def test_adapters_and_engines_in_processes_count(model: Path) -> None:
    big = device(10 * GIB)
    plain = make_plan(run_config(model), big, prompt_tokens=32)
    engine = {"name": "process", "arguments": {"engines": 3}}
    three = make_plan(run_config(model, engine=engine), big, prompt_tokens=32)
    assert three.parts["engine: weights"] == 3 * plain.parts["engine: weights"]
    lora = run_config(model, train={"token_budget": 1024, "lora_rank": 4})
    adapted = make_plan(lora, big, prompt_tokens=32)
    assert adapted.parts["engine: weights"] > 2 * plain.parts["engine: weights"]


def test_ranks_share_out_the_state_and_gather_layers(model: Path) -> None:
    gpus = parse_devices("2xH100-80GB")
    train = {"token_budget": 1024}
    one = make_plan(run_config(model, train=train), gpus, prompt_tokens=32).turns["training"]
    config = run_config(model, train=train | {"ranks": 2})
    two = make_plan(config, gpus, prompt_tokens=32).turns["training"]
    for name in ("weights", "moments"):
        assert two[f"trainer: {name}"] == pytest.approx(one[f"trainer: {name}"] / 2, rel=1e-4)
    # Two of the layers are whole and one's gradients, of two layers; and all that is outside of them: in
    # bfloat16, but for the sums of gradients.
    assert one["trainer: weights"] / 2 < two["trainer: gathered layers"] < 1.5 * one["trainer: weights"]
    with pytest.raises(ConfigError, match=r"train.ranks = 2 with 1 GPUs each .* do not go on 1 x 1 GPUs"):
        make_plan(config, parse_devices("H100-80GB"), prompt_tokens=32)


def test_slices_in_the_host_s_memory_are_planned_there(model: Path) -> None:
    gpus, train = parse_devices("2xH100-80GB"), {"token_budget": 1024, "ranks": 2}
    sliced = make_plan(run_config(model, train=train), gpus, prompt_tokens=32)
    config = run_config(model, train=train | {"parallel": {"offload": True}})
    plan = make_plan(config, gpus, prompt_tokens=32)
    names = {f"trainer: {name}" for name in ("weights", "gradients", "moments")}
    before, after = sliced.turns["training"], plan.turns["training"]
    assert after.keys() == before.keys() - names
    # Of both ranks; gradients have the size of the weights.
    expected = 2 * (2 * before["trainer: weights"] + before["trainer: moments"])
    assert plan.host_bytes == pytest.approx(expected, rel=1e-4)
    assert any(line.startswith("Beside it, memory of the host: ") for line in sentences(plan))
    # Without a GPU that is the memory which is planned.
    on_cpu = make_plan(config, device(10 * GIB, is_gpu=False), prompt_tokens=32)
    assert {"trainer: weights", "trainer: moments"} < on_cpu.parts.keys()
    assert on_cpu.host_bytes == 0


def test_slices_in_the_host_s_memory_are_advised(model: Path) -> None:
    train = {"token_budget": 128, "gradient_checkpointing": True, "ranks": 2}
    config = run_config(model, train=train)
    free = make_plan(config, device(10 * GIB, count=2), prompt_tokens=32)
    moved = free.parts["trainer: weights"] + free.parts["trainer: moments"]
    small = device(int((free.total - moved / 2) / 0.9), count=2)
    assert make_plan(config, small, prompt_tokens=32).advice == ["train.parallel.offload=true"]


def test_a_sync_by_the_host_s_memory_is_timed_so_and_ranks_share_the_optimizer(model: Path) -> None:
    gpus = device(10 * GIB, count=2, flop_per_s=1e16, bytes_per_s=1e8)
    process = {"name": "process", "arguments": {"engines": 1}}
    train = {"token_budget": 1024}
    one, apart, two = (
        make_plan(run_config(model, **changes), gpus, prompt_tokens=32)
        for changes in ({}, {"engine": process}, {"train": train | {"ranks": 2}})
    )
    num_bytes = 2 * one.num_parameters
    assert one.sync_s == num_bytes / 1e8
    assert apart.sync_s == two.sync_s == 2 * num_bytes / HOST_BYTES_PER_S
    assert f"a sync {two.sync_s:.3g} s" in list(sentences(two))[-1]
    # Of such slow memory reads and writes are all of a train step; ranks cast no weights for each micro-batch.
    assert 0.3 < two.times.training_s / one.times.training_s <= 0.5


def test_the_turns_of_a_server_beside_the_trainer_and_of_a_warm_up(model: Path) -> None:
    engine = {"name": "vllm", "arguments": {"servers": 1, "python": "python", "memory_share": 0.5}}
    config = run_config(model, engine=engine, warmup={"steps": 2})
    plan = make_plan(config, parse_devices("L4-24GB"), prompt_tokens=32)
    turns = plan.turns
    assert list(turns) == ["training", "syncing", "generating", "warm-up"]
    # A share that is given is taken whole; the moments are elsewhere then.
    server = [size for name, size in turns["generating"].items() if name.startswith("server: ")]
    assert sum(server) == pytest.approx(0.5 * plan.device.memory_bytes - 600 * 2**20, abs=2)
    assert "trainer: moments" not in turns["generating"]
    assert "server: weights" not in turns["training"]
    assert "server: key/value cache" not in turns["syncing"]
    assert turns["warm-up"]["trainer: moments"] == turns["training"]["trainer: moments"]


def test_a_step_has_the_turns_of_servers_that_sleep_over_it(model: Path) -> None:
    gpus = device(10 * GIB, count=2, flop_per_s=1e13, bytes_per_s=1e11)

    def plan(seats: list[list[int]], *, lag: int = 1, name: str = "vllm", **arguments: Any) -> Plan:
        own = {"servers": len(seats), "gpus": seats, "python": "python", "memory_share": 0.3, **arguments}
        wide = {"over_sample_threshold": 1.0, "max_staleness": 2}
        produce = {"mode": "separate", "sync_weights_interval": lag, **wide}
        config = run_config(model, engine={"name": name, "arguments": own}, produce=produce)
        return make_plan(config, gpus, prompt_tokens=32)

    def turns_s(found: Plan, lag: int = 1) -> float:
        """The part of a step in which neither generates, trains or syncs."""
        assert found.times
        return found.times.step_s - found.times.generation_s - found.times.training_s - found.sync_s / lag

    apart, beside = plan([[1]]), plan([[0]])
    assert apart.times
    assert apart.times.step_s < 1.1 * max(apart.times.generation_s, apart.times.training_s)
    moments_s = beside.turns["training"]["trainer: moments"] / HOST_BYTES_PER_S
    assert turns_s(beside) == pytest.approx(2 * moments_s, rel=0.01)
    # So are weights of servers that new ones do not follow: there and back in every other step, with SGLang in each.
    weights_s = 2 * beside.num_parameters / HOST_BYTES_PER_S
    assert turns_s(plan([[0]], lag=2, offload="none"), 2) == pytest.approx(2 * weights_s / 2, rel=0.01)
    assert turns_s(plan([[0]], name="sglang", offload="none")) == pytest.approx(2 * weights_s, rel=0.01)
    # Of two servers one goes on.
    one, both = (plan(seats).times for seats in ([[0], [1]], [[0], [0]]))
    assert one
    assert both
    # Two on one GPU share its rate.
    assert 2 * one.generation_s == pytest.approx(both.generation_s)
    assert one.step_s < 0.9 * both.step_s


def test_a_plan_of_a_hub_model_downloads_no_weights(
    whole_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copy in the hub's layout has none, and the network is off."""
    hub = tmp_path / "models--some--model"
    snapshot = hub / "snapshots" / "0123456789012345678901234567890123456789"
    snapshot.mkdir(parents=True)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text(snapshot.name)
    for file in whole_model.iterdir():
        if file.suffix != ".safetensors":
            (snapshot / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    asked: list[Any] = []
    real = huggingface_hub.snapshot_download

    def download(*names: str, **patterns: Any) -> str:
        asked.append(patterns["ignore_patterns"])
        return real(*names, **patterns, cache_dir=tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("forebay.models.loading.default_cache_dir", lambda: tmp_path)
    config = run_config(Path("some/model"))
    assert make_plan(config, device(10 * GIB)).longest > 96
    assert {*asked} == {"*.safetensors"}


def test_planning_leaves_other_models_of_the_process_alone(model: Path) -> None:
    with _no_moves(), _no_moves():
        assert nn.Linear(2, 2).to(torch.float64).weight.dtype == torch.float64
    assert nn.Linear(2, 2).double().weight.dtype == torch.float64


def test_a_server_beside_the_trainer_gets_what_that_leaves(thin_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The folder has no tokenizer.
    monkeypatch.setattr("forebay.plan.estimate._longest_prompt", lambda *_: 32)
    server = {"name": "vllm", "arguments": {"servers": 1, "python": "python"}}
    train = {"token_budget": 256}
    device = parse_devices("L4-24GB")

    def share(device: Device = device, mode: str = "colocated", **arguments: Any) -> float | None:
        engine = {"name": "vllm", "arguments": {**server["arguments"], **arguments}}
        config = run_config(thin_model, engine=engine, produce={"mode": mode}, train=train)
        found: float | None = fit_memory(config, device)[0].engine.arguments.get("memory_share")
        return found

    shares = [share(offload=offload) for offload in ("none", "moments", "all")]
    assert shares == sorted(shares)
    assert 0.85 < shares[0] <= shares[-1] < 0.95
    parts = make_plan(run_config(thin_model, train=train), device).parts
    stay = parts["trainer: weights"] + 600 * 2**20 + 512 * 2**20
    assert shares[1] == pytest.approx(0.95 * (1 - stay / device.memory_bytes), abs=2e-3)
    # In a separate run they take turns just so.
    assert share(mode="separate") == shares[1]
    assert share(memory_share=0.3) == 0.3
    # With two GPUs they need not share one.
    assert share(parse_devices("2xL4-24GB")) is None
    assert share(parse_devices("2xL4-24GB"), gpus=[[0]]) == shares[1]
    # Two of them on one GPU have half of it each.
    assert share(servers=2) < shares[1] / 2
    tiny = Device(name="small", memory_bytes=5 * 2**28)
    with pytest.raises(ConfigError, match=r"It does not fit: .* engine\.arguments\.offload=all"):
        share(tiny)
