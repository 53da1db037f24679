"""Images on several ranks: each gets those that it passes, all come to the tower together, and train as one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_images import RECIPE, SHAPES, picture, write_qwen
from test_rank_messages import passed_on
from test_ranked_training import got_padding, numbers, state
from transformers import LlavaProcessor

from forebay.config import load_config
from forebay.metrics import read_jsonl
from forebay.models import load_model
from forebay.models.images import IMAGES, REPLY_IMAGES
from forebay.runs.config import RunConfig
from forebay.runs.folder import saved_config
from forebay.runs.launch import launch
from forebay.train import LocalRanks, Packer, TrainBatch, TrainConfig, TrainController
from forebay.train.batch import passed
from forebay.train.packing import num_cells
from forebay.train.parallel.learner import ModelFolder
from forebay.types import RolloutState, Status

pytestmark = pytest.mark.usefixtures("warm")
KINDS = ("llava", "qwen2_5_vl", "qwen3_vl")
SMALL, WIDE = picture(28, 28, (200, 10, 10)), picture(56, 28, (10, 200, 90))


@pytest.fixture(scope="module")
def ranks(warm: None) -> Iterator[LocalRanks]:
    ranks = LocalRanks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    SHAPES["write_model"](found["llava"])
    for kind in KINDS[1:]:
        tokenizer, pixels = write_qwen(kind, found[kind])
        # Qwen's own needs torchvision; a trainer asks for the pixels alone.
        LlavaProcessor(pixels, tokenizer, patch_size=7, image_token="<|image_pad|>").save_pretrained(found[kind])
    return found


def rollouts(kind: str, sights: list[str], *, seed: int = 0) -> list[list[RolloutState]]:
    """Groups of two, for each of `sights` one: what its prompt shows (small ``s``, wide ``w``), then, behind a
    ``/``, what the reply in its second rollout does."""
    random = np.random.default_rng(seed)
    # Llava takes one size in a pass.
    files = {"s": (SMALL, 16), "w": (SMALL, 16)} if kind == "llava" else {"s": (SMALL, 4), "w": (WIDE, 8)}
    placeholder, words = (13, (3, 13)) if kind == "llava" else (31, (3, 29))

    def shown(names: str) -> tuple[list[bytes], list[int]]:
        ids = [token for name in names for token in [*[placeholder] * files[name][1], int(random.integers(*words))]]
        return [files[name][0] for name in names], ids

    groups = []
    for number, sight in enumerate(sights):
        asked, _, replied = sight.partition("/")
        pictures, ids = shown(asked)
        prompt, group = [1, *ids, *random.integers(*words, 3)], []
        for member in range(2):
            seen, told = shown(replied if member else "")
            turns = [random.integers(*words, random.integers(2, 6)) for _ in range(2)]
            info = {IMAGES: pictures, REPLY_IMAGES: [[len(turns[0]), image] for image in seen]}
            group.append(
                RolloutState(
                    [],
                    rollout_id=f"{number}.{member}",
                    group_id=number,
                    prompt_ids=np.array(prompt),
                    response_ids=np.concatenate([turns[0], np.array(told, np.int64), turns[1]]),
                    response_mask=np.repeat([1, 0, 1], [len(turns[0]), len(told), len(turns[1])]),
                    mm_info=info if pictures or seen else None,
                    reward={"score": float(member)},
                    status=Status.COMPLETED,
                )
            )
        groups.append(group)
    return groups


MANY = ["s", "", "w", "/w", "ss/s", "", "w/s"]
"""Of each kind some, in several micro-batches."""
ONE = ["", "", "/s", ""]
"""One rollout of all has an image, so one of two ranks has none."""
TOWERS = {"llava": "model.vision_tower", "qwen2_5_vl": "model.visual", "qwen3_vl": "model.visual"}
LAYOUTS = ("padded", "packed", "shared_prompt")
SHORT = [
    *(("llava", "shared_prompt", {}), ("qwen2_5_vl", "padded", {}), ("qwen3_vl", "packed", {})),
    *(("llava", "padded", "frozen"), ("qwen2_5_vl", "packed", "frozen")),
]
CASES = [
    # In the short suite each kind and each layout once with and, but for shared prompts, once without a trained tower.
    *(
        pytest.param(kind, layout, settings, marks=() if (kind, layout, settings) in SHORT else pytest.mark.soak)
        for kind in KINDS
        for layout in LAYOUTS
        for settings in ({}, "frozen")
        if (layout, settings) != ("shared_prompt", "frozen")
    ),
    ("qwen2_5_vl", "packed", {"mini_batches": 2, "kl_coef": 0.1, "gradient_checkpointing": True}),
    ("qwen3_vl", "padded", {"advantage": "gae", "critic_lr": 1e-3, "lora_rank": 2}),
    ("llava", "packed", {"parallel": {"tensor": 2}}),
    ("qwen3_vl", "shared_prompt", {"parallel": {"replicas": 2}}),
]


@pytest.mark.parametrize(("kind", "layout", "settings"), CASES, ids=str)
def test_two_ranks_train_as_one(kind, layout, settings, folders, ranks, tmp_path):
    if settings == "frozen":
        settings = {"frozen": [TOWERS[kind]]}
    # A usual epsilon would magnify the rounding of gradients that are almost 0.
    settings = {"lr": 1e-2, "adam": (0.9, 0.999, 1e-2), "token_budget": 70, "layout": layout, **settings}
    over_ranks = TrainConfig(ranks=2, **settings)
    config = TrainConfig(**{name: value for name, value in settings.items() if name != "parallel"})
    torch.manual_seed(0)
    one = TrainController(load_model(folders[kind]), config, pad_token_id=0)
    # A model as a folder, which its ranks read, and as an object, which they have from elsewhere.
    given = load_model(folders[kind]) if layout == "padded" else ModelFolder(folder=folders[kind])
    torch.manual_seed(0)
    two = TrainController(given, over_ranks, pad_token_id=0, ranks=ranks)
    for step, sights in enumerate((MANY, ONE)):
        groups = rollouts(kind, sights, seed=step)
        expected, got = one.fit(groups), two.fit(groups)
        idle = [pack for mini in got.packs for rank in mini for pack in rank if (pack < 0).any()]
        assert sights is MANY or len(idle) == (over_ranks.parallel.same_sequences == 1)
        assert numbers(got) == pytest.approx(numbers(expected) | got_padding(got), rel=1e-4, abs=1e-5)
        for name in ("trainer_logprobs", "ref_logprobs", "values"):
            values = getattr(expected, name)
            if values is not None:
                np.testing.assert_allclose(getattr(got, name), values, atol=1e-5)
    wanted, found = state(one, tmp_path / "one"), state(two, tmp_path / "two")
    # Moments are sums of gradients, those of the tower among them.
    assert (f"{TOWERS[kind]}." in " ".join(name for name in found if "|" in name)) == ("frozen" not in settings)
    for name, value in wanted.items():
        torch.testing.assert_close(found.pop(name), value, atol=1e-5, rtol=1e-4, msg=f"{{}} in {name}".format)
    assert not found


def test_ranks_that_share_out_tokens_refuse_images(folders, ranks):
    config = TrainConfig(ranks=2, layout="packed", parallel={"context": 2})
    trainer = TrainController(load_model(folders["llava"]), config, pad_token_id=0, ranks=ranks)
    with pytest.raises(ValueError, match=r"set train\.parallel\.context to 1"):
        trainer.fit(rollouts("llava", ONE))
    trainer.fit(rollouts("llava", ["", ""]))


def test_the_recipe_runs_on_two_ranks_and_resumes(folders, tmp_path):
    overrides = ["name=r", f"output={tmp_path}", f"model.source={folders['llava']}", "steps=2", "batch_size=2"]
    overrides += ["rollouts_per_prompt=4", "warmup.steps=2", "tasks.0.data.size=40", "tasks.0.eval_data.size=6"]
    overrides += ["evaluate.every=2", "checkpoint_every=1", "train.ranks=2", "train.kl_coef=0.01"]
    asyncio.run(launch(load_config(RunConfig, RECIPE / "run.toml", overrides)))
    asyncio.run(launch(saved_config(tmp_path / "r", ["steps=3"]), resume=tmp_path / "r"))
    rows = [row for row in read_jsonl(tmp_path / "r" / "metrics.jsonl") if "train/mismatch_kl" in row]
    assert len(rows) == 3
    # Engine and trainer saw the same, with the weights of each step.
    assert max(abs(row["train/mismatch_kl"]) for row in rows) < 1e-5
    assert all(row["train/grad_norm"] > 0 for row in rows)
    begun, trained = (load_model(folder).state_dict() for folder in (folders["llava"], tmp_path / "r" / "model"))
    moved = {name for name, weight in begun.items() if not torch.equal(weight, trained[name])}
    assert any("vision_tower" in name for name in moved)


@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prompt"])
@given(
    sights=st.lists(st.sampled_from(["", "s", "w", "/s", "s/w"]), min_size=1, max_size=8),
    spare=st.integers(0, 60),
    num_ranks=st.integers(1, 4),
)
def test_in_a_round_all_ranks_have_images_or_none_has(layout, sights, spare, num_ranks):
    batch = TrainBatch.from_groups(rollouts("qwen2_5_vl", sights))
    budget = int(batch.lengths.max()) + spare
    (packs,) = Packer(budget, num_ranks, layout).pack_pad_dispatch(batch).packs
    everything = np.concatenate([pack for rank in packs for pack in rank])
    assert sorted(everything[everything >= 0].tolist()) == list(range(batch.num_sequences))
    assert all(num_cells(batch, pack, layout) <= budget for rank in packs for pack in rank)
    for number, packs_now in enumerate(zip(*packs, strict=True)):
        assert all(len(pack) < 2 or (pack >= 0).all() for pack in packs_now), number
        seen = {
            tuple(bool(kind) and any(kind[row] for row in passed(pack)) for kind in (batch.images, batch.reply_images))
            for pack in packs_now
        }
        # Prompts that are shared have a pass of their own.
        together = seen if layout == "shared_prompt" else set(map(any, seen))
        assert num_ranks == 1 or len(together) == 1, number


def test_a_rank_gets_the_images_of_its_own_passes_each_once():
    groups = rollouts("qwen2_5_vl", MANY)
    batch = Packer(60, 3, "packed").pack_pad_dispatch(TrainBatch.from_groups(groups))
    num_files = 0
    for rank in range(3):
        plain, images = passed_on([batch.to_plain(), batch.images_for(rank)])
        built = TrainBatch.from_plain(plain, images)
        own = {row for pack in batch.packs[0][rank] for row in passed(pack).tolist()}
        for kind in ("images", "reply_images"):
            expected = [each if row in own else () for row, each in enumerate(getattr(batch, kind))]
            assert getattr(built, kind) == expected
        files = [file.tobytes() for file in images[0]]
        assert len(set(files)) == len(files)
        num_files += sum(len(each) for row in own for each in (batch.images[row], batch.reply_images[row]))
    assert num_files > 6
    text = Packer(60, 3).pack_pad_dispatch(TrainBatch.from_groups(rollouts("qwen2_5_vl", [""])))
    assert text.images_for(0) == [[], [], []]
    assert TrainBatch.from_plain(text.to_plain(), text.images_for(0)).images == []
