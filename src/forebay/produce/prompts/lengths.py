"""Lengths of prompts that earlier starts of a run have counted, so that a resume renders only what is new to it.

::

    prompt, tools, tokenizer --digest--> known: tokens      else --num_prompt_tokens--> tokens, kept for the next start

A length belongs to what it was counted from, not to a place in the data: a row that was changed has another
digest. It is a cache. Where it is damaged, all is counted anew.
"""

import json
from collections.abc import Iterator
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


class KnownLengths:
    """Counts as `num_prompt_tokens` does, each prompt once; for the tokenizer in the folder of one model."""

    def __init__(self, model_folder: Path, known: dict[int, int]) -> None:
        self._digest = blake2b(f"{__version__} {transformers.__version__}".encode(), digest_size=8)
        for path in sorted(model_folder.iterdir()):
            if path.is_file() and path.suffix not in _WEIGHTS:
                self._digest.update(path.name.encode() + path.read_bytes())
        self.known = known
        """Tokens, by the digest of the prompt."""

    def count(self, prompt: Prompt, tokenizer: ChatTokenizer, *, tools: list[dict[str, Any]] | None = None) -> int:
        """As `num_prompt_tokens`, whose errors it raises."""
        shown = [prompt.message, tools if prompt.tools is None else prompt.tools, prompt.tool_choice, prompt.mm_info]
        digest = self._digest.copy()
        # An image is bytes, which JSON has not; their `repr` names each.
        digest.update(json.dumps(shown, default=repr).encode())
        key = int.from_bytes(digest.digest(), "little", signed=True)
        if key not in self.known:
            self.known[key] = num_prompt_tokens(prompt, tokenizer, tools=tools)
        return self.known[key]


@contextmanager
def known_lengths(folder: Path, model_folder: Path) -> Iterator[KnownLengths]:
    """The lengths that are kept in `folder`; those that the block adds are kept at its end."""
    try:
        check(folder)
        table = np.load(folder / _FILE)
    except DamagedError:
        table = np.empty((0, 2), np.int64)
    lengths = KnownLengths(model_folder, dict(table.tolist()))
    yield lengths
    if len(lengths.known) > len(table):
        with unfinished(folder) as temporary:
            np.save(temporary / _FILE, np.array([*lengths.known.items()], np.int64))
            publish(temporary, folder)
