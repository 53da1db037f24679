"""Where parameters lie in a stretch of bytes."""

from __future__ import annotations

import msgspec
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.io.shared import ALIGNMENT, lay_out, views, write

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.bool]


@st.composite
def parameters(draw: st.DrawFn) -> list[tuple[str, torch.Tensor]]:
    shapes = draw(st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=6))
    return [(f"p{i}", (torch.randn(shape) * 50).to(draw(st.sampled_from(DTYPES)))) for i, shape in enumerate(shapes)]


@given(parameters())
def test_what_is_written_is_what_is_read(weights: list[tuple[str, torch.Tensor]]) -> None:
    layout, num_bytes = lay_out(weights)
    data = torch.zeros(num_bytes, dtype=torch.uint8)
    write(layout, data, weights)
    # As it arrives in another process.
    other = msgspec.msgpack.decode(msgspec.msgpack.encode(layout))
    for (name, tensor), (their_name, theirs) in zip(weights, views(other, data), strict=True):
        assert name == their_name
        assert theirs.dtype == tensor.dtype
        assert torch.equal(theirs, tensor)
    assert all(start % ALIGNMENT == 0 for *_, start, _ in layout)
