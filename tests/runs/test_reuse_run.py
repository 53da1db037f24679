"""Whole runs that train on past groups again: each use is counted once, also after a crash and a resume."""

import asyncio
from collections import Counter, defaultdict

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from forebay.config import parse_config
from forebay.ledger import Ledger
from forebay.metrics import read_jsonl
from forebay.runs import steps
from forebay.runs.config import RunConfig
from forebay.runs.folder import saved_config
from forebay.runs.launch import launch
from forebay.runs.placement import PartLost
from forebay.runs.record.history import list_parts

STEPS, BATCH_SIZE, GROUP_SIZE, TIMES, MAX_STALENESS = 8, 4, 2, 2, 3


def odd_share(state):
    """Scores differ within nearly every group: only such groups are used again."""
    return float((state.response_ids % 2).mean())


def config(output, **changes):
    table = {
        "name": "run",
        "seed": 3,
        "steps": STEPS,
        "batch_size": BATCH_SIZE,
        "rollouts_per_prompt": GROUP_SIZE,
        "output": str(output),
        "checkpoint_every": 3,
        "model": {"source": "tiny", "tiny": {"hidden_size": 16, "num_layers": 1, "num_heads": 1}},
        "tasks": [
            {
                "name": "sorting",
                "data": {"source": "sorting", "arguments": {"length": 3, "letters": 5}, "size": 60},
                "judge": {"name": f"{__name__}:odd_share"},
                "sample": {"max_tokens": 6},
            }
        ],
        "replay": {"reuse": {"times": TIMES, "share": 0.5, "max_staleness": MAX_STALENESS}},
        "train": {"lr": 1e-3},
    }
    return parse_config(RunConfig, {**table, **changes})


def uses_by_step(folder):
    """The groups of every batch by outcome, as the history tells them: the lines that count."""
    found = defaultdict(lambda: {"trained": set(), "reused": set()})
    for part in list_parts(folder, "rollouts"):
        table = pq.read_table(part.path, columns=["group_id", "outcome", "train_step"])
        if part.until is not None:
            table = table.filter(pc.field("train_step") <= part.until)
        for row in table.to_pylist():
            if row["outcome"] in ("trained", "reused"):
                found[row["train_step"]][row["outcome"]].add(row["group_id"])
    return found


def check(folder):
    """Metrics, books and history tell the same uses; the balance holds."""
    uses, ledger = uses_by_step(folder), Ledger.read(folder / "ledger.jsonl")
    rows = [row for row in read_jsonl(folder / "metrics.jsonl") if "train/loss" in row]
    assert [row["train_step"] for row in rows] == sorted(uses) == list(range(1, STEPS + 1))
    for row in rows:
        new, past = (uses[row["train_step"]][outcome] for outcome in ("trained", "reused"))
        assert len(new | past) == BATCH_SIZE
        assert row.get("produce/past_groups", 0) == len(past)
        assert row["staleness"] <= MAX_STALENESS
    new, past = (Counter(g for by in uses.values() for g in by[outcome]) for outcome in ("trained", "reused"))
    assert max(new.values()) == 1
    assert max(past.values()) <= TIMES - 1
    # A group is used again after it was trained on, and by few steps more.
    first = {group: step for step in uses for group in uses[step]["trained"]}
    assert all(first[group] < step for step in uses for group in uses[step]["reused"])
    # Half of each batch, from the second step on where it is there.
    assert sum(past.values()) >= STEPS
    balance = ledger.balance(ledger.count_live())
    assert balance.ok
    assert (balance.trained, balance.reused) == (len(new), sum(past.values()))
    assert {group: ledger.life(group, "sorting").num_reused for group in new} == {g: past[g] for g in new}


@pytest.mark.parametrize("store", ["sqlite", "memory"])
@pytest.mark.parametrize("error", [PartLost, RuntimeError])
def test_uses_after_the_checkpoint_are_taken_back_and_made_again(tmp_path, monkeypatch, store, error):
    """A lost part takes the run back to its checkpoint; any other error ends it, and it is resumed."""
    report, used = steps.report, defaultdict(list)

    def reported(run, train_step, batch, metrics):
        report(run, train_step, batch, metrics)
        used[train_step].append({group[0].group_id for group in batch.by_outcome().get("reused", ())})
        if train_step == 5 and len(used[5]) == 1:
            raise error("gone")

    monkeypatch.setattr(steps, "report", reported)
    produce = {"mode": "separate", "max_staleness": 1}
    table = config(tmp_path, produce=produce, replay={**config(tmp_path).replay.model_dump(), "store": store})
    if error is PartLost:
        asyncio.run(launch(table))
    else:
        with pytest.raises(error, match="gone"):
            asyncio.run(launch(table))
        asyncio.run(launch(saved_config(table.folder), resume=table.folder))
    check(table.folder)
    # Step 4 has its past groups once more: more or fewer where new ones of other scores came this time.
    before, after = sorted(used[4], key=len)
    assert before
    assert before <= after


def test_a_colocated_run_that_goes_on_uses_past_groups_again(tmp_path):
    table = config(tmp_path, steps=5)
    asyncio.run(launch(table))
    asyncio.run(launch(saved_config(table.folder, [f"steps={STEPS}"]), resume=table.folder))
    check(table.folder)


def test_a_separate_run_of_staleness_0_trains_the_batches_of_a_colocated_one(tmp_path):
    """New groups in the places of past ones would expire unused."""
    found = []
    for mode in ("colocated", "separate"):
        table = config(tmp_path / mode, produce={"mode": mode, "max_staleness": 0})
        asyncio.run(launch(table))
        check(table.folder)
        ledger = Ledger.read(table.folder / "ledger.jsonl")
        found.append((uses_by_step(table.folder), ledger.balance(ledger.count_live()).dropped))
    assert found[0] == found[1]
