"""The tool agent loop: the model calls tools until it answers without calling one.

::

    schemas --tools=--> prompt
    turn --parser--> no calls --> done
              '----> calls, all at once, each with its time --> results --> messages with mask 0 --> turn
                         | wrong, too slow: a message that says so
                         | ToolUnavailableError: the rollout is FAILED

Turns, budgets and pauses are those of `forebay.agents.multi_turn`; this is its environment.
"""

import asyncio
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from forebay.agents.base import AgentLoop
from forebay.agents.chat.rendering import NO_TOOLS
from forebay.agents.chat.tool_calls import Parser, ToolCall, api_call, check_parser, choose_parser, resolved
from forebay.agents.environments import Environment, Memory, Reply
from forebay.agents.extra_fields import TOOL_CALLS_KEY, TOOL_ERRORS_KEY
from forebay.agents.multi_turn import MultiTurnAgentLoop
from forebay.aio.time_limits import time_limit
from forebay.config import StrictModel, checked_by
from forebay.tools import Tool, ToolError
from forebay.tools.base import build_tool, find_tool, schema_of
from forebay.tools.contract import Result, Schema
from forebay.types import Message, RolloutState

TOOL_TIMEOUT_S = 10.0
"""For one call: a program, a look-up; a model that computes for longer should learn to compute less."""
MAX_RESULT_CHARACTERS = 4000
"""About a thousand tokens: a result must not fill the context."""


class ToolEnvironment(Environment):
    """Runs the tool calls of each turn; a turn without calls is the answer.

    Args:
        arguments: of the agent.
        parse: finds the calls in a turn.

    Raises:
        ConfigError: a tool is unknown or does not take its arguments.
        ValueError: two tools have one name.
    """

    reads_special_tokens = True
    gives_rewards = False

    def __init__(self, arguments: "ToolAgentLoop.Arguments", parse: Parser) -> None:
        tools = [build_tool(tool) for tool in arguments.tools]
        self.tools = {tool.name: tool for tool in tools}
        if len(self.tools) < len(tools):
            raise ValueError(f"tools need different names, got {[tool.name for tool in tools]}")
        self.roles = (arguments.result_role,)
        self._arguments = arguments
        self._parse = parse

    async def reset(self, state: RolloutState) -> Memory:
        """Name the tools in the prompt: those of the data, or all.

        Raises:
            ValueError: the data names a tool that is not here, or a tool choice that cannot be enforced.
        """
        if state.tools is None:
            state.tools = [tool.schema for tool in self.tools.values()]
        named = [(schema.get("function") or {}).get("name") for schema in state.tools]
        if unknown := [name for name in named if name not in self.tools]:
            raise ValueError(
                f"the data offers tools that the agent does not have: {unknown}; it has {', '.join(self.tools)}"
            )
        if state.tool_choice not in (None, "auto", NO_TOOLS):
            raise ValueError(
                f"tool_choice {state.tool_choice!r} cannot be enforced on what the model writes; use 'auto', "
                f"or 'none' to offer no tools"
            )
        state.extra_fields[TOOL_CALLS_KEY] = state.extra_fields[TOOL_ERRORS_KEY] = 0
        return {}

    async def step(self, state: RolloutState, memory: Memory, text: str) -> Reply:
        """The results of the calls in `text`, in their order."""
        # The model was told of no tools, so a text that looks like a call is text.
        calls = [] if state.tool_choice == NO_TOOLS else self._parse(text)
        if not calls:
            return Reply(done=True)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._result_of(call)) for call in calls]
        except BaseExceptionGroup as errors:
            # The error of one broken tool says more than a group of errors does.
            raise errors.exceptions[0] from None
        results = [task.result() for task in tasks]
        made: list[dict[str, Any]] = []
        messages: list[Message] = []
        for call, (_, result) in zip(calls, results, strict=True):
            arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments)
            made.append(api_call(len(made), call.name, arguments))
            messages.append({"role": self.roles[0], "content": self._said(result)})
            if self.roles[0] == "tool":
                # A call that cannot be read has no name.
                messages[-1] |= {"name": call.name, "tool_call_id": made[-1]["id"]}
        state.tool_calls = [*(state.tool_calls or ()), *made]
        state.extra_fields[TOOL_CALLS_KEY] += len(calls)
        state.extra_fields[TOOL_ERRORS_KEY] += sum(not ok for ok, _ in results)
        return Reply(messages)

    def _said(self, result: Result) -> Result:
        """The content of the message with this result: text, or parts of which some are images."""
        form = self._arguments.result_format
        if isinstance(result, str):
            # Not `format`: formats and results may have other braces.
            return form.replace("{result}", self._cut(result))
        before, *_, behind = form.split("{result}")
        cut = [self._cut(piece) if isinstance(piece, str) else piece for piece in result]
        kinds = (("text" if isinstance(piece, str) else "image", piece) for piece in (before, *cut, behind))
        return [{"type": kind, kind: piece} for kind, piece in kinds if piece != ""]

    async def _result_of(self, call: ToolCall) -> tuple[bool, Result]:
        """Whether there is a result, and what the model reads."""
        limit_s = self._arguments.tool_timeout_s
        try:
            tool, arguments = self._find(call)
            async with time_limit(limit_s, lambda: ToolError(f"no result within {limit_s:g} s")):
                result = await tool.call(arguments)
        except ToolError as error:
            return False, f"Error: {error}"
        return True, result

    def _find(self, call: ToolCall) -> tuple[Tool, dict[str, Any]]:
        """The tool and its arguments.

        Raises:
            ToolError: the call is malformed, or there is no such tool.
        """
        if call.problem is not None:
            raise ToolError(call.problem)
        known = {name: tool.schema["function"] for name, tool in self.tools.items()}
        name, arguments = resolved(call, known)
        if name not in known:
            raise ToolError(f"there is no tool {name!r}, only {', '.join(known)}")
        if isinstance(arguments, str):
            parameters = (known[name].get("parameters") or {}).get("properties") or {}
            raise ToolError(f"{name} takes an object with {', '.join(parameters) or 'nothing'}")
        return self.tools[name], arguments

    async def shut_down(self) -> None:
        """Close the tools that can be closed, all of them.

        Raises:
            ExceptionGroup: some could not be closed.
        """
        errors: list[Exception] = []
        for tool in self.tools.values():
            close = getattr(tool, "close", None)
            try:
                closing = None if close is None else close()
                if inspect.isawaitable(closing):
                    await closing
            # Tools are user code, and the others are to be closed too.
            except Exception as error:
                error.add_note(f"tool {tool.name!r}")
                errors.append(error)
        if errors:
            raise ExceptionGroup("tools could not be closed", errors)

    def _cut(self, text: str) -> str:
        # Half a surrogate pair, which JSON can hold, is nothing that a tokenizer takes.
        text = text.encode(errors="backslashreplace").decode()
        end = self._arguments.max_result_characters
        left = len(text) - end
        return text if left <= 0 else f"{text[:end]}... ({left} characters left out)"


def _check_format(text: str) -> None:
    if "{result}" not in text:
        raise ValueError("result_format must hold {result}, where the result goes")


class ToolAgentLoop(AgentLoop):
    """Lets the model call tools until it answers.

    Invariants: as for `MultiTurnAgentLoop`, whose turns these are. The calls of one turn run at the same
    time and their results come in the order of the calls. An error of a call is a result that the
    model reads; a tool that is broken fails the rollout. ``extra_fields`` count turns, calls and errors, and
    ``tool_calls`` are those of all turns. A rollout whose ``tool_choice`` is ``"none"`` is offered no tools.

    Args: arguments: those of `Arguments`, by name; `tools` may also hold functions and `Tool` objects, and
    `parser` be a function (see `forebay.agents.chat.tool_calls`). The others are of every `AgentLoop`.

    Raises:
        ConfigError: an argument does not fit; a tool is unknown or does not take its arguments.
        ValueError: the chat template does not render results, or shows no dialect of calls.
    """

    class Arguments(StrictModel, strict=True):
        """Keys of a ``tools`` agent in a run file."""

        tools: Annotated[Sequence[Annotated[Any, checked_by(find_tool)]], Field(min_length=1)]
        """The tools: ``calculator``, ``python``, ``search`` or ``package.module:Name`` of a function
        or class of tools, or tables with such a ``name`` and its ``arguments``."""
        parser: Annotated[Any, checked_by(check_parser)] = None
        """How the model writes calls: a dialect's name, or a regular expression with a group ``arguments``
        and perhaps one ``name``; None: as its chat template shows."""
        max_turns: int = Field(default=8, ge=1)
        """Turns of the model; the tools called in the last are still run."""
        max_turn_tokens: int | None = Field(default=None, ge=1)
        """A turn is cut after so many tokens; None: no limit."""
        max_context: int | None = Field(default=None, ge=1)
        """Tokens of prompt, turns and results together; None: what the engine allows, in a run at most
        ``train.token_budget``."""
        tool_timeout_s: float | None = Field(default=TOOL_TIMEOUT_S, gt=0)
        """Seconds for each call, from when it has its thread or sandbox; None: no limit."""
        max_result_characters: int = Field(default=MAX_RESULT_CHARACTERS, ge=0)
        """Longer results are cut, and say so."""
        result_role: str = "tool"
        """Role of the messages that carry results; ``user`` where the chat template does not know
        ``tool``."""
        result_format: Annotated[str, checked_by(_check_format)] = "{result}"
        """Text of those messages, with ``{result}`` where the result goes: ``Result: {result}``."""

    arguments: Arguments
    is_whole_at_awaits = True

    def set_up(self) -> None:
        """Make the tools, and the loop that takes turns with them."""
        own = self.arguments
        self.turns = MultiTurnAgentLoop(
            self.rollout_controller,
            self.judge,
            self.tokenizer,
            sample_params=self.sample_params,
            activities=self.activities,
            environment=ToolEnvironment(own, choose_parser(own.parser, self.tokenizer)),
            **own.model_dump(include={"max_turns", "max_turn_tokens", "max_context"}),
            # Every call has a time of its own, after which the model reads that it has passed.
            environment_timeout_s=None,
        )

    @classmethod
    def prompt_tools(cls, arguments: Mapping[str, Any]) -> list[Schema] | None:
        """The schemas of the tools."""
        return [schema_of(tool) for tool in arguments["tools"]]

    async def generate_sample(self, state: RolloutState) -> RolloutState:
        """Produce, or go on with, one rollout in place."""
        self.turns.activities = self.activities
        return await self.turns.generate_sample(state)

    def go_on(self) -> None:
        """Let tools be called again."""
        self.turns.go_on()

    async def pause(self) -> None:
        """End turns and tool calls; their rollouts end as ABORTED."""
        await self.turns.pause()

    async def close(self) -> None:
        """Close the tools and the judge."""
        await self.turns.close()
