"""Where parameters lie in a stretch of bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.engines.broadcast import buckets, end_of
from forebay.engines.weight_layout import ALIGNMENT, WeightsCorruptError, from_message, layout_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.bool]


@st.composite
def parameters(draw: st.DrawFn) -> list[tuple[str, torch.Tensor]]:
    shapes = draw(st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=6))
    return [
        (f"p{i}", (torch.randn(shape) * 50).to(draw(st.sampled_from(DTYPES))))
        for i, shape in enumerate(shapes)
    ]


@given(parameters())
def test_what_is_written_is_what_is_read(weights: list[tuple[str, torch.Tensor]]) -> None:
    layout = layout_of(weights)
    data = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    layout.write(data, weights)
    sums = layout.checksums(data)
    other = from_message(layout.to_message())
    assert other == layout
    for (name, tensor), (their_name, theirs) in zip(weights, other.views(data), strict=True):
        assert name == their_name
        assert theirs.dtype == tensor.dtype
        assert torch.equal(theirs, tensor)
    other.check(data, sums)
    assert all(spec.start % ALIGNMENT == 0 for spec in layout.specs)


@given(parameters(), st.integers(1, 300))
def test_buckets_hold_every_parameter_once_in_order(
    weights: list[tuple[str, torch.Tensor]], bucket_bytes: int
) -> None:
    layout = layout_of(weights)
    parts = list(buckets(layout, bucket_bytes))
    assert [spec for part in parts for spec in part] == list(layout.specs)
    assert all(len(part) == 1 or end_of(part) - part[0].start <= bucket_bytes for part in parts)


def test_a_changed_byte_names_its_parameter() -> None:
    weights = [("first", torch.ones(3)), ("second", torch.ones(3))]
    layout = layout_of(weights)
    data = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    layout.write(data, weights)
    sums = layout.checksums(data)
    data[layout.specs[1].start + 2] += 1
    with pytest.raises(WeightsCorruptError, match="'second'"):
        layout.check(data, sums)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="float33"):
        from_message([("x", "float33", [1])])
