"""From a judge model's reply to scores. Text in, numbers out.

::

    reply --"json" | "number" | regular expression | function--> raw score(s) --scale--> 0 .. 1
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forebay.config import import_object
from forebay.judges.base import Verdict
from forebay.judges.extraction import compile_pattern

Parse = str | Callable[[str], Any]

_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class ReplyParser:
    """Reads the verdict of a judge's reply.

    Invariants: the last number, object or match counts, since models think aloud; raw scores outside `scale`
    are errors, never clipped.

    >>> ReplyParser("json", scale=(1, 10)).verdict('... {"score": 10, "tone": 3}')
    {'score': 1.0, 'tone': 3.0}
    >>> ReplyParser(r"Rank: (\\d+)").verdicts("Rank: 1 Rank: 2", 2)
    [1.0, 2.0]

    Args:
        parse: ``json`` (an object with ``score``; its other numbers are logged; for a group, ``scores``),
            ``number``, a regular expression with one group around a number, a function of the reply that
            returns a verdict (for a group: a list of them), or ``package.module:function`` of one.
        scale: the lowest and highest raw score; they become 0 and 1. None: as they are.

    Raises:
        ValueError: `parse` is none of these, or `scale` is not two rising numbers.
    """

    def __init__(self, parse: Parse = "json", *, scale: Sequence[float] | None = None) -> None:
        if scale is not None and not (len(scale) == 2 and scale[0] < scale[1]):
            raise ValueError(f"scale must be [lowest, highest] raw score, got {scale!r}")
        self._scale = scale
        self._function: Callable[[str], Any] | None = None
        self._pattern: re.Pattern[str] | None = None
        if callable(parse):
            self._function = parse
        elif _IMPORT_PATH.fullmatch(parse):
            self._function = import_object("parse", parse)
        elif parse != "json":
            self._pattern = compile_pattern("last_number" if parse == "number" else parse)

    def verdict(self, reply: str) -> Verdict:
        """The verdict on one rollout.

        Raises:
            ValueError: the reply holds none.
        """
        if self._function is not None:
            return self._scaled(self._function(reply))
        if self._pattern is not None:
            return self._scaled(_last_of(self._numbers(reply), 1, reply)[0])
        return self._scaled(_last_object(reply, "score"))

    def verdicts(self, reply: str, count: int) -> list[Verdict]:
        """The verdicts on the `count` rollouts of a group, in their order.

        Raises:
            ValueError: the reply does not hold as many.
        """
        if self._function is not None:
            found = list(self._function(reply))
        elif self._pattern is not None:
            found = self._numbers(reply)
        else:
            found = _last_object(reply, "scores")["scores"]
        return [self._scaled(item) for item in _last_of(found, count, reply)]

    def _numbers(self, reply: str) -> list[float]:
        assert self._pattern is not None
        return [float(text.replace(",", "")) for text in self._pattern.findall(reply)]

    def _scaled(self, verdict: Any) -> Verdict:
        details = dict(verdict) if isinstance(verdict, Mapping) else {"score": verdict}
        details = {name: float(value) for name, value in details.items() if _is_number(value)}
        if "score" not in details:
            raise ValueError(f"no number for a score in {verdict!r}")
        if self._scale is not None:
            low, high = self._scale
            if not low <= details["score"] <= high:
                raise ValueError(f"the score {details['score']:g} is not within {low:g} .. {high:g}")
            details["score"] = (details["score"] - low) / (high - low)
        return details if len(details) > 1 else details["score"]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _last_of(found: Any, count: int, reply: str) -> list[Any]:
    """The last one, for a single rollout; all of a group's, if they are as many."""
    if not isinstance(found, list) or len(found) < count or (count > 1 and len(found) != count):
        number = len(found) if isinstance(found, list) else "no list of"
        raise ValueError(f"{number} scores where {count} are asked for: {reply[-200:]!r}")
    return found[-count:]


def _last_object(text: str, key: str) -> dict[str, Any]:
    """The last JSON object of `text` that has `key`."""
    decoder = json.JSONDecoder()
    found: dict[str, Any] | None = None
    at = text.find("{")
    while at >= 0:
        try:
            value, at = decoder.raw_decode(text, at)
        except ValueError:
            at += 1
        else:
            found = value if key in value else found
        at = text.find("{", at)
    if found is None:
        raise ValueError(f"no JSON object with {key!r}: {text[-200:]!r}")
    return found
