"""Images: the bytes that a rollout keeps, and what the model's own processor makes of them.

::

    chat, images --render_prompt--> token ids, with as many placeholders as the images take    once a prompt
    images --Sight--> pixel_values, image_grid_thw, ..., positions   an engine's prefill, a trainer's pass

A rollout keeps the bytes of the files, in ``mm_info``, and no pixels: a photo is some fifty times
smaller so, servers take files, and a processor makes the same pixels of the same bytes, bit by bit. Engine
and trainer read a model's processor from the folder that the model was loaded from.
"""

import copy
import io
import threading
from base64 import b64encode
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.config import ConfigError, errors_about
from forebay.extras import needed_by
from forebay.types import IntArray, Message

IMAGES = "images"
"""Key in ``mm_info``: the bytes of the prompt's files, in the order of their placeholders."""
REPLY_IMAGES = "reply_images"
"""Key in ``mm_info``: of each image in a reply the number of response tokens before the reply, and the bytes
of the file."""

Images = tuple[bytes, ...]


class Sight:
    """Pixels and positions, which a model's passes over prompts with images take besides token ids.

    ::

        sight = Sight(model)
        model(ids, **sight.inputs([images_of(state)], model.device))
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.has_axes = hasattr(getattr(model, "base_model", None), "get_rope_index")
        """Whether it tells positions in time, height and width apart."""

    def inputs(self, images: Sequence[Images], device: Any) -> dict[str, Any]:
        """The tensors for a pass over prompts with these images, one after the other, by their names.

        Raises:
            ConfigError: the model has no processor; or the images differ in size, and it cannot have such
                ones in one pass.
        """
        import torch

        made = [_inputs(self._model.name_or_path, image) for prompt in images for image in prompt]
        with errors_about("the model takes images of one size in a pass; scale them", RuntimeError):
            joined = {name: torch.cat([one[name] for one in made]) for name in (made or [{}])[0]}
        return {name: values.to(device) for name, values in joined.items()}

    def positions(self, ids: IntArray, images: Images) -> tuple[NDArray[np.int64], int]:
        """int64, 3 x L: time, height and width of each token, which are its number where there is no image.

        Tokens after `ids`, all text, count on from the largest: by so much, the second result, they are off
        their numbers. Multimodal RoPE (Wang et al. 2024, "Qwen2-VL", section 2.1).
        """
        if not (images and self.has_axes):
            return np.tile(np.arange(len(ids)), (3, 1)), 0
        import torch

        ids_1L = torch.from_numpy(ids.astype(np.int64))[None]
        grids = torch.cat([_inputs(self._model.name_or_path, image)["image_grid_thw"] for image in images])
        # Types of tokens as the model's own code numbers them: 0 is text, 1 an image.
        is_image_1L = ids_1L.eq(self._model.config.image_token_id).int()
        index = self._model.base_model.get_rope_index
        positions_31L, shift = index(ids_1L, mm_token_type_ids=is_image_1L, image_grid_thw=grids)
        return np.asarray(positions_31L[:, 0]), int(shift)


def images_of(rollout: Any) -> Images:
    """The images in the prompt of a rollout, or in a `Prompt`, in their order."""
    return tuple((rollout.mm_info or {}).get(IMAGES, ()))


def reply_images_of(rollout: Any) -> Images:
    """Those of the replies within a rollout's response, in their order: not of one that was taken off."""
    noted, end = (rollout.mm_info or {}).get(REPLY_IMAGES, ()), len(rollout.response_ids)
    return tuple(image for start, image in noted if start < end)


def holders_in(message: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """The parts of a chat that stand for images, in their order."""
    for part in message:
        if isinstance(part.get("content"), list):
            yield from (piece for piece in part["content"] if piece.get("type") in ("image", "image_url"))


@cache
def load_processor(folder: str) -> Any:
    """The processor of the model in `folder`.

    Raises:
        ConfigError: it has none, or it cannot be loaded.
    """
    from transformers import AutoProcessor

    with errors_about(f"cannot load the processor in {folder!r}", OSError, ValueError, ImportError):
        processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
    if not hasattr(processor, "image_processor"):
        raise ConfigError(f"the data has images, and the model in {folder!r} takes none: it has no processor")
    return processor


def with_pictures(message: Sequence[Message], images: Images) -> list[Message]:
    """A copy of the chat, with decoded images at their placeholders.

    Raises:
        ConfigError: one cannot be read.
        ValueError: there are more placeholders, or fewer.
    """
    chat = copy.deepcopy(list(message))
    holders = list(holders_in(chat))
    if len(holders) != len(images):
        raise ValueError("images come with prompts, replies and results of tools, not with other chats")
    for holder, image in zip(holders, images, strict=True):
        holder["image"] = _picture(image)
    return chat


def placeholder_of(folder: Path) -> int | None:
    """The token id that stands for images in prompts of the model in `folder`; None if it takes none."""
    from transformers import AutoConfig

    found: int | None = getattr(AutoConfig.from_pretrained(folder), "image_token_id", None)
    return found


def one_for_each(ids: IntArray, images: Images, placeholder: int | None) -> list[int]:
    """`ids` with one placeholder for each image, as servers take them, in place of as many as it takes.

    Images with nothing between them are taken to be of one size.
    """
    is_image = ids == placeholder
    first = is_image & (np.concatenate([[-1], ids[:-1]]) != placeholder)
    if np.count_nonzero(first) != len(images):
        first = is_image & ((is_image.cumsum() - 1) % max(1, is_image.sum() // len(images)) == 0)
    return [*map(int, ids[first | ~is_image])]


def as_url(image: bytes) -> str:
    """The file as a data URL, of which others make the same pixels: without colors of other kinds."""
    from PIL import Image

    if Image.open(io.BytesIO(image)).mode != "RGB":
        _picture(image).save(file := io.BytesIO(), "PNG")
        image = file.getvalue()
    return f"data:image/png;base64,{b64encode(image).decode()}"


MADE_BYTES = 1 << 30
"""Of pixels that a process keeps for its next passes, the latest; a megapixel is some 26 MB."""
_made: dict[tuple[str, bytes], dict[str, Any]] = {}
_making = threading.Lock()


def _inputs(folder: str, image: bytes) -> dict[str, Any]:
    # Members of a group are in different micro-batches, and a step has several passes over each.
    with _making:
        if (made := _made.pop((folder, image), None)) is None:
            made = dict(load_processor(folder).image_processor(images=[_picture(image)], return_tensors="pt"))
            left = MADE_BYTES - sum(value.nbytes for one in (made, *_made.values()) for value in one.values())
            while _made and left < 0:
                left += sum(value.nbytes for value in _made.pop(next(iter(_made))).values())
        _made[folder, image] = made
        return made


def _picture(image: bytes) -> Any:
    with needed_by("a prompt with images"):
        from PIL import Image, ImageOps
    # A file that is cut off is a syntax error to some of its readers.
    with errors_about("cannot read an image", OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        # Upright, as people see it.
        return ImageOps.exif_transpose(Image.open(io.BytesIO(image))).convert("RGB")
