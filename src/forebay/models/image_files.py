"""A row's images as bytes of files, and as placeholders in its chat.

::

    columns "images" or "image"   } bytes, {"bytes", "path"} of datasets, PIL images,
    parts of the chat's messages  } paths, file: and data: URLs      --> bytes, in order
    chat --> each placeholder as {"type": "image", "digest": ...}; without any, all images before the first
             user's text. By the digest, prompts that differ in their images alone are not equal.

A text may say ``<image>`` where one of the columns' images stands.
"""

import io
import re
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from forebay.config import ConfigError, errors_about
from forebay.models.images import holders_in
from forebay.types import Message

MARK = "<image>"
FORMS = ("image", "image_url", "bytes", "path", "url")
"""Where a part of a chat, or a row of `datasets`, has the image."""


def take_images(row: dict[str, Any], message: list[Message], place: str) -> tuple[list[Message], list[bytes]]:
    """The chat with its placeholders, and the images; their columns leave `row`.

    Raises:
        ConfigError: one cannot be read, or there are not as many as placeholders.
    """
    may_have = "images" in row or "image" in row
    columns = [row.pop(column, None) for column in ("images", "image")]
    lists = [value if isinstance(value, list | tuple) else [value] for value in columns]
    beside = [value for values in lists for value in values if value is not None]
    if not beside and not any(holders_in(message)):
        # Beside rows with images the model would take it for one.
        if may_have and any(MARK in str(part.get("content")) for part in message):
            raise ConfigError(f"{place}: the text says {MARK}, and the row has no image")
        return message, []
    # An assistant's message of tool calls alone has no content.
    chat = [
        {**part, "content": _pieces(part["content"], bool(beside))} if "content" in part else part for part in message
    ]
    if not any(holders_in(chat)):
        first = next((part for part in chat if part["role"] == "user"), chat[0])
        first["content"] = [{"type": "image"} for _ in beside] + first["content"]
    left, images = iter(beside), []
    for holder in holders_in(chat):
        images.append(read_image(next(left, None) if len(holder) == 1 else holder, place))
        holder.clear()
        holder |= {"type": "image", "digest": blake2b(images[-1], digest_size=8).hexdigest()}
    if unused := len(list(left)):
        raise ConfigError(f"{place}: {unused} of {len(beside)} images have no placeholder in the prompt")
    return chat, images


def _pieces(content: Any, has_images: bool) -> list[dict[str, Any]]:
    """New pieces of a message's content; where images stand beside the chat, a `MARK` is a placeholder."""
    if not isinstance(content, str):
        # Arrow gives every piece all the fields that any piece has; the absent ones as None.
        return [{key: value for key, value in piece.items() if value is not None} for piece in content]
    # Every second one is a mark.
    texts = enumerate(re.split(f"({MARK})", content) if has_images else [content])
    return [{"type": "image"} if at % 2 else {"type": "text", "text": text} for at, text in texts if text]


def read_image(value: Any, place: str) -> bytes:
    """The bytes of the image's file; those of a PIL image as PNG, which loses nothing.

    Raises:
        ConfigError: it is none, or its file cannot be read.
    """
    if isinstance(value, bytes):
        return value
    if isinstance(value, Mapping):
        return read_image(next((value[name] for name in FORMS if value.get(name) is not None), None), place)
    if hasattr(value, "save"):
        value.save(file := io.BytesIO(), "PNG")
        return file.getvalue()
    name = str(value)
    url = name if re.match("[a-z]+:", name) else Path(name).absolute().as_uri()
    if not isinstance(value, str | Path) or not url.startswith(("file:", "data:")):
        raise ConfigError(
            f"{place}: an image is bytes, a PIL image, a path, or a URL with file: or data: (nothing is "
            f"downloaded), not {name[:200]}"
        )
    with errors_about(f"{place}: cannot read the image {url[:200]!r}", OSError, ValueError):
        return bytes(urlopen(url).read())
