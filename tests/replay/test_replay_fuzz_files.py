"""Snapshots and payloads that nobody wrote: a clear error that leaves the buffer as it was, or a whole one.

Damage is found by checksums (`test_replay_snapshot`). Here the checksums are right and the content is wrong:
made by another program, another version, or somebody with bad intentions.
"""

import asyncio
import contextlib
import io
import json
import shutil
import tempfile
import zipfile
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from replay_factory import make_group, make_state, refusal

from forebay.cli import buffer as commands
from forebay.replay import IndexedStorage, PrioritizedReplayPolicy, ReplayBuffer
from forebay.replay.format import snapshot
from forebay.replay.format.packed import GroupCodec
from forebay.replay.format.tables import GROUPS_SCHEMA, ROLLOUTS_SCHEMA
from forebay.replay.format.values import Decoder, Encoder, damage_named
from forebay.types import RolloutState, Status

# A failing example may be long; it is to be shown all the same.
pytestmark = pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 5)
    | st.sampled_from([2**31, 2**63 - 1, 2**63, -(2**63), 10**30, 10**12])
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["../groups-0123456789abcdef.arrow", "/etc/passwd", "completed", "math", "<i4", "|O"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
TAGS = ["float", "tuple", "dict", "bytes", "array", "objects", "scalar", "status", "sample_params", "ref", "x"]
TREES = st.recursive(
    JSON,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(TAGS).map("$".__add__), inner | st.lists(inner, max_size=3), max_size=1),
        st.builds(lambda *content: {"$array": list(content)}, st.sampled_from(["'<i4'", "'|O'", "3"]), inner, inner),
        st.builds(lambda *content: {"$scalar": list(content)}, st.sampled_from(["'<i4'", "'|O'", "3"]), inner),
        st.builds(lambda *content: {"$objects": list(content)}, inner, inner),
    ),
    max_leaves=6,
)


def new_buffer():
    return ReplayBuffer(PrioritizedReplayPolicy(seed=1), IndexedStorage())


async def filled_buffer():
    buffer = new_buffer()
    rich = make_state("rich", steps=[1, 2], mm_info={"pixels": np.zeros((2, 2), np.uint8), "more": (b"x", np.int8(1))})
    await buffer.put([rich, make_state("rich", 1, num_tokens=3)], "math", tags={"level": 3}, current_train_step=4)
    await buffer.put(make_group("b", 1, status=Status.FAILED), "code", priority=0.5)
    await buffer.put(make_group("c"), "code")
    await buffer.take_batch({"code": 1}, train_step=5)
    return buffer


class Saved(tuple):
    """Too long to be shown."""

    def __repr__(self):
        return "Saved"


@pytest.fixture(scope="module")
def saved():
    """A snapshot's manifest, and the content of its files by kind."""
    with tempfile.TemporaryDirectory() as folder:

        async def save():
            await (await filled_buffer()).save(folder)

        asyncio.run(save())
        manifest = json.loads((Path(folder) / snapshot.MANIFEST).read_text())
        files = {kind: (Path(folder) / entry["name"]).read_bytes() for kind, entry in manifest["files"].items()}
    return Saved((manifest, files))


def write(folder, manifest, files):
    """Write a snapshot whose checksums are right."""
    entries = manifest.get("files")
    for kind, data in files.items():
        entry = entries.get(kind) if isinstance(entries, dict) else None
        if not isinstance(entry, dict):
            continue
        for name, value in {"bytes": len(data), "crc32": zlib.crc32(data)}.items():
            if entry.get(name) == ...:
                entry[name] = value
        if isinstance(entry.get("name"), str) and Path(entry["name"]).name == entry["name"] != "":
            (folder / entry["name"]).write_bytes(data)
    manifest["sha256"] = snapshot._digest_of(manifest)
    (folder / snapshot.MANIFEST).write_text(json.dumps(manifest))


async def check(manifest, files):
    """Resume what is written: all or nothing; and look at it from outside."""
    folder = Path(tempfile.mkdtemp())
    try:
        write(folder, manifest, files)
        buffer = new_buffer()
        await buffer.put(make_group("held"), "math")
        await buffer.take_batch({"math": 1}, train_step=1)
        before = buffer.policy.state_dict()
        if await refusal(buffer.resume(folder)):
            assert buffer.policy.state_dict() == before
            assert [row.item[0].group_id for row in await buffer.storage.get({"status": "archived"})] == ["held"]
            assert len(buffer) == 0
            assert buffer.num_evicted == {}
        else:
            await use(buffer)
        with contextlib.redirect_stdout(io.StringIO()):
            await refusal(commands.inspect.__wrapped__(str(folder)))
            await refusal(commands.query.__wrapped__(str(folder), "{}", "-staleness", 9))
            await refusal(commands.show.__wrapped__(str(folder), 0))
    finally:
        shutil.rmtree(folder)


async def use(buffer):
    """Whatever was accepted is a buffer that works."""
    await buffer.put(make_group("new"), "math", current_train_step=9)
    (new,) = await buffer.storage.get({}, order="-timestamp_id", limit=1)
    assert new.item[0].group_id == "new"
    await buffer.refresh_staleness({"math": 2, "code": 2}, 9)
    await buffer.restore(0)
    for task in {row.task_name for row in await buffer.storage.get({}, rows_only=True)}:
        for status in Status:
            await buffer.get(9, task, status)
    assert len(buffer) == 0


def unsigned(manifest):
    """A copy in which `write` fills in the checksums of the files."""
    copied = json.loads(json.dumps(manifest))
    for entry in copied["files"].values():
        entry |= dict.fromkeys(("bytes", "crc32"), ...)
    return copied


def places_in(tree, path=()):
    """The paths of everything in nested dicts and lists."""
    yield path
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from places_in(value, (*path, key))


def change(tree, path, value):
    """Put `value` at `path`; Ellipsis removes what is there."""
    for key in path[:-1]:
        tree = tree[key]
    if value is ...:
        del tree[path[-1]]
    else:
        tree[path[-1]] = value


CHANGES = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), JSON | st.just(...)), min_size=1, max_size=2)
"""Where, as a share of all places, and what is there instead."""


@given(changes=CHANGES)
async def test_a_manifest_of_anything(saved, changes):
    manifest, files = saved
    manifest = unsigned(manifest)
    for share, value in changes:
        places = [path for path in places_in(manifest) if path and path[-1] not in ("bytes", "crc32", "sha256")]
        change(manifest, places[int(share * len(places))], value)
    await check(manifest, files)


def foreign(kind):
    """A file of another format, or of other columns."""
    table, stream = pa.table({"uid": [1, 2]}), io.BytesIO()
    if kind == "arrow":
        with pa.ipc.new_file(stream, table.schema) as writer:
            writer.write_table(table)
    elif kind == "arrow stream":
        with pa.ipc.new_stream(stream, table.schema) as writer:
            writer.write_table(table)
    elif kind == "parquet":
        pq.write_table(table, stream)
    elif kind == "zip":
        with zipfile.ZipFile(stream, "w") as archive:
            archive.writestr("uid.npy", b"1")
    return stream.getvalue()


@pytest.mark.parametrize("kind", ["arrow", "arrow stream", "parquet", "zip", "empty", "the other"])
@pytest.mark.parametrize("which", ["groups", "rollouts"])
async def test_foreign_files(saved, tmp_path, kind, which):
    manifest, files = saved
    other = {"groups": "rollouts", "rollouts": "groups"}[which]
    files = files | {which: files[other] if kind == "the other" else foreign(kind)}
    manifest = unsigned(manifest)
    write(tmp_path, manifest, files)
    assert "arrow" in await refusal(new_buffer().resume(tmp_path))
    await check(manifest, files)


def cell_values(kind):
    """Values that fit a column of that type, and mostly nothing else."""
    if pa.types.is_integer(kind):
        return st.none() | st.integers(-2, 9) | st.sampled_from([-(2**63), 2**63 - 1])
    if pa.types.is_floating(kind):
        return st.none() | st.floats()
    if pa.types.is_large_list(kind):
        inner = st.binary(max_size=4) if pa.types.is_large_binary(kind.value_type) else st.integers(0, 9)
        return st.none() | st.lists(inner | st.none(), max_size=3)
    return st.none() | st.text(st.characters(codec="utf-8"), max_size=4) | TREES.map(json.dumps)


def encode(table):
    stream = io.BytesIO()
    with pa.ipc.new_file(stream, table.schema) as writer:
        writer.write_table(table)
    return stream.getvalue()


EDITS = {
    kind: st.lists(
        st.sampled_from(schema.names).flatmap(
            lambda name, schema=schema: st.tuples(
                st.integers(0, 9), st.just(name), cell_values(schema.field(name).type)
            )
        ),
        min_size=1,
        max_size=3,
    )
    for kind, schema in (("groups", GROUPS_SCHEMA), ("rollouts", ROLLOUTS_SCHEMA))
}


@given(
    edited=st.sampled_from(sorted(EDITS)).flatmap(lambda kind: st.tuples(st.just(kind), EDITS[kind])),
    again=st.booleans(),
)
async def test_tables_of_anything(saved, edited, again):
    manifest, files = saved
    kind, edits = edited
    table = pa.ipc.open_file(files[kind]).read_all()
    lines = table.to_pylist()
    for number, name, value in edits:
        lines[number % len(lines)][name] = value
    if again:
        lines.append(lines[0])
    await check(unsigned(manifest), files | {kind: encode(pa.Table.from_pylist(lines, table.schema))})


@given(
    which=st.sampled_from(["groups", "rollouts"]),
    where=st.floats(0, 1, exclude_max=True),
    new=st.binary(min_size=1, max_size=8) | st.sampled_from([b"\xff" * 8, b"\x00" * 8]),
    keep=st.just(1.0) | st.floats(0, 1),
)
async def test_bytes_of_anything(saved, which, where, new, keep):
    """Changed bytes under a right checksum: nothing but Arrow's own checks stands between them and memory."""
    manifest, files = saved
    changed = bytearray(files[which])
    place = int(where * len(changed))
    changed[place : place + len(new)] = new[: len(changed) - place]
    await check(unsigned(manifest), files | {which: bytes(changed[: int(keep * len(changed))])})


async def decoded(data):
    return GroupCodec().decode(data)


GROUP = [make_state("g", i, steps=[1, 2], mm_info={"x": np.zeros(3, np.int16), "y": (1,)}) for i in range(2)]


@given(where=st.floats(0, 1, exclude_max=True), new=st.binary(max_size=8), cut=st.booleans())
async def test_payload_bytes_of_anything(where, new, cut):
    data = GroupCodec().encode(GROUP)
    place = int(where * len(data))
    data = data[:place] + new + (b"" if cut else data[place + len(new) :])
    if not await refusal(decoded(data)):
        assert all(isinstance(state, RolloutState) for state in GroupCodec().decode(data))


@given(share=st.floats(0, 1, exclude_max=True), value=TREES | st.just(...))
async def test_payload_headers_of_anything(share, value):
    whole = GroupCodec().encode(GROUP)
    end = 8 + int.from_bytes(whole[4:8], "little")
    header = msgspec.msgpack.decode(whole[8:end])
    header["trees"] = json.loads(header["trees"])
    places = [path for path in places_in(header) if path]
    change(header, places[int(share * len(places))], value)
    if "trees" in header:
        header["trees"] = json.dumps(header["trees"])
    try:
        text = msgspec.msgpack.encode(header)
    except OverflowError:
        # No bytes hold such a number.
        return
    changed = whole[:4] + len(text).to_bytes(4, "little") + text + whole[end:]
    if not await refusal(decoded(changed)):
        assert GroupCodec().encode(GroupCodec().decode(changed))


@given(tree=TREES)
@example(tree={"$array": ["'<i4'", [10**12], 0]})
@example(tree={"$objects": [[10**12], []]})
@example(tree={"$array": ["'|O'", [1], 0]})
@example(tree={"$array": ["[('x', '|O')]", [1], 0]})
@example(tree={"$scalar": ["'|O'", "MTIzNDU2Nzg="]})
async def test_trees_of_anything(tree):
    """What is decoded can be encoded again, unless it is refused."""

    async def decode():
        with damage_named("value"):
            value = Decoder([b"12345678"]).decode(tree)
        Encoder().encode(value, "value")

    await refusal(decode())


@pytest.mark.parametrize("field", ["extra_fields", "reward_model", "mm_info"])
async def test_values_that_nest_too_deep_are_named(field):
    deep, circle = {}, {}
    for _ in range(5000):
        deep = {"x": [deep]}
    circle["x"] = circle
    for value in (deep, circle):
        buffer = new_buffer()
        group = [make_state("g", **{field: value})]
        assert field in await refusal(buffer.put(group, "math"))
        with pytest.raises(ValueError, match=field):
            GroupCodec().encode(group)
