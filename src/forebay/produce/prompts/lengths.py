"""Lengths of prompts that earlier starts of a run have counted, so that a resume renders only what is new to it.

::

    prompt, tools, tokenizer --digest--> known: tokens      else --num_prompt_tokens--> tokens, kept for the next start

A length belongs to what it was counted from, not to a place in the data: a row that was changed has another
digest. It is a cache. Where it is damaged, all is counted anew.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from forebay import __version__
from forebay.agents.chat.rendering import ChatTokenizer
from forebay.io.safe_files import DamagedError, check, publish, unfinished
from forebay.produce.prompts.dataset import Prompt, num_prompt_tokens

_FILE = "lengths.npy"
_WEIGHTS = (".safetensors", ".bin")


@contextmanager
def counted_once(folder: Path, model_folder: Path, tokenizer: ChatTokenizer) -> Iterator[Callable[..., int]]:
    """Counts as `num_prompt_tokens` does, with the tokenizer in `model_folder`, what no earlier start has counted.

    The lengths are kept in `folder`, those that the block adds at its end.
    """
    try:
        check(folder)
        table = np.load(folder / _FILE)
    except DamagedError:
        table = np.empty((0, 2), np.int64)
    known: dict[int, int] = dict(table.tolist())
    counted_by = blake2b(f"{__version__} {transformers.__version__}".encode(), digest_size=8)
    for path in sorted(model_folder.iterdir()):
        if path.is_file() and path.suffix not in _WEIGHTS:
            counted_by.update(path.name.encode() + path.read_bytes())

    def count(prompt: Prompt, *, tools: list[dict[str, Any]] | None = None) -> int:
        shown = [prompt.message, tools if prompt.tools is None else prompt.tools, prompt.tool_choice, prompt.mm_info]
        digest = counted_by.copy()
        # An image is bytes, which JSON has not; their `repr` names each.
        digest.update(json.dumps(shown, default=repr).encode())
        key = int.from_bytes(digest.digest(), "little", signed=True)
        if key not in known:
            known[key] = num_prompt_tokens(prompt, tokenizer, tools=tools)
        return known[key]

    yield count
    if len(known) > len(table):
        with unfinished(folder) as temporary:
            np.save(temporary / _FILE, np.array([*known.items()], np.int64))
            publish(temporary, folder)
