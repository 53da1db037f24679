"""The conformance suite on the stores in memory and on SQLite."""

import pytest

from forebay.replay import IndexedStorage, NaiveStorage, SQLStorage
from forebay.testing import StorageConformance


class TestNaiveStorage(StorageConformance):
    @pytest.fixture
    def storage(self):
        return NaiveStorage()


class TestIndexedStorage(StorageConformance):
    @pytest.fixture
    def storage(self):
        return IndexedStorage()


class TestSQLite(StorageConformance):
    @pytest.fixture
    def storage(self, tmp_path):
        store = SQLStorage(tmp_path / "buffer.db")
        yield store
        store.close()


class TestPostgres(StorageConformance):
    @pytest.fixture
    def storage(self, postgres_url):
        store = SQLStorage(postgres_url)
        yield store
        store.close()
