import pytest

from forebay.replay import FIFOReplayPolicy, IndexedStorage, NaiveStorage, ReplayBuffer


@pytest.fixture(params=[NaiveStorage, IndexedStorage], ids=lambda store: store.__name__)
def make_store(request):
    """Every store must pass every test that asks for this."""
    return request.param


@pytest.fixture
def store(make_store):
    return make_store()


@pytest.fixture
def buffer(make_store):
    return ReplayBuffer(FIFOReplayPolicy(), make_store())
