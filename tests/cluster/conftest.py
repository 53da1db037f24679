"""The local Ray cluster, as the fixture `ray`; its tests are in `ON_RAY` of the other `conftest`."""

import importlib.util
import sys
from pathlib import Path

import pytest

from ray_cluster import local_cluster

TESTS = Path(__file__).parent.parent

# What the tests of the plain classes are made of serves their actors too.
sys.path += [str(TESTS / folder) for folder in ("replay", "produce", "runs")]

# So do their scripted inference servers, which are in a file of the name that this one has.
_spec = importlib.util.spec_from_file_location("http_fakes", TESTS / "engines" / "http" / "conftest.py")
http_fakes = sys.modules["http_fakes"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(http_fakes)
start_fake = http_fakes.start_fake


# On a machine with little to spare Ray takes minutes to start an actor, or to start it again.
LIMITS = (
    "buffer.CLOSE_LIMIT_S",
    "ranks.SILENCE_LIMIT_S",
    "ray_cluster.CLOSE_LIMIT_S",
    "supervisor.SILENCE_LIMIT_S",
    "trainer.SILENCE_LIMIT_S",
)


@pytest.fixture(scope="session")
def ray():
    with local_cluster() as ray:
        yield ray


@pytest.fixture(autouse=True)
def _patient(request, monkeypatch):
    if "ray" in request.fixturenames:
        for name in LIMITS:
            monkeypatch.setattr(f"forebay.cluster.{name}", 500.0)
