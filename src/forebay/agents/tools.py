"""The tool agent loop: the model calls tools until it answers without calling one.

::

    schemas --tools=--> prompt
    turn --parser--> no calls --> done
              '----> calls, all at once, each with its time --> results --> messages with mask 0 --> turn
                         | wrong, too slow: a message that says so
                         | ToolUnavailableError: the rollout is FAILED

Turns, budgets and pauses are those of `forebay.agents.multi_turn`; this is its environment.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from forebay.agents.base import AgentLoop, Generator, GroupJudge
from forebay.agents.chat.increments import CALL_ID, TurnTokenizer
from forebay.agents.chat.tool_calls import Parser, ToolCall, check_parser, choose_parser
from forebay.agents.environments.contract import Environment, Memory, Reply
from forebay.agents.measures import TOOL_CALLS_KEY, TOOL_ERRORS_KEY
from forebay.agents.multi_turn import MultiTurnAgentLoop
from forebay.agents.single_turn import NO_TOOLS
from forebay.aio.time_limits import time_limit
from forebay.config import StrictModel
from forebay.renamed import old_keywords
from forebay.tools import Tool, ToolError, build_tool, check_tool, schema_of
from forebay.tools.contract import Schema
from forebay.types import Message, RolloutState, SampleParams
from forebay.watching.activity import Activities

TOOL_TIMEOUT_S = 10.0
"""For one call: a program, a look-up; a model that computes for longer should learn to compute less."""
MAX_RESULT_CHARACTERS = 4000
"""About a thousand tokens: a result must not fill the context."""


class ToolEnvironment(Environment):
    """Runs the tool calls of each turn; a turn without calls is the answer.

    Args:
        tools: what may be called, by name.
        parse: finds the calls in a turn.
        tool_timeout_s: for each call, from when it has its thread or sandbox; None: no limit.
        max_result_characters: longer results are cut, and say so.
        result_role: of the messages that carry results.
        result_format: of their text, with ``{result}`` in it.

    Raises:
        ValueError: an argument does not fit; the message says which.
    """

    reads_special_tokens = True
    gives_rewards = False

    def __init__(
        self,
        tools: Sequence[Tool],
        parse: Parser,
        *,
        tool_timeout_s: float | None = TOOL_TIMEOUT_S,
        max_result_characters: int = MAX_RESULT_CHARACTERS,
        result_role: str = "tool",
        result_format: str = "{result}",
    ) -> None:
        self.tools = {tool.name: tool for tool in tools}
        if len(self.tools) < len(tools) or not tools:
            raise ValueError(f"tools need different names, and at least one; got {[t.name for t in tools]}")
        if tool_timeout_s is not None and tool_timeout_s <= 0:
            raise ValueError(f"tool_timeout_s must be positive or None, got {tool_timeout_s}")
        if "{result}" not in result_format:
            raise ValueError(f"result_format must hold {{result}}, got {result_format!r}")
        self.roles = (result_role,)
        self._format = result_format
        self._parse = parse
        self._timeout_s = tool_timeout_s
        self._max_characters = max_result_characters

    async def reset(self, state: RolloutState) -> Memory:
        """Tell the prompt of the tools, unless the data says which.

        Raises:
            ValueError: the data names a tool that is not here, or a tool choice that cannot be enforced.
        """
        if state.tools is None:
            state.tools = [tool.schema for tool in self.tools.values()]
        named = [(schema.get("function") or {}).get("name") for schema in state.tools]
        if unknown := [name for name in named if name not in self.tools]:
            raise ValueError(
                f"the data offers tools that the agent does not have: {unknown}; it has "
                f"{', '.join(self.tools)}"
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
        calls = [] if state.tool_choice == NO_TOOLS else self._parse(text)
        if not calls:
            return Reply(done=True)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._result_of(call)) for call in calls]
        except BaseExceptionGroup as errors:
            # One broken tool is enough, and says more than that there were errors.
            raise errors.exceptions[0] from None
        results = [task.result() for task in tasks]
        made = [_as_api(number, call) for number, call in enumerate(calls)]
        state.tool_calls = [*(state.tool_calls or ()), *made]
        state.extra_fields[TOOL_CALLS_KEY] += len(calls)
        state.extra_fields[TOOL_ERRORS_KEY] += sum(not ok for ok, _ in results)
        return Reply([self._message(call, text) for call, (_, text) in zip(made, results, strict=True)])

    async def _result_of(self, call: ToolCall) -> tuple[bool, str]:
        """Whether there is a result, and what the model reads."""
        limit: asyncio.Timeout | None = None
        try:
            tool, arguments = self._find(call)
            async with time_limit(self._timeout_s) as limit:
                result = await tool.call(arguments)
        except ToolError as error:
            return False, self._cut(f"Error: {error}")
        except TimeoutError:
            if limit is None or not limit.expired():
                raise
            return False, f"Error: no result within {self._timeout_s:g} s"
        return True, self._cut(result)

    def _find(self, call: ToolCall) -> tuple[Tool, dict[str, Any]]:
        """The tool and its arguments.

        Raises:
            ToolError: the call is malformed, or there is no such tool.
        """
        if call.problem is not None:
            raise ToolError(call.problem)
        name = next(iter(self.tools)) if call.name is None and len(self.tools) == 1 else call.name
        if name not in self.tools:
            raise ToolError(f"there is no tool {name!r}, only {', '.join(self.tools)}")
        tool = self.tools[name]
        if isinstance(call.arguments, dict):
            return tool, call.arguments
        parameters = list((tool.schema["function"].get("parameters") or {}).get("properties") or ())
        if len(parameters) != 1:
            raise ToolError(f"{name} takes an object with {', '.join(parameters) or 'nothing'}")
        return tool, {parameters[0]: call.arguments}

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

    def _message(self, call: dict[str, Any], text: str) -> Message:
        role, text = self.roles[0], self._format.replace("{result}", text)
        if role != "tool":
            return {"role": role, "content": text}
        return {"role": role, "name": call["function"]["name"], "tool_call_id": call["id"], "content": text}

    def _cut(self, text: str) -> str:
        # Half a surrogate pair, which JSON can hold, is nothing that a tokenizer takes.
        text = text.encode(errors="backslashreplace").decode()
        left = len(text) - self._max_characters
        return text if left <= 0 else f"{text[: self._max_characters]}... ({left} characters left out)"


def _as_api(number: int, call: ToolCall) -> dict[str, Any]:
    """`call` as the chat API writes it; of one that cannot be read only the id."""
    arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments)
    return {
        # Templates insist on nine characters; the number makes the calls of a turn differ.
        "id": f"{CALL_ID[:5]}{number:04}",
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _check_tools(tools: list[Any]) -> list[Any]:
    if not tools:
        raise ValueError("name at least one tool")
    return [check_tool(tool) for tool in tools]


def _check_format(text: str) -> str:
    if "{result}" not in text:
        raise ValueError("result_format must hold {result}, where the result goes")
    return text


class ToolsArguments(StrictModel, strict=True):
    """What a run file may say of a ``tools`` agent."""

    tools: Annotated[list[Any], AfterValidator(_check_tools)]
    """What may be called: ``calculator``, ``python``, ``search`` or ``package.module:Name`` of a function or
    class of tools, or tables with such a ``name`` and its ``arguments``."""
    parser: Annotated[Any, AfterValidator(check_parser)] = None
    """How the model writes calls: a dialect's name, or a regular expression with a group ``arguments`` and
    perhaps one ``name``; None: as its chat template shows."""
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
    """Role of the messages that carry results; ``user`` where the chat template does not know ``tool``."""
    result_format: Annotated[str, AfterValidator(_check_format)] = "{result}"
    """Text of those messages, for example ``Result: {result}``."""


@old_keywords(judger="judge")
class ToolAgentLoop(AgentLoop):
    """Lets the model call tools until it answers.

    Invariants: as for `MultiTurnAgentLoop`, whose turns these are. The calls of one turn run at the same
    time and their results come in the order of the calls. What goes wrong with a call is a result that the
    model reads; a tool that is broken fails the rollout. ``extra_fields`` count turns, calls and errors, and
    ``tool_calls`` are those of all turns. A rollout whose ``tool_choice`` is ``"none"`` is offered no tools.

    >>> loop = ToolAgentLoop(controller, judge, tokenizer, sample_params=SampleParams(max_tokens=256),
    ...                      tools=["calculator", {"name": "search", "arguments": {"corpus": "docs"}}])

    Args:
        rollout_controller: makes the tokens.
        judge: gives the rewards; it reads the last turn as the response.
        tokenizer: with a chat template that knows tools, or with `parser` and `result_role` set.
        sample_params: for rollouts that bring none.
        tools: names, tables with ``name`` and ``arguments``, functions or `Tool` objects.
        parser: as in `ToolsArguments`, or a function (see `forebay.agents.chat.tool_calls`).
        max_turns, max_turn_tokens, max_context, tool_timeout_s, max_result_characters, result_role,
        result_format: see `ToolsArguments`.
        activities: where to note what is being done; None: nobody looks.

    Raises:
        ConfigError: a tool is unknown or does not take its arguments.
        ValueError: another argument does not fit, or the chat template does not render results.
    """

    def __init__(
        self,
        rollout_controller: Generator,
        judge: GroupJudge | None,
        tokenizer: TurnTokenizer,
        *,
        sample_params: SampleParams,
        tools: Sequence[Tool | Callable[..., Any] | str | Mapping[str, Any]],
        parser: str | Parser | None = None,
        max_turns: int = 8,
        max_turn_tokens: int | None = None,
        max_context: int | None = None,
        tool_timeout_s: float | None = TOOL_TIMEOUT_S,
        max_result_characters: int = MAX_RESULT_CHARACTERS,
        result_role: str = "tool",
        result_format: str = "{result}",
        activities: Activities | None = None,
    ) -> None:
        super().__init__(rollout_controller, judge, activities=activities)
        environment = ToolEnvironment(
            [build_tool(tool) for tool in tools],
            choose_parser(parser, tokenizer),
            tool_timeout_s=tool_timeout_s,
            max_result_characters=max_result_characters,
            result_role=result_role,
            result_format=result_format,
        )
        self.turns = MultiTurnAgentLoop(
            rollout_controller,
            judge,
            tokenizer,
            sample_params=sample_params,
            environment=environment,
            max_turns=max_turns,
            max_turn_tokens=max_turn_tokens,
            max_context=max_context,
            # Every call has a time of its own, after which the model reads that it has passed.
            environment_timeout_s=None,
            activities=self.activities,
        )

    @classmethod
    def prompt_tools(cls, arguments: Mapping[str, Any]) -> list[Schema] | None:
        """The schemas of the tools."""
        return [schema_of(tool) for tool in arguments["tools"]]

    async def generate_sample(self, state: RolloutState) -> RolloutState:
        """Produce, or go on with, one rollout in place."""
        self.turns.activities = self.activities
        return await self.turns.generate_sample(state)

    async def generate_group(
        self, states: list[RolloutState], *, enable_partial_rollout: bool = False
    ) -> list[RolloutState]:
        """As `AgentLoop.generate_group`; a group that begins ends the pause."""
        self.turns.go_on()
        return await super().generate_group(states, enable_partial_rollout=enable_partial_rollout)

    async def pause(self) -> None:
        """End turns and tool calls; their rollouts end as ABORTED."""
        await self.turns.pause()

    async def close(self) -> None:
        """Close the tools and the judge."""
        await self.turns.close()
