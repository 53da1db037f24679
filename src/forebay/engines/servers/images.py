"""Images on their way to a server: each once a group, where it knows them by name (vLLM)

::

    the first of a group:  name and file --> the server answers: it has the image
    the others:            wait for that; the name alone
                           | refused: the server has dropped it    from now on fewer are named alone
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from forebay.engines.base import GenerateRequest
from forebay.engines.servers.link import Busy, Refused
from forebay.models.images import Images, as_url

MOST_NAMED = 1024
"""Images that a server is taken to have, the latest; fewer once it has dropped one of them."""


class SentImages:
    """The images that one server has.

    ::

        async with sent.sending(request.images, make_body) as (body, taken):
            async for event in link.events(body, taken):
                ...
    """

    def __init__(self) -> None:
        self._known: dict[str, asyncio.Event] = {}
        """By the names of images, the latest last; set once the server has it, or does not get it."""
        self._most = MOST_NAMED

    @contextlib.asynccontextmanager
    async def sending(
        self, images: Images, make: Callable[[], dict[str, Any]]
    ) -> AsyncIterator[tuple[dict[str, Any], Callable[[], None]]]:
        """The request that `make` makes, with the files of those `images` that the server lacks, by their names.

        The second result is to be called once the server has taken the request.

        Raises:
            Busy: the server refused a name without its file; the next try sends the file.
        """
        known, taken = self._known if self._most else {}, asyncio.Event()
        parts = (body := make()).get("content_parts", [])
        while coming := [one for part in parts if (one := known.get(part["uuid"])) and not one.is_set()]:
            await coming[0].wait()
            # The weights, after which images are named, may be others by now.
            parts = (body := make()).get("content_parts", [])
        for part, image in zip(parts, images, strict=bool(parts)):
            known[part["uuid"]] = event = known.pop(part["uuid"], taken)
            part["url"] = as_url(image) if event is taken else None
        try:
            yield body, taken.set
        except Refused as refusal:
            if taken.is_set() or all(part["url"] for part in parts):
                raise
            # Once for all that named it: the first of them forgets it below.
            if any(part["uuid"] in known for part in parts if not part["url"]):
                self._most //= 2
            raise Busy(f"an image is not there any more: {refusal}", 0.0) from refusal
        finally:
            if not taken.is_set():
                for part in parts:
                    known.pop(part["uuid"], None)
            taken.set()
            while len(known) > self._most:
                del known[next(iter(known))]


def check_prompt(request: GenerateRequest, has: list[int] | None) -> None:
    """Check that the server has the token ids that are trained on: `has` is what it says.

    Raises:
        Refused: it has others, or does not say.
    """
    if has != (wanted := request.input_ids.tolist()):
        told = "does not say its own" if has is None else f"made {len(has)} others"
        raise Refused(
            f"request {request.request_id!r} has images and {len(wanted)} tokens, and the server {told}: use "
            f"vLLM 0.32 or SGLang 0.5.13, or newer, and a model with one kind of placeholder (Qwen-VL)"
        )
