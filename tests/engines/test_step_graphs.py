"""A decode step as a GPU sees it: what is recorded is right when repeated, and little is read back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import forebay
from forebay.engines import GenerateRequest, TransformersEngine
from forebay.engines.local.batch import DecodeBatch
from forebay.engines.local.rows import Row
from forebay.engines.local.step_graphs import cuda_recorder
from forebay.types import SampleParams


class Graph(TorchDispatchMode):
    """Records operations with their tensors, as a CUDA graph does, and repeats them at the same addresses.

    Like a graph it knows nothing of Python: a number or tensor that was fresh while it was recorded stays as
    it was then. Reading a value back is an error.
    """

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, Any, Any, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default):
            raise RuntimeError("operation not permitted when stream is capturing")
        out = func(*args, **kwargs)
        writes = any(result.alias_info and result.alias_info.is_write for result in func._schema.arguments)
        given = {addresses(tensor) for tensor in tensors((args, kwargs))}
        view = not writes and any(addresses(tensor) in given for tensor in tensors(out))
        if not view:
            self._operations.append((func, args, kwargs, out, writes))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out, writes in self._operations:
            again = func(*args, **kwargs)
            if not writes:
                for old, new in zip(tensors(out), tensors(again), strict=True):
                    old.copy_(new)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def addresses(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Recorder:
    """Counts recordings and replays; what a recording computed is spoiled, as on a GPU nothing runs yet."""

    def __init__(self) -> None:
        self.num_recorded = self.num_replayed = 0

    def __call__(self) -> Callable[[Callable[[], torch.Tensor]], Callable[[], None]]:
        return self.record

    def record(self, work: Callable[[], torch.Tensor]) -> Callable[[], None]:
        graph = Graph()
        with graph:
            logits = work()
        logits.fill_(torch.nan)
        self.num_recorded += 1

        def replay() -> None:
            self.num_replayed += 1
            graph.replay()

        return replay


def rows(count: int, max_tokens: int = 30) -> list[Row]:
    return [
        Row(
            GenerateRequest(
                request_id=str(i),
                input_ids=np.arange(1 + 7 * i % 40, dtype=np.int32) % 50,
                params=SampleParams(max_tokens=max_tokens, temperature=i % 3 * 0.5),
                max_tokens=max_tokens - 2 * i,
                seed=i,
            )
        )
        for i in range(count)
    ]


def new_batch(model: Any, recorder: Any = None) -> DecodeBatch:
    return DecodeBatch(model, max_context_tokens=150, prefill_tokens=500, recorder=recorder)


def run(batch: DecodeBatch, asked: list[Row], change: Callable[[int], None] = lambda step: None) -> list[Any]:
    """All completions in the order asked for; two rows join later."""
    ended = dict(batch.admit(asked[:-2]))
    for step in range(200):
        if step == 4:
            ended |= dict(batch.admit(asked[-2:]))
        if not batch.size:
            break
        change(step)
        ended |= dict(batch.step(step))
    return [ended[row] for row in asked]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt_neox", "gpt2"])
def test_steps_that_are_repeated_give_the_tokens_of_those_that_run(kind, make_model):
    model = make_model(kind)

    def halve_at_ten(step: int) -> None:
        if step == 10:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)

    recorder = Recorder()
    plain, repeated = new_batch(model), new_batch(model, recorder)
    expected = run(plain, rows(9), halve_at_ten)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    got = run(repeated, rows(9), halve_at_ten)
    for one, other in zip(got, expected, strict=True):
        assert one.response_ids.tolist() == other.response_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
        assert one.finish_reason == other.finish_reason == "length"
    # Nine rows leave one by one, in shapes that last two steps: most of them are too short to record.
    assert recorder.num_recorded >= 1
    assert recorder.num_replayed >= 8


def test_recordings_end_where_the_cache_or_the_weights_move(make_model):
    model, recorder = make_model("llama"), Recorder()
    batch = new_batch(model, recorder)
    first = run(batch, rows(4))
    recorded = recorder.num_recorded
    batch.release()
    assert [one.response_ids.tolist() for one in run(batch, rows(4))] == [one.response_ids.tolist() for one in first]
    assert recorder.num_recorded == 2 * recorded


def test_a_model_that_cannot_be_recorded_runs_as_it_is(make_model, caplog, monkeypatch):
    model, recorder = make_model("llama"), Recorder()
    expected = run(new_batch(model), rows(4))
    forward = model.forward

    def reading(**given: Any) -> Any:
        given["position_ids"].max().item()
        return forward(**given)

    monkeypatch.setattr(model, "forward", reading)
    with caplog.at_level(logging.WARNING):
        got = run(new_batch(model, recorder), rows(4))
    assert [one.response_ids.tolist() for one in got] == [one.response_ids.tolist() for one in expected]
    assert "decoding without CUDA graphs: the model cannot be recorded" in caplog.text
    assert recorder.num_replayed == 0


class Operations(TorchDispatchMode):
    """Names of those that are more than a view: each is a launch, and what it gives back takes memory."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_row_that_leaves_costs_two_launches_for_all_layers_and_no_memory(make_model):
    model = make_model("llama", num_hidden_layers=6)
    batch, asked = new_batch(model), rows(5)
    expected = run(new_batch(model), rows(5)[1:])
    batch.admit(asked)
    with Operations() as operations:
        batch.abort([asked[0]])
    assert operations.seen == ["aten::_foreach_copy_"] * 2
    ended: dict[Row, Any] = {}
    while batch.size:
        ended |= dict(batch.step(0))
    assert [ended[row].response_ids.tolist() for row in asked[1:]] == [one.response_ids.tolist() for one in expected]


class Recording(Graph):
    """A `torch.cuda.CUDAGraph`."""


class Device:
    """CUDA as recordings see it, on a CPU: torch's allocator, streams and the generator of random numbers.

    As in `CUDAGraph.capture_end`, which learns nothing where the driver has given the recording up.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.underway: set[tuple[int, object]] = set()
        self.num_released = self.num_streams = 0
        self.log: list[str] = []
        self.recorded_in: list[str] = []
        self.default = self.stream(name="the default")
        self.streams = threading.local()
        self.is_random_broken = False
        generator = SimpleNamespace(clone_state=lambda: "a copy", graphsafe_set_state=self.mend)
        for name, fake in {
            "graph": self.graph,
            "empty_cache": self.empty_cache,
            "CUDAGraph": Recording,
            "Stream": self.stream,
            "graph_pool_handle": object,
            "default_generators": [None, generator],
            "default_stream": lambda device: self.default,
            "current_stream": lambda device: self.current(),
            "set_stream": self.enter,
            "stream": self.within,
        }.items():
            patch.setattr(torch.cuda, name, fake)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", self.end, raising=False)
        patch.setattr(torch._C, "_cuda_releasePool", self.release, raising=False)

    def stream(self, device: object = None, priority: int = 0, *, name: str = "") -> Any:
        name = name or f"stream {self.num_streams}"
        self.num_streams += 1
        return SimpleNamespace(
            name=name,
            device=torch.device("cuda:1"),
            wait_stream=lambda other: self.log.append(f"{name} waits for {other.name}"),
            synchronize=lambda: self.log.append(f"the host waits for {name}"),
        )

    def current(self) -> Any:
        return getattr(self.streams, "current", self.default)

    def enter(self, stream: Any) -> None:
        self.log.append(f"{threading.current_thread().name} works in {stream.name}")
        self.streams.current = stream

    @contextlib.contextmanager
    def within(self, stream: Any) -> Any:
        before = self.current()
        self.streams.current = stream
        yield
        self.streams.current = before

    def graph(self, graph: Recording, *, pool: object, stream: Any, capture_error_mode: str) -> Any:
        @contextlib.contextmanager
        def capture() -> Any:
            torch.cuda.empty_cache()
            self.underway.add((stream.device.index, pool))
            self.recorded_in.append(stream.name)
            try:
                with graph:
                    yield
            except RuntimeError as error:
                self.is_random_broken = True
                raise RuntimeError("operation failed due to a previous error during capture") from error
            self.underway.remove((stream.device.index, pool))

        return capture()

    def mend(self, state: str) -> None:
        assert state == "a copy"
        self.is_random_broken = False

    def end(self, index: int, pool: object) -> None:
        if (index, pool) not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove((index, pool))

    def release(self, index: int, pool: object) -> None:
        self.num_released += 1

    def empty_cache(self) -> None:
        if self.underway:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")


def test_a_recording_that_the_driver_gave_up_leaves_torch_as_it_was(make_model, monkeypatch):
    model, device = make_model("llama"), Device(monkeypatch)
    record = cuda_recorder(device.stream())
    record(lambda: torch.ones(2) + 1)
    forward = model.forward

    def reading(**given: Any) -> Any:
        given["position_ids"].max().item()
        return forward(**given)

    monkeypatch.setattr(model, "forward", reading)
    batch = new_batch(model, partial(cuda_recorder, device.stream()))
    assert all(one.finish_reason == "length" for one in run(batch, rows(4)))
    assert not batch._graphs.used
    torch.cuda.empty_cache()
    assert device.num_released == 1
    assert not device.is_random_broken
    # One that fails before it has begun, or after torch ended it, is not ended again.
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: torch.ones(1).reshape(7))
    with pytest.raises(RuntimeError, match="shape"):
        record(lambda: torch.ones(2))
    assert device.num_released == 1


async def test_an_engine_on_a_gpu_has_a_stream_for_its_tokens_and_one_for_all_recordings(make_model, monkeypatch):
    """Beside a trainer's work its tokens need not wait, and each further stream would cost some 32 MB for good."""
    model, device = make_model("llama"), Device(monkeypatch)
    monkeypatch.setattr(model, "to", lambda place: model)
    asked = [row.request for row in rows(4)]
    alone = TransformersEngine(make_model("llama"))
    expected = await asyncio.gather(*(alone.generate(request) for request in asked))
    engine = TransformersEngine(model, device="cuda:1")
    for _ in range(2):
        made = await asyncio.gather(*(engine.generate(request) for request in asked))
        assert [one.response_ids.tolist() for one in made] == [one.response_ids.tolist() for one in expected]
        await engine.pause()
        await engine.resume()
    assert device.log == ["forebay-engine_0 works in stream 1"]
    # The probe's, before there is a worker, and those of each turn.
    assert len(device.recorded_in) >= 3
    assert set(device.recorded_in) == {"stream 2"}
    copy = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *given: device.log.append("copied") or copy(*given))
    await engine.load_weights(make_model("llama").named_parameters(), 1)
    assert device.log[1:] == ["stream 1 waits for the default", "copied", "the host waits for stream 1"]
    await asyncio.gather(engine.close(), alone.close())


def test_nothing_waits_for_a_whole_device():
    """While a thread records, the driver refuses that to all others, and gives the recording up."""
    sources = Path(forebay.__file__).parent.rglob("*.py")
    assert not [path for path in sources if "cuda.synchronize(" in path.read_text(encoding="utf-8")]


def test_attention_of_cudnn_is_out_of_use(make_model):
    torch.backends.cuda.enable_cudnn_sdp(True)
    new_batch(make_model("llama"))
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("text", ["CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED in cublasCreate"])
def test_memory_that_runs_out_while_recording_is_a_shortage(make_model, caplog, text):
    model, recorder = make_model("llama"), Recorder()
    expected = run(new_batch(model), rows(4))
    record, num_tries = recorder.record, 0

    def short_once(work: Callable[[], torch.Tensor]) -> Callable[[], None]:
        nonlocal num_tries
        num_tries += 1
        if num_tries == 1:
            raise RuntimeError(text)
        return record(work)

    recorder.record = short_once
    batch, waiting, ended = new_batch(model, recorder), rows(4), {}
    while waiting or batch.size:
        left = dict(batch.admit(waiting) if waiting else batch.step(0))
        waiting = sorted((row for row in left if left[row] is None), key=lambda row: row.turn)
        ended |= {row: completion for row, completion in left.items() if completion is not None}
    got = [completion for _, completion in sorted(ended.items(), key=lambda item: item[0].turn)]
    assert [one.response_ids.tolist() for one in got] == [one.response_ids.tolist() for one in expected]
    assert caplog.text.count("out of memory with a key/value cache") == 1
    assert recorder.num_replayed, "it went on recording"


WAITS = {"cpu", "item", "tolist", "nonzero", "unique", "__bool__", "__int__", "__float__", "__index__"}


class Reads(TorchFunctionMode):
    """What Python asks of tensors that a GPU would have to wait for, and the keys that attention is given."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.uploads: list[Any] = []
        self.key_heads: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in WAITS:
            self.reads.append(name)
        if name in ("from_numpy", "tensor", "as_tensor"):
            self.uploads.append(name)
        if name == "scaled_dot_product_attention":
            self.key_heads.add(args[1].shape[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_a_step_reads_once_from_the_device_and_copies_no_keys_for_shared_heads(kind, make_model):
    model = make_model(kind)
    batch = new_batch(model)
    run(batch, rows(6))
    batch.admit(rows(6))
    batch.step(0)
    with Reads() as seen:
        for step in range(1, 5):
            batch.step(step)
    assert seen.reads == ["cpu"] * 4
    assert not seen.uploads, "what rows draw by is on the device until rows join or leave"
    config = model.config
    assert seen.key_heads == {getattr(config, "num_key_value_heads", config.num_attention_heads)}
