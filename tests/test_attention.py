"""Which kernel of attention a run gets, and the one sentence where it cannot have the one it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers import utils

from forebay.config import ConfigError, apply_overrides, parse_config
from forebay.engines import EngineSurroundings, build_engines
from forebay.engines.build import EngineConfig
from forebay.models import ModelConfig, TinyConfig, attention, attention_choices, load_tokenizer, resolve_model
from forebay.models.attention import attention_of, planned_attention, use_attention
from forebay.runs.config import RunConfig

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
LLAMA = hf.LlamaConfig(hidden_size=128, num_attention_heads=4)
PACKED: dict[str, Any] = {"device": CUDA, "precision": "bfloat16", "packed": True}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what torch and transformers find on this machine."""

    def has(*installed: str, capability: tuple[int, int] = (9, 0)) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=0: capability)
        for version in (2, 3):
            is_there = f"flash_attention_{version}" in installed
            monkeypatch.setattr(utils, f"is_flash_attn_{version}_available", lambda is_there=is_there: is_there)
        triton = object() if "triton" in installed else None
        monkeypatch.setattr(attention, "find_spec", lambda name: triton)

    return has


@pytest.mark.parametrize(
    ("installed", "capability", "best"),
    [
        (("flash_attention_2", "flash_attention_3", "triton"), (9, 0), "flash_attention_3"),
        (("flash_attention_2", "flash_attention_3", "triton"), (8, 9), "flash_attention_2"),
        (("triton",), (9, 0), "varlen"),
        ((), (7, 5), "sdpa"),
    ],
)
def test_auto_takes_the_best_that_is_there(machine, installed, capability, best):
    machine(*installed, capability=capability)
    assert attention_choices("auto", LLAMA, **PACKED)[0] == best
    # The others take the kernel that torch picks for causal rows.
    for changes in ({"packed": False}, {"precision": "float32"}, {"device": CPU, "precision": "float32"}):
        assert attention_choices("auto", LLAMA, **(PACKED | changes)) == ["sdpa", "eager"]


@pytest.mark.parametrize(
    ("config", "choices"),
    [
        # Heads of 20 numbers.
        (hf.LlamaConfig(hidden_size=80, num_attention_heads=4), ["flex_attention", "sdpa", "eager"]),
        # Its scores go through a tanh.
        (hf.Gemma2Config(), ["flex_attention", "eager"]),
        (hf.MambaConfig(), ["eager"]),
        (hf.JambaConfig(), ["sdpa", "eager"]),
        (hf.Qwen3MoeConfig(), ["varlen", "flex_attention", "sdpa", "eager"]),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_auto_leaves_out_what_the_model_does_not_take(machine, config, choices):
    machine("triton")
    assert attention_choices("auto", config, **PACKED) == choices


@pytest.mark.parametrize(
    ("wanted", "config", "changes", "says"),
    [
        ("flash_attention_2", LLAMA, {}, "it is not installed: pip install flash-attn --no-build-isolation"),
        ("flash_attention_3", LLAMA, {}, "it is not installed: pip install flash-attn-3"),
        ("flex_attention", LLAMA, {}, "it is not installed: pip install triton"),
        ("varlen", LLAMA, {"device": CPU}, "it needs a CUDA device, and the run computes on cpu"),
        ("varlen", LLAMA, {"precision": "float32"}, "it computes in bfloat16 only, not in float32"),
        ("sdpa", hf.Gemma2Config(), {}, "models of type 'gemma2' "),
        ("flex_attention", hf.GPT2Config(), {}, "models of type 'gpt2' do not take it"),
    ],
)
def test_a_kernel_that_cannot_be_is_one_sentence(machine, wanted, config, changes, says):
    machine()
    with pytest.raises(ConfigError) as caught:
        attention_choices(wanted, config, **(PACKED | changes))
    message = str(caught.value)
    assert message.startswith(f"train.attention = '{wanted}': {says}")
    assert message.endswith("; set train.attention = 'auto'")
    assert "\n" not in message


def test_old_gpus_have_no_kernel_without_a_mask(machine):
    machine("triton", capability=(7, 5))
    for wanted in ("varlen", "flex_attention", "flash_attention_2"):
        with pytest.raises(ConfigError, match="Ampere"):
            attention_choices(wanted, LLAMA, **PACKED)


def test_a_model_is_switched_or_its_code_does_not_let_it():
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, intermediate_size=16))
    for kernel in ("eager", "varlen", "sdpa"):
        use_attention(model, kernel)
        assert attention_of(model) == kernel
    model = hf.BloomForCausalLM(hf.BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=9))
    with pytest.raises(ValueError, match="'bloom' cannot be switched to attention 'varlen'"):
        use_attention(model, "varlen")


def test_a_plan_counts_on_any_machine():
    def planned(wanted: Any, config: Any = LLAMA, **changes: Any) -> str:
        where = {"is_gpu": True, "precision": "bfloat16", "packed": True} | changes
        return planned_attention(wanted, config, **where)

    assert [planned(wanted) for wanted in ("auto", "flash_attention_3", "flex_attention")] == ["varlen"] * 3
    assert [planned(wanted) for wanted in ("sdpa", "eager")] == ["sdpa", "eager"]
    assert planned("auto", is_gpu=False) == planned("auto", packed=False) == "sdpa"
    assert planned("auto", hf.Gemma2Config()) == "eager"


TABLE: dict[str, Any] = {
    "name": "kernels", "steps": 1, "batch_size": 1, "rollouts_per_prompt": 2, "model": {"source": "tiny"},
    "tasks": [{"name": "a", "data": {"source": "sorting"}, "judge": "exact_match"}],
}  # fmt: skip


def test_trainer_and_engine_have_a_key_each():
    changed = apply_overrides({**TABLE, "engine": "process"}, ["engine.attention=sdpa", "train.attention=eager"])
    run = parse_config(RunConfig, changed)
    assert (run.engine.name, run.engine.attention, run.train.attention) == ("process", "sdpa", "eager")


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ({"name": "process", "attention": "varlen"}, "should be 'auto', 'sdpa' or 'eager'"),
        ({"name": "transformers", "attention": "flash_attention_2"}, "should be 'auto', 'sdpa' or 'eager'"),
        ({"name": "vllm", "attention": "sdpa"}, "engine 'vllm' chooses its own kernel"),
    ],
)
def test_engines_refuse_a_kernel_that_they_cannot_use(engine, says):
    if engine["name"] == "vllm":
        engine = {**engine, "arguments": {"urls": ["http://127.0.0.1:8000"]}}
    with pytest.raises(ConfigError, match=rf"engine\.attention'? = .*{says}"):
        parse_config(RunConfig, {**TABLE, "engine": engine})


def test_an_engine_computes_with_the_kernel_of_its_key(tmp_path: Path):
    model = ModelConfig(source="tiny", tiny=TinyConfig(hidden_size=8, num_layers=1, num_heads=2))
    folder = resolve_model(model, cache_dir=tmp_path)
    for wanted, kernel in (("auto", "sdpa"), ("eager", "eager")):
        surroundings = EngineSurroundings(
            model_folder=folder, model=model, attention=wanted, tokenizer=load_tokenizer(folder), scratch=tmp_path
        )
        (engine,) = build_engines(EngineConfig(name="transformers"), surroundings)
        assert attention_of(engine._model) == kernel
