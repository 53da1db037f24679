"""Weights of a trainer on two ranks, in buckets to two servers: bit for bit, also where a server fails."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from forebay.engines import RolloutController
from forebay.engines.weights import buckets as bucket_module
from forebay.engines.weights.buckets import Buckets
from forebay.io.shared import MemoryFile
from forebay.models.live_weights import LiveWeights
from forebay.train import TrainConfig, TrainController
from forebay.types import RolloutState, SampleParams, Status

pytestmark = pytest.mark.usefixtures("warm")

BUCKET = 4096


@pytest.fixture(scope="module")
def trainer(warm) -> Iterator[TrainController]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=23,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=True,
        )
    )
    trainer = TrainController(model, TrainConfig(ranks=2), pad_token_id=0, engine_dtype="bfloat16")
    yield trainer
    trainer.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr("forebay.engines.pool._TRY_AGAIN_S", 0.01)
    monkeypatch.setattr(bucket_module, "BUCKET_BYTES", BUCKET)


@pytest.fixture
async def servers(start_fake) -> list[Any]:
    return [await start_fake(), await start_fake()]


@pytest.fixture
async def controller(servers, connect) -> AsyncIterator[RolloutController]:
    controller = RolloutController([connect(server, bucket_device="cpu") for server in servers])
    yield controller
    await controller.close()


def train(trainer: TrainController) -> dict[str, torch.Tensor]:
    """A step; the weights after it, as engines are to have them."""
    random = np.random.default_rng(trainer.train_step)
    groups = [
        [
            RolloutState(
                [],
                rollout_id=f"{number}.{member}",
                group_id=number,
                prompt_ids=[3, 4],
                response_ids=random.integers(3, 23, 5),
                logprobs=-random.random(5),
                response_model_steps=np.zeros(5),
                reward={"score": float(member)},
                status=Status.COMPLETED,
            )
            for member in range(2)
        ]
        for number in range(2)
    ]
    trainer.fit(groups)
    found: Any = trainer._learner.weights()
    return {name: tensor.bfloat16() for name, tensor in found}


def assert_has(server: Any, expected: dict[str, torch.Tensor]) -> None:
    assert list(server.received) == list(expected), "in the order of the trainer"
    assert all(torch.equal(server.received[name], tensor) for name, tensor in expected.items())


def count_answers(server: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each bucket that the server takes from now on."""
    took, receive = list[int](), server._receive

    def counting(info: dict[str, Any]) -> None:
        took.append(sum(info["tensor_sizes"]))
        receive(info)

    monkeypatch.setattr(server, "_receive", counting)
    return took


async def test_ranks_fill_buckets_that_all_servers_take_and_nobody_has_the_whole_model(
    trainer, servers, controller, monkeypatch
):
    expected = train(trainer)
    made: list[int] = []

    class Counted(MemoryFile):
        def __init__(self, num_bytes: int) -> None:
            made.append(num_bytes)
            super().__init__(num_bytes)

    monkeypatch.setattr(bucket_module, "MemoryFile", Counted)
    # Where a whole model was put together before.
    monkeypatch.setattr("forebay.train.parallel.learner.MemoryFile", None)
    took = [count_answers(server, monkeypatch) for server in servers]
    await trainer.sync_weights(controller)
    whole = sum(tensor.nbytes for tensor in expected.values())
    for server, sizes in zip(servers, took, strict=True):
        assert_has(server, expected)
        assert sum(sizes) == whole
        assert len(sizes) > 2
        assert max(sizes) <= BUCKET
        assert not server.loaded, "nothing went over the disk"
        # Confirmed by its name.
        assert "step_000001" in server.version
    assert set(made) == {BUCKET}
    assert controller.model_step == trainer.model_step
    # Everything is given back but for what the next hand-over makes anew.
    assert not controller.engines[0]._files.current.live._filled


async def test_servers_that_are_close_together_share_what_was_filled_once():
    copied: list[str] = []

    class Source:
        def sizes(self) -> Iterator[tuple[str, torch.Tensor]]:
            return ((str(number), torch.zeros(BUCKET // 4)) for number in range(6))

        def copy_weights(self, layout: Any, memory: Any) -> None:
            copied.append(layout[0][0])

    buckets = Buckets(LiveWeights(Source(), "float32", threading.Lock(), int), "cpu")
    places: list[set[str]] = []
    slow = buckets.reading(0)
    first = await slow.__aenter__()
    for number in range(len(buckets)):
        async with buckets.reading(number) as one, buckets.reading(number) as other:
            assert one is other
            places.append({one.handle["path"]})
            # What a slower server reads is not written again.
            assert number == 0 or one.memory is not first.memory
    assert Counter(copied) == Counter(str(number) for number in range(6)), "each was filled once"
    assert len(set.union(*places)) <= 4
    await slow.__aexit__(None, None, None)


def fails_in_the_middle(server: Any, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server takes a bucket, and no more until `failing` is cleared."""
    receive = server._receive

    def once(info: dict[str, Any]) -> None:
        receive(info)
        server.failing["/update_weights"] = fault
        monkeypatch.setattr(server, "_receive", receive)

    monkeypatch.setattr(server, "_receive", once)


async def answer_of(controller: RolloutController) -> RolloutState:
    state = RolloutState([], rollout_id=1, prompt_ids=[1], sample_params=SampleParams(max_tokens=3))
    return await controller.generate_sample(state)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("fault", ["dies", "refuses", "hangs"])
async def test_a_server_that_fails_in_the_middle_holds_up_no_other_and_comes_back_with_the_weights_of_now(
    trainer, servers, controller, ask, monkeypatch, fault
):
    train(trainer)
    await trainer.sync_weights(controller)
    expected = train(trainer)
    fails_in_the_middle(servers[0], fault, monkeypatch)
    syncing = asyncio.create_task(trainer.sync_weights(controller))
    name = f"step_{trainer.model_step:06d}"
    await until(lambda: name in servers[1].version)
    assert_has(servers[1], expected)
    await until(lambda: servers[1].state == "running")
    if fault == "hangs":
        # The other generates with the new weights while this one still waits for an answer.
        assert not syncing.done()
        completion = await controller.engines[1].generate(ask(max_tokens=1))
        assert completion.model_steps.tolist() == [trainer.model_step]
        # As when the call's limit has passed.
        for connection in list(servers[0]._connections):
            connection.transport.abort()
    await syncing
    assert controller.model_step == trainer.model_step
    state = await answer_of(controller)
    assert state.response_model_steps.tolist() == [trainer.model_step] * 3
    servers[0].failing.clear()
    await until(lambda: len(controller.engines_up) == 2)
    assert_has(servers[0], expected)
    assert name in servers[0].version


async def test_no_hand_over_waits_for_a_server_that_is_away(trainer, servers, controller):
    train(trainer)
    await trainer.sync_weights(controller)
    await servers[0].kill()
    controller._lose(next(iter(controller._members)), "it was killed")
    expected = train(trainer)
    await trainer.sync_weights(controller)
    assert_has(servers[1], expected)
    await servers[0].start()
    await until(lambda: len(controller.engines_up) == 2)
    assert_has(servers[0], expected)
    state = await answer_of(controller)
    assert state.response_model_steps.tolist() == [trainer.model_step] * 3


async def test_weights_of_ranks_are_sent_to_all_workers_of_two_servers(
    trainer, start_fake, fake_kinds, connect, monkeypatch
):
    monkeypatch.setattr(fake_kinds["FarVLLM"], "num_workers", 2)
    far = [await start_fake(fake_kinds["FarVLLM"]) for _ in range(2)]
    controller = RolloutController([connect(server, bucket_device="cpu", sender_device="cpu") for server in far])
    for _ in range(2):
        expected = train(trainer)
        await trainer.sync_weights(controller)
        await until(lambda: len(controller.engines_up) == 2)
        for server in far:
            assert f"step_{trainer.model_step:06d}" in server.version
            assert server.received.keys() == expected.keys()
            assert all(torch.equal(server.received[name], tensor) for name, tensor in expected.items())
            assert server.calls.count("POST /update_weights") > 2
            assert not server.loaded
    await controller.close()
    assert all(engine._weights.sender._process.returncode is not None for engine in controller.engines)


async def test_servers_that_load_files_get_them_bucket_by_bucket(trainer, servers, connect, monkeypatch):
    engine = connect(servers[0])
    await engine.bring_up()
    expected = train(trainer)
    monkeypatch.setattr("forebay.train.parallel.learner.MemoryFile", None)
    await trainer.sync_weights(engine_only := RolloutController(engine))
    files = sorted(servers[0].loaded[-1].glob("*.safetensors"))
    assert len(files) > 2
    assert all(file.stat().st_size < 2 * BUCKET for file in files)
    stored = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())
    await engine_only.close()
