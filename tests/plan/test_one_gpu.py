"""The run files for one GPU resolve, can be planned, and fit as docs/gpu.md says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoConfig, Qwen2_5_VLConfig

from forebay.config import load_config
from forebay.plan import make_plan, parse_devices
from forebay.plan.hardware import GIB
from forebay.runs.config import RunConfig
from forebay.runs.rollouts import load_data

ROOT = Path(__file__).parents[2]
SIZES = {
    # Qwen2.5-0.5B, Qwen2.5-1.5B and Qwen3-8B: kind, hidden, MLP, layers, heads, heads of keys, tied.
    "0.5b": ("qwen2", 896, 4864, 24, 14, 2, True),
    "1.5b": ("qwen2", 1536, 8960, 28, 12, 2, True),
    "1.5b_vllm": ("qwen2", 1536, 8960, 28, 12, 2, True),
    "8b_lora": ("qwen3", 4096, 12288, 36, 32, 8, False),
    "8b_lora_vllm": ("qwen3", 4096, 12288, 36, 32, 8, False),
}
ON_SMALL = "train.lora_rank=32 train.lr=1e-5 train.gradient_checkpointing=true train.token_budget=4096"
PLANS = [
    ("0.5b", "H100-80GB", "", 12),
    ("0.5b", "L4-24GB", "", 12),
    ("1.5b", "H100-80GB", "", 54),
    ("1.5b", "L4-24GB", ON_SMALL, 15),
    ("1.5b_vllm", "H100-80GB", "", 52),
    ("8b_lora", "H100-80GB", "", 44),
    ("8b_lora_vllm", "H100-80GB", "", 62),
]
WORDS = 151936
"""Of the real models."""
FEW_WORDS = 1000
"""Of those of one layer."""
SMALL = ["batch_size=8", "tasks.0.data.size=200", "tasks.0.data.arguments={size=200}"]
PAGE = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")


def plan(name: str, gpu: str, overrides: str, folder: Path, *, num_layers: int | None = None):
    kind, hidden, mlp, layers, heads, key_heads, tied = SIZES[name]
    AutoConfig.for_model(
        kind,
        vocab_size=WORDS if num_layers is None else FEW_WORDS,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=num_layers or layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=128 if kind == "qwen3" else hidden // heads,
        max_position_embeddings=32768,
        tie_word_embeddings=tied,
    ).save_pretrained(folder)
    file = ROOT / "recipes" / "one_gpu" / f"{name}.toml"
    few = [] if num_layers is None else ["batch_size=8"]
    config = load_config(RunConfig, file, [f"model.source={folder}", *overrides.split(), *few])
    return make_plan(config, parse_devices(gpu), prompt_tokens=256)


def test_the_page_names_every_run_file() -> None:
    files = sorted((ROOT / "recipes" / "one_gpu").glob("*.toml"))
    assert [file.stem for file in files] == sorted(SIZES)
    assert all(f"`recipes/one_gpu/{file.name}`" in PAGE for file in files)
    assert f"`{ON_SMALL}`" in PAGE
    assert all(f"{gib} GiB" in PAGE or f"{gib} of an L4" in PAGE for *_, gib in PLANS)


@pytest.mark.parametrize("name", SIZES)
def test_a_run_file_can_be_planned(name: str, tmp_path: Path) -> None:
    found = plan(name, "H100-80GB", "", tmp_path, num_layers=1)
    assert found.fits
    assert found.times is not None
    assert {"training", "generating"} <= found.turns.keys()
    assert "trainer: weights" in found.turns["training"]
    # A server beside the trainer sleeps while that trains.
    beside = name.endswith("_vllm")
    assert ("engine: weights" in found.turns["training"]) is not beside
    assert found.turns["generating"]["server: key/value cache" if beside else "engine: key/value cache"] > 0


@pytest.mark.soak
@pytest.mark.parametrize(("name", "gpu", "overrides", "gib"), PLANS)
def test_a_run_fits_as_the_page_says(name: str, gpu: str, overrides: str, gib: int, tmp_path: Path) -> None:
    found = plan(name, gpu, overrides, tmp_path)
    assert found.fits
    assert found.total / GIB == pytest.approx(gib, abs=0.6)


def plan_scenes(gpu: str, overrides: list[str], folder: Path, *, num_layers: int, depth: int):
    """Of Qwen2.5-VL-3B, with fewer layers perhaps, and then fewer words and scenes."""
    overrides = overrides if num_layers > 1 else [*overrides, *SMALL]
    text = {"vocab_size": WORDS if num_layers > 1 else FEW_WORDS, "hidden_size": 2048, "intermediate_size": 11008}
    text |= {"num_hidden_layers": num_layers}
    text |= {"num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 128000}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    tower = {"depth": depth, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048}
    tied = {"tie_word_embeddings": True}
    Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope, **tied}, vision_config=tower, **tied
    ).save_pretrained(folder)
    file = ROOT / "recipes" / "shapes" / "gpu.toml"
    config = load_config(RunConfig, file, [f"model.source={folder}", *overrides])
    return config, make_plan(config, parse_devices(gpu), prompt_tokens=128)


EIGHT = ["train.frozen=[]", "train.ranks=8", "engine.name=process", "engine.arguments.engines=8"]


@pytest.mark.parametrize(("gpu", "overrides"), [("H100-80GB", []), ("8xH100-80GB", EIGHT)])
def test_a_vision_language_model_can_be_planned(
    gpu: str, overrides: list[str], tmp_path: Path, forgotten_modules
) -> None:
    config, found = plan_scenes(gpu, overrides, tmp_path, num_layers=1, depth=1)
    assert found.fits
    weights, moments = (found.turns["training"][f"trainer: {name}"] for name in ("weights", "moments"))
    # The tower has them where it is trained.
    assert (moments > 1.99 * weights) == bool(overrides)
    assert len(config.model_dump()["train"]["frozen"]) == (not overrides)
    assert " ".join(overrides) in (ROOT / "recipes" / "shapes" / "gpu.toml").read_text().replace("'", "")
    (data,) = load_data(config)
    answers = Counter(prompt.reward_model["ground_truth"] for prompt in data.training)
    assert len(answers) > 4
    assert len(data.held_out) == 200


@pytest.mark.soak
@pytest.mark.parametrize(("gpu", "overrides", "gib"), [("H100-80GB", [], 64), ("8xH100-80GB", EIGHT, 19)])
def test_a_vision_language_model_fits_as_the_page_says(
    gpu: str, overrides: list[str], gib: int, tmp_path: Path, forgotten_modules
) -> None:
    _, found = plan_scenes(gpu, overrides, tmp_path, num_layers=36, depth=32)
    assert found.total / GIB == pytest.approx(gib, abs=0.6)
