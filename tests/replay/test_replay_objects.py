"""Values of well-known classes in snapshots and databases: back as they were, with nothing imported."""

import dataclasses
import datetime as dt
import subprocess
import sys
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, PrivateAttr
from replay_factory import make_state

from forebay.replay import FIFOReplayPolicy, ReplayBuffer
from forebay.replay.format.packed import GroupCodec
from forebay.replay.format.values import Checker, Decoder, Encoder, SavedFields
from forebay.types import Status


@dataclasses.dataclass
class Puzzle:
    grid: Any
    solved_at: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    row: int
    marks: frozenset = frozenset()

    def __post_init__(self):
        if self.row < 0:
            raise AssertionError("no constructor may run")


class Verdict(BaseModel):
    model_config = ConfigDict(extra="allow")
    score: float
    notes: Any = None
    _seen: Any = PrivateAttr(default=0)


def round_trip(value):
    encoder = Encoder()
    tree = encoder.encode(value, "value")
    Checker().encode(value, "value")
    return Decoder(encoder.blobs).decode(tree)


ZONES = st.sampled_from([None, dt.UTC, dt.timezone(dt.timedelta(hours=-3, minutes=-30)), ZoneInfo("Europe/Berlin")])
SCALARS = st.none() | st.integers() | st.text(max_size=3) | st.dates() | st.timedeltas() | st.booleans()
MOMENTS = st.datetimes(timezones=ZONES) | st.times(timezones=st.sampled_from([None, dt.UTC]))
VALUES = st.recursive(
    SCALARS | MOMENTS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.sets(SCALARS, max_size=3)
        | st.frozensets(SCALARS, max_size=3)
        | st.builds(Puzzle, inner, inner)
        | st.builds(Cell, st.integers(0, 9), st.frozensets(SCALARS, max_size=2))
        | st.builds(Verdict, score=st.floats(allow_nan=False), notes=inner, more=inner)
    ),
    max_leaves=8,
)


@given(VALUES)
def test_values_come_back_equal_and_of_the_same_type(value):
    restored = round_trip(value)
    assert restored == value
    assert type(restored) is type(value)
    assert repr(restored) == repr(value) or isinstance(value, set | frozenset) or "{" in repr(value)


def test_what_pydantic_keeps_beside_the_fields_comes_back():
    verdict = Verdict(score=1, extra_note="x")
    verdict._seen = 7
    restored = round_trip(verdict)
    assert (restored._seen, restored.model_extra) == (7, {"extra_note": "x"})
    assert restored.model_fields_set == {"score", "extra_note"}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3),
        torch.arange(6).reshape(2, 3).T,
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.zeros(0, 4),
        torch.tensor([1 + 2j]).conj(),
        torch.ones(3, requires_grad=True),
    ],
    ids=str,
)
def test_tensors_come_back_by_their_bytes(tensor):
    one, other = round_trip([tensor, {"again": tensor}])
    assert other["again"] is one
    assert (one.dtype, one.shape, one.requires_grad) == (tensor.dtype, tensor.shape, False)
    assert torch.equal(one, tensor)
    one += one.to(one.dtype)  # in memory of its own


class Odd(dict):
    """Not made as other objects are."""


def local_class():
    @dataclasses.dataclass
    class Local:
        x: int = 1

    return Local()


def with_attribute():
    puzzle = Puzzle(1)
    puzzle.note = "x"
    return puzzle


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (local_class(), "not found there again"),
        (with_attribute(), "the attribute 'note'"),
        (Odd(), "which a snapshot cannot hold"),
        (Path("a"), "which a snapshot cannot hold"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.nn.Parameter(torch.ones(1)), "which a snapshot cannot hold"),
        (dt.time(1, tzinfo=ZoneInfo("Europe/Berlin")), "named zone"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_come_back_as_something_else_is_refused(value, said):
    for kind in (Encoder, Checker):
        with pytest.raises(ValueError, match=rf"^reward\['x'\]\[0\] .*{said}"):
            kind().encode({"x": [value]}, "reward")


def test_no_module_is_imported_because_a_file_names_it(tmp_path, monkeypatch):
    (tmp_path / "trap_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    tree = {"$dataclass": ["trap_module:Puzzle", {"grid": {"$set": [1]}}]}
    restored = Decoder([]).decode(tree)
    assert restored == SavedFields("$dataclass", "trap_module:Puzzle", {"grid": {1}})
    assert "trap_module" not in sys.modules
    # It is stored as what it stands for.
    assert Encoder().encode(restored, "value") == tree


@pytest.mark.parametrize(
    "path",
    ["os:system", "subprocess:Popen", f"{__name__}:with_attribute", f"{__name__}:Puzzle.__init__", "", ":", "os"],
)
def test_only_dataclasses_and_models_with_these_fields_are_made(path):
    for tag, state in (("$dataclass", {"args": "x"}), ("$model", {"__dict__": {"args": "x"}})):
        restored = Decoder([]).decode({tag: [path, state]})
        assert restored == SavedFields(tag, path, state)
    changed = Decoder([]).decode({"$dataclass": [f"{__name__}:Puzzle", {"grid": 1}]})
    assert changed == SavedFields("$dataclass", f"{__name__}:Puzzle", {"grid": 1})


async def test_a_snapshot_and_a_database_hold_them(tmp_path):
    puzzle = Puzzle({1, 2}, dt.datetime(2026, 1, 2, tzinfo=dt.UTC))
    shared, image = torch.arange(4), bytes(range(256)) * 100
    group = [
        make_state(
            "g", member, steps=[1], mm_info={"pixels": shared, "images": [image]}, extra_fields={"puzzle": puzzle}
        )
        for member in range(2)
    ]
    buffer = ReplayBuffer(FIFOReplayPolicy())
    await buffer.put(group, "math")
    await buffer.save(tmp_path / "snapshot")
    other = ReplayBuffer(FIFOReplayPolicy())
    await other.resume(tmp_path / "snapshot")
    (restored,) = await other.get(1, "math", Status.COMPLETED)
    for read in (restored, GroupCodec().decode(GroupCodec().encode(group))):
        assert [state.extra_fields["puzzle"] for state in read] == [puzzle, puzzle]
        assert torch.equal(read[0].mm_info["pixels"], shared)
        assert read[0].mm_info["pixels"] is read[1].mm_info["pixels"]
        assert read[0].mm_info["images"] == [image]
        assert read[0].mm_info["images"][0] is read[1].mm_info["images"][0]
    assert len(image) < len(GroupCodec().encode(group)) < 2 * len(image)
    size = sum(file.stat().st_size for file in (tmp_path / "snapshot").rglob("*") if file.is_file())
    assert len(image) < size < 2 * len(image)
    # A process that knows neither the class nor torch before: the fields, and torch when it is needed.
    code = (
        "import asyncio, sys; from forebay.replay import *\n"
        "from forebay.types import Status\n"
        "async def main():\n"
        "    buffer = ReplayBuffer(FIFOReplayPolicy())\n"
        f"    await buffer.resume({str(tmp_path / 'snapshot')!r})\n"
        f"    await buffer.save({str(tmp_path / 'again')!r})\n"
        "    (group,) = await buffer.get(1, 'math', Status.COMPLETED)\n"
        "    print(type(group[0].extra_fields['puzzle']).__name__, group[0].mm_info['pixels'].tolist())\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split(maxsplit=1) == ["SavedFields", "[0, 1, 2, 3]\n"], done.stderr
    # What went through a process without the class is whole again in one with it.
    last = ReplayBuffer(FIFOReplayPolicy())
    await last.resume(tmp_path / "again")
    (restored,) = await last.get(1, "math", Status.COMPLETED)
    assert restored[0].extra_fields["puzzle"] == puzzle


def test_values_of_references_are_not_taken_for_each_other(monkeypatch):
    """What a reference points to is made when it is fetched; its memory may be used again after that."""

    class ObjectRef:
        def __init__(self, number):
            self.number = number

    class FakeRay:
        put = staticmethod(lambda value: value)

        @staticmethod
        def get(ref):
            return {"pixels": np.full(3, ref.number), "also": torch.full((3,), ref.number)}

    FakeRay.ObjectRef = ObjectRef
    monkeypatch.setitem(sys.modules, "ray", FakeRay)
    restored = round_trip([ObjectRef(number) for number in range(50)])
    for number, value in enumerate(restored):
        assert value["pixels"].tolist() == value["also"].tolist() == [number] * 3
