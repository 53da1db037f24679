"""The local Ray cluster, as the fixture `ray`; see `ray_cluster` for the mark that its tests carry."""

import sys
from pathlib import Path

import pytest

from ray_cluster import local_cluster

# What the tests of the plain classes are made of serves their actors too.
sys.path += [str(Path(__file__).parent.parent / folder) for folder in ("replay", "produce", "runs")]


@pytest.fixture(scope="session")
def ray():
    with local_cluster() as ray:
        yield ray
