"""Many fragments at once: stacked ones stored, and the journal of their changes."""

import numpy as np
import pytest
from fragment_factory import fids, make_fragment, send

from forebay.fragments import FragmentMetadata, FragmentStore, SampleFragment
from forebay.fragments.store import journal

# Stacked fragments.


@pytest.mark.parametrize("size", [3, 2_000])
def test_what_was_stacked_can_be_stored_again(database_config, size):
    store = FragmentStore(**database_config)
    nested = {"a": [np.arange(3, dtype=np.int16), {"b": 7}], "c": (), "d": np.float32(2)}
    ids = store.add_fragments([make_fragment("w", 300 * i, size=size, extras=nested) for i in range(5)])
    again = store.add_stacked(store.stack(ids))
    for one, other in zip(store.get_fragments(ids), store.get_fragments(again), strict=True):
        assert (one.worker_uuid, one.fid_in_worker) == (other.worker_uuid, other.fid_in_worker)
        assert other.obs.tobytes() == one.obs.tobytes()
        assert other.extras["a"][0].tolist() == [0, 1, 2]
        assert other.extras["a"][1] == {"b": 7}
        assert other.episode_uuids == one.episode_uuids
    assert store.stack(again).fid_in_worker == [0, 300, 600, 900, 1200]


def stacked(**fields):
    plain = dict.fromkeys(["action", "next_done", "first", "in_state"])
    values = {"obs": np.arange(8).reshape(4, 2), "reward": np.zeros((4, 0)), "worker_uuid": "w"}
    return SampleFragment(**plain | values | {"fid_in_worker": list(range(4))} | fields)


def test_a_plain_value_is_that_of_every_fragment(store):
    fragments = store.get_fragments(store.add_stacked(stacked()))
    assert [fragment.worker_uuid for fragment in fragments] == ["w"] * 4
    assert [fragment.obs.tolist() for fragment in fragments] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert fragments[2].reward.shape == (0,)
    assert fragments[3].fid_in_worker == 3


def test_a_stacked_batch_has_one_length(store):
    with pytest.raises(ValueError, match=r"have one length, .* got \[3, 4\]"):
        store.add_stacked(stacked(obs=np.zeros((3, 2))))
    with pytest.raises(ValueError, match=r"obs is a builtins\.object"):
        store.add_stacked(stacked(obs=object()))
    with pytest.raises(ValueError, match=r"have one length, .* got \[\]"):
        store.add_stacked(stacked(obs=None, reward=None, fid_in_worker=0))
    assert len(store) == 0


# Ids that have left.


async def test_a_fragment_that_was_used_up_is_not_taken_again(make, store):
    buffer = make(max_chunks=2)
    (first,) = await send(buffer, store, "w", [0])
    batch = await buffer.fetch_fragments(1)
    await buffer.release(batch.lease)
    assert first not in store
    await buffer.add_fragment(first, FragmentMetadata("w", 0, -1, ""))
    metrics = await buffer.metrics()
    assert (metrics["chunks"], metrics["duplicate_fragments"], metrics["added_fragments"]) == (0, 1, 1)
    # One that was evicted is as little here as one that was used up.
    evicted, *_ = await send(buffer, store, "w", [1, 2, 3])
    await buffer.add_fragment(evicted, FragmentMetadata("w", 1, -1, ""))
    assert sorted(fids(await buffer.fetch_fragments(2))) == [2, 3]


# The journal.


@pytest.mark.parametrize("min_entry_bytes", [0, 300, 1 << 20])
async def test_the_next_buffer_is_the_same_however_often_a_snapshot_is_due(
    make_plain, store, monkeypatch, min_entry_bytes
):
    monkeypatch.setattr(journal, "MIN_ENTRY_BYTES", min_entry_bytes)
    settings = {"max_reuse": 3, "fragments_per_chunk": 2, "max_staleness": 2}
    buffer = make_plain(**settings)
    for fid in range(0, 60, 3):
        await send(buffer, store, "w", [fid, fid + 1], version=fid // 30)
        await send(buffer, store, "partial", [fid, fid], version=fid // 30)
        batch = await buffer.fetch_fragments(2)
        if fid % 2:
            await buffer.release(batch.lease)
        await buffer.update_model_version("", fid // 20)
    before, prepared = await buffer.metrics(), await buffer.prepared_fragments()
    after = make_plain(**settings)
    assert await after.metrics() | {"fragments_per_s": 0} == before | {"fragments_per_s": 0}
    assert await after.prepared_fragments() == prepared
    uses = [[(chunk.number, chunk.uses) for chunk in one._state.snapshot().chunks] for one in (buffer, after)]
    assert uses[0] == uses[1] != []
