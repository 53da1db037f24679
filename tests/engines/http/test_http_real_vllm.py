"""The contract over a real vLLM server on this machine's CPU.

``FOREBAY_VLLM_PYTHON=/path/to/an/environment/bin/python`` names an interpreter that has vLLM.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from forebay.config import Component
from forebay.engines import EngineSurroundings, RolloutController, build_engines
from forebay.engines.local.sampling import Sampling, draw
from forebay.engines.servers.dialects import Dialect
from forebay.engines.servers.launch import LocalServer
from forebay.engines.servers.link import ServerLink
from forebay.engines.servers.sender import PROGRAM
from forebay.engines.weights.files import shared_weights, write_untied
from forebay.io.shared import views
from forebay.models import ModelConfig, load_model, load_tokenizer
from forebay.models.config import TinyConfig
from forebay.models.live_weights import LiveWeights
from forebay.models.starting_weights import BASE_FINGERPRINT, fingerprint
from forebay.models.tiny import write_tiny
from forebay.train import TrainConfig, TrainController
from forebay.train.model.lora import adapter_config, adapter_weights, add_lora, model_weights
from forebay.train.weight_sync import sync_weights
from forebay.types import RolloutState, SampleParams, Status

PYTHON = os.environ.get("FOREBAY_VLLM_PYTHON")
CONTEXT = 2048
LONG = 1800
"""Tokens of a rollout that is to be caught while it runs."""
PROMPT = [1, 20, 21, 22]

pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="FOREBAY_VLLM_PYTHON names no interpreter with vLLM"),
    pytest.mark.asyncio(loop_scope="module"),
]


class Trainer:
    """A model whose weights change, and which knows what each of them makes of a response."""

    def __init__(self, folder: Path) -> None:
        self.model = load_model(folder)
        self.step = 0
        self.versions: dict[int, dict[str, torch.Tensor]] = {}
        self.keep()

    def keep(self) -> None:
        self.versions[self.step] = {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def train(self) -> list[tuple[str, torch.Tensor]]:
        self.step += 1
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        self.keep()
        return list(self.model.named_parameters())

    def sizes(self) -> Any:
        return self.model.named_parameters()

    def copy_weights(self, layout: Any, memory: Any) -> None:
        for name, place in views(layout, memory.data):
            place.copy_(self.model.get_parameter(name).detach())

    def logprobs(self, prompt: list[int], ids: list[int], step: int, **how: Any) -> np.ndarray:
        """Of each response token under the distribution that `how` draws from, by the weights of `step`."""
        self._restore(step)
        with torch.no_grad():
            logits = self.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            logprobs = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].numpy()
        if how.get("temperature") == 0:
            self._restore(self.step)
            return logprobs
        full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | how
        rows = len(ids)
        sampling = Sampling(
            np.full(rows, full["temperature"], np.float32),
            np.full(rows, full["top_k"], np.int64),
            np.full(rows, full["top_p"], np.float32),
        )
        # Whatever is drawn, the rows with the right token tell its log probability.
        found = np.full(rows, np.nan)
        for u in np.linspace(0.0005, 0.9995, 1000):
            both = draw(logits, sampling, torch.full((rows,), u, dtype=torch.float64)).numpy()
            drawn, logprob = both[:, 0].astype(np.int32), both[:, 1].astype(np.float32)
            found = np.where(drawn == np.array(ids), logprob, found)
        self._restore(self.step)
        return found

    def _restore(self, step: int) -> None:
        self.model.load_state_dict(self.versions[step], strict=False)
        self.model.tie_weights()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    write_tiny(folder, TinyConfig(hidden_size=128, num_layers=2, num_heads=2), max_context=CONTEXT, seed=0)
    return folder


@pytest.fixture(scope="module")
def trainer(folder: Path) -> Trainer:
    return Trainer(folder)


def controller_for(folder: Path, scratch: Path, lora_rank: int = 0, **further: Any) -> RolloutController:
    arguments = {"servers": 1, "python": PYTHON, "options": ["--enforce-eager"], **further}
    arguments["environment"] = {
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        **further.get("environment", {}),
    }
    surroundings = EngineSurroundings(
        model_folder=folder,
        model=ModelConfig(source=str(folder)),
        tokenizer=load_tokenizer(folder),
        scratch=scratch,
        lora_rank=lora_rank,
    )
    return RolloutController(build_engines(Component(name="vllm", arguments=arguments), surroundings))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def controller(
    folder: Path, trainer: Trainer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RolloutController]:
    controller = controller_for(folder, tmp_path_factory.mktemp("scratch"))
    # Returns when the server is up.
    await controller.update_weights(list(trainer.model.named_parameters()), 0)
    yield controller
    await controller.close()


def rollout(name: str, max_tokens: int = 40, **params: Any) -> RolloutState:
    return RolloutState(
        [], rollout_id=name, prompt_ids=PROMPT, sample_params=SampleParams(max_tokens=max_tokens, **params)
    )


def check(trainer: Trainer, state: RolloutState, **how: Any) -> None:
    """Every log probability is that of the weights the token is labeled with."""
    ids = state.response_ids.tolist()
    assert len(ids) == len(state.logprobs) == len(state.response_model_steps)
    for step in np.unique(state.response_model_steps):
        own = state.response_model_steps == step
        expected = trainer.logprobs(PROMPT, ids, int(step), **how)[own]
        known = ~np.isnan(expected)
        assert known.mean() > 0.9
        np.testing.assert_allclose(state.logprobs[own][known], expected[known], atol=2e-3)


@pytest.mark.parametrize(
    "how", [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.5}, {"temperature": 0.7, "top_k": 9, "top_p": 0.8}]
)
async def test_log_probabilities_are_those_of_what_was_drawn_from(controller, trainer, how):
    state = await controller.generate_sample(rollout(f"how {how}", **how))
    assert state.status is Status.COMPLETED, state.error_msg
    check(trainer, state, **how)


async def test_the_same_request_draws_the_same_tokens(controller):
    first, again, other = [await controller.generate_sample(rollout(name)) for name in ("same", "same", "other")]
    assert first.response_ids.tolist() == again.response_ids.tolist() != other.response_ids.tolist()


async def test_ends_with_a_stop_id(controller):
    whole = await controller.generate_sample(rollout("stops", temperature=0.0))
    stop_id = int(whole.response_ids[5])
    state = await controller.generate_sample(rollout("stops", temperature=0.0, stop_token_ids=(stop_id,)))
    first = whole.response_ids.tolist().index(stop_id)
    assert state.response_ids.tolist() == whole.response_ids[: first + 1].tolist()
    assert state.finish_reason == "stop"


async def started(controller: RolloutController, count: int) -> None:
    """Returns once so many more tokens are made."""
    before = controller.count_tokens_made()
    async with asyncio.timeout(300):
        while controller.count_tokens_made() < before + count:
            await asyncio.sleep(0.01)


async def test_weights_change_under_running_rollouts_and_labels_are_exact(controller, trainer):
    running = [
        asyncio.create_task(controller.generate_sample(rollout(f"flight {i}", LONG, temperature=0.0)))
        for i in range(4)
    ]
    for _ in range(2):
        await started(controller, 60)
        step_weights = trainer.train()
        await controller.update_weights(step_weights, trainer.step)
    for state in await asyncio.gather(*running):
        assert len(state.response_ids) == LONG or state.finish_reason == "stop"
        assert (np.diff(state.response_model_steps) >= 0).all()
        check(trainer, state, temperature=0.0)
    assert controller.model_step == trainer.step


async def test_pause_keeps_tokens_and_a_continued_rollout_is_whole(controller, trainer):
    running = [
        asyncio.create_task(controller.generate_sample(rollout(f"pause {i}", LONG, temperature=0.0))) for i in range(4)
    ]
    await started(controller, 100)
    await controller.pause_generation()
    states = await asyncio.gather(*running)
    assert {state.status for state in states} == {Status.ABORTED}
    late = await controller.generate_sample(rollout("late"))
    assert (late.status, len(late.response_ids)) == (Status.ABORTED, 0)
    await controller.continue_generation()
    for state in await asyncio.gather(*map(controller.generate_sample, states)):
        assert state.status is Status.COMPLETED
        check(trainer, state, temperature=0.0)


async def test_a_time_limit_and_a_cancellation_free_the_server(controller):
    controller._time_limit_s = 0.02
    for number in range(5):
        state = await controller.generate_sample(rollout(f"overdue {number}", LONG, temperature=0.0))
        # On a crowded machine the server may send all its tokens at once, and late.
        if state.status is Status.ABORTED:
            break
    controller._time_limit_s = None
    assert state.status is Status.ABORTED
    assert "time limit of 0.02 s" in state.error_msg
    running = asyncio.create_task(controller.generate_sample(rollout("cancelled", LONG, temperature=0.0)))
    await started(controller, 20)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    health = await controller.health()
    assert (health.ok, health.num_running, health.num_waiting) == (True, 0, 0)


async def test_a_killed_server_loses_no_rollout_and_comes_back_with_the_current_weights(controller, trainer):
    running = [
        asyncio.create_task(controller.generate_sample(rollout(f"killed {i}", LONG, temperature=0.0)))
        for i in range(4)
    ]
    await started(controller, 100)
    guard = controller.engines[0]._server._process
    server = int(Path(f"/proc/{guard.pid}/task/{guard.pid}/children").read_text().split()[0])
    os.killpg(server, signal.SIGKILL)
    for state in await asyncio.gather(*running):
        assert state.status is Status.COMPLETED, state.error_msg
        check(trainer, state, temperature=0.0)
    counts = controller.counts()
    assert counts["engine_restarts"] == 1
    # Those that were complete by then needed none.
    assert 1 <= counts["retries"] <= 4


class AdapterTrainer(Trainer):
    """The same with adapters: what changes is these, and what is compared is the merged model."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder)
        base_fingerprint = fingerprint(self.model.named_parameters())
        self._adapted = add_lora(load_model(folder), rank=rank, alpha=2 * rank, targets="all-linear")
        self.adapter_config = adapter_config(self._adapted) | {BASE_FINGERPRINT: base_fingerprint}

    def step_adapters(self) -> None:
        self.step += 1
        with torch.no_grad():
            for _, weight in adapter_weights(self._adapted):
                weight.copy_(torch.randn_like(weight) * 0.1)
        self.versions[self.step] = {name: value.clone() for name, value in self.weights()}
        self._restore(self.step)

    def adapters(self) -> Any:
        return ((name, weight.detach()) for name, weight in adapter_weights(self._adapted))

    def weights(self, *, merged: bool = True) -> Any:
        return model_weights(self._adapted, merged=merged)


async def test_adapters_alone_give_what_merged_weights_would_have_given(folder, tmp_path):
    trainer = AdapterTrainer(folder, rank=5)
    controller = controller_for(folder, tmp_path, lora_rank=5)
    [engine] = controller.engines
    weights = tmp_path / "weights"
    assert controller.takes_adapters

    async def sync() -> None:
        trainer.step_adapters()
        await sync_weights(trainer, controller, trainer.step)

    async def makes_what_merged_weights_make(name: str) -> None:
        state = await controller.generate_sample(rollout(name, temperature=0.0))
        assert state.status is Status.COMPLETED, state.error_msg
        assert set(state.response_model_steps.tolist()) == {trainer.step}
        expected = trainer.logprobs(PROMPT, state.response_ids.tolist(), trainer.step, temperature=0)
        np.testing.assert_allclose(state.logprobs, expected, atol=1e-4)
        other = trainer.logprobs(PROMPT, state.response_ids.tolist(), trainer.step - 1, temperature=0)
        assert np.abs(state.logprobs - other).max() > 0.01
        asked = await engine._link.do([engine._dialect.version])
        assert asked["weight_version"] == engine._files.current.version

    try:
        for name in ("first", "second"):
            await sync()
            await makes_what_merged_weights_make(name)
        # What runs goes on under the new ones.
        running = [
            asyncio.create_task(controller.generate_sample(rollout(f"flight {i}", LONG, temperature=0.0)))
            for i in range(3)
        ]
        await started(controller, 60)
        await sync()
        for state in await asyncio.gather(*running):
            check(trainer, state, temperature=0.0)
        assert not list(weights.rglob("model.safetensors"))
        # Another base: it is handed over first, and the adapters lie on it.
        await controller.update_weights(list(trainer.weights()), trainer.step)
        await sync()
        await makes_what_merged_weights_make("on the base again")
        # Started anew, it has the base and the adapters.
        await engine._server.stop()
        trainer.step_adapters()
        await sync_weights(trainer, controller, trainer.step)
        await makes_what_merged_weights_make("after a restart")
        assert controller.counts()["engine_restarts"] == 1
    finally:
        await controller.close()


async def test_live_weights_and_held_requests(folder, trainer, tmp_path):
    """vLLM's own cycle, over shared memory: it loads Forebay's transfer engine as a plug-in."""
    controller = controller_for(folder, tmp_path, in_flight="keep")
    engine, turn = controller.engines[0], threading.Lock()
    # The output layer is the embedding to the trainer, and written out for vLLM on a CPU, which packs it.
    live = LiveWeights(trainer, "float32", turn, lambda: trainer.step)
    trainer._restore(trainer.step)
    try:
        await controller.update_weights(live, trainer.step)
        first = trainer.step
        check(trainer, await controller.generate_sample(rollout("live", 20, temperature=0.0)), temperature=0.0)
        running = [
            asyncio.create_task(controller.generate_sample(rollout(f"held {i}", LONG, temperature=0.0)))
            for i in range(2)
        ]
        await started(controller, 40)
        trainer.train()
        await controller.update_weights(live, trainer.step)
        states = await asyncio.gather(*running)
        for state in states:
            assert len(state.response_ids) == LONG or state.finish_reason == "stop"
            steps = state.response_model_steps.tolist()
            assert steps == sorted(steps)
            assert set(steps) <= {first, trainer.step}
            # Before the update every token is exactly of the old weights; after it, over the old cache.
            own = state.response_model_steps == first
            ids = state.response_ids.tolist()
            expected = trainer.logprobs(PROMPT, ids, first, temperature=0.0)
            np.testing.assert_allclose(state.logprobs[own], expected[own], atol=2e-3)
            if trainer.step in steps:
                assert abs(state.logprobs[~own] - expected[~own]).max() > 0.01
        assert any(trainer.step in state.response_model_steps for state in states)
        # A new request meets no cache of older weights.
        check(trainer, await controller.generate_sample(rollout("new", 20, temperature=0.0)), temperature=0.0)
        link = engine._link
        assert (await link.do([link.dialect.version]))["weight_version"] == engine._weights.label
        assert not list(tmp_path.rglob("weights")), "nothing went over the disk"
    finally:
        await controller.close()


async def test_two_ranks_train_and_the_server_computes_what_they_do(folder, tmp_path, warm, monkeypatch):
    """Each bucket is filled by both ranks, and loaded by vLLM: no rank has it all, and no disk is used."""
    monkeypatch.setattr("forebay.engines.weights.buckets.BUCKET_BYTES", 1 << 19)
    controller = controller_for(folder, tmp_path)
    config = TrainConfig(ranks=2, lr=1e-2, token_budget=400)
    ranked = TrainController(load_model(folder), config, pad_token_id=0)
    try:
        for step in range(3):
            num_bytes = await ranked.sync_weights(controller)
            assert num_bytes > 2 << 19, "one bucket would do"
            states = [
                RolloutState(
                    [], rollout_id=f"{step}:{number}", prompt_ids=PROMPT, sample_params=SampleParams(max_tokens=40)
                )
                for number in range(4)
            ]
            await asyncio.gather(*map(controller.generate_sample, states))
            for number, state in enumerate(states):
                assert state.status is Status.COMPLETED, state.error_msg
                assert set(state.response_model_steps.tolist()) == {step}
                state.reward = {"score": float(number % 2)}
            batch = ranked.pack([states])
            trainers = ranked.compute_logprobs(batch)
            servers = np.concatenate([state.logprobs for state in states])
            np.testing.assert_allclose(servers, trainers, atol=1e-5)
            await asyncio.to_thread(ranked.fit, [states])
            # The weights of before would not do.
            assert np.abs(ranked.compute_logprobs(batch) - servers).max() > 1e-3
        assert not list(tmp_path.rglob("weights"))
    finally:
        await controller.close()
        ranked.close()


async def test_weights_are_sent_to_a_server_of_others_which_maps_no_memory(folder, trainer, tmp_path, monkeypatch):
    """Over gloo, as to a machine of its own."""
    monkeypatch.setattr("forebay.engines.weights.buckets.BUCKET_BYTES", 1 << 19)
    monkeypatch.setattr("forebay.engines.pool._TRY_AGAIN_S", 0.1)
    told = Dialect.bucket

    def without_path(self: Dialect, bucket: Any) -> Any:
        call = told(self, bucket)
        del call.body["update_info"]["path"]
        return call

    monkeypatch.setattr(Dialect, "bucket", without_path)
    dialect, served = Dialect(), write_untied(folder, tmp_path / "served", shared_weights(folder))
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    own = dialect.command(str(served), 0, CONTEXT, "float32")
    place = own.index("--port") + 1

    def command(port: int) -> list[str]:
        return [
            PYTHON,
            *own[:place],
            str(port),
            *own[place + 1 :],
            *dialect.transfer_options["cpu"],
            "--enforce-eager",
        ]

    server = LocalServer(
        command,
        log=tmp_path / "server.log",
        environment={**dialect.environment, **environment, "PYTHONPATH": str(PROGRAM.parent)},
    )
    await server.start(ServerLink(dialect, server).is_ready)
    try:
        controller = await asyncio.to_thread(
            controller_for, folder, tmp_path, servers=0, urls=[server.url], python="", options=[]
        )
        live = LiveWeights(trainer, "float32", threading.Lock(), lambda: trainer.step)
        for number in range(2):
            trainer.train()
            await controller.update_weights(live, trainer.step)
            state = await controller.generate_sample(rollout(f"sent {number}", 20, temperature=0.0))
            assert state.response_model_steps.tolist() == [trainer.step] * len(state.response_ids)
            check(trainer, state, temperature=0.0)
        [engine] = controller.engines
        assert engine._weights.sender._has_sent
        assert not list(tmp_path.rglob("weights")), "nothing went over the disk"
        await controller.close()
    finally:
        await server.stop()
