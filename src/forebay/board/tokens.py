"""The text of each token of a rollout, by the tokenizer that lies in the run's folder."""

from functools import lru_cache
from pathlib import Path
from typing import Any

NAME = "tokenizer.json"


def pieces_of(folder: Path, token_ids: list[int]) -> list[str] | None:
    """The text that each token adds; None where the run has no tokenizer yet.

    Tokens that are parts of one character add nothing until the last of them.
    """
    if (found := _find(folder)) is None:
        return None
    from tokenizers.decoders import DecodeStream

    tokenizer, stream = _load(found, found.stat().st_mtime_ns), DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, token_id) or "" for token_id in token_ids]


def _find(folder: Path) -> Path | None:
    places = [folder / "model", folder / "warmup"]
    places += sorted(folder.glob("checkpoints/step_*/trainer/model"), reverse=True)
    return next((place / NAME for place in places if (place / NAME).is_file()), None)


# The time is in the key of the cache: a run may write the file anew.
@lru_cache(maxsize=4)
def _load(path: Path, changed_ns: int) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))
