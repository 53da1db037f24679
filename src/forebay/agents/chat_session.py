"""One agent program's conversation with the model: chat messages outside, recorded tokens inside.

::

    complete(messages) --> which recorded conversation do they continue?
        one of them   --> its tokens + increment of the new messages, mask 0 ----+
        none          --> a trajectory of its own, from the whole chat template -+--> generate a turn, mask 1
                                                                                           |
    answer to the program <-- text and tool calls of the turn <----------------------------+

What the model wrote is never tokenised again: a program that sends the conversation back, as chat programs
do, is recognised by the messages. One that rewrites it (drops old turns, asks in the voice of a sub-agent,
samples the same question twice) gets a further trajectory of the same attempt.

A pause ends the attempt, and with it the program, which cannot be frozen. When the rollout goes on, the
program starts again and its requests are answered from the record for as long as they are the same; the turn
that the pause cut is finished, and from there on everything is new. A program that asks something else the
second time starts over.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from forebay.agents.base import Generator
from forebay.agents.increments import IncrementRenderer, TurnTokenizer
from forebay.agents.single_turn import render_prompt
from forebay.types import TOKEN_FIELDS, Message, RolloutState, SampleParams, Status, reset_rollout_response

RECORD_KEY = "chat_record"
"""Key in ``extra_fields``: the conversation of a trajectory, for going on after a pause."""


class RequestError(ValueError):
    """The program asked for something that cannot be given; it is told so, and may go on."""


class BudgetExhaustedError(RequestError):
    """The rollout's token budget or context is used up."""


class SessionEndedError(RuntimeError):
    """The attempt is over: paused, failed or closed."""


@dataclass
class Turn:
    """What a request is answered with."""

    message: Message
    """Role ``assistant``, with ``content`` and, if it called tools, ``tool_calls``."""
    finish_reason: str
    """``stop``, ``length`` or ``tool_calls``."""
    num_prompt_tokens: int
    num_tokens: int
    logprobs: list[tuple[str, float]] = field(default_factory=list)
    """(token, log probability) of each token."""


@dataclass(eq=False)
class _Trajectory:
    """One recorded conversation and its tokens."""

    state: RolloutState
    tools: list[dict[str, Any]] | None
    messages: list[Message]
    """As `plain_message` has them, the model's own turns included."""
    turn_start: int = 0
    """Where in ``response_ids`` the latest turn begins."""
    is_busy: bool = False
    num_replayed: int | None = None
    """While the program runs again after a pause: how many messages it has been seen to repeat."""


class TurnReader:
    """Makes a chat message of a turn's tokens. This one knows text only."""

    def __init__(self, tokenizer: TurnTokenizer) -> None:
        self._tokenizer = tokenizer

    def read(self, turn_ids: Sequence[int], tools: list[dict[str, Any]] | None) -> Message:
        """The message; ``tool_calls`` as the chat API has them."""
        return {"role": "assistant", "content": self._tokenizer.decode(turn_ids, skip_special_tokens=True)}


class ChatSession:
    """Answers the chat requests of one attempt at one rollout, and records them.

    Invariants: the tokens of a trajectory are exactly what the model saw and wrote, in that order; policy
    tokens over all trajectories stay within ``sample_params.max_tokens`` of the rollout; requests at the same
    time never share a trajectory. The sampling parameters are the rollout's, whatever a request asks for,
    because the trainer must know the distribution; only ``max_tokens`` and ``stop`` of a request count.

    >>> session = ChatSession(state, controller, tokenizer, increments, TurnReader(tokenizer))
    >>> turn = await session.complete([{"role": "user", "content": "2 + 2?"}])       # doctest: +SKIP
    >>> turn.message["content"]                                                      # doctest: +SKIP
    '4'

    Args:
        state: the rollout; its ``sample_params`` are set.
        rollout_controller: makes the tokens.
        tokenizer: of the model.
        increments: renders what stands between two turns.
        reader: makes messages of turns.
    """

    def __init__(
        self,
        state: RolloutState,
        rollout_controller: Generator,
        tokenizer: TurnTokenizer,
        increments: IncrementRenderer,
        reader: TurnReader,
    ) -> None:
        assert state.sample_params is not None
        self.state = state
        self.num_requests = 0
        self.ended = asyncio.Event()
        """Set when nothing more will be answered, because a turn was aborted or failed."""
        self.is_exhausted = False
        """Whether the budget or the context cut a turn or refused one."""
        self._params: SampleParams = state.sample_params
        self._controller, self._tokenizer = rollout_controller, tokenizer
        self._increments, self._reader = increments, reader
        self._trajectories: list[_Trajectory] = []
        self._reserved = 0
        self._restore()

    # The record of an earlier run of the program

    def _restore(self) -> None:
        record = self.state.extra_fields.get(RECORD_KEY)
        if record is None or not len(self.state.response_ids):
            self.state.extra_fields.pop(RECORD_KEY, None)
            return
        trajectory = _Trajectory(
            self.state, record["tools"], record["messages"], record["turn_start"], num_replayed=0
        )
        self._trajectories.append(trajectory)

    def _note(self, trajectory: _Trajectory) -> None:
        trajectory.state.extra_fields[RECORD_KEY] = {
            "tools": trajectory.tools,
            "messages": trajectory.messages,
            "turn_start": trajectory.turn_start,
        }

    def _replayed(self, trajectory: _Trajectory, messages: list[Message]) -> Message | None:
        """The recorded answer to `messages`, if the program repeats itself; None: the turn is to be made.

        A program that does something else than before starts over: the record is wiped.
        """
        assert trajectory.num_replayed is not None
        recorded = trajectory.messages
        num = len(messages)
        if num < trajectory.num_replayed or recorded[:num] != messages:
            reset_rollout_response(trajectory.state)
            self._trajectories.remove(trajectory)
            return None
        if num < len(recorded):
            trajectory.num_replayed = num + 1
            if num + 1 == len(recorded):
                # All of it has been repeated.
                trajectory.num_replayed = None
            return recorded[num]
        trajectory.num_replayed = None
        return None

    # Requests

    async def complete(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Turn:
        """The model's next turn after `messages`.

        Raises:
            RequestError: the messages cannot be rendered, or there is no budget left.
            SessionEndedError: the attempt was interrupted, before or during this request.
        """
        if self.ended.is_set():
            raise SessionEndedError("the rollout was interrupted")
        self.num_requests += 1
        given = [plain_message(message) for message in messages]
        if not given or given[-1]["role"] == "assistant":
            raise RequestError("messages must end with one that the model can answer, not an assistant's")
        replaying = next((t for t in self._trajectories if t.num_replayed is not None), None)
        if replaying is not None and replaying.tools == tools:
            answer = self._replayed(replaying, given)
            if answer is not None:
                return Turn(answer, "tool_calls" if answer.get("tool_calls") else "stop", 0, 0)
        trajectory = self._continued(given, tools) or self._begun(given, tools)
        trajectory.is_busy = True
        try:
            return await self._generate(trajectory, max_tokens, tuple(stop))
        finally:
            trajectory.is_busy = False

    def _continued(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> _Trajectory | None:
        """The recorded conversation that `messages` continue, their tokens appended; the longest one."""
        candidates = [
            trajectory
            for trajectory in self._trajectories
            if not trajectory.is_busy
            and trajectory.tools == tools
            and len(trajectory.messages) <= len(messages)
            and messages[: len(trajectory.messages)] == trajectory.messages
        ]
        if not candidates:
            return None
        best = max(candidates, key=lambda trajectory: len(trajectory.messages))
        replies = messages[len(best.messages) :]
        if not replies:
            # A turn that a pause cut, asked for again; otherwise the same question twice.
            return best if best.messages[-1]["role"] != "assistant" else None
        if best.messages[-1]["role"] != "assistant" or any(m["role"] == "assistant" for m in replies):
            return None
        state = best.state
        turn_ids = state.response_ids[best.turn_start :].tolist()
        try:
            ids = self._increments.render(turn_ids, replies)
        except ValueError as error:
            raise RequestError(str(error)) from None
        step = int(state.response_model_steps[-1])
        state.append(ids, logprobs=np.zeros(len(ids), np.float32), mask=0, model_step=step)
        best.turn_start = len(state.response_ids)
        best.messages = messages
        self._note(best)
        return best

    def _begun(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> _Trajectory:
        try:
            prompt_ids = render_prompt(self._tokenizer, messages, tools)
        # Templates refuse what they do not know in many ways: raise_exception, missing attributes.
        except Exception as error:
            raise RequestError(f"the chat template cannot render these messages: {error}") from error
        is_first = not self._trajectories
        state = self.state if is_first else self._further(messages, tools)
        state.prompt_ids = state.tokens = prompt_ids
        trajectory = _Trajectory(state, tools, messages)
        self._trajectories.append(trajectory)
        self._note(trajectory)
        return trajectory

    def _further(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> RolloutState:
        first = self.state
        return RolloutState(
            messages,
            rollout_id=f"{first.rollout_id}/{len(self._trajectories)}",
            group_id=first.group_id,
            task_name=first.task_name,
            session_id=f"{first.session_id or first.rollout_id}/{len(self._trajectories)}",
            num_tries=first.num_tries,
            tools=tools,
            status=Status.INIT,
        )

    async def _generate(self, trajectory: _Trajectory, max_tokens: int | None, stop: tuple[str, ...]) -> Turn:
        state = trajectory.state
        num_before = int(state.response_mask.sum())
        started = int(state.response_mask[: trajectory.turn_start].sum())
        left = self._params.max_tokens - self._num_policy_tokens() - self._reserved
        room = left if max_tokens is None else min(left, max_tokens - (num_before - started))
        if left <= 0:
            self.is_exhausted = True
            self._drop_unanswered(trajectory)
            raise BudgetExhaustedError(
                f"the budget of {self._params.max_tokens} tokens of this rollout is used up"
            )
        # What requests at the same time may use is not there for others.
        self._reserved += room
        state.sample_params = replace(
            self._params, max_tokens=num_before + room, stop=(*self._params.stop, *stop)
        )
        try:
            await self._controller.generate_sample(state)
        except ValueError as error:
            self.is_exhausted = True
            self._drop_unanswered(trajectory)
            raise BudgetExhaustedError(str(error)) from None
        finally:
            self._reserved -= room
            state.sample_params = self._params
        if state.status is not Status.COMPLETED:
            self.ended.set()
            raise SessionEndedError(state.error_msg or "the rollout was interrupted")
        return self._answer(trajectory, room, left)

    def _answer(self, trajectory: _Trajectory, room: int, left: int) -> Turn:
        state = trajectory.state
        state.status = Status.INIT
        turn_ids = state.response_ids[trajectory.turn_start :].tolist()
        message = plain_message(self._reader.read(turn_ids, trajectory.tools))
        trajectory.messages = [*trajectory.messages, message]
        state.response = message["content"] or ""
        self._note(trajectory)
        is_cut = state.finish_reason == "length"
        if is_cut and (room == left or len(turn_ids) < room):
            self.is_exhausted = True
        reason = "length" if is_cut else "tool_calls" if message.get("tool_calls") else "stop"
        logprobs = state.logprobs[trajectory.turn_start :].tolist()
        return Turn(
            message,
            reason,
            num_prompt_tokens=len(state.tokens) - len(turn_ids),
            num_tokens=len(turn_ids),
            logprobs=[
                (self._tokenizer.decode([token]), value)
                for token, value in zip(turn_ids, logprobs, strict=True)
            ],
        )

    def _drop_unanswered(self, trajectory: _Trajectory) -> None:
        """Take off messages that the model has no room to answer: nothing would learn from them."""
        state = trajectory.state
        end = trajectory.turn_start
        while end and not state.response_mask[end - 1]:
            end -= 1
        num_cut = len(state.response_ids) - end
        if num_cut and not state.response_mask[end:].any():
            truncate(state, end)
        if not len(state.response_ids):
            self._trajectories.remove(trajectory)

    def _num_policy_tokens(self) -> int:
        return sum(int(t.state.response_mask.sum()) for t in self._trajectories)

    def finished(self) -> list[RolloutState]:
        """The trajectories of the attempt, the rollout itself first; empty ones are left out."""
        states = [t.state for t in self._trajectories if len(t.state.response_ids)]
        further = [state for state in states if state is not self.state]
        if self.state not in [t.state for t in self._trajectories] and further:
            # The rollout itself has nothing left; a further trajectory takes its place.
            return further
        return [self.state, *further]


def truncate(state: RolloutState, num_response_tokens: int) -> None:
    """Keep the first `num_response_tokens` tokens of the response."""
    surplus = len(state.response_ids) - num_response_tokens
    state.tokens = state.tokens[: len(state.tokens) - surplus].copy()
    for name in TOKEN_FIELDS:
        setattr(state, name, getattr(state, name)[:num_response_tokens].copy())


def plain_message(message: Mapping[str, Any]) -> Message:
    """`message` in one form, so that what comes back from a program can be compared with what was sent.

    Text parts are joined, empty fields left out, the arguments of tool calls become objects.

    Raises:
        RequestError: it has no role, or content that is not text.
    """
    if "role" not in message:
        raise RequestError(f"a message has no role: {json.dumps(message, default=str)[:200]}")
    role = "system" if message["role"] == "developer" else message["role"]
    plain: Message = {"role": role, "content": _text(message.get("content"))}
    for key in ("name", "tool_call_id"):
        if message.get(key):
            plain[key] = message[key]
    if message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in message["tool_calls"]]
    return plain


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"content must be text, got {type(content).__name__}")
    parts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(f"content of type {kind!r} is not supported; only text is")
        parts.append(str(part["text"]))
    return "".join(parts)


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # What is not JSON stays the text that the model wrote.
        with contextlib.suppress(json.JSONDecodeError):
            arguments = json.loads(arguments)
    return {
        "id": call.get("id", ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
