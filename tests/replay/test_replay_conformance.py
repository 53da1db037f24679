"""The conformance suite on the stores in memory and on SQLite."""

import pytest
from store_examples import StorageExamples

from forebay.replay import IndexedStorage, NaiveStorage, SQLStorage
from forebay.testing import StorageConformance


class TestNaiveStorage(StorageConformance, StorageExamples):
    @pytest.fixture
    def storage(self):
        return NaiveStorage()


class TestIndexedStorage(StorageConformance, StorageExamples):
    @pytest.fixture
    def storage(self):
        return IndexedStorage()


class TestSQLite(StorageConformance, StorageExamples):
    @pytest.fixture
    def storage(self, tmp_path):
        store = SQLStorage(tmp_path / "buffer.db")
        yield store
        store.close()


class TestPostgres(StorageConformance, StorageExamples):
    @pytest.fixture
    def storage(self, postgres_url):
        store = SQLStorage(postgres_url)
        yield store
        store.close()
