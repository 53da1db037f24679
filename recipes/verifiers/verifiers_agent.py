"""Environments of the `verifiers` library (0.4): its harnesses and tasks, played by the policy.

An agent loop of one's own around `ProgramAgentLoop`, and a data source; run.toml beside it names both.

::

    load_tasks(env) --> rows: prompts to display, and which task each is
    rollout --> one episode: harness --> verifiers' own server --> this rollout's endpoint --> model
                    '--> the task's rewards --> reward                     '--> tokens, logprobs, versions

The harness decides what the model reads, so the recorded trajectories may be several, with prompts of their
own. `verifiers` needs packages that Forebay does not; it is imported when an environment is opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from forebay.agents.base import AgentLoop
from forebay.agents.program import PROGRAM_TIMEOUT_S, ProgramAgentLoop, ProgramSession
from forebay.aio.time_limits import start_thread
from forebay.config import ConfigError, StrictModel
from forebay.types import RolloutState

TASK_KEY = "verifiers_task"
"""Key in ``reward_model``: the number of the task in its taskset."""


Row = dict[str, Any]


class VerifiersAgentLoop(AgentLoop):
    """Plays episodes of a `verifiers` environment.

    Invariants: the rewards of the episode's tasks are the rollout's, averaged over its trainable agents, and
    its metrics stand beside ``score``; an episode with an error makes its rollout FAILED. Agents of the
    environment that name no model of their own are played by the policy.

    The judge is asked only where the episode gave no reward.

    Args:
        arguments: those of `Arguments`, by name. The others are of every `AgentLoop`.

    Raises:
        ConfigError: an argument does not fit; the library is missing or refuses `env`.
    """

    class Arguments(StrictModel, strict=True):
        """Keys of a ``verifiers`` agent in a run file."""

        env: Mapping[str, Any]
        """The library's own ``[env]`` table: ``taskset`` with its ``id``, perhaps ``agent.harness``, ..."""
        timeout_s: float | None = Field(default=PROGRAM_TIMEOUT_S, gt=0)
        """Seconds for one episode; None: no limit."""
        max_context: int | None = Field(default=None, ge=1)
        """Tokens of one trajectory, prompt and all; None: what the engine allows, in a run at most
        ``train.token_budget``."""

    arguments: Arguments

    def set_up(self) -> None:
        """Open the environment for its tasks; it is served once the first episode begins."""
        own = self.arguments
        self._tasks = _Tasks(open_environment(own.env).taskset)
        self._server: _Server | None = None
        self._opening = asyncio.Lock()
        self._programs = ProgramAgentLoop(
            self.rollout_controller,
            # Its judge would keep the episode's reward from being used.
            None,
            self.tokenizer,
            sample_params=self.sample_params,
            activities=self.activities,
            program=self._play,
            timeout_s=own.timeout_s,
            max_context=own.max_context,
        )
        self._programs.name = f"environment {own.env['taskset']['id']}"

    async def generate_sample(self, state: RolloutState) -> list[RolloutState]:
        """Play one episode."""
        self._programs.activities = self.activities
        return await self._programs.generate_sample(state)

    async def pause(self) -> None:
        """End episodes; their rollouts end as ABORTED."""
        await self._programs.pause()

    async def close(self) -> None:
        """Close the environment."""
        await self._programs.close()
        if self._server is not None:
            await self._server.opened.aclose()
            self._server = None
        await super().close()

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[Any]:
        """An environment that serves; a worn one is closed with the last of its episodes."""
        async with self._opening:
            if self._server is None or self._server.is_worn:
                # It imports packages and reads data.
                env = await asyncio.wrap_future(start_thread(open_environment, self.arguments.env))
                server = _Server(env)
                await server.opened.enter_async_context(server.env.serving())
                self._server = server
            server = self._server
            server.num_begun += 1
        server.num_running += 1
        try:
            yield server.env
        finally:
            server.num_running -= 1
            if server.is_worn and not server.num_running:
                if server is self._server:
                    self._server = None
                await server.opened.aclose()

    async def _play(self, session: ProgramSession) -> dict[str, float]:
        """One episode against the rollout's endpoint; its reward and metrics.

        Raises:
            ValueError: the prompt names no task; its source must be `load_tasks`.
            RuntimeError: the episode had an error, or no reward.
        """
        number = (session.task["reward_model"] or {}).get(TASK_KEY)
        if number is None:
            raise ValueError("the prompt names no task; its source must be verifiers_agent:load_tasks")
        # There is no key: the address is the secret.
        library = _library()
        client = library.EvalClientConfig(base_url=session.base_url, api_key_var="FOREBAY_NO_KEY")
        context = library.ModelContext(model=session.model, client=client)
        async with self._serving() as env:
            episode = await env.run_episode(self._tasks[number], context)
        return _verdict(episode)


def open_environment(env: Mapping[str, Any]) -> Any:
    """The `verifiers.v1.Env` that `env` describes, in the words of the library's own ``[env]`` table.

    Raises:
        ConfigError: the library is missing, or it does not accept the table.
    """
    taskset = env.get("taskset")
    if not isinstance(taskset, Mapping) or not taskset.get("id"):
        raise ConfigError(f"env needs a taskset: {{'taskset': {{'id': ...}}}}; got {dict(env)}")
    library = _library()
    try:
        return library.load_environment(library.resolve_env_config(dict(env)))
    # Environments are packages of other people, loaded by name; each fails in its own way.
    except Exception as error:
        raise ConfigError(f"verifiers refuses env {dict(env)}: {type(error).__name__}: {error}") from error


def _library() -> Any:
    try:
        return importlib.import_module("verifiers.v1")
    except ImportError as error:
        raise ConfigError(
            f"environments of verifiers need the package of that name, 0.4 or newer: pip install verifiers ({error})"
        ) from None


def load_tasks(*, env: Mapping[str, Any], size: int | None = None) -> list[Row]:
    """A data source: one row for each of the first `size` tasks of the environment's taskset.

    Raises:
        ConfigError: the environment cannot be opened, or has endless tasks and there is no `size`.
    """
    taskset = open_environment(env).taskset
    if size is None and not taskset.bounded:
        raise ConfigError(f"taskset {env['taskset']['id']!r} has endless tasks; set size")
    rows: list[Row] = []
    for number, task in enumerate(itertools.islice(taskset, size)):
        # The prompt as far as it is known before the harness has made it.
        data = task.data
        prompt = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        prompt.append({"role": "user", "content": data.prompt_text or data.name or f"task {data.idx}"})
        rows.append({"prompt": prompt, "answer": "", "reward_model": {TASK_KEY: number}})
    return rows


class _Tasks:
    """The tasks of a taskset by number, read as far as they are asked for."""

    def __init__(self, taskset: Any) -> None:
        self._read: list[Any] = []
        self._rest = iter(taskset)

    def __getitem__(self, number: int) -> Any:
        missing = number + 1 - len(self._read)
        if missing > 0:
            self._read.extend(itertools.islice(self._rest, missing))
        if not 0 <= number < len(self._read):
            raise ValueError(f"the taskset has {len(self._read)} tasks, so no task {number}")
        return self._read[number]


@dataclass(eq=False)
class _Server:
    """An opened environment, and how much it has been used."""

    env: Any
    opened: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    num_begun: int = 0
    num_running: int = 0

    @property
    def is_worn(self) -> bool:
        """Whether it serves no more episodes."""
        return self.num_begun >= EPISODES_PER_SERVER


EPISODES_PER_SERVER = 256
"""`verifiers` keeps an HTTP client for every endpoint until its server is closed, and every rollout has its
own endpoint; so a server is replaced before they are many."""


def _verdict(episode: Any) -> dict[str, float]:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "not finished")
    traces = [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable]
    if not any(trace.rewards for trace in traces):
        raise RuntimeError("the episode gave no reward to any trainable agent")
    metrics = {name: float(value) for trace in traces for name, value in trace.metrics.items() if value is not None}
    return {**metrics, "score": sum(trace.reward for trace in traces) / len(traces)}
