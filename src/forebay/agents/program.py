"""The agent loop for programs that talk to a chat API: each attempt is one run of the program.

::

    rollout --> ChatSession + private address --> program(session) --requests--> model
                     |                                 |
                     v                                 v returns, maybe with a reward; raises: FAILED
              trajectories: tokens, logprobs, versions, masks, recorded on the way through

The program is the user's: an async function, a plain one (in a thread), or a command. It needs no import of
this package. A pause ends the program, which runs again when the rollout goes on; see
`forebay.agents.chat.session` for what becomes of the turns it had.
"""

import asyncio
import contextlib
import inspect
import json
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO, Annotated, Any

from pydantic import Field

from forebay.agents.base import AgentLoop
from forebay.agents.chat.rendering import IncrementRenderer
from forebay.agents.chat.session import MODEL, ChatSession
from forebay.agents.chat.tool_calls import check_parser, choose_reader
from forebay.agents.extra_fields import REQUESTS_KEY
from forebay.aio.tasks import beside, without_exit
from forebay.aio.time_limits import in_thread, timeout
from forebay.config import StrictModel, checked_by, import_object
from forebay.extras import needed_by
from forebay.judges.base import checked_reward
from forebay.types import Message, RolloutState, Status
from forebay.watching.activity import TOOL

PROGRAM_TIMEOUT_S = 600.0
"""Long for an episode, short enough to notice a program that hangs."""

Program = Callable[["ProgramSession"], Any]


def _find_program(program: Any) -> Any:
    return import_object("program", program) if isinstance(program, str) else program


class ProgramAgentLoop(AgentLoop):
    """Runs an agent program against the policy and records what it makes of it.

    Invariants: tokens reach the trainer as the model wrote them; sessions know nothing of each other; a
    program that raises, ends with an error or takes too long makes its rollout FAILED, except where the token
    budget was used up: then what there is counts as truncated (``length``).

    Without a judge, the program's result is the reward: a number, or a mapping with ``score``. Programs
    cannot change the sampling parameters. `name` is what messages call the program.

    Args:
        arguments: those of `Arguments`, by name; `program` may also be a function of a `ProgramSession`, and
            `parser` a function (see `forebay.agents.chat.tool_calls`). The others are of every `AgentLoop`.

    Raises:
        ConfigError: an argument does not fit, the endpoint may not listen there, or aiohttp is missing.
    """

    class Arguments(StrictModel, strict=True):
        """Keys of a ``program`` agent in a run file."""

        program: Annotated[Any, checked_by(_find_program)]
        """``package.module:function`` of a function of a `ProgramSession`, or the words of a command as a
        list. A command gets OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL, and messages and task as JSON
        on its standard input; its reward is the last line it prints, if that is JSON."""
        timeout_s: float | None = Field(default=PROGRAM_TIMEOUT_S, gt=0)
        """Seconds for one run of the program; None: no limit."""
        max_turn_tokens: int | None = Field(default=None, ge=1)
        """Tokens of one turn; None: what is left of the budget. Requests at the same time wait until others
        do not need the tokens that they may use, so a program that asks several should set it."""
        max_context: int | None = Field(default=None, ge=1)
        """Tokens of one trajectory, prompt and all; None: what the engine allows, in a run at most
        ``train.token_budget``."""
        parser: Annotated[Any, checked_by(check_parser)] = None
        """How the model writes tool calls, as for ``tools``; None: as its chat template shows. Where nothing
        shows it, requests with tools are refused."""
        host: str = "127.0.0.1"
        """Address of this machine at which the program finds the chat API, perhaps with a port, else any that
        is free; ``remote:HOST:PORT`` may be one that other machines reach."""

    arguments: Arguments

    def set_up(self) -> None:
        """Get ready to serve the program, and to read what the model writes."""
        own = self.arguments
        self.name = f"program {getattr(own.program, '__name__', own.program)}"
        self._program = _as_function(own.program)
        with needed_by("the chat endpoint"):
            from forebay.agents.chat.endpoint import ChatEndpoint

        self._endpoint = ChatEndpoint(own.host)
        self._increments = IncrementRenderer(self.tokenizer)
        self._reader = choose_reader(self.tokenizer, own.parser)
        self._sessions: set[ChatSession] = set()

    async def generate_sample(self, state: RolloutState) -> list[RolloutState]:
        """Run the program once; the rollout and the further trajectories of this attempt."""
        session = ChatSession(
            state,
            self.rollout_controller,
            self.tokenizer,
            self._increments,
            self._reader,
            max_turn_tokens=self.arguments.max_turn_tokens,
            max_context=self.arguments.max_context,
        )
        self._sessions.add(session)
        try:
            async with self._endpoint.serving(session) as base_url:
                result = await self._run(session, base_url)
        finally:
            self._sessions.discard(session)
        return self._finish(session, result)

    async def pause(self) -> None:
        """End programs and turns; their rollouts end as ABORTED."""
        for session in self._sessions:
            session.interrupt()
        await super().pause()

    async def close(self) -> None:
        """Stop listening, and close the judge."""
        await self._endpoint.close()
        await super().close()

    async def _run(self, session: ChatSession, base_url: str) -> Any:
        """The program's result; None if the session ended before it did."""
        state = session.state
        given = ProgramSession(
            base_url,
            [dict(message) for message in state.message],
            {name: getattr(state, name) for name in _TASK_FIELDS},
        )
        with self.span(TOOL, state) as activity:
            activity.note = self.name
            limit_s = self.arguments.timeout_s

            def late() -> TimeoutError:
                asked = f"after {session.num_requests} requests"
                return TimeoutError(f"{self.name} took longer than {limit_s:g} s, {asked}")

            try:
                async with (
                    beside(self._program(given)) as program,
                    beside(session.ended.wait()) as ended,
                    # Within the others: their end takes its own time.
                    timeout(limit_s, late),
                ):
                    await asyncio.wait([program, ended], return_when=asyncio.FIRST_COMPLETED)
            finally:
                # However the program ended: nothing may be written into its trajectories any more.
                await session.close()
        if session.ended.is_set():
            return None
        if (error := program.exception()) is not None:
            # It has given up for want of tokens: what it has counts as cut, not as failed.
            if session.is_exhausted:
                return None
            raise RuntimeError(f"{self.name}: {type(error).__name__}: {error}") from error
        return program.result()

    def _finish(self, session: ChatSession, result: Any) -> list[RolloutState]:
        first = session.state
        if session.end_status is not None:
            first.status, first.error_msg = session.end_status, session.error_msg
            first.finish_reason = "abort" if session.end_status is Status.ABORTED else "error"
            return [first]
        try:
            trajectories = session.finished()
        except RuntimeError as error:
            raise RuntimeError(f"{self.name}: {error}") from None
        if not len(first.response_ids):
            raise RuntimeError(
                f"{self.name} ended without one answer of the model, after {session.num_requests} requests"
            )
        for state in trajectories:
            state.status = Status.COMPLETED
        first.extra_fields[REQUESTS_KEY] = session.num_requests
        if self.judge is None and result is not None:
            try:
                first.reward = checked_reward(result)
            except (TypeError, ValueError):
                said = f"{self.name} must return a number, or a mapping with a number as score; it returned {result!r}"
                raise ValueError(said[:_TAIL_CHARACTERS]) from None
        return trajectories


@dataclass(frozen=True)
class ProgramSession:
    """The argument of a program.

    >>> async def program(session):
    ...     client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
    ...     answer = await client.chat.completions.create(model=session.model, messages=session.messages)
    ...     return float("46" in answer.choices[0].message.content)
    """

    base_url: str
    """The address of the chat API; it is this rollout's alone."""
    messages: list[Message]
    """The prompt of the task."""
    task: dict[str, Any]
    """``task_name``, ``data_source``, ``reward_model`` (the ground truth, for example), ``tools``,
    ``tool_choice`` and ``rollout_id``."""
    api_key: str = "unused"
    model: str = MODEL


_MAX_OUTPUT_BYTES = 1 << 20
"""The last of a command's output is read: its reward is the last line."""


_TAIL_CHARACTERS = 500
_TASK_FIELDS = ("tools", "tool_choice", "task_name", "data_source", "reward_model", "rollout_id")


def _as_function(program: Program | str | Sequence[str]) -> Callable[[ProgramSession], Awaitable[Any]]:
    program = _find_program(program)
    if not callable(program):
        command = [str(word) for word in program]
        if not command:
            raise ValueError("the program is an empty command")
        return lambda session: _run_command(command, session)
    plain: Any = program
    if inspect.iscoroutinefunction(program):
        return lambda session: without_exit(plain, session)
    # A thread of its own, not one of a pool: programs wait for the model, and all of a pool could do so at
    # once. It cannot be stopped: once the session has ended, its next request fails.
    return lambda session: in_thread(plain, session)


async def _run_command(command: Sequence[str], session: ProgramSession) -> Any:
    """Run `command`; the JSON in the last line it prints, if there is any.

    Raises:
        RuntimeError: it ended with an error; the message ends with what it said.
    """
    task = json.dumps({"messages": session.messages, "task": session.task}, default=str)
    # Files, not pipes: a program need not read its task, may print much, and what it leaves running may keep
    # its output open.
    with TemporaryFile() as given, TemporaryFile() as output, TemporaryFile() as errors:
        given.write(task.encode())
        given.seek(0)
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=given,
            stdout=output,
            stderr=errors,
            # Its own group, so that whatever it started ends with it.
            start_new_session=True,
            env={
                **os.environ,
                "OPENAI_BASE_URL": session.base_url,
                "OPENAI_API_KEY": session.api_key,
                "OPENAI_MODEL": session.model,
            },
        )
        try:
            await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode:
            said = _tail(errors).strip()[-_TAIL_CHARACTERS:]
            raise RuntimeError(f"it ended with code {process.returncode}: {said or '(it said nothing)'}")
        with contextlib.suppress(ValueError, IndexError, RecursionError):
            return json.loads(_tail(output).strip().splitlines()[-1])
        return None


def _tail(file: IO[bytes]) -> str:
    """The end of what a program printed."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - _MAX_OUTPUT_BYTES))
    return file.read().decode(errors="replace")
