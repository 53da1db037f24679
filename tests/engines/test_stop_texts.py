from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from forebay.engines.local.stopping import StopTexts
from forebay.models.tiny import character_tokenizer


@pytest.fixture(scope="module")
def characters() -> Any:
    return character_tokenizer("abEND .\n")


@pytest.fixture(scope="module")
def byte_tokens() -> Any:
    """One token per byte, as byte-level vocabularies fall back to: a character may take several."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def first_stop(stops: StopTexts, stop: tuple[str, ...], ids: list[int]) -> int | None:
    """How many tokens there are when the text is first complete, fed one at a time."""
    count = stops.num_tail_tokens(stop)
    complete = (n for n in range(1, len(ids) + 1) if stops.completed(stop, ids[max(0, n - count) : n]))
    return next(complete, None)


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("ab END ab", ("END",), "ab END"),
        ("ab EN ED", ("END",), None),
        ("a.b\nEND", ("END", "\n"), "a.b\n"),
        ("aEENDb", ("END",), "aEEND"),
        ("a..b", ("..",), "a.."),
        ("a b", (" ",), "a "),
    ],
)
def test_the_token_that_completes_a_text_is_the_last(characters, text, stop, expected):
    found = first_stop(StopTexts(characters), stop, characters.encode(text, add_special_tokens=False))
    assert (None if found is None else text[:found]) == expected


def test_special_tokens_count_by_their_text(characters):
    ids = [*characters.encode("ab"), characters.eos_token_id]
    assert StopTexts(characters).completed(("b<eos>",), ids)


def test_a_text_whose_characters_take_several_tokens(byte_tokens):
    text = "caf\u00e9 \U0001f30a wave"
    for stop in ("\u00e9", "\U0001f30a", "\u00e9 \U0001f30a w"):
        end = len(text[: text.index(stop) + len(stop)].encode())
        assert first_stop(StopTexts(byte_tokens), (stop,), list(text.encode())) == end


def test_a_text_that_was_complete_before_the_last_token_is_not_found_again(characters):
    ids = characters.encode("ENDaN", add_special_tokens=False)
    assert not StopTexts(characters).completed(("END",), ids)
