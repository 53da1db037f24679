"""What a plan asks for the memory of a step is remembered; see `remembered`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from remembered import remembered

from forebay.plan import estimate


@pytest.fixture(autouse=True, scope="module")
def _steps_are_remembered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate, "step_memory", remembered)
        yield
