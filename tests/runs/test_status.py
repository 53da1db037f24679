"""The numbers of now: counts that agree with what is there, shares of each step, stalls counted once."""

import asyncio
import contextlib
import re
import sys
from collections import Counter
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.aio.virtual_time import run
from forebay.config import parse_config
from forebay.metrics import PhaseTimer, read_jsonl
from forebay.produce import AgentLoopManager, SyncProduceStrategyConfig, TaskRunner
from forebay.replay import AsyncReplayBufferConfig
from forebay.runs.checkpoints import phase
from forebay.runs.config import RunConfig
from forebay.runs.launch import launch
from forebay.runs.reporting import totals
from forebay.runs.show.status import COUNTED_STATUSES, MAX_AGE, NUM_OLDEST, RunStatus
from forebay.types import RolloutState, Status
from forebay.watching.activity import GENERATE, JUDGE, PUT, TRAIN, WAIT_BATCH, Activities
from forebay.watching.stalls import StallWatch

WARN_AFTER_S = 10.0


def build_status(activities=None, *, tasks=("math",), **options):
    activities = activities or Activities()
    runners = [
        TaskRunner(task_name=name, agent_loop=None, produce_strategy=SyncProduceStrategyConfig().build(), sampler=None)
        for name in tasks
    ]
    manager = AgentLoopManager(
        task_runners=runners,
        replay_buffer=AsyncReplayBufferConfig().build(),
        stall_watch=StallWatch(activities, warn_after_s=WARN_AFTER_S, fail_after_s=9e9),
        activities=activities,
    )
    status = RunStatus(
        manager,
        activities,
        SimpleNamespace(model_step=3, describe=lambda activity: f"about {activity.name}"),
        batch_size=8,
        **options,
    )
    return status, manager, activities


def rollout(steps, *, mask=None, status=Status.COMPLETED, task="math"):
    return RolloutState(
        [{"role": "user", "content": "?"}],
        task_name=task,
        group_id=f"{task}/{id(steps)}",
        response_ids=range(len(steps)),
        response_model_steps=steps,
        response_mask=mask if mask is not None else [1] * len(steps),
        status=status,
        reward={"score": 1.0},
    )


def test_what_is_in_flight_is_counted_by_stage_and_the_oldest_of_production_is_named():
    async def main():
        status, _, activities = build_status()
        with activities.span(TRAIN, "step 1"), activities.span(WAIT_BATCH, "the batch"):
            await asyncio.sleep(5)
            with (
                activities.span(GENERATE, "a", task="math"),
                activities.span(GENERATE, "b", task="code"),
                activities.span(JUDGE, "g", task="math"),
            ):
                await asyncio.sleep(2)
                now = status.now()
                assert now.stages == {GENERATE: 2, JUDGE: 1}
                assert now.stages_of == {"math": {GENERATE: 1, JUDGE: 1}}
                assert astuple(now.oldest[0])[:4] == (GENERATE, "a", 2.0, "about a")
                assert [one.name for one in now.doing] == ["step 1", "the batch"]
                assert now.model_step == 3
        now = status.now()
        assert now.stages == {}
        assert now.oldest == []
        assert now.tasks["math"].batch == 8

    run(main())


def test_a_judge_that_hangs_is_named_behind_ever_so_many_older_generations():
    async def main():
        status, _, activities = build_status()
        with contextlib.ExitStack() as stack:
            for number in range(3 * NUM_OLDEST):
                stack.enter_context(activities.span(GENERATE, f"rollout {number}"))
            for number in range(3):
                stack.enter_context(activities.span(JUDGE, f"group {number}"))
            # Of another task, whose work is all younger.
            for number in range(2):
                stack.enter_context(activities.span(GENERATE, f"code {number}", task="code"))
            oldest = [one.name for one in status.now().oldest]
        first = [f"rollout {number}" for number in range(NUM_OLDEST)]
        assert oldest[:NUM_OLDEST] == first
        assert sorted(oldest[NUM_OLDEST:]) == ["code 0", "group 0"]

    run(main())


@given(
    rows=st.lists(
        st.tuples(st.sampled_from(["math", "code"]), st.sampled_from(COUNTED_STATUSES), st.integers(0, MAX_AGE + 9)),
        max_size=25,
    ),
    train_step=st.integers(1, MAX_AGE + 12),
)
def test_groups_are_counted_as_they_are_in_the_buffer(rows, train_step):
    async def main():
        status, manager, _ = build_status(tasks=("math", "code"))
        buffer = manager.replay_buffer
        for task, kind, step in rows:
            await buffer.put([rollout([step], status=kind, task=task)], task)
        await buffer.refresh_staleness({"math": 10**6, "code": 10**6}, train_step)
        await status.count_buffer()
        for name, task in status.now().tasks.items():
            mine = [(kind, train_step - 1 - step) for task, kind, step in rows if task == name]
            assert {k: n for k, n in task.buffer.items() if n} == Counter(kind for kind, _ in mine)
            ages = [age for kind, age in mine if kind is Status.COMPLETED]
            assert task.ages == Counter(min(max(age, 0), MAX_AGE) for age in ages)
            assert task.max_age == max([0, *ages])

    run(main())


def test_the_values_of_a_step_are_those_of_all_tasks_and_of_each():
    async def main():
        status, manager, activities = build_status(tasks=("math", "code"))
        for task, step in (("math", 0), ("math", 1), ("code", 1)):
            await manager.replay_buffer.put([rollout([step], task=task)], task)
        await manager.replay_buffer.refresh_staleness({"math": 9, "code": 9}, 3)
        await status.count_buffer()
        with activities.span(GENERATE, "a"):
            await asyncio.sleep(1.5)
            return status.step_values(2, [[rollout([1])]])

    values = run(main())
    assert values["buffer/completed"] == 3
    assert values["buffer/staleness_mean"] == pytest.approx(4 / 3)
    assert values["buffer/math/staleness_mean"] == 1.5
    assert values["buffer/code/completed"] == 1
    assert values["buffer/staleness_max"] == 2
    assert values["in_flight/rollouts"] == 1
    assert values["in_flight/oldest_s"] == 1.5
    assert values["in_flight/code/groups"] == 0


@given(steps=st.lists(st.lists(st.tuples(st.integers(-1, 12), st.booleans()), min_size=1, max_size=6), max_size=5))
def test_the_shares_of_trained_tokens_are_of_those_that_the_policy_made(steps):
    async def main():
        status, _, _ = build_status()
        groups = [[rollout([step for step, _ in group], mask=[int(own) for _, own in group])] for group in steps]
        return status.step_values(13, groups)

    values = {name: value for name, value in run(main()).items() if name.startswith("staleness/")}
    known = np.array([12 - step for group in steps for step, own in group if own and step >= 0])
    assert sum(values.values()) == pytest.approx(1.0 if len(known) else 0.0)
    if len(known):
        assert values["staleness/share_2"] == pytest.approx((known == 2).mean())
        assert values["staleness/share_4_to_7"] == pytest.approx(((known >= 4) & (known <= 7)).mean())
        assert values["staleness/share_8_up"] == pytest.approx((known >= 8).mean())


def test_busy_shares_of_a_step_are_those_of_its_own_time():
    async def main():
        status, _, activities = build_status()
        shares = []
        for busy_s in (3.0, 1.0):
            with activities.span(TRAIN, 1):
                await asyncio.sleep(busy_s)
            with activities.span(GENERATE, 1):
                await asyncio.sleep(1.0)
            values = status.step_values(1, [])
            shares.append((values["busy/trainer"], values["busy/producer"]))
        facts = status.run_facts(
            [
                {"samples": 2.0, "response_tokens": 5.0, "staleness": 1, "train/staleness_mean": 0.5},
                {"samples": 2.0, "response_tokens": 15.0, "staleness": 3, "train/staleness_mean": 1.5},
            ]
        )
        return shares, facts

    shares, facts = run(main())
    assert shares == [(0.75, 0.25), (0.5, 0.5)]
    assert facts["staleness"].startswith("mean 1.250, max 3 train steps")
    assert facts["busy"] == "producer 33% of the time, trainer 67% of the time"


FAILURE = "rollout 7: judge Grader: down"


@pytest.mark.parametrize("counters", ["all", "of a part of a GPU", "not installed"])
def test_the_use_of_the_trainers_gpu_is_the_mean_of_the_looks_at_it(monkeypatch, counters):
    class NVMLError(Exception):
        pass

    def busy(device):
        if counters != "all":
            raise NVMLError("Not Supported")
        return percent.pop(0)

    percent = [100, 50, 30]
    installed = SimpleNamespace(NVMLError=NVMLError) if counters != "not installed" else None
    monkeypatch.setitem(sys.modules, "pynvml", installed)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * 10**9)
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda device: 7 * 10**9)
    monkeypatch.setattr(torch.cuda, "utilization", busy)
    expected = {"gpu/reserved_gb": 3.0}
    if counters != "not installed":
        expected["gpu/used_gb"] = 7.0
    if counters == "all":
        expected["gpu/busy"] = pytest.approx(0.6)

    async def main(device):
        status, _, _ = build_status(device=torch.device(device))
        await status.count_buffer()
        for _ in range(2):
            status.now()
        values = status.step_values(1, [[rollout([0])]])
        return {name: value for name, value in values.items() if name.startswith("gpu/")}

    assert asyncio.run(main("cuda:1")) == expected
    assert asyncio.run(main("cpu")) == {}


def test_a_failing_judge_is_counted_by_task_and_named():
    async def main():
        status, _, activities = build_status(tasks=("math", "code"))
        for task, notes in {"math": ["", FAILURE, "", "", "CancelledError"], "code": [""]}.items():
            for note in notes:
                with activities.span(JUDGE, "g", task=task) as activity:
                    activity.note = note
        values = [status.step_values(step, [])["failed/judge"] for step in (1, 2)]
        return values, status.judge_failure

    # Of the one that was cancelled nothing is known.
    assert run(main()) == ([0.25, 0.0], FAILURE)


def test_the_totals_of_a_run_are_what_was_trained_and_what_became_of_the_groups():
    async def main():
        status, manager, _ = build_status()
        for number in range(1200):
            manager.ledger.record(number, "math", "produced")
            if number < 1100:
                manager.ledger.record(number, "math", "trained", train_step=1)
        history = [{"samples": 8.0, "response_tokens": 14.2} for _ in range(8)]
        return await totals(
            SimpleNamespace(
                config=SimpleNamespace(produce=SimpleNamespace(is_async=False)),
                manager=manager,
                status=status,
                history=history,
                cluster=SimpleNamespace(counts=lambda: {"cluster/trainer_restarts": 1.0, "cluster/lost": 0.0}),
                best_checkpoint="step_000002 (eval/score 0.7)",
            )
        )

    assert run(main()) == {
        "rollouts": "64 with 909 tokens trained",  # 8 steps x 8 rollouts x 14.2 tokens
        "groups math": "1,200 generated, 1,100 trained",
        "best": "step_000002 (eval/score 0.7)",
        "restarts": "trainer restarts 1",
    }


def test_the_facts_of_a_run_without_steps_are_sayable():
    async def main():
        return build_status()[0].run_facts([])

    assert run(main())["staleness"].startswith("mean -")


@pytest.mark.parametrize("looks", [False, True])
def test_every_stall_that_was_warned_of_is_counted_once(looks):
    async def store(activities, watch):
        with activities.span(PUT, "g"):
            pass
        watch.progressed()

    async def main():
        status, manager, activities = build_status()
        watch = manager.stall_watch
        counts = []
        async with watch.guard():
            for wait_s in (9.0, 30.0, 30.0, 5.0, 11.0):
                for _ in range(10):
                    await asyncio.sleep(wait_s / 10)
                    if looks:
                        assert bool(status.now().stall) == (watch.stalled_s >= WARN_AFTER_S)
                await store(activities, watch)
                counts.append(status.num_stalls)
        assert status.now().stall == ""
        return counts

    assert run(main()) == [0, 1, 2, 2, 3]


def small_run(output, **changes):
    data = {"source": "sorting", "arguments": {"length": 3, "letters": 5}}
    task = {
        "data": {**data, "size": 40},
        "eval_data": {**data, "start": 40, "size": 4},
        "judge": {"name": "exact_match", "arguments": {"partial_credit": True}},
        "sample": {"max_tokens": 5},
    }
    table = {
        "name": "run",
        "steps": 3,
        "batch_size": 4,
        "rollouts_per_prompt": 2,
        "output": str(output),
        "model": {"source": "tiny", "tiny": {"hidden_size": 32, "num_layers": 2, "num_heads": 2}},
        "tasks": [{"name": "one", **task}, {"name": "two", **task}],
        "train": {"lr": 1e-3, "token_budget": 512},
    }
    return parse_config(RunConfig, {**table, **changes})


DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


@pytest.mark.parametrize(
    "changes",
    [
        {
            "produce": {
                "mode": "separate",
                "max_staleness": 1,
                "staleness_rule": "drop",
                "over_sample_threshold": 0.5,
            },
            "evaluate": {"every": 2, "rollouts_per_prompt": 2},
        },
        {"train": {"lr": 1e-3, "correction": "token_tis"}},
    ],
    ids=["separate", "colocated"],
)
def test_every_number_that_a_run_logs_is_in_the_docs_and_the_summary_says_what_matters(tmp_path, capsys, changes):
    asyncio.run(launch(small_run(tmp_path, **changes)))
    names = {name for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") for name in row}
    listed = re.findall(r"^\| `([^`]+)` \|", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    patterns = [re.sub(r"<\w+>", "[^/]+", re.escape(name).replace(r"\<", "<")) for name in listed]
    assert not {
        name
        for name in names
        # A task's own numbers are called as those of all, with its name in the middle.
        if not any(re.fullmatch(p, re.sub("/(one|two)/", "/", name)) for p in patterns)
    }
    out = capsys.readouterr().out
    if "produce" in changes:
        assert "max 0 train steps" in out or "max 1 train steps" in out
        assert re.search(r"busy +producer +\d+% of the time, trainer +\d+%", out)
        assert re.search(r"stalls +none warned of", out)


async def test_a_run_says_how_much_longer_the_groups_are_that_grew_too_old():
    status, manager, _ = build_status()
    for number in range(8):
        event = "dropped" if number % 2 else "trained"
        tokens = (30 if number % 2 else 10) + number // 4
        manager.ledger.record(number, "math", event, reason="expired", num_tokens=tokens)
    assert status.step_values(1, [])["dropped/tokens_over_trained"] == pytest.approx(30.5 / 10.5)


def test_a_train_step_that_hangs_is_told_once():
    told = []
    run_parts = SimpleNamespace(
        display=SimpleNamespace(phase=lambda name: None, warning=told.append),
        config=SimpleNamespace(produce=SimpleNamespace(stall_after_s=10.0)),
        activities=Activities(),
        timer=PhaseTimer(),
        history=[],
        train_step=6,
    )

    async def main():
        for seconds in (9, 29, 80, 100):
            with phase(run_parts, "train", TRAIN):
                await asyncio.sleep(seconds)
            run_parts.history.append({"time/train_s": seconds})
            # What has ended is not warned of later.
            await asyncio.sleep(1000)

    run(main())
    # The first is below the limit, and the last two are within three times the longest before.
    assert told == ["train has taken 27 s and goes on; before, at most 9 s"]
