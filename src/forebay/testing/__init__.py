"""Tools for tests of programs and plug-ins: engines without models, time that jumps, and what every replay
store must do.

`StorageConformance` needs pytest, which is loaded with it.
"""

from typing import TYPE_CHECKING, Any

from forebay.aio.virtual_time import DeadlockError, VirtualTimeLoop
from forebay.aio.virtual_time import run as run_in_virtual_time
from forebay.engines.scripted import ScriptedEngine

if TYPE_CHECKING:
    from forebay.testing.store_suite import StorageConformance

__all__ = ["DeadlockError", "ScriptedEngine", "StorageConformance", "VirtualTimeLoop", "run_in_virtual_time"]


def __getattr__(name: str) -> Any:
    if name == "StorageConformance":
        import pytest

        # So that a failing assertion says what was compared, as it does in a test file.
        pytest.register_assert_rewrite("forebay.testing.store_suite")
        from forebay.testing.store_suite import StorageConformance

        return StorageConformance
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
