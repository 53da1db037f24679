"""Nothing that leaves a buffer by itself, or comes back from disk, is chosen by how long its rollouts are."""

import random

import pytest
from replay_factory import make_group, names

from forebay.replay import FIFOReplayPolicy, IndexedStorage, ReplayBuffer, SQLStorage
from forebay.replay.format import tables
from forebay.types import Status

LENGTHS = [0, 1, 7, 40, 400]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("make_storage", [lambda folder: IndexedStorage(), lambda folder: SQLStorage(folder / "b.db")])
async def test_eviction_and_resume_are_blind_to_length(make_storage, seed, tmp_path, monkeypatch):
    # Pieces of a snapshot end within long groups, at them, and after many short ones.
    monkeypatch.setattr(tables, "BATCH_TOKENS", 100)
    lengths = random.Random(seed).choices(LENGTHS, k=30)
    evicted = []
    buffer = ReplayBuffer(
        FIFOReplayPolicy(), make_storage(tmp_path), limit=20, on_evict=lambda row: evicted.extend(names([row.item]))
    )
    for number, length in enumerate(lengths):
        await buffer.put(make_group(number, num_tokens=length), "math", model_step=0, current_train_step=1)
    assert evicted == list(range(10))
    await buffer.save(tmp_path / "snapshot")
    await buffer.close()
    resumed = ReplayBuffer(FIFOReplayPolicy(), IndexedStorage())
    await resumed.resume(tmp_path / "snapshot")
    groups = await resumed.get(99, "math", Status.COMPLETED)
    assert names(groups) == list(range(10, 30))
    assert [len(group[0].response_ids) for group in groups] == lengths[10:]
