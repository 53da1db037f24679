"""A recorded buffer notes groups that came by `put_groups` as those that came one by one."""

from replay_factory import make_group, names

from forebay.replay import FIFOReplayPolicy, IndexedStorage, ReplayBuffer
from forebay.runs.record.events import BufferRerun, observe_buffer
from forebay.runs.record.journal import Recorder, Segment, read_events
from forebay.types import Status


async def test_put_groups_is_recorded_and_done_again_alike(tmp_path):
    recorder = Recorder(tmp_path, run_file="")
    buffer = ReplayBuffer(FIFOReplayPolicy(), IndexedStorage(), limit=4)
    observe_buffer(recorder, buffer)
    groups = [make_group("a", num_tokens=2), [], make_group("b", num_tokens=1), make_group("c")]
    await buffer.put_groups(iter(groups), "math", model_step=1, current_train_step=3, tags={"x": 1})
    await buffer.put(make_group("d", steps=[0]), "math", current_train_step=4, stale_threshold=2)
    await buffer.put_groups([make_group("e"), make_group("f")], "math", priority=0.5)
    recorder.close()
    events = list(read_events(Segment(recorder.segment, None, None)))
    noted = [event for event in events if event.facts["event"] == "put"]
    assert [event.facts["group"] for event in noted] == ["a", "b", "c", "d", "e", "f"]
    assert [event.facts.get("evicted") for event in noted] == [None] * 5 + [2]
    assert noted[3].facts["status"] == "expired"
    # As they were given: not labeled yet.
    assert not (noted[0].group[0].response_model_steps >= 0).any()
    rerun = BufferRerun(ReplayBuffer(FIFOReplayPolicy(), IndexedStorage(), limit=4))
    for event in events:
        await rerun.execute(event)
    for one in (buffer, rerun.buffer):
        one.rows = [
            (row.uid, row.timestamp_id, row.status, row.staleness, row.tags, row.priority)
            for row in await one.storage.get({}, rows_only=True)
        ]
    assert rerun.buffer.rows == buffer.rows
    assert names(await rerun.buffer.get(9, "math", Status.COMPLETED)) == ["c", "e", "f"]
