"""The order in which a run trains on the groups of its buffer: `replay.policy`."""

import asyncio

import pytest
from test_separate_run import STEPS, config

from forebay.config import ConfigError
from forebay.ledger import Ledger
from forebay.replay import ReplayBuffer, ReplayPolicy
from forebay.replay.query import StorageIndices
from forebay.runs.launch import launch
from forebay.runs.rollouts import build_buffer
from forebay.types import Status

BATCH = 2


class NewestFirst(ReplayPolicy):
    order = "-timestamp_id"


def spread(row):
    scores = [state.reward["score"] for state in row.item]
    return max(scores) - min(scores)


def choices(tmp_path, monkeypatch, **changes):
    """Of each batch that left something behind: what was there, and what was taken, as rows."""
    take, found = ReplayBuffer._take, []

    async def noted(self, count, task_name, group_status, view, **options):
        query = StorageIndices(task_name, group_status, None).get_key()
        rows = await self.storage.get(query)
        groups = await take(self, count, task_name, group_status, view, **options)
        if group_status is Status.COMPLETED and 0 < len(groups) < len(rows):
            by_id = {row.item[0].group_id: row for row in rows}
            found.append((rows, [by_id[group[0].group_id] for group in groups]))
        return groups

    monkeypatch.setattr(ReplayBuffer, "_take", noted)
    run = config(tmp_path, batch_size=BATCH, **changes)
    asyncio.run(launch(run))
    ledger = Ledger.read(run.folder / "ledger.jsonl")
    balance = ledger.balance(ledger.count_live())
    assert balance.ok
    assert balance.trained == STEPS * BATCH
    assert found
    return found


@pytest.mark.parametrize("store", ["memory", "sqlite"])
@pytest.mark.parametrize(
    ("policy", "key"),
    [
        (None, lambda row: (row.oldest_model_step, row.timestamp_id)),
        ("staleness", lambda row: (row.oldest_model_step, row.timestamp_id)),
        ("fifo", lambda row: row.timestamp_id),
        (f"{__name__}:NewestFirst", lambda row: -row.timestamp_id),
    ],
)
def test_a_run_trains_in_the_order_of_its_policy(tmp_path, monkeypatch, policy, key, store):
    for rows, taken in choices(tmp_path, monkeypatch, replay={"policy": policy, "store": store}):
        assert [row.uid for row in taken] == [row.uid for row in sorted(rows, key=key)[: len(taken)]]


def test_prioritized_draws_are_weighted_by_how_far_the_scores_lie_apart(tmp_path, monkeypatch):
    for rows, taken in choices(tmp_path, monkeypatch, replay={"policy": "prioritized"}):
        assert [row.priority for row in rows] == pytest.approx([spread(row) for row in rows])
        left = [row for row in rows if row not in taken]
        # What teaches nothing comes last.
        assert all(map(spread, taken)) or not any(map(spread, left))


def test_draws_follow_the_seed_of_the_run(tmp_path):
    states = [
        build_buffer(config(tmp_path, seed=seed, replay={"policy": "prioritized"})).policy.state_dict()
        for seed in (1, 1, 2)
    ]
    assert states[0] == states[1] != states[2]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"replay": {"policy": "priority"}}, "did you mean 'prioritized'"),
        ({"replay": {"policy": f"{__name__}:spread"}}, "is made without arguments"),
        ({"replay": {"policy": f"{__name__}:ReplayBuffer"}}, "is made without arguments"),
        ({"replay": {"policy": "collections:Counter"}}, "is no ReplayPolicy; derive its class from that"),
        (
            {"replay": {"policy": "prioritized"}, "produce": {"mode": "separate"}},
            "staleness_rule = 'correct' lets none expire: set that to 'drop'",
        ),
        (
            {"replay": {"policy": "prioritized"}, "train": {"advantage": "reinforce_pp"}},
            r"train\.advantage does not compare those: leave it out",
        ),
        (
            {
                "replay": {"policy": "prioritized", "reuse": {"times": 2}},
                "train": {"correction": "ratio"},
            },
            "rank a group differently: set the order to 'priority'",
        ),
    ],
)
def test_a_policy_that_cannot_work_is_refused(tmp_path, changes, says):
    with pytest.raises(ConfigError, match=says):
        config(tmp_path, **changes)
