"""Episodes of the verifiers library against a scripted policy.

They need the library, which is heavy and has requirements of its own: in an environment that has it, run
``PYTHONPATH=src pytest tests/agents/test_verifiers.py``.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chat_families import make_tokenizer

from forebay.config import ConfigError
from forebay.engines import RolloutController, ScriptedEngine
from forebay.types import RolloutState, SampleParams, Status

sys.path.append(str(Path(__file__).parents[2] / "recipes" / "verifiers"))
import verifiers_agent
from verifiers_agent import TASK_KEY, load_tasks, open_environment

PLUGIN = '''
"""A taskset of riddles, a harness that asks twice, and what they are worth."""

import httpx
import verifiers.v1 as vf

__all__ = ["Riddles", "AskTwice"]


class RiddleData(vf.TaskData):
    answer: str


class Riddle(vf.Task[RiddleData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))

    @vf.metric
    async def asked(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class Riddles(vf.Taskset[Riddle]):
    def load(self):
        for number in range(4):
            data = RiddleData(prompt=f"What is {number} + 1?", answer=str(number + 1))
            yield Riddle(data, self.config.task)


class AskTwice(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, timeout=300) as client:
            for again in ("Are you sure?", None):
                body = {"model": ctx.model, "messages": messages}
                reply = await client.post(f"{endpoint}/chat/completions", json=body)
                reply.raise_for_status()
                messages.append(reply.json()["choices"][0]["message"])
                if again:
                    messages.append({"role": "user", "content": again})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
'''

ENV = {
    "taskset": {"id": "forebay_riddles"},
    "agent": {"harness": {"id": "forebay_riddles"}, "runtime": {"type": "subprocess"}},
}


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    pytest.importorskip("verifiers.v1", reason="verifiers is not installed")
    (tmp_path / "forebay_riddles.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("forebay_riddles", None)


async def play(turns: list[str], *, task: int = 1, size: int = 2) -> list[RolloutState]:
    tokenizer = make_tokenizer("chatml")

    def script(request: Any) -> list[int]:
        asked = tokenizer.decode(request.input_ids.tolist()).count("<|im_start|>assistant")
        return tokenizer.encode(turns[asked - 1] + "<|im_end|>", add_special_tokens=False)

    # Of this module: another test may have had it imported anew.
    loop = verifiers_agent.VerifiersAgentLoop(
        RolloutController(ScriptedEngine(script, eos_token_ids=[tokenizer.eos_token_id])),
        None,
        tokenizer,
        sample_params=SampleParams(max_tokens=100),
        env=ENV,
    )
    group = [
        RolloutState([{"role": "user", "content": "riddle"}], rollout_id=f"g/{i}", reward_model={TASK_KEY: task})
        for i in range(size)
    ]
    try:
        return await loop.generate_group(group)
    finally:
        await loop.close()


def test_tasks_are_prompts(plugin) -> None:
    rows = load_tasks(env=ENV, size=2)
    assert [row["prompt"] for row in rows] == [
        [{"role": "user", "content": f"What is {number} + 1?"}] for number in (0, 1)
    ]
    assert [row["reward_model"] for row in rows] == [{TASK_KEY: 0}, {TASK_KEY: 1}]
    assert len(load_tasks(env=ENV)) == 4


async def test_an_episode_is_recorded_as_the_model_wrote_it_and_rewarded_by_its_task(plugin) -> None:
    group = await play(["It is 7.", "No, 2."])
    tokenizer = make_tokenizer("chatml")
    for state in group:
        assert (state.status, state.error_msg) == (Status.COMPLETED, None)
        assert tokenizer.decode(state.tokens) == (
            "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\nIt is 7.<|im_end|>\n"
            "<|im_start|>user\nAre you sure?<|im_end|>\n<|im_start|>assistant\nNo, 2.<|im_end|>"
        )
        mine = state.response_ids[state.response_mask == 1]
        assert tokenizer.decode(mine) == "It is 7.<|im_end|>No, 2.<|im_end|>"
        assert state.reward == {"score": 1.0, "asked": 2.0}
    assert [state.reward["score"] for state in await play(["2", "7"])] == [0.0, 0.0]


async def test_an_episode_with_an_error_fails_its_rollout(plugin) -> None:
    (state,) = await play(["2", "2"], task=9, size=1)
    assert state.status is Status.FAILED
    assert "no task 9" in state.error_msg


def test_what_the_library_refuses_is_said(plugin) -> None:
    with pytest.raises(ConfigError, match="env needs a taskset"):
        open_environment({})
    with pytest.raises(ConfigError, match=r"verifiers refuses env .*no_such_taskset"):
        open_environment({"taskset": {"id": "no_such_taskset"}})


def test_without_the_library_it_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(ConfigError, match="pip install verifiers"):
        load_tasks(env=ENV)


async def test_an_environment_is_opened_beside_the_event_loop_and_errors_name_it(monkeypatch) -> None:
    opened_in = []

    class Env:
        taskset = ("riddle",)

        @contextlib.asynccontextmanager
        async def serving(self):
            yield

        async def run_episode(self, task: Any, context: Any) -> Any:
            raise OSError(f"no {task}")

    def open_env(env: Any) -> Env:
        opened_in.append(threading.current_thread())
        return Env()

    def settings(**values: Any) -> Any:
        return SimpleNamespace(**values)

    library = SimpleNamespace(EvalClientConfig=settings, ModelContext=settings)
    monkeypatch.setattr(verifiers_agent, "open_environment", open_env)
    monkeypatch.setattr(verifiers_agent, "_library", lambda: library)
    (state,) = await play([], task=0, size=1)
    assert state.error_msg == (
        "rollout g/0: VerifiersAgentLoop: RuntimeError: environment forebay_riddles: OSError: no riddle"
    )
    assert [thread is threading.main_thread() for thread in opened_in] == [True, False]
