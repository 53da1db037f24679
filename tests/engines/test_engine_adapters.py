"""LoRA adapters on an engine's starting weights give what the trainer's merged weights would have given."""

from __future__ import annotations

import asyncio
import copy
import os
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_partial_rollouts import GREEDY, Tokens, has_reached_the_engine, rollout

from forebay.engines import RolloutController, ScriptedEngine, TransformersEngine
from forebay.engines.weights.takeover import AdaptedWeights, take_weights
from forebay.io.shared import LentTensors
from forebay.models.starting_weights import BASE_FINGERPRINT, AdaptersRefusedError, BaseDiffersError, fingerprint
from forebay.train.model.lora import adapter_config, adapter_weights, add_lora, model_weights
from forebay.train.weight_sync import sync_weights
from forebay.types import Status


class Source:
    """A trainer's side, with adapters as after some steps."""

    def __init__(self, model: Any, *, targets: Any = "all-linear", rank: int = 3, seed: int = 0) -> None:
        base_fingerprint = fingerprint(model.named_parameters())
        self.model = add_lora(copy.deepcopy(model), rank=rank, alpha=7.0, targets=targets)
        self.adapter_config = adapter_config(self.model) | {BASE_FINGERPRINT: base_fingerprint}
        self.step(seed)

    def step(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _, weight in adapter_weights(self.model):
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)

    def adapters(self) -> Any:
        return ((name, weight.detach()) for name, weight in adapter_weights(self.model))

    def weights(self, *, merged: bool = True) -> Any:
        return model_weights(self.model, merged=merged)


def snapshot(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_holds(model: Any, weights: Any) -> None:
    """To the last bit."""
    expected = dict(weights)
    assert expected.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


@pytest.fixture
async def engine(llama: Any) -> Any:
    made = TransformersEngine(llama)
    yield made
    await made.close()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt_neox", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# peft says that it sets fan_in_fan_out for the layers of GPT-2.
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set")
async def test_adapters_give_the_merged_weights_to_the_bit(make_model: Any, kind: str, dtype: Any) -> None:
    model = make_model(kind).to(dtype)
    source = Source(model)
    engine = TransformersEngine(model)
    for step in (1, 2):
        source.step(step)
        await engine.load_adapters(source.adapters(), step, config=source.adapter_config)
        assert_holds(model, source.weights())
        assert engine.model_step == step
    await engine.close()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
async def test_rank_stabilized_adapters_are_scaled_as_peft_scales_them(engine: Any, llama: Any) -> None:
    source = Source(llama)
    stabilized = LoraConfig(r=3, lora_alpha=7, target_modules="all-linear", use_rslora=True)
    source.model = get_peft_model(copy.deepcopy(llama), stabilized)
    source.step(1)
    await engine.load_adapters(source.adapters(), 1, config=adapter_config(source.model))
    assert_holds(llama, source.weights())


async def test_layers_without_an_adapter_of_now_have_their_starting_weights(engine: Any, llama: Any) -> None:
    everywhere, somewhere = Source(llama), Source(llama, targets=("q_proj",), seed=1)
    for source in (everywhere, somewhere, everywhere):
        await engine.load_adapters(source.adapters(), 1, config=source.adapter_config)
        assert_holds(llama, source.weights())


async def test_whole_weights_are_the_new_starting_weights(engine: Any, llama: Any, make_model: Any) -> None:
    source = Source(llama)
    await engine.load_adapters(source.adapters(), 1, config=source.adapter_config)
    other = make_model("llama", initializer_range=0.2)
    await engine.load_weights(other.named_parameters(), 2)
    assert_holds(llama, other.named_parameters())
    with pytest.raises(BaseDiffersError, match="give it those first"):
        await engine.load_adapters(source.adapters(), 3, config=source.adapter_config)
    assert_holds(llama, other.named_parameters())
    assert engine.model_step == 2
    on_other = Source(other, seed=4)
    await engine.load_adapters(on_other.adapters(), 3, config=on_other.adapter_config)
    assert_holds(llama, on_other.weights())


@pytest.mark.parametrize("seed", range(200 if os.environ.get("FOREBAY_SOAK") == "1" else 4))
def test_in_any_order_of_hand_overs_the_model_holds_what_was_given_last(make_model: Any, seed: int) -> None:
    random = np.random.default_rng(seed)
    bases = [make_model("llama", initializer_range=scale) for scale in (0.2, 0.3)]
    sources = [
        [Source(base, targets=targets) for targets in ("all-linear", ("q_proj",), ("k_proj", "down_proj"))]
        for base in bases
    ]
    model, below = copy.deepcopy(bases[0]), 0
    adapted, expected = AdaptedWeights(model), snapshot(model)
    are_lent, begun = False, [snapshot(base) for base in bases]
    for _ in range(20):
        chosen, source = int(random.integers(2)), sources[int(random.integers(2))][int(random.integers(3))]
        if random.random() < 0.25:
            given = ((name, tensor.detach()) for name, tensor in bases[chosen].named_parameters())
            weights = LentTensors(given) if random.random() < 0.5 else given
            are_lent = take_weights(model.state_dict(keep_vars=True), weights, are_lent=are_lent)
            assert are_lent == isinstance(weights, LentTensors)
            adapted.full_load(are_lent=are_lent)
            below, expected = chosen, snapshot(bases[chosen])
            continue
        source.step(int(random.integers(1000)))
        given, config = dict(source.adapters()), source.adapter_config
        if random.random() < 0.2:
            # The last of them: all others are fine.
            given[list(given)[-1]] = torch.zeros(1)
        elif source in sources[below]:
            adapted.load(given.items(), config)
            expected = {name: value.clone() for name, value in source.weights()}
            continue
        with pytest.raises(ValueError, match=r"shape|starting weights"):
            adapted.load(given.items(), config)
        assert_holds(model, expected.items())
    assert_holds(model, expected.items())
    # What was lent was not written to.
    for base, tensors in zip(bases, begun, strict=True):
        assert_holds(base, tensors.items())


NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        ({"use_dora": True}, {}, "'use_dora': True"),
        ({"rank_pattern": {"q_proj": 8}}, {}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 8}}, {}, "alpha_pattern"),
        ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save"),
        ({"bias": "all"}, {}, "'bias': 'all'"),
        ({"lora_bias": True}, {}, "lora_bias"),
        ({"init_lora_weights": "pissa"}, {}, "pissa"),
        ({"something_newer": 1}, {}, "something_newer"),
        ({"peft_type": "IA3"}, {}, "'IA3' are not LoRA"),
        ({}, {"model.lm_head.weight": torch.zeros(1)}, "no factor of a linear layer"),
        ({}, {"base_model.model.model.norm.lora_A.weight": torch.zeros(3, 32)}, "LlamaRMSNorm, not a linear"),
        ({}, {"base_model.model.lm_head.lora_A.weight": torch.zeros(3, 32)}, "shares its weight"),
    ],
)
async def test_adapters_that_would_not_be_exact_are_refused(
    engine: Any, llama: Any, config: Any, change: Any, message: str
) -> None:
    source, before = Source(llama), snapshot(llama)
    with pytest.raises(AdaptersRefusedError, match=message):
        await engine.load_adapters(
            {**dict(source.adapters()), **change}.items(), 1, config=source.adapter_config | config
        )
    assert_holds(llama, before.items())
    assert engine.model_step == 0


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        ({"r": None}, {}, "r = None"),
        ({"r": 4}, {}, r"lora_A of .* has shape \(3, 32\), but the layer and a rank of 4 need \(4, 32\)"),
        ({}, {NAME: torch.zeros(3, 31)}, r"shape \(3, 31\)"),
        ({}, {NAME: None}, "has no lora_A"),
        ({}, {"base_model.model.model.nothing.lora_A.weight": torch.zeros(3, 32)}, "no layer 'model.nothing'"),
    ],
)
async def test_adapters_that_do_not_fit_the_model_change_nothing(
    engine: Any, llama: Any, config: Any, change: Any, message: str
) -> None:
    source = Source(llama)
    await engine.load_adapters(source.adapters(), 1, config=source.adapter_config)
    before = snapshot(llama)
    source.step(9)
    given = {name: value for name, value in {**dict(source.adapters()), **change}.items() if value is not None}
    with pytest.raises(ValueError, match=message) as raised:
        await engine.load_adapters(given.items(), 2, config=source.adapter_config | config)
    assert not isinstance(raised.value, AdaptersRefusedError)
    with pytest.raises(ValueError, match="no adapters were given"):
        await engine.load_adapters([], 2, config=source.adapter_config)
    assert_holds(llama, before.items())
    assert engine.model_step == 1


async def test_one_bit_of_the_starting_weights_makes_them_others(engine: Any, llama: Any) -> None:
    source = Source(llama)
    # The last number of a matrix: none is left out.
    source.adapter_config[BASE_FINGERPRINT] = fingerprint(
        (name, torch.cat([value.flatten()[:-1], value.flatten()[-1:] * (1 + 2**-23)]).view(value.shape))
        for name, value in snapshot(llama).items()
    )
    with pytest.raises(BaseDiffersError):
        await engine.load_adapters(source.adapters(), 1, config=source.adapter_config)


async def test_a_rollout_goes_on_over_new_adapters_from_one_token_to_the_next(llama: Any) -> None:
    controller, source, old = RolloutController(TransformersEngine(llama), seed=1), Source(llama), None
    await sync_weights(source, controller, 4)
    old = copy.deepcopy(llama)
    tokens, state = Tokens(llama), rollout(GREEDY)
    tokens.stop_before(10)
    running = asyncio.create_task(controller.generate_sample(state))
    await tokens.stopped()
    source.step(1)
    syncing = asyncio.create_task(controller.update_adapters(list(source.adapters()), 5, config=source.adapter_config))
    await has_reached_the_engine()
    tokens.go()
    await syncing
    await running
    assert state.status is Status.COMPLETED
    assert state.response_model_steps.tolist() == [4] * 10 + [5] * 30
    response = torch.from_numpy(state.response_ids.astype(np.int64))
    with torch.inference_mode():
        logits = old(torch.from_numpy(state.tokens.astype(np.int64))[None]).logits[0, 4:-1]
        by_old = logits.log_softmax(-1)[torch.arange(40), response].numpy()
    np.testing.assert_allclose(state.logprobs[:10], by_old[:10], atol=1e-4)
    assert np.abs(state.logprobs[10:] - by_old[10:]).max() > 0.1
    await controller.close()


class Counting(TransformersEngine):
    """Notes what it is given."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.given: list[tuple[str, int]] = []

    async def load_weights(self, weights: Any, model_step: int) -> None:
        await super().load_weights(weights, model_step)
        self.given.append(("weights", model_step))

    async def load_adapters(self, adapters: Any, model_step: int, *, config: Any) -> None:
        self.given.append(("adapters", model_step))
        await super().load_adapters(adapters, model_step, config=config)


async def synced(models: list[Any], source: Source, **settings: Any) -> list[list[tuple[str, int]]]:
    """What engines of these models are given in the syncs of steps 6 and 7, after which they hold it."""
    engines = [Counting(model, **settings) for model in models]
    controller = RolloutController(engines)
    for step in (6, 7):
        source.step(step)
        await sync_weights(source, controller, step)
        assert controller.model_step == step
    for model in models:
        for name, expected in source.weights():
            torch.testing.assert_close(model.get_parameter(name), expected.to(model.dtype), atol=0, rtol=0)
    await controller.close()
    return [engine.given for engine in engines]


async def test_engines_with_the_starting_weights_are_given_adapters_alone(make_model: Any) -> None:
    models = [make_model("llama"), make_model("llama")]
    given = await synced(models, Source(models[0]))
    assert given == [[("adapters", 6), ("adapters", 7)]] * 2


async def test_an_engine_with_other_weights_is_given_the_starting_weights_once(make_model: Any) -> None:
    own, other = make_model("llama"), make_model("llama", initializer_range=0.2)
    given = await synced([own, other], Source(own))
    assert given == [[("adapters", 6), ("weights", 0), ("adapters", 6), ("adapters", 7)]] * 2


async def test_an_engine_that_holds_another_dtype_is_given_merged_weights(
    make_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    # Its starting weights are rounded: adapters on them would not be the merged weights, rounded.
    given = await synced([make_model("llama").bfloat16()], Source(make_model("llama")))
    assert given[0][-1] == ("weights", 7)
    assert "adapters merged: these adapters are for the starting weights" in caplog.text


async def test_adapters_that_an_engine_cannot_use_come_merged(make_model: Any) -> None:
    model = make_model("qwen2", tie_word_embeddings=False)
    given = await synced([model], Source(model, targets=("embed_tokens", "q_proj")))
    assert given == [[("adapters", 6), ("weights", 6), ("adapters", 7), ("weights", 7)]]


async def test_engines_that_take_no_adapters_are_given_merged_weights(make_model: Any) -> None:
    model = make_model("llama")
    assert await synced([model], Source(model), takes_adapters=False) == [[("weights", 6), ("weights", 7)]]


async def test_one_engine_that_takes_none_decides_for_all(llama: Any) -> None:
    engine = TransformersEngine(llama)
    assert RolloutController(engine).takes_adapters
    assert not RolloutController([engine, ScriptedEngine({})]).takes_adapters
    await engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        await engine.load_adapters([], 1, config={})
