import pytest

from forebay.replay import FIFOReplayPolicy, IndexedStorage, NaiveStorage, ReplayBuffer, SQLStorage
from postgres_server import empty_place, running_server


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


@pytest.fixture(scope="session")
def postgres_server():
    with running_server() as url:
        yield url


@pytest.fixture
def postgres_url(postgres_server):
    """An empty place of its own in the server's database."""
    with empty_place(postgres_server) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgres"])
def sql_url(request, tmp_path):
    """A place for a SQL store, on each kind of database."""
    return tmp_path / "buffer.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


@pytest.fixture
def open_store(sql_url):
    """Opens a SQL store on the same database, as often as it is called; closed at the end."""
    opened = []

    def open_():
        opened.append(SQLStorage(sql_url))
        return opened[-1]

    yield open_
    for store in opened:
        store.close()
