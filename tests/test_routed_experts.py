"""Experts of a mixture: what an engine chose is what a rollout says and what a trainer computes with."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from forebay.engines import Completion, GenerateRequest, RolloutController, ScriptedEngine, TransformersEngine
from forebay.engines.pool import EnginePool
from forebay.engines.process.engine import ProcessEngine
from forebay.engines.process.host import HostSession
from forebay.models.routing import Routing, copied
from forebay.replay.format.encode import pack_group
from forebay.replay.format.packed import unpack_group
from forebay.train import TrainConfig, TrainController
from forebay.train.batch import TrainBatch
from forebay.train.collate import collate
from forebay.train.model.forward import response_logprobs
from forebay.train.packing import Packer
from forebay.types import RolloutState, SampleParams, Status

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.3,
}
LAYOUTS = ("padded", "packed", "shared_prompt")
CPU = torch.device("cpu")


def moe(seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SIZES, "num_experts": 8, **changes})).eval()


async def rolled_out(controller: RolloutController, max_tokens: int = 12) -> list[list[RolloutState]]:
    groups = [
        [
            RolloutState(
                [],
                rollout_id=4 * group + member,
                group_id=group,
                prompt_ids=np.arange(1, 3 + 3 * group),
                sample_params=SampleParams(max_tokens=max_tokens + group + member),
                reward={"score": float(member)},
            )
            for member in range(3)
        ]
        for group in range(2)
    ]
    await asyncio.gather(*(controller.generate_sample(state) for group in groups for state in group))
    return groups


def chosen(model: Any, ids: Any) -> np.ndarray:
    """By a plain pass over these tokens."""
    plain = copy.deepcopy(model)
    routing = Routing(plain)
    with torch.no_grad():
        plain(torch.as_tensor(np.asarray(ids, np.int64))[None])
    return routing.taken().numpy()


def replayed(model: Any, groups: Any, layout: str, routing: Routing | None) -> np.ndarray:
    """Log probabilities of the response tokens, by token."""
    batch = TrainBatch.from_groups(groups)
    Packer(200, layout=layout).pack_pad_dispatch(batch)
    found = np.zeros(batch.num_response_tokens, np.float32)
    for pack in batch.packs[0][0]:
        micro = collate(batch, pack, pad_token_id=0, device=CPU)
        with torch.no_grad():
            found[micro.token_index] = response_logprobs(model, micro, routing=routing).logprobs.numpy()
    return found


@pytest.mark.parametrize("cache_tokens", ["auto", 150])
async def test_an_engine_says_where_it_sent_each_token(cache_tokens: Any) -> None:
    """Also of requests that were given up for want of memory and computed again."""
    model = moe()
    engine = TransformersEngine(copy.deepcopy(model), cache_tokens=cache_tokens)
    groups = await rolled_out(RolloutController(engine))
    await engine.close()
    for state in (state for group in groups for state in group):
        assert state.routed_experts.dtype == np.int8
        assert state.routed_experts.shape == (len(state.tokens) - 1, 2, 2)
        assert np.array_equal(state.routed_experts, chosen(model, state.tokens[:-1]))


@pytest.mark.parametrize("prompt", [[5], [1, 2, 3]])
async def test_a_router_without_topk_decodes_and_says_nothing(prompt: list[int]) -> None:
    """Phi-MoE's chooses its experts one after the other."""
    torch.manual_seed(0)
    model = PhimoeForCausalLM(PhimoeConfig(**{**SIZES, "pad_token_id": 0}, num_local_experts=4)).eval()
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False)[0].tolist()
    controller = RolloutController(TransformersEngine(model))
    greedy = SampleParams(max_tokens=4, temperature=0)
    state = RolloutState([], rollout_id=1, prompt_ids=prompt, sample_params=greedy)
    await controller.generate_sample(state)
    await controller.close()
    assert list(state.tokens) == expected
    assert state.routed_experts is None


async def test_a_continued_rollout_keeps_the_experts_that_made_its_tokens() -> None:
    old, new = moe(0), moe(1)
    engine = TransformersEngine(copy.deepcopy(old))
    controller = RolloutController(engine)
    state = RolloutState([], rollout_id=1, prompt_ids=[5, 6, 7], sample_params=SampleParams(max_tokens=4))
    await controller.generate_sample(state)
    first = state.tokens.copy()
    # As an environment's reply.
    state.append([9, 10], mask=0)
    await controller.update_weights(list(new.named_parameters()), 1)
    state.sample_params = SampleParams(max_tokens=9)
    await controller.generate_sample(state)
    await controller.close()
    assert len(state.routed_experts) == len(state.tokens) - 1
    known = len(first) - 1
    assert np.array_equal(state.routed_experts[:known], chosen(old, first[:-1]))
    assert np.array_equal(state.routed_experts[known:], chosen(new, state.tokens[:-1])[known:])


async def test_with_the_engines_experts_only_rounding_is_left() -> None:
    engine_model = moe(hidden_size=64, num_hidden_layers=4, num_experts=16).to(torch.bfloat16)
    trainer_model = copy.deepcopy(engine_model).float()
    engine = TransformersEngine(engine_model)
    groups = await rolled_out(RolloutController(engine), max_tokens=40)
    await engine.close()
    sampled = np.concatenate([state.logprobs for group in groups for state in group])
    for state in (state for group in groups for state in group):
        state.status = Status.COMPLETED
    routing = Routing(trainer_model)
    own = replayed(trainer_model, groups, "padded", None)
    same = [replayed(trainer_model, groups, layout, routing) for layout in LAYOUTS]
    for other in same[1:]:
        assert np.allclose(other, same[0], atol=1e-5)
    without, with_ = (np.quantile(np.abs(found - sampled), 0.99) for found in (own, same[0]))
    assert with_ < 0.6 * without


def gradients(groups: Any, model: Any, **settings: Any) -> dict[str, torch.Tensor]:
    """Of one train step, seen through plain gradient descent's moments."""
    trainer = TrainController(model, TrainConfig(token_budget=200, lr=1e-3, **settings), pad_token_id=0)
    seen: dict[str, torch.Tensor] = {}
    for name, parameter in trainer.learner.model.named_parameters():
        if parameter.requires_grad:

            def keep(grad: torch.Tensor, name: str = name) -> None:
                seen[name] = seen.get(name, 0) + grad.detach().clone()

            parameter.register_hook(keep)
    trainer.fit(TrainBatch.from_groups(groups))
    return seen


def as_completed(groups: Any, num_experts: int = 8, *, other: bool = False) -> Any:
    random = np.random.default_rng(3)
    for group in groups:
        for state in group:
            state.status = Status.COMPLETED
            if other:
                every = np.tile(np.arange(num_experts, dtype=np.int8), (*state.routed_experts.shape[:2], 1))
                state.routed_experts = random.permuted(every, axis=-1)[..., :2]
                # An engine computes a prompt once for all of its group.
                shared = len(state.prompt_ids)
                state.routed_experts[:shared] = group[0].routed_experts[:shared]
    return groups


async def test_gradients_are_those_of_the_replayed_experts_however_layers_are_computed() -> None:
    engine = TransformersEngine(moe())
    groups = await rolled_out(RolloutController(engine))
    await engine.close()
    plain = as_completed(copy.deepcopy(groups))
    for state in (state for group in plain for state in group):
        state.routed_experts = None
    # In float32 trainer and engine choose alike, so that replaying changes nothing.
    own, same = gradients(plain, moe()), gradients(as_completed(groups), moe())
    for name, grad in own.items():
        assert torch.allclose(same[name], grad, atol=1e-6), name
    # A model that computes its load balance does not train on it.
    balanced = gradients(plain, moe(output_router_logits=True, router_aux_loss_coef=10.0))
    for name, grad in own.items():
        assert torch.allclose(balanced[name], grad, atol=1e-6), name
    others = as_completed(groups, other=True)
    kept = gradients(others, moe())
    assert not torch.allclose(kept["model.layers.1.mlp.gate.weight"], own["model.layers.1.mlp.gate.weight"])
    assert kept["model.layers.1.mlp.gate.weight"].abs().max() > 0
    for settings in ({"gradient_checkpointing": True}, {"layout": "packed"}, {"layout": "shared_prompt"}):
        for name, grad in gradients(others, moe(), **settings).items():
            assert torch.allclose(grad, kept[name], atol=1e-6), (settings, name)


def test_a_copy_of_a_model_that_is_listened_to_has_routers_of_its_own() -> None:
    model, ids = moe(), torch.arange(1, 9)[None]
    routing = Routing(model)
    twin = copied(model)
    with torch.no_grad():
        before = model(ids).logits
        heard = routing.taken()
        for name, weight in twin.named_parameters():
            if name.endswith("mlp.gate.weight"):
                weight.neg_()
        assert not torch.equal(twin(ids).logits, before)
        assert torch.equal(routing.taken(), heard)
        assert torch.equal(model(ids).logits, before)


def test_a_router_with_groups_and_layers_without_experts() -> None:
    torch.manual_seed(0)
    sizes = {name: size for name, size in SIZES.items() if name not in ("head_dim", "num_key_value_heads")}
    grouped = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
    heads = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
    config = DeepseekV3Config(**sizes, **grouped, **heads, v_head_dim=8)
    model = DeepseekV3ForCausalLM(config).eval()
    routing = Routing(model)
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        plain = model(ids).logits
        own = routing.taken()
        assert own.shape == (8, 1, 2)
        routing.replay(own)
        assert torch.equal(model(ids).logits, plain)
        others = (own + 1) % 8
        routing.replay(others)
        assert not torch.allclose(model(ids).logits, plain)
        assert torch.equal(routing.taken(), others)
        routing.replay(torch.full_like(own, -1))
        assert torch.equal(model(ids).logits, plain)
    with pytest.raises(ValueError, match="has 1 layers with experts and takes 2 of each"):
        routing.replay(own[..., :1])


def test_experts_are_stored_as_they_are_and_batches_fill_what_is_unknown() -> None:
    known, unknown = (
        RolloutState([], rollout_id=i, prompt_ids=[1, 2], status=Status.COMPLETED, reward={"score": 1.0})
        for i in range(2)
    )
    for state in (known, unknown):
        state.append([3, 4, 5])
    known.routed_experts = np.arange(16, dtype=np.int8).reshape(4, 2, 2)
    packed = pack_group([known, unknown])
    data = np.frombuffer(b"".join(bytes(buffer) for buffer in packed.buffers), np.uint8).copy()
    back, none = unpack_group(packed.head, data)
    assert back.routed_experts.dtype == np.int8
    assert np.array_equal(back.routed_experts, known.routed_experts)
    assert none.routed_experts is None
    batch = TrainBatch.from_groups([[back], [none]])
    assert np.array_equal(batch.routed_experts[:4], known.routed_experts)
    assert (batch.routed_experts[4:] == -1).all()
    none.routed_experts = np.zeros((4, 3, 2), np.int16)
    with pytest.raises(ValueError, match="could not broadcast"):
        TrainBatch.from_groups([[back], [none]])


class Asked(ProcessEngine):
    """Asks a host in this process, by the bytes that go over a socket."""

    def __init__(self, session: HostSession) -> None:
        self.is_closed, self._session = False, session

    async def _call(self, method: str, argument: Any, buffers: Sequence[bytes] = ()) -> tuple[Any, list[Any]]:
        answer, made = await self._session._generate(
            raw(argument), [np.frombuffer(passed_on(part), np.uint8) for part in buffers]
        )
        return raw(answer), [np.frombuffer(passed_on(part), np.uint8) for part in made]


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(value))


def passed_on(value: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


async def test_experts_travel_from_an_engine_in_another_process_and_images_to_it() -> None:
    experts = np.arange(12, dtype=np.int16).reshape(3, 2, 2)
    request = GenerateRequest(
        request_id="a",
        input_ids=np.array([1, 2]),
        params=SampleParams(),
        max_tokens=2,
        images=(b"one", b"two"),
        seed=0,
    )
    for sent in (experts, None):
        answer = Completion(response_ids=np.array([7, 8]), routed_experts=sent, finish_reason="stop")
        session = object.__new__(HostSession)
        engine = ScriptedEngine({(1, 2): answer})
        session._pool, session._timer = EnginePool([engine]), None
        session._report = lambda: None
        found = (await Asked(session).generate(request)).routed_experts
        assert found is None if sent is None else (np.array_equal(found, sent) and found.dtype == np.int16)
        assert [asked.images for asked in engine.requests] == [request.images]
