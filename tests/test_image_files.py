"""Images of rows: where they stand, in which form they come, and that they tell prompts from each other."""

from __future__ import annotations

import base64
import io
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from forebay.config import ConfigError
from forebay.models.image_files import take_images
from forebay.produce import DataConfig, load_prompts
from forebay.produce.prompts.dataset import hold_out

PICTURE = Image.new("RGB", (3, 2), (1, 2, 3))
PICTURE.save(_file := io.BytesIO(), "PNG")
PNG = _file.getvalue()
HOLDER, TEXT = {"type": "image"}, {"type": "text", "text": "what?"}
TAKEN = {**HOLDER, "digest": blake2b(PNG, digest_size=8).hexdigest()}


def user(*pieces: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(pieces)}]


def test_every_form_of_an_image_becomes_its_file(tmp_path: Path) -> None:
    path = tmp_path / "a picture.png"
    path.write_bytes(PNG)
    data = "data:image/png;base64," + base64.b64encode(PNG).decode()
    forms = [PNG, {"bytes": PNG, "path": "x.png"}, {"bytes": None, "path": str(path)}, path.as_uri(), data]
    row = {"images": [*forms, str(path), PICTURE], "level": 3}
    chat, images = take_images(row, [{"role": "user", "content": "what?"}], "row 0")
    assert images == [PNG] * 7
    assert chat == user(*[TAKEN] * 7, TEXT)
    assert row == {"level": 3}
    with pytest.raises(ConfigError, match=r"row 0: .*nothing is downloaded.*, not https://x.org/a.png"):
        take_images({"image": "https://x.org/a.png"}, [{"role": "user", "content": "what?"}], "row 0")
    with pytest.raises(ConfigError, match="row 0: cannot read the image"):
        take_images({"image": "nowhere.png"}, [{"role": "user", "content": "what?"}], "row 0")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("<image>what?", [TAKEN, TEXT]),
        ("what?<image>", [TEXT, TAKEN]),
        ([HOLDER, TEXT], [TAKEN, TEXT]),
        ([{"type": "image", "text": None}, {**TEXT, "image": None}], [TAKEN, TEXT]),
        ([TEXT], [TAKEN, TEXT]),
    ],
)
def test_placeholders_stand_where_the_chat_says(said: Any, expected: list[Any]) -> None:
    message = [{"role": "system", "content": "look"}, {"role": "user", "content": said}]
    chat, images = take_images({"image": PNG}, message, "row 0")
    assert chat[1]["content"] == expected
    assert images == [PNG]


def test_images_inside_the_chat_and_a_wrong_number_of_them() -> None:
    url = {"url": "data:image/png;base64," + base64.b64encode(PNG).decode()}
    chat, images = take_images({}, user({"type": "image_url", "image_url": url}, TEXT), "row 0")
    assert (chat, images) == (user(TAKEN, TEXT), [PNG])
    with pytest.raises(ConfigError, match=r"an image is bytes, .*, not None"):
        take_images({"images": [PNG]}, user(HOLDER, HOLDER, TEXT), "row 0")
    with pytest.raises(ConfigError, match="1 of 2 images have no placeholder"):
        take_images({"images": [PNG, PNG]}, user(HOLDER, TEXT), "row 0")
    # A text that only speaks of images.
    plain = [{"role": "user", "content": "what is <image>?"}]
    assert take_images({}, plain, "row 0") == (plain, [])
    with pytest.raises(ConfigError, match="row 0: the text says <image>, and the row has no image"):
        take_images({"image": None}, plain, "row 0")


def test_a_message_of_tool_calls_alone_has_no_content_beside_images() -> None:
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "zoom", "arguments": {}}}]}
    assert take_images({}, [*user(TEXT), called], "row 0") == ([*user(TEXT), called], [])
    chat, images = take_images({"images": [PNG]}, [*user(TEXT), called], "row 0")
    assert (chat, images) == ([*user(TAKEN, TEXT), called], [PNG])


def test_images_of_a_dataset_are_the_files_that_it_keeps(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    PICTURE.save(jpeg := io.BytesIO(), "JPEG")
    kept = {"prompt": ["what?"], "answer": ["1"], "image": [{"bytes": jpeg.getvalue(), "path": None}]}
    dataset = datasets.Dataset.from_dict(kept).cast_column("image", datasets.Image())
    dataset.save_to_disk(tmp_path / "saved")
    (prompt,) = load_prompts(DataConfig(source=str(tmp_path / "saved")))
    assert prompt.mm_info == {"images": [jpeg.getvalue()]}


def rows() -> list[dict[str, Any]]:
    return [{"image": PNG + bytes([i]), "prompt": "what?", "answer": str(i)} for i in range(4)]


def test_prompts_that_differ_in_their_image_alone_are_not_one() -> None:
    prompts = load_prompts(DataConfig(source=f"{__name__}:rows"))
    kept = hold_out(prompts, prompts[:1])
    assert [prompt.reward_model for prompt in kept] == [{"ground_truth": str(i)} for i in (1, 2, 3)]
    assert not prompts[0].extra
