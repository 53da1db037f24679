import itertools

import pytest
import sqlalchemy as sa
from postgres_server import running_server

from forebay.replay import FIFOReplayPolicy, IndexedStorage, NaiveStorage, PandasStorage, ReplayBuffer


@pytest.fixture(params=[NaiveStorage, IndexedStorage, PandasStorage], ids=lambda store: store.__name__)
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


_numbers = itertools.count()


@pytest.fixture
def postgres_url(postgres_server):
    """An empty place of its own in the server's database."""
    name = f"place_{next(_numbers)}"
    engine = sa.create_engine(postgres_server.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.execute(sa.schema.CreateSchema(name))
    engine.dispose()
    return f"{postgres_server}&options=-csearch_path%3D{name}"
