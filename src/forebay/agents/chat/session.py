"""One agent program's conversation with the model: chat messages outside, recorded tokens inside.

::

    complete(messages) --> which recorded conversation do they continue?
        one of them   --> its tokens + increment of the new messages, mask 0 ----+
        none          --> a trajectory of its own, from the whole chat template -+--> generate a turn, mask 1
                                                                                           |
    answer to the program <-- text and tool calls of the turn <----------------------------+

The model's own text is never tokenized again: a program that sends the conversation back, as chat programs
do, is recognized by the messages. One that rewrites it (drops old turns, asks in the voice of a sub-agent,
samples the same question twice), or adds what the template cannot render as an increment, gets a further
trajectory of the same attempt.

A pause ends the attempt, and with it the program, which cannot be frozen. When the rollout goes on, the
program starts again and its requests are answered from the record for as long as they are the same; the turn
that the pause cut is finished, and from there on everything is new. A program that asks something else the
second time starts over.

    a request   waits for: tokens that requests at the same time have reserved, then for its turn
                woken by: the end of another request, the end of the session
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forebay.agents.base import Generator
from forebay.agents.chat.conversation import RequestError, Trajectory, plain_message, render_conversation, with_names
from forebay.agents.chat.rendering import ChatTokenizer, IncrementRenderer
from forebay.agents.chat.tool_calls import TurnReader
from forebay.agents.extra_fields import RECORD_KEY
from forebay.aio.changed import Changes
from forebay.aio.tasks import is_cancelled
from forebay.types import TOKEN_FIELDS, Message, RolloutState, SampleParams, Status, reset_rollout_response

MODEL = "policy"
"""The model's name for clients of a session; any other is accepted too."""


class ChatSession:
    """Answers the chat requests of one attempt at one rollout, and records them.

    Invariants: the tokens of a trajectory are exactly what the model saw and wrote, in that order; policy
    tokens over all trajectories stay within ``sample_params.max_tokens`` of the rollout, and each trajectory
    within `max_context`; requests at the same time never share a trajectory; after `close` nothing is written
    any more. The sampling parameters are the rollout's, whatever a request asks for, because the trainer must
    know the distribution; only ``max_tokens`` and ``stop`` of a request count.

    Args:
        state: the rollout; its ``sample_params`` are set.
        rollout_controller: makes the tokens.
        tokenizer: of the model.
        increments: renders what stands between two turns.
        reader: makes messages of turns.
        max_turn_tokens: of one turn; None: what is left. Requests at the same time share the budget: one
            waits until the tokens that it may use are not reserved by others.
        max_context: tokens of one trajectory, prompt and all; None: what the engine allows.
    """

    def __init__(
        self,
        state: RolloutState,
        rollout_controller: Generator,
        tokenizer: ChatTokenizer,
        increments: IncrementRenderer,
        reader: TurnReader,
        *,
        max_turn_tokens: int | None = None,
        max_context: int | None = None,
    ) -> None:
        assert state.sample_params is not None
        self.state = state
        self.num_requests = 0
        self.ended = asyncio.Event()
        """Set when nothing more will be answered, because of a pause or a failure."""
        self.end_status: Status | None = None
        """ABORTED or FAILED once it has `ended`."""
        self.error_msg: str | None = None
        self._params: SampleParams = state.sample_params
        self._controller, self._tokenizer = rollout_controller, tokenizer
        self._increments, self._reader = increments, reader
        self._max_turn_tokens, self._max_context = max_turn_tokens, max_context
        self._refused_prompt = False
        self._trajectories: list[Trajectory] = []
        self._num_begun = 0
        self._reserved = 0
        self._waiting = asyncio.Lock()
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._news = Changes()
        # The record of an earlier run of the program, which a pause ended.
        record = state.extra_fields.pop(RECORD_KEY, None)
        if record is not None and len(state.response_ids):
            self._trajectories.append(Trajectory(state, **record, num_replayed=0))
            self._trajectories[0].note()

    @property
    def is_exhausted(self) -> bool:
        """Whether the budget or the context cut or refused what was asked last, in any trajectory."""
        return self._refused_prompt or any(trajectory.is_exhausted for trajectory in self._trajectories)

    def _replayed(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> "Turn | None":
        """The recorded answer to `messages`, if the program repeats itself; None: the turn is to be made.

        A program that does something else than before starts over: the record is wiped.
        """
        trajectory = next((t for t in self._trajectories if t.num_replayed is not None), None)
        if trajectory is None:
            return None
        recorded, num = trajectory.messages, len(messages)
        assert trajectory.num_replayed is not None
        place = trajectory.place_of_turn(num) if num < len(recorded) else None
        if (
            num <= trajectory.num_replayed
            or recorded[:num] != messages
            or trajectory.tools != tools
            or (num < len(recorded) and place is None)
        ):
            reset_rollout_response(trajectory.state)
            self._trajectories.remove(trajectory)
            return None
        # All of it has been repeated once its last answer, or its last question, has.
        trajectory.num_replayed = num + 1 if num + 1 < len(recorded) else None
        return None if place is None else self._turn(trajectory, recorded[num], place)

    # Requests

    async def complete(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        may_call: bool = True,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> "Turn":
        """The model's next turn after `messages`. Without `may_call` a call of `tools` is text.

        Raises:
            RequestError: the messages cannot be rendered, or there is no budget left.
            SessionEndedError: the attempt was interrupted, before or during this request.
        """
        self._check_open()
        self.num_requests += 1
        given = [plain_message(message) for message in messages]
        if not given or given[-1]["role"] == "assistant":
            raise RequestError("messages must end with one that the model can answer, not an assistant's")
        self._reader.check(tools)
        answer = self._replayed(given, tools)
        if answer is not None:
            return answer
        trajectory = self._continued(given, tools) or self._begun(given, tools)
        trajectory.is_busy = True
        try:
            room = await self._reserve(trajectory, max_tokens)
            try:
                await self._generate(trajectory, room, tuple(stop))
            finally:
                self._reserved -= room
            return self._answer(trajectory, tools if may_call else None, tuple(stop))
        except BaseException:
            # A question without an answer is forgotten, unless the rollout goes on from it after a pause.
            if self.end_status is not Status.ABORTED:
                trajectory.take_back()
                if not len(trajectory.state.response_ids):
                    self._refused_prompt |= trajectory.is_exhausted
                    reset_rollout_response(trajectory.state)
                    self._trajectories.remove(trajectory)
            raise
        finally:
            trajectory.is_busy = False
            self._news.note()

    def _continued(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> Trajectory | None:
        """The recorded conversation that `messages` continue, their tokens appended; the longest one."""
        candidates = [
            trajectory
            for trajectory in self._trajectories
            if not trajectory.is_busy
            and trajectory.tools == tools
            and messages[: len(trajectory.messages)] == trajectory.messages
        ]
        if not candidates:
            return None
        best = max(candidates, key=lambda trajectory: len(trajectory.messages))
        replies = with_names(messages)[len(best.messages) :]
        if not replies:
            # A turn that a pause cut, asked for again; otherwise the same question twice.
            return best if best.messages[-1]["role"] != "assistant" else None
        if best.messages[-1]["role"] != "assistant" or any(m["role"] == "assistant" for m in replies):
            return None
        try:
            ids = self._increments.render(best.turn_ids, replies, is_cut=best.is_cut)
        # Templates refuse in many ways; one that knows no increment may know the whole conversation.
        except Exception:
            return None
        best.continue_with(messages, ids)
        return best

    def _begun(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> Trajectory:
        prompt_ids = render_conversation(self._tokenizer, messages, tools)
        state = self.state
        if any(trajectory.state is state for trajectory in self._trajectories):
            self._num_begun += 1
            state = RolloutState(
                messages,
                rollout_id=f"{state.rollout_id}/{self._num_begun}",
                group_id=state.group_id,
                task_name=state.task_name,
                session_id=f"{state.session_id or state.rollout_id}/{self._num_begun}",
                num_tries=state.num_tries,
                tools=tools,
                status=Status.INIT,
            )
        state.prompt_ids = state.tokens = prompt_ids
        trajectory = Trajectory(state, tools, messages)
        self._trajectories.append(trajectory)
        trajectory.note()
        return trajectory

    async def _reserve(self, trajectory: Trajectory, max_tokens: int | None) -> int:
        """How many tokens the turn may have; they are not there for others until it has ended."""
        num_made = len(trajectory.turn_ids)
        limits = [limit - num_made for limit in (max_tokens, self._max_turn_tokens) if limit is not None]
        if self._max_context is not None:
            num_tokens = len(trajectory.state.tokens)
            if num_tokens >= self._max_context:
                raise self._exhausted(
                    trajectory,
                    f"the conversation has {num_tokens} tokens and leaves no room for an answer within the "
                    f"context of {self._max_context}",
                )
            limits.append(self._max_context - num_tokens)
        async with self._waiting:
            while True:
                self._check_open()
                unused = self._params.max_tokens - self._num_policy_tokens()
                if unused <= 0:
                    raise self._exhausted(
                        trajectory, f"the budget of {self._params.max_tokens} tokens of this rollout is used up"
                    )
                # A turn that a pause cut may have reached a limit of this request already.
                wanted = max(1, min([unused, *limits]))
                if not self._reserved or wanted <= unused - self._reserved:
                    self._reserved += wanted
                    return wanted
                await self._news.wait(self._news.version)

    async def _generate(self, trajectory: Trajectory, room: int, stop: tuple[str, ...]) -> None:
        state = trajectory.state
        limit = int(state.response_mask.sum()) + room
        state.sample_params = replace(self._params, max_tokens=limit, stop=(*self._params.stop, *stop))
        turn = asyncio.ensure_future(self._controller.generate_sample(state))
        self._running.add(turn)
        try:
            await turn
        except ValueError as error:
            raise self._exhausted(trajectory, str(error)) from None
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise SessionEndedError("the program has ended") from None
        # An engine is lost, or the controller is user code that raised: the rollout cannot go on.
        except Exception as error:
            self._end(Status.FAILED, f"{type(error).__name__}: {error}")
            raise SessionEndedError(str(error)) from error
        finally:
            self._running.discard(turn)
            state.sample_params = self._params
        if state.status is not Status.COMPLETED:
            self._end(state.status, state.error_msg)
            raise SessionEndedError(state.error_msg or "the rollout was interrupted")
        state.status = Status.INIT
        # Cut by the rollout's budget or by the context, not by what was asked for this turn.
        trajectory.is_exhausted = state.finish_reason == "length" and (
            self._num_policy_tokens() >= self._params.max_tokens
            or int(state.response_mask.sum()) < limit
            or len(state.tokens) == self._max_context
        )
        if not trajectory.turn_ids:
            raise self._exhausted(trajectory, f"the context of {len(state.tokens)} tokens is used up")
        self._refused_prompt = False

    def _answer(self, trajectory: Trajectory, tools: list[dict[str, Any]] | None, stop: tuple[str, ...]) -> "Turn":
        state, turn_ids = trajectory.state, trajectory.turn_ids
        is_cut = state.finish_reason == "length"
        num_calls = sum(len(message.get("tool_calls", ())) for message in trajectory.messages)
        message = plain_message(self._reader.read(turn_ids, tools, num_calls, is_cut=is_cut))
        if not message.get("tool_calls"):
            # A text that ends the turn is in the tokens, and not in the answer.
            text = message["content"]
            end = min((text.index(words) for words in stop if words in text), default=len(text))
            message["content"] = text[:end]
        trajectory.messages = [*trajectory.messages, message]
        reason = "length" if is_cut else "tool_calls" if message.get("tool_calls") else "stop"
        trajectory.finish_reasons = [*trajectory.finish_reasons, reason]
        trajectory.note()
        state.response = message["content"]
        return self._turn(trajectory, message, len(trajectory.finish_reasons) - 1)

    def _turn(self, trajectory: Trajectory, message: Message, place: int) -> "Turn":
        """The turn at `place`, whose message is `message`."""
        state, starts = trajectory.state, trajectory.turn_starts
        end = starts[place + 1] if place + 1 < len(starts) else len(state.response_ids)
        made = slice(starts[place], starts[place] + int(state.response_mask[starts[place] : end].sum()))
        pairs = list(zip(state.response_ids[made].tolist(), state.logprobs[made].tolist(), strict=True))
        return Turn(
            message,
            trajectory.finish_reasons[place],
            num_prompt_tokens=len(state.prompt_ids) + made.start,
            num_tokens=len(pairs),
            logprobs=lambda: [(self._tokenizer.decode([token]), value) for token, value in pairs],
        )

    def _exhausted(self, trajectory: Trajectory, reason: str) -> "BudgetExhaustedError":
        trajectory.is_exhausted = True
        return BudgetExhaustedError(reason)

    def _num_policy_tokens(self) -> int:
        return sum(int(t.state.response_mask.sum()) for t in self._trajectories)

    # The end

    def interrupt(self) -> None:
        """End the attempt for a pause: running turns are left to the pause of the engines, nothing new
        begins."""
        self._end(Status.ABORTED, None)

    async def close(self) -> None:
        """Return once nothing is written any more; turns without a waiting request are given up."""
        self._closed = True
        self._news.note()
        # A pause ends them itself, and lets them keep the tokens they have.
        if self.end_status is not Status.ABORTED or is_cancelled():
            for turn in self._running:
                turn.cancel()
        while any(trajectory.is_busy for trajectory in self._trajectories):
            await self._news.wait(self._news.version)

    def finished(self) -> list[RolloutState]:
        """The trajectories of the attempt, the rollout itself first; empty ones are left out.

        Finish reasons are ``length`` where the budget or the context cut what was asked last, else ``stop``.

        Raises:
            RuntimeError: the program went on after a pause, and has not asked again what it had asked.
        """
        if any(trajectory.num_replayed is not None for trajectory in self._trajectories):
            raise RuntimeError("after a pause it did not ask again what it had asked before")
        for trajectory in self._trajectories:
            trajectory.state.finish_reason = "length" if trajectory.is_exhausted else "stop"
        states = [t.state for t in self._trajectories if len(t.state.response_ids)]
        further = [state for state in states if state is not self.state]
        if further and len(further) == len(states):
            # The rollout itself has nothing left; a further trajectory becomes it.
            source = further.pop(0)
            others = ("prompt_ids", "tokens", "response", "finish_reason", "routed_experts")
            for name in (*others, *TOKEN_FIELDS):
                setattr(self.state, name, getattr(source, name))
            self.state.extra_fields[RECORD_KEY] = source.extra_fields[RECORD_KEY]
        return [self.state, *further]

    def _end(self, status: Status, error_msg: str | None) -> None:
        # The first status stands, but a failure is never taken for a pause.
        if self.end_status is None or status is Status.FAILED:
            self.end_status, self.error_msg = status, error_msg
        self.ended.set()
        self._news.note()

    def _check_open(self) -> None:
        if self.ended.is_set() or self._closed:
            raise SessionEndedError("the rollout was interrupted, or its program has ended")


class BudgetExhaustedError(RequestError):
    """The rollout's token budget or context is used up."""


class SessionEndedError(RuntimeError):
    """The attempt is over: paused, failed or closed."""


@dataclass
class Turn:
    """The answer to a request."""

    message: Message
    """Role ``assistant``, with ``content`` and, if it called tools, ``tool_calls``."""
    finish_reason: str
    """``stop``, ``length`` or ``tool_calls``."""
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    logprobs: Callable[[], list[tuple[str, float]]] = list
    """(token, log probability) of each token; a call, since most programs do not ask."""
