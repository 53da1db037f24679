"""What the buffer promises, embedded and as a Ray actor."""

import asyncio

import numpy as np
import pytest
from fragment_factory import fids, make_fragment, send

from forebay.fragments import FragmentIndex, FragmentMetadata, FragmentStore, Lease, RateLimit


async def test_a_fragment_is_served_with_its_index_and_its_payload(make, store):
    buffer = make()
    (fragment_id,) = await send(buffer, store, "w", [0])
    batch = await buffer.fetch_fragments(1)
    assert batch == [(FragmentIndex("w", 0), fragment_id)]
    assert isinstance(batch.lease, Lease)
    assert batch.staleness == [0]
    assert store.get_fragment(fragment_id).fid_in_worker == 0
    assert await buffer.prepared_fragments() == batch
    assert (await buffer.prepared_fragments()).lease == batch.lease


async def test_nothing_is_prepared_before_the_first_fetch(make):
    prepared = await make().prepared_fragments()
    assert prepared == []
    assert prepared.lease is None


def test_each_call_may_have_an_event_loop_of_its_own(make_plain, store):
    buffer = make_plain(max_reuse=2)
    ids = asyncio.run(send(buffer, store, "w", [0, 1]))
    batches = [asyncio.run(buffer.fetch_fragments(2)) for _ in range(2)]
    assert [sorted(fids(batch)) for batch in batches] == [[0, 1], [0, 1]]
    assert all(asyncio.run(buffer.release(batch.lease)) for batch in batches)
    # A loop may have ended before it could delete them.
    asyncio.run(buffer.close())
    assert not set(ids) & set(store.ids())


async def test_the_database_config_opens_the_same_store(make, store):
    (fragment_id,) = await send(buffer := make(), store, "w", [3])
    other = FragmentStore(**await buffer.get_database_config())
    assert other.get_fragment(fragment_id).fid_in_worker == 3


async def test_consecutive_fragments_of_one_worker_form_a_chunk(make, store):
    buffer = make(fragments_per_chunk=2, max_chunks=4)
    for fid in range(4):
        await send(buffer, store, "a", [fid])
        await send(buffer, store, "b", [fid + 10])
    batch = await buffer.fetch_fragments(8)
    pairs = {
        (i.worker_uuid, i.fid_in_worker, j.fid_in_worker)
        for (i, _), (j, _) in zip(batch[::2], batch[1::2], strict=True)
    }
    assert pairs == {("a", 0, 1), ("a", 2, 3), ("b", 10, 11), ("b", 12, 13)}


@pytest.mark.parametrize("count", [0, -2, 1, 3, 10])
async def test_a_batch_that_can_never_be_is_refused(make_plain, count):
    buffer = make_plain(fragments_per_chunk=2, max_chunks=4)
    with pytest.raises(ValueError, match=f"multiple of fragments_per_chunk=2.*got {count}"):
        await buffer.fetch_fragments(count)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_chunks": 0}, "max_chunks must be at least 1, got 0"),
        ({"max_staleness": -1}, "max_staleness must be at least 0, got -1"),
        ({"max_reuse": 0}, "max_reuse must be at least 1, got 0"),
        ({"fragments_per_chunk": 0}, "fragments_per_chunk must be at least 1, got 0"),
        ({"lease_s": 0.0}, "lease_s must be above 0"),
        ({"fragments_per_report": 0}, "fragments_per_report must be at least 1"),
    ],
)
def test_impossible_settings_are_refused(make_plain, settings, message):
    with pytest.raises(ValueError, match=message):
        make_plain(**settings)


# Staleness and sessions.


async def test_an_old_chunk_behind_a_fresh_one_is_dropped(make, store):
    buffer = make()
    await buffer.update_model_version("s", 1)
    await send(buffer, store, "fresh", [0], version=1, session="s")
    (old,) = await send(buffer, store, "old", [0], version=0, session="s")
    await buffer.update_model_version("s", 2)
    metrics = await buffer.metrics()
    assert (metrics["chunks"], metrics["dropped/stale"]) == (1, 1)
    assert old not in store
    assert [index.worker_uuid for index, _ in await buffer.fetch_fragments(1)] == ["fresh"]


async def test_a_chunk_is_as_old_as_its_oldest_fragment(make, store):
    buffer = make(fragments_per_chunk=2)
    await buffer.update_model_version("s", 1)
    await send(buffer, store, "w", [0], version=1, session="s")
    await send(buffer, store, "w", [1], version=0, session="s")
    await buffer.update_model_version("s", 2)
    metrics = await buffer.metrics()
    assert (metrics["chunks"], metrics["dropped/stale"]) == (0, 2)


async def test_fragments_too_old_on_arrival_or_of_another_session_are_dropped(make, store):
    buffer = make()
    await buffer.update_model_version("s", 5)
    await send(buffer, store, "w", [0], version=3, session="s")
    await send(buffer, store, "w", [1], version=5, session="other")
    await send(buffer, store, "w", [2], version=4, session="s")
    metrics = await buffer.metrics()
    assert (metrics["dropped/stale"], metrics["dropped/session"]) == (1, 1)
    assert fids(await buffer.fetch_fragments(1)) == [2]


async def test_a_new_session_releases_what_the_old_one_held(make, store):
    buffer = make(fragments_per_chunk=2)
    await buffer.update_model_version("one", 0)
    await send(buffer, store, "w", [0, 1, 2], version=0, session="one")
    await buffer.update_model_version("two", 0)
    metrics = await buffer.metrics()
    assert (metrics["chunks"], metrics["partial_fragments"], metrics["dropped/session"]) == (0, 0, 3)
    assert len(store) == 0


async def test_a_dead_worker_pins_nothing_once_its_fragments_are_too_old(make, store):
    buffer = make(fragments_per_chunk=2)
    await send(buffer, store, "dead", [0])
    await buffer.update_model_version("", 1)
    assert (await buffer.metrics())["partial_fragments"] == 0
    assert len(store) == 0


async def test_a_worker_that_says_goodbye_releases_its_partial_chunk(make, store):
    buffer = make(fragments_per_chunk=2)
    await send(buffer, store, "w", [0, 1, 2])
    await buffer.remove_worker("w")
    metrics = await buffer.metrics()
    assert (metrics["chunks"], metrics["dropped/silent_worker"], len(store)) == (1, 1, 2)


async def test_a_lost_fragment_costs_the_partial_chunk_and_no_more(make, store):
    buffer = make(fragments_per_chunk=2)
    await send(buffer, store, "w", [0, 2, 3, 4, 5])
    metrics = await buffer.metrics()
    assert (metrics["dropped/gap"], metrics["chunks"], len(store)) == (1, 2, 4)
    assert sorted(fids(await buffer.fetch_fragments(4))) == [2, 3, 4, 5]


# Capacity and reuse.


async def test_a_full_buffer_drops_its_oldest_chunk(make, store):
    buffer = make(max_chunks=2)
    await send(buffer, store, "w", [0, 1, 2])
    metrics = await buffer.metrics()
    assert (metrics["chunks"], metrics["dropped/evicted"], len(store)) == (2, 1, 2)
    assert sorted(fids(await buffer.fetch_fragments(2))) == [1, 2]


async def test_a_chunk_is_served_max_reuse_times(make, store):
    buffer = make(max_reuse=3)
    await send(buffer, store, "w", [0])
    for _ in range(3):
        assert fids(await buffer.fetch_fragments(1)) == [0]
    with pytest.raises(TimeoutError):
        await buffer.fetch_fragments(1, timeout_s=0.01)
    metrics = await buffer.metrics()
    assert (metrics["used_up_fragments"], metrics["chunks"], metrics["mean_reuse"]) == (1, 0, 3)


async def test_adding_a_fragment_again_changes_nothing(make, store):
    buffer = make()
    (fragment_id,) = await send(buffer, store, "w", [0])
    await buffer.add_fragment(fragment_id, FragmentMetadata("w", 0, -1, ""))
    metrics = await buffer.metrics()
    assert (metrics["chunks"], metrics["added_fragments"], metrics["duplicate_fragments"]) == (1, 1, 1)
    assert fragment_id in store


# Leases.


async def test_a_second_fetch_leaves_the_payloads_of_the_first(make, store):
    buffer = make()
    await send(buffer, store, "w", [0, 1])
    first, second = await buffer.fetch_fragments(1), await buffer.fetch_fragments(1)
    assert store.stack(first.fragment_ids).fid_in_worker == fids(first)
    assert await buffer.release(first.lease)
    with pytest.raises(KeyError, match="its lease was released"):
        store.get_fragment(first[0][1])
    assert store.stack(second.fragment_ids).fid_in_worker == fids(second)


async def test_a_payload_stays_until_the_last_of_its_leases_ends(make, store):
    buffer = make(max_reuse=2)
    await send(buffer, store, "w", [0])
    first, second = await buffer.fetch_fragments(1), await buffer.fetch_fragments(1)
    await buffer.release(first.lease)
    assert len(store) == 1
    await buffer.release(second.lease.lease_id)
    assert len(store) == 0
    assert not await buffer.release(second.lease)


async def test_dropping_a_leased_chunk_leaves_its_payload_to_the_lease(make, store):
    buffer = make(max_reuse=2)
    await send(buffer, store, "w", [0])
    batch = await buffer.fetch_fragments(1)
    await buffer.update_model_version("", 9)
    assert len(store) == 1
    await buffer.release(batch.lease)
    assert len(store) == 0


async def test_what_is_no_lease_is_refused(make_plain):
    with pytest.raises(ValueError, match="got 'mine'"):
        await make_plain().release("mine")


# Waiting.


async def test_a_fetch_waits_until_there_is_enough(make, store):
    buffer = make()
    fetching = asyncio.create_task(buffer.fetch_fragments(2))
    await send(buffer, store, "w", [0])
    await asyncio.sleep(0)
    assert not fetching.done()
    await send(buffer, store, "w", [1])
    assert sorted(fids(await fetching)) == [0, 1]


async def test_a_cancelled_fetch_takes_nothing(make, store):
    buffer = make()
    fetching = asyncio.create_task(buffer.fetch_fragments(1))
    while not (await buffer.metrics())["waiting_fetches"]:
        await asyncio.sleep(0.01)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    while (await buffer.metrics())["waiting_fetches"]:
        await asyncio.sleep(0.01)
    await send(buffer, store, "w", [0])
    metrics = await buffer.metrics()
    assert (metrics["chunks"], metrics["leases"], metrics["fetches"]) == (1, 0, 0)


# Metrics.


async def test_metrics_are_numbers_from_the_start_and_right_from_the_first_fetch(make, store):
    buffer = make(max_reuse=4, max_staleness=3)
    assert all(value == value for value in (await buffer.metrics()).values())
    await buffer.update_model_version("s", 0)
    await send(buffer, store, "w", [0], version=0, session="s")
    await buffer.update_model_version("s", 2)
    await buffer.fetch_fragments(1)
    metrics = await buffer.metrics()
    # Not only of chunks that have been used up.
    assert (metrics["mean_staleness"], metrics["max_staleness"], metrics["mean_reuse"]) == (2, 2, 1)
    await buffer.update_model_version("s", 3)
    await buffer.fetch_fragments(1)
    metrics = await buffer.metrics()
    assert (metrics["mean_staleness"], metrics["max_staleness"], metrics["mean_reuse"]) == (2.5, 3, 2)


async def test_a_report_comes_every_so_many_fragments(make_plain, store):
    reports = []
    buffer = make_plain(fragments_per_report=2, report=reports.append)
    await send(buffer, store, "w", range(5))
    assert [report["added_fragments"] for report in reports] == [2, 4]


# Sampling.


async def test_equal_seeds_draw_equal_batches(make_plain, tmp_path):
    async def draws(name, seed):
        config = {"path": tmp_path / name}
        buffer = make_plain(database_config=config, max_reuse=9, seed=seed)
        await send(buffer, FragmentStore(**config), "w", range(8))
        return [fids(await buffer.fetch_fragments(3)) for _ in range(4)]

    first = await draws("first", 5)
    assert all(len(set(draw)) == 3 for draw in first)
    assert len(set(map(tuple, first))) > 1
    assert await draws("second", 5) == first
    assert await draws("third", 6) != first


# Going on.


async def test_opening_a_buffer_keeps_the_store(make, store):
    fragment_id = store.add_fragment(make_fragment())
    await make().metrics()
    assert store.get_fragment(fragment_id).fid_in_worker == 0


async def test_a_saved_buffer_goes_on_elsewhere(make, make_plain, store, tmp_path):
    buffer = make(fragments_per_chunk=2, max_reuse=2)
    await buffer.update_model_version("s", 4)
    await send(buffer, store, "w", range(5), version=4, session="s")
    batch = await buffer.fetch_fragments(2)
    await buffer.save(str(tmp_path / "saved"))
    with pytest.raises(FileExistsError):
        await buffer.save(str(tmp_path / "saved"))
    before = await buffer.metrics()
    await buffer.release(batch.lease)
    config = {"path": tmp_path / "saved"}
    saved = make_plain(fragments_per_chunk=2, max_reuse=2, database_config=config)
    after = await saved.metrics()
    assert after | {"fragments_per_s": 0} == before | {"fragments_per_s": 0}
    assert await saved.prepared_fragments() == batch
    assert FragmentStore(**config).stack(batch.fragment_ids).fid_in_worker == fids(batch)
    await send(saved, FragmentStore(**config), "w", [5], version=4, session="s")
    assert (await saved.metrics())["chunks"] == 3


async def test_a_save_that_failed_keeps_no_later_one_from_its_place(make_plain, store, tmp_path):
    buffer = make_plain()
    await send(buffer, store, "w", [0])
    (tmp_path / "saved.tmp" / "index").mkdir(parents=True)
    (tmp_path / "saved.tmp" / "index" / "data.mdb").write_bytes(b"cut short")
    await buffer.save(str(tmp_path / "saved"))
    saved = make_plain(database_config={"path": tmp_path / "saved"})
    assert fids(await saved.fetch_fragments(1)) == [0]
    assert not (tmp_path / "saved.tmp").exists()


async def test_what_a_journal_cannot_keep_is_refused_before_anything_changes(make_plain, store, tmp_path):
    buffer = make_plain()
    for name, metadata in (
        ("", FragmentMetadata("w", 0, -1, "")),
        ("x", FragmentMetadata("w", "0", -1, "")),
        ("x", FragmentMetadata("w", 0, None, "")),
        ("x", FragmentMetadata(None, 0, -1, "")),
        ("x", FragmentMetadata("w", 2**70, -1, "")),
        (None, FragmentMetadata("w", 0, -1, "")),
    ):
        with pytest.raises(ValueError, match="cannot keep"):
            await buffer.add_fragment(name, metadata)
    with pytest.raises(ValueError, match=r"session_id='s', model_version=1.5"):
        await buffer.update_model_version("s", 1.5)
    with pytest.raises(ValueError, match="worker_uuid=None"):
        await buffer.remove_worker(None)
    assert (await buffer.metrics())["added_fragments"] == 0
    await send(buffer, store, "w", [0])
    await buffer.close()
    assert fids(await make_plain().fetch_fragments(1)) == [0]


async def test_numbers_of_numpy_are_kept_as_numbers(make_plain, store):
    buffer = make_plain()
    await buffer.update_model_version("s", np.int32(4))
    name = store.add_fragment(make_fragment())
    await buffer.add_fragment(name, FragmentMetadata("w", np.int64(0), np.int64(4), "s"))
    await buffer.close()
    again = make_plain()
    assert (await again.metrics())["model_version"] == 4
    assert await again.fetch_fragments(1) == [(FragmentIndex("w", 0), name)]


async def test_settings_of_numpy_are_kept_as_numbers(make_plain, store):
    limit = RateLimit(samples_per_insert=np.float32(1.5), error_buffer=np.float64(3))
    settings = {"lease_s": np.float32(0.5), "worker_timeout_s": np.float64(60), "max_reuse": 2, "rate_limit": limit}
    buffer = make_plain(**settings)
    name = store.add_fragment(make_fragment())
    await buffer.add_fragment(name, FragmentMetadata("w", 0, -1, ""))
    lease = (await buffer.fetch_fragments(1)).lease
    await buffer.close()
    again = make_plain(**settings)
    assert (await again.metrics())["leases"] == 1
    assert lease.term_s == (await again.prepared_fragments()).lease.term_s == 0.5
