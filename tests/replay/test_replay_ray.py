"""Ray object references in a buffer, with Ray itself."""

import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
import torch
from pydantic import BaseModel
from replay_factory import make_state, same

from forebay.replay import FIFOReplayPolicy, IndexedStorage, ReplayBuffer
from forebay.replay.format.packed import GroupCodec
from forebay.types import Status
from ray_cluster import local_cluster


@dataclass
class Seen:
    moment: datetime


class Answer(BaseModel):
    texts: set[str]


POINTED_TO = {
    "tensor": torch.arange(5).to(torch.bfloat16),
    "kinds": {1, 2},
    "seen": Seen(datetime(2026, 1, 2, tzinfo=UTC)),
    "answer": Answer(texts={"a", "b"}),
    "waited": timedelta(seconds=3),
}
IMAGE = np.arange(12, dtype=np.uint8).reshape(3, 4)


@pytest.fixture(scope="session")
def ray():
    with local_cluster() as ray:
        yield ray


def make_group(ray):
    """References at every depth, one of them in both members, one that points to a reference."""
    shared, lone = ray.put({"pixels": IMAGE}), ray.put([1, ("two", None), POINTED_TO])
    outer = ray.put({"inner": shared})
    first = make_state("g", 0, steps=[1], mm_info={"images": [shared, (lone, {"deep": shared})]})
    second = make_state("g", 1, steps=[1], mm_info=shared, extra_fields={"outer": outer, 3: [lone]})
    return [first, second], (shared, lone, outer)


def check(ray, group, originals):
    """The references are new ones, shared as before, and point to equal values."""
    images, (lone, nested) = group[0].mm_info["images"]
    outer = group[1].extra_fields["outer"]
    assert all(isinstance(ref, ray.ObjectRef) for ref in (images, lone, outer))
    assert images == nested["deep"] == group[1].mm_info
    assert lone == group[1].extra_fields[3][0]
    assert not {images, lone, outer} & set(originals)
    assert same(ray.get(images), {"pixels": IMAGE})
    *plain, pointed_to = ray.get(lone)
    assert plain == [1, ("two", None)]
    assert torch.equal(pointed_to.pop("tensor"), POINTED_TO["tensor"])
    assert pointed_to == {name: value for name, value in POINTED_TO.items() if name != "tensor"}
    inner = ray.get(outer)["inner"]
    assert isinstance(inner, ray.ObjectRef)
    assert same(ray.get(inner), {"pixels": IMAGE})


async def test_a_snapshot_stores_values_and_restores_references(ray, tmp_path):
    buffer = ReplayBuffer(FIFOReplayPolicy(), IndexedStorage())
    group, originals = make_group(ray)
    await buffer.put(group, "math")
    await buffer.save(tmp_path)
    other = ReplayBuffer(FIFOReplayPolicy(), IndexedStorage())
    await other.resume(tmp_path)
    (restored,) = await other.get(1, "math", Status.COMPLETED)
    check(ray, restored, originals)
    # A program without Ray is told what it would need.
    code = (
        "import asyncio; from forebay.replay import SyncReplayBufferConfig\n"
        f"try: asyncio.run(SyncReplayBufferConfig().build().resume({str(tmp_path)!r}))\n"
        "except ValueError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ray.init()" in done.stdout, done.stderr


def test_a_database_stores_values_and_restores_references(ray):
    codec = GroupCodec()
    group, originals = make_group(ray)
    check(ray, codec.decode(codec.encode(group)), originals)
