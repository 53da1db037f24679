"""Drawn shapes and questions about them, and a small model with eyes that learns to answer.

A question is ``shape?`` or ``color?``, the answer a word: ``circle``, ``red``. A picture has 28 x 28 pixels
with one shape in one color, near the middle. The demonstrations for the supervised warm-up are guesses: they
teach which words answer which question, and nothing of what is in a picture. The model is transformers' own
Llava of a small CLIP tower and a Qwen3 decoder whose tokens are these words, with random weights::

    python shapes.py model        writes it to the folder "model"

For pretrained models there are scenes of several shapes, in which some are to be counted (`gpu.toml`).
"""

from __future__ import annotations

import io
import random
import sys
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from forebay.config import ConfigError

COLORS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 70, 220), "yellow": (230, 210, 40)}
SHAPES = ("circle", "square", "cross", "ring")
QUESTIONS = ("shape?", "color?")
SIZE = 28
"""Pixels of a side."""
PATCH = 7
SPREAD = 0.1
"""Standard deviation of the first weights, about 1 / sqrt(width). With the usual 0.02, made for widths of
thousands, so little of a picture reaches the answer that a hundred steps go by before anything is learned."""


def questions(*, size: int = 4000, seed: int = 0, jitter: int = 1, guesses: float = 1.0) -> list[dict[str, Any]]:
    """`size` questions, as rows ``{"image", "prompt", "answer", "demonstration"}``.

    Shapes are up to `jitter` pixels off the middle; `guesses` is the share of demonstrations that guess.

    Raises:
        ConfigError: a number is out of range.
    """
    if size < 1 or not 0 <= jitter <= 4 or not 0 <= guesses <= 1:
        raise ConfigError(
            f"questions: size is at least 1, jitter 0 to 4, guesses 0 to 1; got {size}, {jitter}, {guesses}"
        )
    draw = random.Random(f"shapes/{seed}")
    return [_row(draw, jitter, guesses) for _ in range(size)]


def _row(draw: random.Random, jitter: int, guesses: float) -> dict[str, Any]:
    color, shape, question = draw.choice(list(COLORS)), draw.choice(SHAPES), draw.choice(QUESTIONS)
    shade = tuple(max(0, min(255, level + draw.randint(-20, 20))) for level in COLORS[color])
    x, y = (SIZE // 2 + draw.randint(-jitter, jitter) for _ in "xy")
    picture = Image.new("RGB", (SIZE, SIZE), (draw.randint(0, 40),) * 3)
    _draw(ImageDraw.Draw(picture), shape, x, y, draw.randint(7, 10), shade)
    picture.save(file := io.BytesIO(), "PNG")
    answer, words = (shape, list(SHAPES)) if question == "shape?" else (color, list(COLORS))
    shown = {"role": "assistant", "content": draw.choice(words) if draw.random() < guesses else answer}
    return {"image": file.getvalue(), "prompt": question, "answer": answer, "demonstration": [shown]}


def scenes(*, size: int = 4000, seed: int = 0) -> list[dict[str, Any]]:
    """`size` scenes of 224 x 224 pixels with a question how many of one shape in one color there are."""
    draw = random.Random(f"scenes/{seed}")
    return [_scene(draw) for _ in range(size)]


def _scene(draw: random.Random) -> dict[str, Any]:
    wanted, count = (draw.choice(list(COLORS)), draw.choice(SHAPES)), 0
    picture = Image.new("RGB", (224, 224), (draw.randint(0, 40),) * 3)
    # In nine cells, so that none hides another.
    for cell in draw.sample(range(9), draw.randint(4, 9)):
        shown = wanted if draw.random() < 0.5 else (draw.choice(list(COLORS)), draw.choice(SHAPES))
        count += shown == wanted
        x, y = (37 + 75 * place + draw.randint(-8, 8) for place in divmod(cell, 3))
        _draw(ImageDraw.Draw(picture), shown[1], x, y, draw.randint(16, 26), COLORS[shown[0]])
    picture.save(file := io.BytesIO(), "PNG")
    color, shape = wanted
    asked = f"How many shapes are a {color} {shape}? End with the number."
    return {"image": file.getvalue(), "prompt": asked, "answer": str(count)}


def _draw(pen: ImageDraw.ImageDraw, shape: str, x: int, y: int, radius: int, color: Any) -> None:
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        pen.ellipse(box, fill=color)
    elif shape == "ring":
        pen.ellipse(box, outline=color, width=3)
    elif shape == "square":
        pen.rectangle(box, fill=color)
    else:
        pen.rectangle((x - radius, y - 2, x + radius, y + 2), fill=color)
        pen.rectangle((x - 2, y - radius, x + 2, y + radius), fill=color)


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def word_tokenizer(words: list[str]) -> Any:
    """One token for each word, and pad, start and end tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "<bos>", "<eos>", *words]
    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def write_model(folder: Path, *, seed: int = 0) -> None:
    """Write model, tokenizer and processor; the same seed gives the same weights."""
    import torch
    from transformers import CLIPImageProcessor, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

    tokenizer = word_tokenizer([*QUESTIONS, *SHAPES, *COLORS])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    side = {"height": SIZE, "width": SIZE}
    pixels = CLIPImageProcessor(size=side, crop_size=side, do_center_crop=False, do_resize=False)
    processor = LlavaProcessor(
        pixels, tokenizer, patch_size=PATCH, vision_feature_select_strategy="default",
        chat_template=CHAT_TEMPLATE, num_additional_image_tokens=1,
    )  # fmt: skip
    tower = {
        "model_type": "clip_vision_model", "image_size": SIZE, "patch_size": PATCH, "hidden_size": 64,
        "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "projection_dim": 64,
        "initializer_range": SPREAD,
    }  # fmt: skip
    text = {
        "model_type": "qwen3", "vocab_size": len(tokenizer), "hidden_size": 96, "intermediate_size": 256,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 64, "initializer_range": SPREAD,
        "tie_word_embeddings": True, "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    config = LlavaConfig(
        vision_config=tower, text_config=text, image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_select_strategy="default", vision_feature_layer=-1, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, initializer_range=SPREAD,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlavaForConditionalGeneration(config)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


if __name__ == "__main__":
    write_model(Path(sys.argv[1] if len(sys.argv) > 1 else "model"))
