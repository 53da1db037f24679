"""The multi-turn agent loop: model and environment take turns until one of them ends the episode.

It does not sample tokens (the rollout controller does), parse tool calls (`forebay.agents.tools`) or judge.

::

              +------------------------------ increment, mask 0 <------------------------------+
              v                                                                                |
    prompt -> generate a turn, mask 1 --stop, turn limit--> environment.step(text) --Reply--> done? max_turns?
              | abort         | tokens, context used up          | pause                            | yes
              v               v                                  v                                  v
           ABORTED         COMPLETED "length"                 ABORTED             COMPLETED "stop" or "length"

Everything an interrupted episode needs to go on is plain data in the rollout (`EPISODE_KEY`), so it goes on
in any process: in the middle of a turn from its tokens, after a turn with the environment's reply to it.
"""

import asyncio
import contextlib
import copy
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import Field

from forebay.agents.base import AgentLoop
from forebay.agents.chat.conversation import cut_unanswered
from forebay.agents.chat.rendering import IncrementRenderer, PromptRenderer
from forebay.agents.environments import Memory, Reply, build_environment, find_environment
from forebay.agents.extra_fields import CONVERSATION_KEY, TURNS_KEY
from forebay.aio.tasks import is_cancelled, without_exit
from forebay.aio.time_limits import time_limit, timeout
from forebay.config import StrictModel, checked_by
from forebay.models.image_files import take_images
from forebay.models.images import REPLY_IMAGES, images_of, load_processor, reply_images_of
from forebay.types import EPISODE_KEY, TURN_REWARDS_KEY, RolloutState, Status
from forebay.watching.activity import TOOL

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

ENVIRONMENT_TIMEOUT_S = 60.0
"""Longer than a game or a look-up takes, short enough to notice an environment that hangs."""


class MultiTurnAgentLoop(AgentLoop):
    """Lets the model and an environment take turns.

    Invariants: tokens the model wrote are never changed; the environment's have mask 0, logprob 0 and the
    model step of the token before them; ``sample_params.max_tokens`` bounds the model's tokens over all
    turns; ``response`` is the text of the model's latest turn; ``finish_reason`` is ``length`` where a limit
    ended the episode or the last turn. Without a judge the reward is the sum of the environment's.

    Args:
        arguments: those of `Arguments`, by name; `environment` may also be an `Environment`. The others are
            of every `AgentLoop`.

    Raises:
        ConfigError: an argument does not fit.
        ValueError: the chat template cannot render the environment's replies.
    """

    class Arguments(StrictModel, strict=True):
        """Keys of a ``multi_turn`` agent in a run file."""

        environment: Annotated[Any, checked_by(find_environment)]
        """The environment that answers the model: ``live`` or ``package.module:Class`` of
        an `Environment`, or a table with such a ``name`` and its ``arguments``."""
        max_turns: int = Field(default=8, ge=1)
        """Turns of the model; the environment still replies to the last."""
        max_turn_tokens: int | None = Field(default=None, ge=1)
        """A turn is cut after so many tokens, and the environment reads what there is; None: no limit."""
        max_context: int | None = Field(default=None, ge=1)
        """Tokens of prompt, turns and replies together; None: what the engine allows, in a run at most
        ``train.token_budget``."""
        environment_timeout_s: float | None = Field(default=ENVIRONMENT_TIMEOUT_S, gt=0)
        """Seconds for one reply, without what it waits for a sandbox, after which the rollout is FAILED;
        None: no limit. To resume a rollout may take as long as its replies together."""

    arguments: Arguments
    is_whole_at_awaits = True

    def set_up(self) -> None:
        """Make the environment."""
        self.environment = build_environment(self.arguments.environment)
        self._name = f"environment {type(self.environment).__name__}"
        self._prompts = PromptRenderer(self.tokenizer)
        self._increments = IncrementRenderer(self.tokenizer, roles=self.environment.roles)
        self._is_paused = False
        self._calls: dict[asyncio.Task[Any], bool] = {}
        """Those of the environment that run, and whether a pause has cancelled them."""

    @classmethod
    def prompt_tools(cls, arguments: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """The tools that the environment offers in the prompt."""
        tools = getattr(find_environment(arguments["environment"]), "prompt_tools", None)
        return None if tools is None else list(tools)

    def go_on(self) -> None:
        """Let the environment be called again."""
        self._is_paused = False

    async def pause(self) -> None:
        """End turns and environment calls; their rollouts end as ABORTED."""
        self._is_paused = True
        for call in self._calls:
            # False: it has just ended, by itself, and keeps its result, or by a pause before.
            self._calls[call] |= call.cancel()
        await super().pause()

    async def close(self) -> None:
        """Shut the environment down, and close the judge."""
        await self.environment.shut_down()
        await super().close()

    async def generate_sample(self, state: RolloutState) -> RolloutState:
        """Play, or go on with, one episode in place."""
        try:
            async with self._opened(state) as record:
                while record.ended_by is None:
                    # For copies that are saved while the turn or the reply is waited for.
                    state.extra_fields[EPISODE_KEY] = asdict(record)
                    if record.awaits_reply:
                        await self._reply(state, record)
                        continue
                    await self._generate_turn(state, record)
                    if not record.awaits_reply:
                        break
        except Interrupted:
            state.status, state.finish_reason = Status.ABORTED, "abort"
        return state

    @contextlib.asynccontextmanager
    async def _opened(self, state: RolloutState) -> "AsyncIterator[EpisodeRecord]":
        """The episode of `state`, begun or resumed, and closed however it ends."""
        try:
            # An episode without a token has nothing to go on from, and begins anew.
            if len(state.response_ids) and EPISODE_KEY in state.extra_fields:
                record = EpisodeRecord(**copy.deepcopy(state.extra_fields[EPISODE_KEY]))
                # A copy, as for a step: what `resume` does to it is not kept.
                memory = copy.deepcopy(record.memory)
                # The environment may replay all of them.
                replies = 1 + state.extra_fields.get(TURNS_KEY, 0)
                await self._call(self.environment.resume, state, memory, num_replies=replies)
            else:
                record = await self._begin(state)
            try:
                yield record
            finally:
                state.extra_fields[EPISODE_KEY] = asdict(record)
        finally:
            limit_s = self.arguments.environment_timeout_s
            try:
                async with timeout(limit_s) as limit:
                    await self.environment.close(state)
            except TimeoutError:
                if not limit.expired():
                    raise
                # The episode is what it is; what may be left open is for people to look at.
                logger.error("%s did not close rollout %s within %g s", self._name, state.rollout_id, limit_s)

    async def _begin(self, state: RolloutState) -> "EpisodeRecord":
        """A new episode; what an earlier try left behind is forgotten."""
        for key in (EPISODE_KEY, TURNS_KEY, CONVERSATION_KEY):
            state.extra_fields.pop(key, None)
        if state.mm_info is not None and REPLY_IMAGES in state.mm_info:
            state.mm_info = {key: value for key, value in state.mm_info.items() if key != REPLY_IMAGES}
        memory = await self._call(self.environment.reset, state)
        self._prompts.render(state)
        if self._room(state) <= 0:
            raise ValueError(
                f"the prompt of rollout {state.rollout_id!r} has {len(state.tokens)} tokens and leaves no "
                f"room for an answer within max_context = {self.arguments.max_context}; shorten it, or "
                f"raise the limit"
            )
        state.extra_fields[CONVERSATION_KEY] = []
        state.extra_fields[TURNS_KEY] = 0
        return EpisodeRecord(memory, turn_start=len(state.response_ids))

    async def _generate_turn(self, state: RolloutState, record: "EpisodeRecord") -> None:
        """Write, or finish, the model's turn; the record says whether the environment is next."""
        whole = state.sample_params
        assert whole is not None
        num_earlier = int(state.response_mask[: record.turn_start].sum())
        turn_limit = num_earlier + (self.arguments.max_turn_tokens or whole.max_tokens)
        in_context = int(state.response_mask.sum()) + self._room(state)
        limit = int(min(whole.max_tokens, turn_limit, in_context))
        # At least 1 is what sample parameters may hold; with nothing left the controller makes nothing.
        state.sample_params = replace(whole, max_tokens=max(limit, 1))
        try:
            await self.rollout_controller.generate_sample(state)
        finally:
            state.sample_params = whole
        turn_ids = state.response_ids[record.turn_start :].tolist()
        if turn_ids:
            state.response = str(self.tokenizer.decode(turn_ids, skip_special_tokens=True))
        if state.status is not Status.COMPLETED:
            return
        num_used = num_earlier + len(turn_ids)
        record.is_cut = state.finish_reason == "length"
        if turn_ids:
            state.extra_fields[TURNS_KEY] += 1
            said = {"role": "assistant", "content": self._read(turn_ids, record)}
            state.extra_fields[CONVERSATION_KEY].append(said)
        # Cut by the limit of a turn alone, it is read as it is; the rollout has tokens left.
        if not record.is_cut or turn_limit <= num_used < whole.max_tokens:
            record.awaits_reply = True
            # Until the environment has replied, this rollout must not pass for a finished one.
            state.status = Status.INIT
        else:
            self._end(state, record, "max_tokens" if num_used >= whole.max_tokens else "context")

    def _read(self, turn_ids: list[int], record: "EpisodeRecord") -> str:
        """The text of a turn, for the environment and in the conversation."""
        special = self.environment.reads_special_tokens
        if special and not record.is_cut and turn_ids[-1] in self.tokenizer.all_special_ids:
            # The end of the turn, not a part of it.
            turn_ids = turn_ids[:-1]
        return str(self.tokenizer.decode(turn_ids, skip_special_tokens=not special))

    async def _reply(self, state: RolloutState, record: "EpisodeRecord") -> None:
        turn_ids = state.response_ids[record.turn_start :].tolist()
        memory = copy.deepcopy(record.memory)
        reply = await self._call(self.environment.step, state, memory, self._read(turn_ids, record))
        if not isinstance(reply, Reply):
            raise TypeError(f"{self._name}: step must return a Reply, got {reply!r}")
        record.memory = memory
        if reply.reward is not None:
            record.rewards.append(float(reply.reward))
            record.rewarded_at.append(len(state.response_ids))
        messages, images = take_images({}, [] if reply.done else reply.messages, self._name)
        state.extra_fields[CONVERSATION_KEY].extend(messages)
        record.awaits_reply = False
        if reply.done or state.extra_fields[TURNS_KEY] >= self.arguments.max_turns:
            self._end(state, record, "environment" if reply.done else "max_turns")
            return
        if not messages:
            raise ValueError(
                f"{self._name} was neither done nor had anything to say after turn "
                f"{state.extra_fields[TURNS_KEY]}; return Reply(text) or Reply(done=True)"
            )
        if images or images_of(state) or reply_images_of(state):
            processor = load_processor(self.tokenizer.name_or_path)
            # Written by the model, so there is no image for it, and no engine can go on.
            if processor.image_token_id in state.response_ids[state.response_mask != 0]:
                self._end(state, record, "placeholder")
                return
        ids = self._increments.render(turn_ids, messages, is_cut=record.is_cut, images=tuple(images))
        if len(ids) >= self._room(state):
            self._end(state, record, "context")
            return
        if images:
            info, start = state.mm_info or {}, len(state.response_ids)
            noted = [*info.get(REPLY_IMAGES, ()), *([start, image] for image in images)]
            # A new one: the members of a group share that of their prompt.
            state.mm_info = {**info, REPLY_IMAGES: noted}
        # With the step of the token before, a reply makes the rollout neither older nor younger.
        step = int(state.response_model_steps[-1]) if len(state.response_model_steps) else -1
        state.append(ids, logprobs=np.zeros(len(ids), np.float32), mask=0, model_step=step)
        record.turn_start = len(state.response_ids)

    def _room(self, state: RolloutState) -> float:
        """How many more tokens the context takes."""
        limit = self.arguments.max_context
        return math.inf if limit is None else limit - len(state.tokens)

    def _end(self, state: RolloutState, record: "EpisodeRecord", by: str) -> None:
        record.ended_by = by
        cut_unanswered(state)
        conversation = state.extra_fields[CONVERSATION_KEY]
        while conversation and conversation[-1]["role"] != "assistant":
            conversation.pop()
        state.status = Status.COMPLETED
        stops = by in ("environment", "placeholder") and not record.is_cut
        state.finish_reason = "stop" if stops else "length"
        if self.judge is None and self.environment.gives_rewards:
            state.reward = {"score": float(sum(record.rewards))}
            pairs = zip(record.rewarded_at, record.rewards, strict=False)
            state.extra_fields[TURN_REWARDS_KEY] = [list(pair) for pair in pairs]

    async def _call(
        self, method: Callable[..., Awaitable[Result]], state: RolloutState, *arguments: Any, num_replies: int = 1
    ) -> Result:
        """Wait for the environment, so that a pause ends it and a stall names it.

        Raises:
            Interrupted: a pause came first.
            TimeoutError: it took longer than so many replies may.
        """
        one_s = self.arguments.environment_timeout_s
        limit_s = None if one_s is None else one_s * num_replies
        what = f"{self._name}, turn {state.extra_fields.get(TURNS_KEY, 0)}"
        if self._is_paused:
            raise Interrupted
        with self.span(TOOL, state) as activity:
            activity.note = what
            # Made within its limit, whose clock it may stop.
            async with time_limit(limit_s, lambda: TimeoutError(f"{what} did not answer within {limit_s:g} s")):
                call = asyncio.create_task(without_exit(method, state, *arguments))
                self._calls[call] = False
                try:
                    return await call
                except asyncio.CancelledError:
                    if self._calls[call] and not is_cancelled():
                        raise Interrupted from None
                    raise
                except Exception as error:
                    raise RuntimeError(f"{what}: {type(error).__name__}: {error}") from error
                finally:
                    del self._calls[call]


@dataclass
class EpisodeRecord:
    """The state of an episode between two turns."""

    memory: Memory = field(default_factory=dict)
    """The environment's memory of this rollout, saved with it."""
    turn_start: int = 0
    """Where in ``response_ids`` the model's latest turn begins."""
    is_cut: bool = False
    """Whether that turn ended by a limit, not by the model."""
    awaits_reply: bool = False
    """The turn is finished and the environment has not replied to it."""
    rewards: list[float] = field(default_factory=list)
    """The environment's rewards so far."""
    rewarded_at: list[int] = field(default_factory=list)
    """How many response tokens there were at each of them."""
    ended_by: str | None = None
    """``environment``, ``max_turns``, ``max_tokens``, ``context``; ``placeholder``: the model wrote one of an
    image; None: not ended."""


class Interrupted(Exception):
    """A pause ended the call."""


def episode_reward(state: RolloutState) -> float:
    """The sum of the rewards that the environment gave; a judge (``forebay.agents:episode_reward``)."""
    return float(sum(state.extra_fields[EPISODE_KEY]["rewards"]))
