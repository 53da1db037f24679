"""What runs in the process of an engine on a cluster, called here as what it is: a plain class."""

import asyncio
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_ray_run import run_config

from forebay.cluster.calls import NotBuilt
from forebay.cluster.engines import EngineActor, EngineSpec, RayEngine, engine_on
from forebay.cluster.trainer import TrainerActor, TrainerSpec
from forebay.config import Component
from forebay.engines import EngineLost, GenerateRequest, ScriptedEngine
from forebay.engines.pool import EnginePool
from forebay.engines.servers import build
from forebay.engines.servers.launch import LocalServer
from forebay.io.shared import lay_out, write
from forebay.models import load_model, resolve_model
from forebay.models.starting_weights import AdaptersRefusedError
from forebay.train.model.lora import adapter_weights
from forebay.types import SampleParams

NOTHING = ((), np.empty(0, np.uint8))
"""No weights, for engines that take none."""


class Frail(ScriptedEngine):
    """A remote engine that is lost over its first request, and then does not come back in this process."""

    def __init__(self, marker):
        super().__init__(lambda request: [7, 8, 9])
        self._marker = marker
        self._is_lost = False

    async def bring_up(self):
        if self._is_lost:
            raise EngineLost("the server does not start any more")

    async def generate(self, request):
        try:
            os.close(os.open(self._marker, os.O_CREAT | os.O_EXCL))
            self._is_lost = True
        except FileExistsError:
            pass
        completion = await super().generate(request)
        if not self._is_lost:
            return completion
        return replace(completion, finish_reason="error", error_msg="no answer", lost=True)


def frail_engines(surroundings, marker):
    return [Frail(marker)]


def spec_of(config, **changes):
    return EngineSpec(
        **{
            "config": config,
            "model_folder": resolve_model(config.model, seed=config.seed),
            "name": "engine 0",
            "search_path": tuple(sys.path),
            "device": "cpu",
            "serves_at_once": False,
            **changes,
        }
    )


def ask(name, prompt=(3, 4, 5)):
    ids = np.array(prompt, np.int32)
    return GenerateRequest(request_id=name, input_ids=ids, params=SampleParams(max_tokens=5), max_tokens=5, seed=0)


async def answers(actor, *requests):
    found = {}
    async for results in actor.generate(requests, "caller"):
        found.update(results)
    return [found[number] for number in range(len(requests))]


def frail_config(tmp_path):
    arguments = {"marker": str(tmp_path / "marker")}
    return run_config(tmp_path, engine={"name": f"{__name__}:frail_engines", "arguments": arguments})


async def until_said(signs):
    """The signs of life up to the first that says something."""
    async for sign in signs:
        yield sign[0]
        if sign[0]:
            return


async def test_engines_that_are_given_up_lose_every_request_and_say_why(tmp_path):
    actor = EngineActor()
    with pytest.raises(NotBuilt):
        await actor.pause()
    await actor.start(spec_of(frail_config(tmp_path)))
    assert [completion.lost for completion in await answers(actor, ask("early"))] == [True]
    await actor.load_weights(NOTHING, 1)
    lost = await answers(actor, ask("a"), ask("b"))
    assert [(c.finish_reason, c.lost) for c in lost] == [("error", True)] * 2
    async with asyncio.timeout(300):
        signs = [sign async for sign in until_said(actor.live())]
    assert "does not start any more" in signs[-1]
    # Nobody is to be sent here any more, and new weights do not change that.
    serving = asyncio.ensure_future(actor.serving())
    with pytest.raises(EngineLost):
        await actor.load_weights(NOTHING, 2)
    assert not serving.done()
    serving.cancel()
    await actor.close()


async def test_adapters_alone_give_what_merged_weights_would(tmp_path):
    """From the trainer's process to the engine's, both called here as plain classes."""
    config = run_config(tmp_path, train={"lr": 1e-2, "lora_rank": 2})
    own = {name: value for name, value in vars(spec_of(config)).items() if name != "serves_at_once"}
    trainer, alone, whole = TrainerActor(), EngineActor(), EngineActor()
    trainer.start(TrainerSpec(**{**own, "ranks": ()}))
    for engine in (alone, whole):
        await engine.start(spec_of(config))
    with torch.no_grad():
        for _, weight in adapter_weights(trainer._trainer.model):
            weight.add_(torch.randn_like(weight))
    (step, num_bytes, adapters), laid_out = trainer.weights(True)
    assert adapters["r"] == 2
    await alone.load_weights(laid_out, step, adapters)
    (step, whole_bytes, nothing), laid_out = trainer.weights(False)
    assert nothing is None
    assert num_bytes < whole_bytes
    await whole.load_weights(laid_out, step)
    found = [dict(actor._pool.engines[0]._model.named_parameters()) for actor in (alone, whole)]
    begun = dict(load_model(spec_of(config).model_folder).named_parameters())
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())
    assert any(not torch.equal(begun[name], value) for name, value in found[0].items())
    # One that keeps no starting weights says so, and gets merged ones then.
    refusing = EngineActor()
    await refusing.start(spec_of(run_config(tmp_path, engine=f"{__name__}:two_engines")))
    with pytest.raises(AdaptersRefusedError, match="whole weights only"):
        await refusing.load_weights(laid_out, step, adapters)
    for engine in (alone, whole, refusing):
        await engine.close()


ABORTED = []


class Aborting(ScriptedEngine):
    async def abort(self, request_ids):
        ABORTED.append(list(request_ids))
        if len(ABORTED) == 1:
            raise EngineLost("no answer")


def two_engines(surroundings):
    return [Aborting(lambda request: [7]) for _ in range(2)]


async def test_a_lost_engine_keeps_no_abort_from_the_others(tmp_path):
    ABORTED.clear()
    actor = EngineActor()
    await actor.start(spec_of(run_config(tmp_path, engine=f"{__name__}:two_engines")))
    await actor.abort(["a", "b"])
    assert ABORTED == [["a", "b"], ["a", "b"]]
    await actor.close()


async def test_an_engine_that_begins_in_a_pause_serves_from_its_end_on(tmp_path):
    """It would abort what comes while the others run already."""
    (tmp_path / "marker").touch()
    actor = EngineActor()
    await actor.start(spec_of(frail_config(tmp_path)))
    await actor.pause()
    await actor.load_weights(NOTHING, 1)
    (early,) = await answers(actor, ask("early"))
    assert early.lost
    serving = asyncio.ensure_future(actor.serving())
    await asyncio.sleep(0)
    assert not serving.done()
    await actor.resume()
    await serving
    (served,) = await answers(actor, ask("served"))
    assert served.response_ids.tolist() == [7, 8, 9]
    # One that serves ends what runs, and stays where callers look for it.
    await actor.pause()
    (aborted,) = await answers(actor, ask("aborted"))
    assert (aborted.finish_reason, aborted.lost) == ("abort", False)
    await actor.close()


class Call:
    """A method of an actor, as Ray's handle has it."""

    def __init__(self, method):
        self.remote = method

    def options(self, **_):
        return self


def bounded_engines(surroundings):
    return [ScriptedEngine(lambda request: [7], max_running=n) for n in (2, 3)]


async def test_workers_send_an_engine_no_more_than_its_process_runs_at_once(tmp_path):
    actor = EngineActor()
    await actor.start(spec_of(run_config(tmp_path, engine=f"{__name__}:bounded_engines")))
    assert await actor.facts() == (actor._pool.max_context_tokens, False, False)
    pool = EnginePool(
        [RayEngine(SimpleNamespace(serving=Call(actor.serving), generate=Call(None)), caller="worker 0")]
    )
    assert pool.max_running is None
    (member,) = pool._members
    pool._start()
    await actor.load_weights(NOTHING, 1)
    await member.bringing_up
    assert (pool.max_running, member.most) == (5, 5)
    await actor.close()


async def test_a_request_that_can_never_run_fails_alone(tmp_path):
    config = frail_config(tmp_path)
    (tmp_path / "marker").touch()
    actor = EngineActor()
    await actor.start(spec_of(config))
    await actor.load_weights(NOTHING, 1)
    good, bad = await answers(actor, ask("good"), ask("empty", ()))
    assert good.response_ids.tolist() == [7, 8, 9]
    assert isinstance(bad, ValueError)
    await actor.close()


class Faulty(ScriptedEngine):
    async def generate(self, request):
        if request.request_id == "bad":
            raise KeyError("no such adapter")
        return await super().generate(request)


def faulty_engines(surroundings):
    return [Faulty(lambda request: [7])]


async def test_a_request_that_raises_takes_no_other_along(tmp_path):
    actor = EngineActor()
    await actor.start(spec_of(run_config(tmp_path, engine=f"{__name__}:faulty_engines"), serves_at_once=True))
    good, bad, other = await answers(actor, ask("good"), ask("bad"), ask("other"))
    assert [good.response_ids.tolist(), other.response_ids.tolist()] == [[7], [7]]
    assert (bad.finish_reason, bad.lost) == ("error", False)
    assert "no such adapter" in bad.error_msg
    await actor.close()


def published(weights):
    """As the object store has them."""
    layout, num_bytes = lay_out(weights)
    data = torch.empty(num_bytes, dtype=torch.uint8)
    write(layout, data, weights)
    data = data.numpy()
    data.setflags(write=False)
    return layout, data


async def test_a_running_server_in_the_process(tmp_path, start_fake):
    server = await start_fake()
    config = run_config(tmp_path, engine={"name": "vllm", "arguments": {"urls": [server.url]}})
    actor, spec = EngineActor(), spec_of(config)
    await actor.start(spec)
    await actor.load_weights(published(list(load_model(spec.model_folder).state_dict().items())), 3)
    (completion,) = await answers(actor, ask("a"))
    assert completion.response_ids.tolist() == [13] * 5
    assert set(completion.model_steps) == {3}
    await actor.pause()
    (aborted,) = await answers(actor, ask("b"))
    assert aborted.finish_reason == "abort"
    await actor.resume()
    assert (await actor.health()).ok
    await actor.close()
    # It may be on another machine.
    assert server.loaded


@pytest.fixture
async def started(start_fake, monkeypatch):
    """A scripted server that stands for the one which the run starts."""
    fake = await start_fake()
    fake.context = 512

    class Started(LocalServer):
        url, is_running = fake.url, False

        async def start(self, is_ready):
            while not await is_ready():
                await asyncio.sleep(0.01)
            self.is_running = True

        async def wait(self):
            await asyncio.Event().wait()

        async def stop(self):
            self.is_running = False

    monkeypatch.setattr(build, "LocalServer", Started)
    monkeypatch.setattr("forebay.engines.pool._TRY_AGAIN_S", 0.01)
    return fake


OWN_SERVER = {"name": "vllm", "arguments": {"servers": 1}}


async def test_a_server_that_reads_files_is_given_lent_weights_in_pieces(tmp_path, started, monkeypatch):
    monkeypatch.setattr("forebay.engines.weights.buckets.BUCKET_BYTES", 4096)
    arguments = {"servers": 1, "weights_folder": str(tmp_path / "shared")}
    actor, spec = EngineActor(), spec_of(run_config(tmp_path, engine={"name": "vllm", "arguments": arguments}))
    await actor.start(spec)
    begun = list(load_model(spec.model_folder).named_parameters())
    for step in (1, 2):
        weights = [(name, torch.full_like(weight, float(step))) for name, weight in begun]
        await actor.load_weights(published(weights), step)
        written = [load_file(file) for file in started.loaded[-1].glob("model*.safetensors")]
        assert len(written) > 2
        assert sum(map(len, written)) >= len(weights)
        assert all(any(torch.equal(part.get(name, NONE), weight) for part in written) for name, weight in weights)
        (completion,) = await answers(actor, ask("a"))
        assert completion.response_ids.tolist() == [10 + step] * 5
        assert set(completion.model_steps) == {step}
    # One that comes back reads them again.
    await started.kill()
    asking = asyncio.create_task(answers(actor, ask("b")))
    while actor._pool.engines_up:
        await asyncio.sleep(0.01)
    await started.start()
    (completion,) = await asking
    assert completion.response_ids.tolist() == [12] * 5
    await actor.close()


NONE = torch.empty(0)


async def test_a_server_that_is_started_there_is_given_adapters_alone(tmp_path, started):
    config = run_config(tmp_path, train={"lr": 1e-2, "lora_rank": 2}, engine=OWN_SERVER)
    own = {name: value for name, value in vars(spec_of(config)).items() if name != "serves_at_once"}
    trainer, actor = TrainerActor(), EngineActor()
    trainer.start(TrainerSpec(**{**own, "ranks": ()}))
    await actor.start(spec_of(config))
    _, takes_adapters, takes_buckets = await actor.facts()
    assert (takes_adapters, takes_buckets) == (True, False)
    (step, _, adapters), laid_out = trainer.weights(takes_adapters)
    await actor.load_weights(laid_out, step, adapters)
    assert started.lora_calls == 1
    assert len(started.loaded) == 1, "the base was there"
    (completion,) = await answers(actor, ask("a"))
    assert completion.response_ids.tolist() == [30] * 5
    await actor.close()
    # One that tries held-out prompts only is given none.
    await (trying := EngineActor()).start(spec_of(config, serves_at_once=True))
    assert not (await trying.facts())[1]
    await trying.close()


@pytest.mark.parametrize(
    ("name", "arguments", "device"),
    [
        ("transformers", {}, "cuda"),
        ("process", {"engines": 2}, "cuda"),
        ("process", {"engine": "package.module:Engine"}, None),
        ("transformers", {"device": "cuda:1"}, "cuda:1"),
        ("vllm", {"urls": ["http://127.0.0.1:1"]}, None),
    ],
)
def test_an_engine_of_ours_gets_the_device_that_ray_gave(name, arguments, device):
    engine = Component(name=name, arguments=arguments)
    assert engine_on("cuda", engine).arguments.get("device") == device
    # Named too: Ray does not hide GPUs from a process that asked for none, where "auto" would take one.
    assert engine_on("cpu", engine).arguments.get("device") == ("cpu" if device == "cuda" else device)
