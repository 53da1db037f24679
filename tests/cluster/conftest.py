"""The local Ray cluster, as the fixture `ray`; see `ray_cluster` for the mark that its tests carry."""

import pytest
from ray_cluster import local_cluster


@pytest.fixture(scope="session")
def ray():
    with local_cluster() as ray:
        yield ray
