"""A language model as a judge, over any OpenAI-compatible chat API.

::

    rollout, pair or group --template--> messages --server, if not known--> reply --ReplyParser--> verdict

After a `TransientJudgeError` the judge asks again, up to `max_retries` times.

The response is part of the prompt, so it may try to instruct its judge; policies find such ways when they
pay. Keep the question strict, and look at the rollouts that score best.
"""

import asyncio
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field

from forebay.config import import_object, parse_config
from forebay.extras import require_library
from forebay.judges import base
from forebay.judges.answers import compile_pattern
from forebay.judges.servers import JudgeServer, ServerArguments
from forebay.types import Message, RolloutState

ReadT = TypeVar("ReadT")
NUM_KEPT_REPLIES = 1 << 13
"""A judge is asked again for a few groups at a time, and for greedy answers that stayed as they were."""
Parse = str | Callable[[str], Any]


class LLMJudge(base.Judge):
    """Asks a model for the score.

    Invariants: see `JudgeServer` for the budget. A request that finds the server busy, broken or
    silent, and a reply that cannot be read, are tried again `max_retries` times; then, and when the budget is
    used up or the server refuses, the rollout is FAILED. A question that got an answer is not
    asked again.

    >>> judge = LLMJudge(
    ...     base_url="http://127.0.0.1:8000/v1",
    ...     model="judge-model",
    ...     template="Is this polite? Reply with a number from 1 to 5.\\n{{ response }}",
    ...     parse="number",
    ...     scale=[1, 5],
    ... )

    Args:
        timeout_s: for one request.
        arguments: those of `Arguments`; `parse` may also be a function, and a template left out is one
            of the files in `TEMPLATES`.

    Raises:
        ConfigError: aiohttp or jinja2 is not installed.
        ValueError: an argument does not fit.
    """

    class Arguments(ServerArguments, strict=True):
        """The question, the model that is asked, and how often it may be."""

        base_url: str
        """Address of the API, with its version, such as ``https://host/v1``."""
        model: str
        """The judging model, as the server calls it."""
        template: str | None = None
        """Jinja text of the question. It is given ``prompt`` (the last user message), ``messages``,
        ``response``, ``ground_truth`` (or none), ``reward_model``, ``data_source``, ``task_name`` and
        ``extra_fields``; for a group, ``responses``, and the rest of its first rollout; ``criteria``, with a
        rubric. None: a grade from 0 to 1 is asked for."""
        system: str | None = None
        """A system message before the question."""
        group: bool | Literal["pairs"] = False
        """Ask once for all rollouts of a group; or for each of its ``pairs`` how good the first of the two is
        beside the second, 0 to 1. Then a rollout's score is the mean over the others."""
        rubric: Mapping[str, float] | None = None
        """Criteria in words, with weights: each gets a score, and their weighted mean is the verdict."""
        parse: Any = "json"
        """How the reply is read: ``json`` (an object with ``score``; its other numbers are logged; for a
        group, ``scores``), ``number``, a regular expression with one group around a number, or
        ``package.module:function`` of the reply that returns a verdict (for a group: a list of them)."""
        scale: Sequence[float] | None = None
        """The lowest and highest raw score, which become 0 and 1; None: scores are taken as they are."""
        max_retries: int = Field(default=base.DEFAULT_MAX_RETRIES, ge=0)
        """Further tries for one rollout or group."""
        parameters: Mapping[str, Any] | None = None
        """Further fields of each request (``temperature`` is 0 by default)."""

    def __init__(self, *, timeout_s: float | None = base.DEFAULT_TIMEOUT_S, **arguments: Any) -> None:
        settings = parse_config(self.Arguments, arguments, source="judge 'llm'")
        # The client keeps the time of each request; here waits for a turn and between tries would count too.
        super().__init__(timeout_s=None, max_retries=settings.max_retries)
        self.needs_whole_group = bool(settings.group)
        self._settings = settings
        self._server = JudgeServer(settings, judge="judge 'llm'", timeout_s=timeout_s)
        self._replies: dict[str, str] = {}
        """Replies by request; the oldest ones are forgotten."""
        rubric, parse = settings.rubric, settings.parse
        template = TEMPLATES / f"{_TEMPLATE_OF[settings.group] if rubric is None else 'rubric'}.jinja"
        if rubric is not None:
            if settings.group or not rubric or min(rubric.values()) <= 0:
                raise ValueError(f"rubric = {dict(rubric)} takes weights over 0, and no group")
            parse = lambda reply: of_rubric(rubric, reply)  # noqa: E731
        # Scores of these are shares: one outside of 0 to 1 is an unreadable reply, and asked for again.
        scale = (0, 1) if rubric or settings.group == "pairs" else None
        self._parser = ReplyParser(parse, scale=settings.scale or scale)
        require_library("jinja2", "judge 'llm'")
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        # A name that is not there is an error and not an empty question.
        environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, trim_blocks=True)
        try:
            self._template = environment.from_string(settings.template or template.read_text("utf-8"))
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"template, line {error.lineno}: {error}") from None

    async def score(self, state: RolloutState) -> base.Verdict:
        """The model's verdict on one rollout."""
        return await self._ask(self._messages(state, response=state.response), self._parser.verdict)

    async def score_group(self, states: Sequence[RolloutState]) -> Sequence[base.Verdict]:
        """The model's verdicts on a group, by one question or by pairs; on a single rollout, by its own."""
        if not self.needs_whole_group:
            return [await self.score(state) for state in states]
        if self._settings.group == "pairs":
            return await self._compare(states)
        messages = self._messages(states[0], responses=[state.response for state in states])
        return await self._ask(messages, lambda reply: self._parser.verdicts(reply, len(states)))

    async def _compare(self, states: Sequence[RolloutState]) -> list[float]:
        """The share of the others' worth that each rollout has in pairs; 0.5 without others."""
        # Models favor a place, so each rollout comes first in about half of its pairs.
        pairs = [(a, b) if (a + b) % 2 else (b, a) for a, b in combinations(range(len(states)), 2)]

        async def ask(pair: tuple[int, int]) -> base.Verdict:
            responses = [states[place].response for place in pair]
            return await self._ask(self._messages(states[0], responses=responses), self._parser.verdict)

        worth = [0.0] * len(states)
        # All are waited for: their replies are kept, and the next try asks only for those that failed.
        verdicts = await asyncio.gather(*map(ask, pairs), return_exceptions=True)
        for (first, second), verdict in zip(pairs, verdicts, strict=True):
            if isinstance(verdict, BaseException):
                raise verdict
            share = base.checked_reward(verdict)["score"]
            worth[first] += share
            worth[second] += 1 - share
        return [total / (len(states) - 1) if pairs else 0.5 for total in worth]

    async def _ask(self, messages: Sequence[Message], read: Callable[[str], ReadT]) -> ReadT:
        """The result of `read` on the reply of the model, which may be a known one."""
        settings = self._settings
        request = {"messages": list(messages), "model": settings.model, "temperature": 0.0}
        request |= settings.parameters or {}
        # By a hash: it has the prompt and the response in it, which may be long.
        key = blake2b(json.dumps(request, sort_keys=True).encode()).hexdigest()
        reply = self._replies.get(key)
        if reply is None:
            url = f"{settings.base_url.rstrip('/')}/chat/completions"
            reply = await self._server.post(url, request, _text_of)
        try:
            found = read(reply)
        except ValueError as error:
            raise base.TransientJudgeError(f"the judge's reply cannot be read: {error}", after_s=0.0) from error
        # Only now: a reply that cannot be read would be unreadable for ever.
        self._replies[key] = reply
        if len(self._replies) > NUM_KEPT_REPLIES:
            del self._replies[next(iter(self._replies))]
        return found

    def _messages(self, state: RolloutState, **subject: Any) -> list[Message]:
        asked = [message.get("content") for message in state.message if message.get("role") == "user"]
        question = self._template.render(
            prompt=asked[-1] if asked else "",
            messages=state.message,
            ground_truth=(state.reward_model or {}).get("ground_truth"),
            reward_model=state.reward_model or {},
            data_source=state.data_source,
            task_name=state.task_name,
            extra_fields=state.extra_fields,
            criteria=list(self._settings.rubric or ()),
            **subject,
        )
        said = self._settings.system
        system = [] if said is None else [{"role": "system", "content": said}]
        return [*system, {"role": "user", "content": question}]

    async def aclose(self) -> None:
        """Close the connections to the server."""
        await self._server.aclose()


def _text_of(body: Any) -> str:
    reply = body["choices"][0]["message"]["content"]
    if not isinstance(reply, str):
        # `JudgeServer.post` takes it for another form of reply: the model is asked again.
        raise TypeError("a reply without text")
    return reply


def of_rubric(rubric: Mapping[str, float], reply: str) -> dict[str, float]:
    """The weighted mean of the scores in the last JSON object of `reply`, ``{"1": ..., "2": ...}``, and each.

    >>> of_rubric({"It is right.": 3.0, "It is short.": 1.0}, '{"1": 1, "2": 0}')
    {'score': 0.75, 'It is right.': 1.0, 'It is short.': 0.0}

    Raises:
        ValueError: a criterion has no number.
    """
    found = _last_object(reply, "1")
    try:
        scores = [float(found[str(number)]) for number in range(1, len(rubric) + 1)]
    except (KeyError, TypeError):
        raise ValueError(f"{len(rubric)} criteria, but the scores are {found}") from None
    weighted = sum(weight * score for weight, score in zip(rubric.values(), scores, strict=True))
    return {"score": weighted / sum(rubric.values()), **dict(zip(rubric, scores, strict=True))}


TEMPLATES = Path(__file__).parent / "templates"
"""The questions of a judge that is given none."""
_TEMPLATE_OF = {False: "answer", True: "group", "pairs": "pairs"}

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
        if isinstance(parse, str) and _IMPORT_PATH.fullmatch(parse):
            parse = import_object("parse", parse)
        # Of a reply, and whether it is on a group: the list of scores, if it has one; all of its numbers may
        # be scores.
        self._raw: Callable[[str, bool], Any] = _scores_in
        if not isinstance(parse, str):
            function = parse
            self._raw = lambda reply, of_group: list(function(reply)) if of_group else [function(reply)]
        elif parse != "json":
            pattern = compile_pattern("last_number" if parse == "number" else parse)
            self._raw = lambda reply, _: [float(text.replace(",", "")) for text in pattern.findall(reply)]

    def verdict(self, reply: str) -> base.Verdict:
        """The verdict on one rollout.

        Raises:
            ValueError: the reply holds none.
        """
        return self._scaled(_last_of(self._raw(reply, False), 1, reply)[0])

    def verdicts(self, reply: str, count: int) -> list[base.Verdict]:
        """The verdicts on the `count` rollouts of a group, in their order.

        Raises:
            ValueError: the reply does not hold as many.
        """
        return [self._scaled(item) for item in _last_of(self._raw(reply, True), count, reply)]

    def _scaled(self, verdict: Any) -> base.Verdict:
        details = dict(verdict) if isinstance(verdict, Mapping) else {"score": verdict}
        details = {name: float(value) for name, value in details.items() if isinstance(value, int | float)}
        if not math.isfinite(details.get("score", math.nan)):
            raise ValueError(f"no number for a score in {verdict!r}")
        if self._scale is not None:
            low, high = self._scale
            if not low <= details["score"] <= high:
                raise ValueError(f"the score {details['score']:g} is not within {low:g} .. {high:g}")
            details["score"] = (details["score"] - low) / (high - low)
        return details if len(details) > 1 else details["score"]


def _scores_in(reply: str, of_group: bool) -> Any:
    return _last_object(reply, "scores")["scores"] if of_group else [_last_object(reply, "score")]


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
            # The search goes on behind the object: those inside it are passed over.
            value, at = decoder.raw_decode(text, at)
        except ValueError:
            at += 1
        else:
            found = value if key in value else found
        at = text.find("{", at)
    if found is None:
        raise ValueError(f"no JSON object with {key!r}: {text[-200:]!r}")
    return found
