"""Images: engine and trainer give the same tokens the same log probabilities, wherever these stand."""

from __future__ import annotations

import asyncio
import io
import json
import os
import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoProcessor,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from forebay.agents import MultiTurnAgentLoop, SingleTurnAgentLoop, ToolAgentLoop
from forebay.agents.base import AgentLoop
from forebay.agents.chat.tool_calls import ToolCall
from forebay.agents.environments import Environment, Memory, Reply
from forebay.config import Component, ConfigError, load_config
from forebay.engines import EngineSurroundings, RolloutController, build_engines
from forebay.engines.local.transformers import TransformersEngine
from forebay.metrics import read_jsonl
from forebay.models import ModelConfig, load_model, load_tokenizer
from forebay.models.images import IMAGES, REPLY_IMAGES, Sight, images_of, load_processor, reply_images_of
from forebay.models.tiny import character_tokenizer
from forebay.runs.config import RunConfig
from forebay.runs.launch import launch
from forebay.runs.rollouts import check_lengths, load_data
from forebay.train.batch import Layout, TrainBatch
from forebay.train.collate import collate
from forebay.train.model.forward import response_logprobs
from forebay.train.model.trial import check_layout
from forebay.train.packing import Packer
from forebay.types import EPISODE_KEY, RolloutState, SampleParams

RECIPE = Path(__file__).parents[2] / "recipes" / "shapes"
SHAPES = runpy.run_path(str(RECIPE / "shapes.py"))
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
PLACEHOLDERS = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    SHAPES["write_model"](folder)
    return folder


def write_qwen(kind: str, folder: Path) -> tuple[Any, Any]:
    """A small model with random weights; the tokenizer, and what makes pixels."""
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz ?")
    tokenizer.add_special_tokens({"additional_special_tokens": PLACEHOLDERS})
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(PLACEHOLDERS), strict=True))
    text = {"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    # vLLM on a CPU knows no smaller heads.
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    text |= {"max_position_embeddings": 128, "tie_word_embeddings": False}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 7}
    tower |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64}
    torch.manual_seed(0)
    if kind == "qwen2_5_vl":
        tower |= {"window_size": 28, "fullatt_block_indexes": [1]}
        config = Qwen2_5_VLConfig(text_config={**text, "rope_parameters": rope}, vision_config=tower, **ids)
        Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    else:
        tower |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
        rope["mrope_interleaved"] = True
        wide = Qwen3VLConfig(text_config={**text, "rope_parameters": rope}, vision_config=tower, **ids)
        Qwen3VLForConditionalGeneration(wide).save_pretrained(folder)
    tokenizer.chat_template = SHAPES["CHAT_TEMPLATE"].replace("<image>", PLACEHOLDER)
    tokenizer.save_pretrained(folder)
    return tokenizer, Qwen2VLImageProcessor(patch_size=7, merge_size=2, min_pixels=14 * 14, max_pixels=56 * 56)


def qwen(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a model. Its own processor needs torchvision, so the test's own renders."""
    tokenizer, pixels = write_qwen(kind, folder)

    def render(chat: list[Any], **_: Any) -> list[list[int]]:
        said = tokenizer.bos_token
        for piece in chat[0]["content"]:
            if piece["type"] == "text":
                said += piece["text"]
                continue
            grid = pixels(images=[piece["image"]], return_tensors="pt")["image_grid_thw"]
            said += f"<|vision_start|>{'<|image_pad|>' * (int(grid.prod()) // 4)}<|vision_end|>"
        return [tokenizer.encode(said, add_special_tokens=False)]

    class Processor(SimpleNamespace):
        def __call__(self, images: list[Any], text: list[str], add_special_tokens: bool) -> Any:
            grids = [pixels(images=[image], return_tensors="pt")["image_grid_thw"] for image in images]
            before, *behind = text[0].split("<|image_pad|>")
            for grid, part in zip(grids, behind, strict=True):
                before += "<|image_pad|>" * (int(grid.prod()) // 4) + part
            return {"input_ids": [tokenizer.encode(before, add_special_tokens=add_special_tokens)]}

    placeholder = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    processor = Processor(image_processor=pixels, apply_chat_template=render, image_token_id=placeholder)
    monkeypatch.setattr(AutoProcessor, "from_pretrained", lambda folder, **_: processor)


def picture(width: int, height: int, color: tuple[int, int, int]) -> bytes:
    Image.new("RGB", (width, height), color).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def group(name: str, text: str, *pictures: bytes) -> list[RolloutState]:
    content = [{"type": "image"} for _ in pictures] + [{"type": "text", "text": text}]
    info = {IMAGES: list(pictures)}
    return [
        RolloutState([{"role": "user", "content": content}], rollout_id=f"{name}/{i}", group_id=name, mm_info=info)
        for i in range(3)
    ]


def generated(folder: Path, groups: list[list[RolloutState]], **options: Any) -> Any:
    """The model; each rollout has its tokens, some of them from before an interruption."""
    model, tokenizer = load_model(folder), load_tokenizer(folder)

    async def generate() -> None:
        controller = RolloutController(TransformersEngine(model, tokenizer, **options))
        loop = SingleTurnAgentLoop(controller, None, tokenizer, sample_params=SampleParams(max_tokens=7))
        await asyncio.gather(*(loop.generate_group(states) for states in groups))

    asyncio.run(generate())
    for state in (state for states in groups for state in states):
        assert state.error_msg is None, state.error_msg
        state.reward = {"score": 0.0}
    return model


def worst_difference(model: Any, groups: list[list[RolloutState]], layout: Layout) -> float:
    """Between the log probabilities of the engine and those of the trainer's passes."""
    batch = Packer(100, layout=layout).pack_pad_dispatch(TrainBatch.from_groups(groups))
    differences = []
    for pack in batch.packs[0][0]:
        micro = collate(batch, pack, pad_token_id=0, device=torch.device("cpu"), sight=Sight(model))
        with torch.no_grad():
            logprobs = response_logprobs(model, micro).logprobs.numpy()
        differences.append(np.abs(logprobs - batch.rollout_logprobs[micro.token_index]).max())
    assert len(differences) > 1
    return float(max(differences))


LAYOUTS: tuple[Layout, ...] = ("padded", "packed", "shared_prompt")


def test_engine_and_trainer_see_the_same(llava):
    # One question about two pictures: only their pixels tell these prompts from each other.
    first, second = (row["image"] for row in SHAPES["questions"](size=2))
    groups = [group("a", "shape?", first), group("b", "shape?", second), group("c", "color?", first, second)]
    groups.append(group("d", "color? shape?"))
    model = generated(llava, groups, max_batch=5)
    distances = {layout: worst_difference(model, groups, layout) for layout in LAYOUTS}
    assert max(distances.values()) < 1e-5, distances
    for states in groups[:2]:
        for state in states:
            state.mm_info = {IMAGES: [second if state.group_id == "a" else first]}
    assert worst_difference(model, groups, "shared_prompt") > 1e-3


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_of_images_in_time_height_and_width(kind, tmp_path, monkeypatch):
    qwen(kind, tmp_path, monkeypatch)
    small, wide = picture(28, 28, (200, 10, 10)), picture(56, 28, (10, 200, 90))
    groups = [group("a", "what?", wide), group("b", "and these?", small, wide), group("c", "none?")]
    model = generated(tmp_path, groups)
    assert Sight(model).positions(groups[0][0].prompt_ids, (wide,))[0].max() < len(groups[0][0].prompt_ids) - 1
    distances = {layout: worst_difference(model, groups, layout) for layout in LAYOUTS}
    assert max(distances.values()) < 1e-5, distances
    # A run's own trial, on text alone.
    for layout in LAYOUTS:
        check_layout(model, layout, torch.device("cpu"))
    # As transformers' own code places them: a pass without cache over one whole rollout.
    state = groups[1][0]
    # No pass reads its last token: these weights may have drawn a placeholder there, which ends a response.
    ids = torch.from_numpy(np.concatenate([state.prompt_ids, state.response_ids[:-1]]).astype(np.int64))[None]
    seen = Sight(model).inputs([(small, wide)], torch.device("cpu"))
    is_image = (ids == model.config.image_token_id).int()
    with torch.no_grad():
        logits = model(ids, mm_token_type_ids=is_image, **seen).logits[0, len(state.prompt_ids) - 1 :]
    own = logits.log_softmax(-1).gather(1, torch.from_numpy(state.response_ids.astype(np.int64))[:, None])
    np.testing.assert_allclose(own[:, 0].numpy(), state.logprobs, atol=1e-5)


class Shows(Environment):
    """Replies to the first turn of the member with number N with N images, to others with text."""

    def __init__(self, pictures: list[bytes], said: str) -> None:
        self._pictures, self._said = pictures, said

    async def reset(self, state: RolloutState) -> Memory:
        return {"turns": 0}

    async def step(self, state: RolloutState, memory: Memory, text: str) -> Reply:
        memory["turns"] += 1
        shown = self._pictures[: int(str(state.rollout_id)[-1])] if memory["turns"] == 1 else []
        content = [{"type": "image", "image": picture} for picture in shown]
        content.insert(len(shown) // 2, {"type": "text", "text": f" {self._said} "})
        content.append({"type": "text", "text": f" {self._said} "})
        return Reply([{"role": "user", "content": content}])


def test_pixels_are_made_once_for_all_passes_and_kept_within_a_bound(monkeypatch):
    make, asked = Qwen2VLImageProcessor(patch_size=7, merge_size=2, min_pixels=14 * 14, max_pixels=56 * 56), []

    def made(images: list[Image.Image], **options: Any) -> Any:
        asked.append(images[0].getpixel((0, 0))[0])
        return make(images, **options)

    monkeypatch.setattr("forebay.models.images.load_processor", lambda _: SimpleNamespace(image_processor=made))
    monkeypatch.setattr("forebay.models.images._made", {})
    sight = Sight(SimpleNamespace(name_or_path="here"))
    shown = [(picture(28, 28, (red, 0, 0)),) for red in range(12)]
    passes = [sight.inputs(shown[first:], torch.device("cpu"))["pixel_values"] for first in (0, 0, 6)]
    assert asked == list(range(12))
    assert torch.equal(passes[1][6 * 16 :], passes[2])
    size = sum(value.nbytes for value in make([Image.new("RGB", (28, 28))], return_tensors="pt").values())
    # Room for four: the two that were there last stay beside two others.
    monkeypatch.setattr("forebay.models.images.MADE_BYTES", 4 * size)
    asked.clear()
    for red in (100, 10, 11, 100, 101, 10, 11, 102, 103, 10, 100):
        sight.inputs([(picture(28, 28, (red, 0, 0)),)], torch.device("cpu"))
    assert asked == [100, 101, 102, 103, 100]


def seen_shape(cell: Any, color: tuple[int, int, int]) -> str | None:
    """What stands in this part of a scene in this color, told by where it is colored."""
    rows, columns = np.nonzero((cell == color).all(axis=2))
    if not len(rows):
        return None
    top, left, half = rows.min(), columns.min(), (rows.max() - rows.min()) // 2

    def has(share: float) -> bool:
        """On the way from the middle to a corner of the box around it."""
        return bool((cell[top + int(half * (1 - share)), left + int(half * (1 - share))] == color).all())

    if not has(0.0):
        return "ring"
    return "square" if has(0.9) else "circle" if has(0.6) else "cross"


def test_scenes_show_as_many_shapes_as_their_answers_say():
    rows = SHAPES["scenes"](size=60, seed=3)
    for row in rows:
        shown = np.asarray(Image.open(io.BytesIO(row["image"])))
        _, color, shape = row["prompt"].removesuffix("? End with the number.").rsplit(" ", 2)
        cells = [shown[y : y + 75, x : x + 75] for y in (0, 75, 149) for x in (0, 75, 149)]
        assert sum(seen_shape(cell, SHAPES["COLORS"][color]) == shape for cell in cells) == int(row["answer"])
    assert len({row["answer"] for row in rows}) > 4
    assert {row["prompt"].split()[-5].rstrip("?") for row in rows} == set(SHAPES["SHAPES"])


def played(model: Any, tokenizer: Any, kind: type[AgentLoop], settings: Any, *prompts: Any) -> Any:
    """Groups of two turns, with a seed by which no untrained model writes a placeholder: these end it."""

    async def play(groups: list[list[RolloutState]], seed: int) -> None:
        controller = RolloutController(TransformersEngine(model, tokenizer), seed=seed)
        params = SampleParams(max_tokens=20)
        turns = {"max_turns": 2, "max_turn_tokens": 3}
        loop = kind(controller, None, tokenizer, sample_params=params, **turns, **settings)
        await asyncio.gather(*(loop.generate_group(states) for states in groups))

    for seed in range(50):
        groups = [group(*prompt) for prompt in prompts]
        asyncio.run(play(groups, seed))
        states = [state for states in groups for state in states]
        if all(state.extra_fields[EPISODE_KEY]["ended_by"] == "max_turns" for state in states):
            for state in states:
                state.reward = {"score": 0.0}
            return groups
        ended = {state.extra_fields[EPISODE_KEY]["ended_by"] for state in states}
        assert {state.error_msg for state in states} == {None}
        assert ended <= {"max_turns", "placeholder"}
    raise AssertionError("no seed")


def check_replies(model: Any, groups: list[list[RolloutState]]) -> None:
    """Engine and trainer agree on these, and not by chance: other pixels in a reply are seen."""
    distances = {layout: worst_difference(model, groups, layout) for layout in LAYOUTS}
    assert max(distances.values()) < 1e-5, distances
    for states in groups:
        (start, _), *others = states[1].mm_info[REPLY_IMAGES]
        states[1].mm_info |= {REPLY_IMAGES: [[start, picture(28, 28, (10, 10, 250))], *others]}
    assert worst_difference(model, groups, "shared_prompt") > 1e-3


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl", "qwen3_vl"])
def test_replies_with_images(kind, llava, tmp_path, monkeypatch):
    folder = llava if kind == "llava" else tmp_path
    if kind == "llava":
        first, second = (row["image"] for row in SHAPES["questions"](size=2))
        asked, said = "shape?", "red"
    else:
        qwen(kind, folder, monkeypatch)
        first, second = picture(28, 28, (200, 10, 10)), picture(56, 28, (10, 200, 90))
        asked, said = "what?", "and now"
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    prompts = ("a", asked, second), ("b", asked)
    shows = {"environment": Shows([first, second], said)}
    groups = played(model, tokenizer, MultiTurnAgentLoop, shows, *prompts)
    for states in groups:
        assert [reply_images_of(state) for state in states] == [(), (first,), (first, second)]
        assert [images_of(state) for state in states] == [(second,) if states is groups[0] else ()] * 3
    check_replies(model, groups)

    def look() -> list[Any]:
        """Take a look."""
        return [f" {said} ", Image.open(io.BytesIO(first)), second]

    def calls(text: str) -> list[ToolCall]:
        return [ToolCall("look", {})]

    tools = {"tools": [look], "parser": calls, "result_format": f" {said} {{result}} {said} "}
    groups = played(model, tokenizer, ToolAgentLoop, tools, *prompts)
    for state in (state for states in groups for state in states):
        drawn, as_bytes = reply_images_of(state)
        assert (Image.open(io.BytesIO(drawn)).size, as_bytes) == (Image.open(io.BytesIO(first)).size, second)
    check_replies(model, groups)


def has_torchvision(python: str | None) -> bool:
    """Without it vLLM knows no model that takes images."""
    return python is not None and not subprocess.run([python, "-c", "import torchvision"]).returncode


@pytest.mark.skipif(
    not has_torchvision(os.environ.get("FOREBAY_VLLM_PYTHON")),
    reason="FOREBAY_VLLM_PYTHON names no interpreter with vLLM and torchvision",
)
@pytest.mark.parametrize(("kind", "name"), [("qwen2_5_vl", "Qwen2_5_VL"), ("qwen3_vl", "Qwen3VL")])
def test_vllm_and_trainer_see_the_same(kind, name, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    qwen(kind, folder, monkeypatch)
    pixels = load_processor(str(folder)).image_processor.to_dict()
    video = {"video_processor_type": f"{name.replace('2_5_', '2')}VideoProcessor", "patch_size": 7}
    settings = {"image_processor": pixels, "video_processor": video, "processor_class": f"{name}Processor"}
    (folder / "processor_config.json").write_text(json.dumps(settings))
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    small, wide = picture(28, 28, (200, 10, 10)), picture(56, 28, (10, 200, 90))

    async def play() -> None:
        arguments = {"servers": 1, "python": os.environ["FOREBAY_VLLM_PYTHON"], "options": ["--enforce-eager"]}
        arguments["environment"] = {"VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        surroundings = EngineSurroundings(
            model_folder=folder,
            model=ModelConfig(source=str(folder)),
            tokenizer=tokenizer,
            scratch=tmp_path / "scratch",
        )
        engines = build_engines(Component(name="vllm", arguments=arguments), surroundings)
        controller = RolloutController(engines)
        turns = {"environment": Shows([wide, small], "and now"), "max_turns": 2, "max_turn_tokens": 3}
        loop = MultiTurnAgentLoop(controller, None, tokenizer, sample_params=SampleParams(max_tokens=20), **turns)
        try:
            for step in range(2):
                await controller.update_weights(list(model.named_parameters()), step)
                groups = [group("a", "what?", wide), group("b", "and these?", small, wide), group("c", "none?")]
                await asyncio.gather(*map(loop.generate_group, groups))
                states = [state for states in groups for state in states]
                assert {state.error_msg for state in states} == {None}
                assert any(map(reply_images_of, states)), "all wrote a placeholder"
                assert {int(made) for state in states for made in state.response_model_steps} == {step}
                for state in states:
                    state.reward = {"score": 0.0}
                distances[step] = worst_difference(model, groups, "shared_prompt")
                # Not by chance: other pixels are seen.
                for state in groups[0]:
                    state.mm_info = {**state.mm_info, IMAGES: [picture(56, 28, (250, 10, 10))]}
                assert worst_difference(model, groups, "shared_prompt") > 1e-3
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(torch.randn_like(parameter) * 0.1)
        finally:
            await controller.close()

    distances: dict[int, float] = {}
    asyncio.run(play())
    assert max(distances.values()) < 1e-4, distances


def test_the_recipe_runs_and_its_model_goes_on(llava, tmp_path):
    overrides = [
        f"output={tmp_path}",
        f"model.source={llava}",
        "steps=2",
        "batch_size=2",
        "rollouts_per_prompt=4",
        "warmup.steps=3",
        "tasks.0.data.size=40",
        "tasks.0.eval_data.size=6",
        "evaluate.every=2",
        "checkpoint_every=2",
        "train.kl_coef=0.01",
    ]
    config = load_config(RunConfig, RECIPE / "run.toml", overrides)
    run = asyncio.run(launch(config))
    assert run is not None
    rows = list(read_jsonl(tmp_path / "shapes" / "metrics.jsonl"))
    (mismatch,) = {round(row["train/mismatch_kl"], 4) for row in rows if "train/mismatch_kl" in row}
    assert mismatch == 0
    for folder in (tmp_path / "shapes" / "model", tmp_path / "shapes" / "warmup"):
        assert load_processor(str(folder)).image_token_id == 13
    over_ranks = ["train.ranks=2", "train.parallel.context=2", "train.layout=packed"]
    broken = load_config(RunConfig, RECIPE / "run.toml", [*overrides, *over_ranks])
    with pytest.raises(ConfigError, match=r"the data has images.*set train\.parallel\.context to 1"):
        check_lengths(broken, llava, load_data(broken))
