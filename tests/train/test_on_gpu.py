"""On a CUDA device everything gives what it gives on the CPU; skipped where there is none."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed

from forebay.engines import GenerateRequest, RolloutController, TransformersEngine
from forebay.engines.weights import buckets as bucket_module
from forebay.engines.weights.buckets import Buckets
from forebay.models import precision_on
from forebay.plan import this_machine
from forebay.train import TrainConfig, TrainController
from forebay.train.learner import Learner
from forebay.train.model import forward
from forebay.train.parallel.learner import source_of
from forebay.train.parallel.loading import load_sharded, make_mesh
from forebay.types import SampleParams
from train.conftest import build_groups, build_model

pytestmark = pytest.mark.gpu
GPU = "cuda"


def controller(model, device, **settings):
    settings = {"lr": 1e-2, "dtype": "float32", "token_budget": 64, **settings}
    return TrainController(model, TrainConfig(**settings), pad_token_id=0, device=device)


def weights(trainer):
    return {name: weight.detach().cpu() for name, weight in trainer.learner.weights()}


def assert_like(found, expected, atol):
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prompt"])
def test_a_train_step_gives_the_weights_of_the_cpu(layout):
    groups = build_groups()
    results = [controller(build_model(), device, layout=layout) for device in ("cpu", GPU)]
    batches = [trainer.fit(groups) for trainer in results]
    here, there = (batch.metrics["train/grad_norm"] for batch in batches)
    assert there == pytest.approx(here, rel=1e-4)
    # Adam divides by the size of the gradient: where that is all rounding, a step's direction is too.
    assert_like(weights(results[1]), weights(results[0]), atol=2e-2)
    batch = results[0].pack(groups)
    np.testing.assert_allclose(results[1].compute_logprobs(batch), results[0].compute_logprobs(batch), atol=2e-2)


def test_the_head_by_chunks_gives_the_same_gradients(monkeypatch):
    groups = build_groups()
    norms = []
    for elements in (1 << 25, 64):
        monkeypatch.setattr(forward, "CHUNK_ELEMENTS", elements)
        norms.append(controller(build_model(), GPU).fit(groups).metrics["train/grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_passes_are_bfloat16_and_weights_float32():
    trainer = controller(build_model().bfloat16(), GPU, dtype="auto")
    assert precision_on(torch.device(GPU), "auto") == "bfloat16"
    groups = build_groups()
    trainer.fit(groups)
    assert {weight.dtype for weight in weights(trainer).values()} == {torch.float32}
    assert {moment.dtype for moment in trainer.learner.moments() if moment.ndim} == {torch.float32}
    exact = controller(copy.deepcopy(trainer.model), GPU)
    batch = trainer.pack(groups)
    difference = np.abs(trainer.compute_logprobs(batch) - exact.compute_logprobs(batch))
    assert 0 < difference.max() < 0.2


async def generate(engine, number=6, *, temperature=1.0):
    asked = [
        GenerateRequest(
            request_id=str(row),
            input_ids=np.arange(3, 6 + row, dtype=np.int32),
            params=SampleParams(max_tokens=8, temperature=temperature),
            max_tokens=8,
            seed=row,
        )
        for row in range(number)
    ]
    return await asyncio.gather(*(engine.generate(request) for request in asked))


async def test_an_engine_makes_the_tokens_of_the_cpu():
    made = []
    for device in ("cpu", GPU):
        engine = TransformersEngine(build_model(), device=device)
        made.append(await generate(engine))
        await engine.close()
    for here, there in zip(*made, strict=True):
        # The same draws: a token differs only where rounding moves a border across one.
        same = np.asarray(here.response_ids) == np.asarray(there.response_ids)
        until = len(same) if same.all() else int(np.argmin(same))
        np.testing.assert_allclose(here.logprobs[:until], there.logprobs[:until], atol=1e-4)
    agreed = [list(here.response_ids) == list(there.response_ids) for here, there in zip(*made, strict=True)]
    assert sum(agreed) >= len(agreed) - 1


async def test_weights_reach_the_engine_and_sleep_frees_the_memory():
    # Large enough to be seen beside torch's own blocks.
    model = build_model(hidden_size=256, intermediate_size=1024)
    trainer = controller(model, GPU)
    engine = TransformersEngine(build_model(1, hidden_size=256, intermediate_size=1024), device=GPU)
    rollouts = RolloutController(engine)
    await trainer.sync_weights(rollouts)
    held = dict(engine._model.named_parameters())
    for name, weight in trainer.learner.weights():
        if name in held:
            assert torch.equal(held[name], weight)
    assert all(completion.finish_reason in ("length", "stop") for completion in await generate(engine, 2))
    await rollouts.close()


@pytest.mark.parametrize("moments", ["float32", "cpu", "8bit"])
def test_a_checkpoint_goes_on_on_the_other_device(tmp_path, moments):
    if moments == "8bit":
        pytest.importorskip("bitsandbytes")
    groups = build_groups()
    # Large enough for 8 bits: bitsandbytes leaves weights of less than 4,096 numbers.
    first = controller(build_model(hidden_size=64, intermediate_size=96), GPU, moments=moments)
    first.fit(groups)
    first.save(tmp_path / "one")
    here, there = (
        controller(build_model(hidden_size=64, intermediate_size=96), device, moments=moments)
        for device in ("cpu", GPU)
    )
    for trainer in (here, there):
        trainer.resume(tmp_path / "one")
    assert_like(weights(here), weights(first), atol=0)
    assert_like(weights(there), weights(first), atol=0)
    saved, *read = (dict(trainer.learner._optimizer.state_tensors()) for trainer in (first, here, there))
    for state in read:
        assert {key: value.cpu().tolist() for key, value in state.items()} == {
            key: value.cpu().tolist() for key, value in saved.items()
        }
    assert {key: value.device for key, value in read[1].items()} == {key: value.device for key, value in saved.items()}
    norms = [trainer.fit(groups).metrics["train/grad_norm"] for trainer in (here, there)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)


def test_slices_of_one_rank_give_the_step_of_a_whole_model(tmp_path):
    """FSDP2, NCCL and a checkpoint of slices. In a process of its own, which has one process group."""
    ran = run_apart("train_slices", str(tmp_path), limit_s=90)
    assert ran.returncode == 0, ran.stderr


def run_apart(function, *arguments, limit_s, **around):
    """A function of this module, in a process of its own with `around` in its environment."""
    program = f"import sys, train.test_on_gpu as here; here.{function}(*sys.argv[1:])"
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    around = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | around
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=around, timeout=limit_s, stderr=subprocess.PIPE, text=True)


def train_slices(place):
    device, folder = torch.device(GPU, 0), Path(place)
    torch.cuda.set_device(device)
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{folder}/meet", rank=0, world_size=1, device_id=device
    )
    config = TrainConfig(lr=1e-2, dtype="bfloat16", layout="packed", token_budget=64)
    groups = build_groups()

    def sliced():
        source = source_of(build_model(), folder / "model")
        mesh = make_mesh(GPU, 1, config.parallel)
        model = load_sharded(source, mesh, config.parallel, precision="bfloat16", device=str(device))
        return Learner(model, config, pad_token_id=0, device=device, mesh=mesh)

    packed = TrainController(build_model(), config, pad_token_id=0, device=device)
    batch = packed.pack(groups)
    batch = packed.compute_advantages(batch)
    batch.token_weights = np.where(batch.response_mask, np.float32(0.1), np.float32(0))
    expected = packed.learner.update(batch, 0).norms
    learner = sliced()
    assert learner.update(batch, 0).norms == pytest.approx(expected, rel=0.05)
    (folder / "saved").mkdir()
    learner.begin_save(folder / "saved", 1)
    learner.finish_save()
    resumed = sliced()
    assert resumed.resume(folder / "saved") == 1
    for (name, weight), (_, other) in zip(learner.weights(), resumed.weights(), strict=True):
        assert torch.equal(weight, other), name
    assert resumed.update(batch, 1).norms == pytest.approx(learner.update(batch, 1).norms, rel=0.05)
    distributed.destroy_process_group()


def test_the_device_is_found_for_plans():
    device = this_machine("cuda")
    assert device.is_gpu
    assert device.memory_bytes == torch.cuda.get_device_properties(0).total_memory


@pytest.mark.parametrize("layout", ["packed", "shared_prompt"])
@pytest.mark.parametrize("kernel", ["varlen", "flex_attention", "sdpa"])
def test_kernels_have_the_gradients_of_plain_attention(kernel, layout):
    if kernel == "flex_attention" and layout == "shared_prompt":
        pytest.skip("it is for packed rows")
    # Flex attention has heads of at least 16 numbers. With the larger weights of the other tests logits are so large
    # that bfloat16 is 0.2 nats off, whatever the kernel.
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
    groups, steps = build_groups(), []
    for device, settings in (
        ("cpu", {"attention": "eager"}),
        (GPU, {"attention": kernel, "layout": layout, "dtype": "bfloat16"}),
    ):
        trainer = controller(build_model(**sizes), device, **settings)
        # Before the step: Adam moves a weight whose gradient is all rounding as far as any other.
        logprobs = trainer.compute_logprobs(trainer.pack(groups))
        steps.append((trainer.fit(groups).metrics["train/grad_norm"], logprobs))
    (norm, logprobs), (found_norm, found) = steps
    # On a CPU bfloat16 is off by 0.1% and 0.015.
    assert found_norm == pytest.approx(norm, rel=0.02)
    np.testing.assert_allclose(found, logprobs, atol=0.05)


@pytest.mark.parametrize(
    "keys",
    [
        {"moments": "cpu"},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "offload_activations": True},
        {"gradient_checkpointing": 0.5},
    ],
    ids=str,
)
def test_what_saves_memory_changes_no_number(keys):
    plain, saving = controller(build_model(), GPU), controller(build_model(), GPU, **keys)
    groups = build_groups()
    for _ in range(2):
        norms = [trainer.fit(groups).metrics["train/grad_norm"] for trainer in (plain, saving)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
    if keys.get("moments") == "cpu":
        assert {moment.device.type for moment in saving.learner.moments() if moment.ndim} == {"cpu"}


def test_moments_of_8_bits_are_near_the_others():
    pytest.importorskip("bitsandbytes")
    # Large enough: weights of less than 4,096 numbers keep moments of float32.
    sizes, groups = {"hidden_size": 64, "intermediate_size": 96}, build_groups()
    plain, small = (controller(build_model(**sizes), GPU, moments=kind) for kind in ("float32", "8bit"))
    norms = [trainer.fit(groups).metrics["train/grad_norm"] for trainer in (plain, small)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    assert torch.uint8 in {moment.dtype for moment in small.learner.moments()}
    assert_like(weights(small), weights(plain), atol=3e-2)


def test_compiled_layers_give_the_gradients_of_others():
    pytest.importorskip("triton")
    plain, compiled = controller(build_model(), GPU), controller(build_model(), GPU, compile=True)
    groups = build_groups()
    norms = [trainer.fit(groups).metrics["train/grad_norm"] for trainer in (plain, compiled)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)


@pytest.mark.parametrize("with_weights", [False, True])
def test_a_trainer_that_left_the_device_goes_on_where_it_was(with_weights):
    moving, staying = controller(build_model(), GPU), controller(build_model(), GPU)
    groups = build_groups()
    for trainer in (moving, staying):
        trainer.fit(groups)
    moving.offload(weights=with_weights)
    assert {moment.device.type for moment in moving.learner.moments() if moment.ndim} == {"cpu"}
    expected = {"cpu"} if with_weights else {GPU}
    assert {weight.device.type for weight in moving.model.parameters()} == expected
    moving.onload()
    assert {weight.device.type for weight in moving.model.parameters()} == {GPU}
    norms = [trainer.fit(groups).metrics["train/grad_norm"] for trainer in (staying, moving)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)


async def test_a_model_that_reads_from_the_device_decodes_without_graphs():
    """Its recording fails in the driver, after which torch's cache can still be emptied."""
    model = build_model().to(GPU)
    forward = model.forward

    def reading(*given, **keys):
        keys["input_ids"].max().item()
        return forward(*given, **keys)

    model.forward = reading
    engine = TransformersEngine(model, device=GPU)
    assert not engine._batch._graphs.used
    assert all(made.finish_reason in ("length", "stop") for made in await generate(engine, 2))
    await engine.pause()
    torch.cuda.empty_cache()
    torch.rand(1, device=GPU)
    # Another engine of the process still records.
    other = TransformersEngine(build_model(), device=GPU)
    assert other._batch._graphs.used
    await generate(other, 2)
    await asyncio.gather(engine.close(), other.close())


async def test_recordings_of_each_turn_take_the_memory_of_the_last():
    engine = TransformersEngine(build_model(), device=GPU)
    held = []
    for _ in range(6):
        await generate(engine)
        assert engine._batch._graphs._recorded, "it records"
        await engine.pause()
        held.append(torch.cuda.memory_reserved())
        await engine.resume()
    await engine.close()
    # A stream's working memory alone is 8 MB, on Hopper 32.
    assert held[-1] < held[1] + (8 << 20), held


@pytest.mark.parametrize("moments", ["float32", "cpu", "8bit"])
async def test_an_engine_records_while_a_trainer_takes_steps(moments):
    """Some of them wait for the device, and the driver refuses some ways to do so."""
    if moments == "8bit":
        pytest.importorskip("bitsandbytes")
    trainer, groups = controller(build_model(), GPU, moments=moments), build_groups()
    engine = TransformersEngine(build_model(), device=GPU)
    alone = await generate(engine)
    training = asyncio.get_running_loop().run_in_executor(None, lambda: [trainer.fit(groups) for _ in range(20)])
    while not training.done():
        # Each turn records anew.
        await engine.pause()
        await engine.resume()
        for made, before in zip(await generate(engine), alone, strict=True):
            np.testing.assert_allclose(made.logprobs, before.logprobs, atol=1e-4)
    await training
    assert engine._batch._graphs.used
    await engine.close()


READER = """
import base64, json, pickle, sys, torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
for line in sys.stdin:
    handle, layout = json.loads(line)
    (arguments,) = pickle.loads(base64.b64decode(handle)).values()
    data = rebuild_cuda_tensor(*arguments)
    found = {}
    for name, kind, shape, begin, end in layout:
        found[name] = data[begin:end].view(getattr(torch, kind)).view(shape).float().cpu().tolist()
    del data
    print(json.dumps(found), flush=True)
"""


@pytest.mark.parametrize("segments", ["expandable_segments:False", "expandable_segments:True"])
def test_another_process_reads_buckets_where_they_lie(segments):
    """By CUDA IPC, as vLLM and SGLang do. Its own process, since torch reads the setting once."""
    # Where imports are read for the first time, those of its two processes alone take 40.
    ran = run_apart("write_buckets", limit_s=120, PYTORCH_ALLOC_CONF=segments)
    if segments.endswith("True") and "pidfd_getfd" in ran.stderr:
        pytest.skip("such memory goes by a file descriptor, and this machine's kernel hands none to another process")
    assert ran.returncode == 0, ran.stderr


def write_buckets():
    bucket_module.BUCKET_BYTES = 1 << 11
    config = TrainConfig(lr=1e-2, dtype="float32", token_budget=64)
    trainer = TrainController(build_model(), config, pad_token_id=0, device=GPU, engine_dtype="bfloat16")
    groups = build_groups()
    reader = subprocess.Popen([sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    async def hand_over():
        buckets, found = Buckets(trainer.live_weights(), GPU), {}
        for number in range(len(buckets)):
            async with buckets.reading(number) as bucket:
                told = [bucket.handle["ipc_handles_pickled"], bucket.layout]
                reader.stdin.write(json.dumps(told).encode() + b"\n")
                reader.stdin.flush()
                found |= json.loads(reader.stdout.readline())
        assert len(buckets) > 2
        await buckets.release()
        return found

    for step in range(3):
        trainer.fit(groups)
        before = torch.cuda.memory_allocated()
        found = asyncio.run(hand_over())
        expected = {name: weight.bfloat16().float() for name, weight in weights(trainer).items()}
        assert_like({name: torch.tensor(values) for name, values in found.items()}, expected, atol=0)
        assert torch.cuda.memory_allocated() == before, step
    reader.stdin.close()
    assert reader.wait(20) == 0


RUNS = {
    "one process": ["recipes/demo_separate.toml"],
    "an engine of its own": ["recipes/demo_separate.toml", "engine.name=process"],
    "adapters": ["recipes/demo_tiny.toml", "engine.name=process", "train.lora_rank=8"],
    "a rank": ["recipes/demo_separate.toml", "train.ranks=1"],
    "store in memory": ["recipes/demo_separate.toml", "replay.store=memory", "produce.max_staleness=0"],
}


def test_runs_train_stop_and_go_on(tmp_path):
    """All at once, since each takes seconds to begin."""
    short = ["batch_size=4", "rollouts_per_prompt=4", "tasks.0.eval_data.size=8", "warmup.steps=2", "evaluate.every=4"]
    root, running = Path(__file__).parents[2], {}
    program = """
import subprocess, sys
folder, *given = sys.argv[1:]
command = [sys.executable, "-c", "from forebay.cli import main; main()", "train"]
for arguments in ([*given, "steps=4"], ["--resume", folder, "steps=6"]):
    if subprocess.run(command + arguments).returncode:
        sys.exit(1)
"""
    for case, (recipe, *keys) in RUNS.items():
        given = [str(root / recipe), *keys, *short, "checkpoint_every=2", f"device={GPU}", f"output={tmp_path / case}"]
        running[case] = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / case / Path(recipe).stem), *given],
            env=os.environ | {"FOREBAY_CACHE": str(tmp_path / case / "cache")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    told = {case: (run.communicate(timeout=240)[0].decode(), run.returncode) for case, run in running.items()}
    for case, (output, code) in told.items():
        assert code == 0, f"{case}:\n{output}"
        assert GPU in output, f"{case}:\n{output}"
        (metrics,) = (tmp_path / case).glob("*/metrics.jsonl")
        steps = [json.loads(line)["train_step"] for line in metrics.read_text().splitlines()]
        assert max(steps) == 6, f"{case}:\n{output}"
