"""What version 0.1 wrote (`tests/fixtures/v01`) is read, or refused in one sentence.

The files were written by the code of version 0.1: a snapshot and an SQLite file of the same four groups, made
smaller by VACUUM; a ledger that went back to a checkpoint once; the folder of a run of two steps, without its
second checkpoint.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from forebay.cli.commands import app
from forebay.ledger import Ledger
from forebay.replay import ReplayBuffer, StalenessReplayPolicy
from forebay.types import Status

V01 = Path(__file__).parent / "fixtures" / "v01"


def run(*arguments, exit_code=0):
    result = CliRunner().invoke(app, [str(one) for one in arguments], catch_exceptions=False)
    assert result.exit_code == exit_code, result.output
    return result


@pytest.fixture
def copy(tmp_path):
    """Copies a part of the fixtures to where it may be changed."""

    def make(name):
        source = V01 / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
        return tmp_path / name

    return make


async def check_content(buffer):
    assert len(buffer) == 3
    # The stalest was taken for step 6, and comes back.
    await buffer.restore(5)
    groups = await buffer.get(9, "math", Status.COMPLETED)
    assert [group[0].group_id for group in groups] == ["b", "a", "d"]
    first = groups[1][1]
    assert first.message == [{"role": "user", "content": "prompt a"}]
    assert (first.reward, first.extra_fields) == ({"score": 0.5}, {"level": 3, "notes": [1, "two", None]})
    np.testing.assert_array_equal(first.response_ids, [4, 5, 6, 7])
    np.testing.assert_array_equal(first.logprobs, np.array([-0.5, -0.25, -1.0, np.nan], np.float32))
    np.testing.assert_array_equal(first.response_model_steps[:3], 3)
    assert [group[0].group_id for group in await buffer.get(9, "code", Status.ABORTED)] == ["c"]


async def test_a_snapshot_is_read(copy):
    buffer = ReplayBuffer(StalenessReplayPolicy())
    await buffer.resume(copy("snapshot"))
    await check_content(buffer)


def test_a_database_is_refused_in_one_sentence(copy):
    sql = pytest.importorskip("forebay.replay.stores.sql.store")
    with pytest.raises(ValueError, match=r"schema version '1'; this release reads 2: .*buffer migrate"):
        sql.SQLStorage(copy("buffer.db"))


def test_a_ledger_is_read(copy):
    ledger = Ledger.read(copy("ledger.jsonl"))
    balance = ledger.balance({"math": 2})
    assert (balance.generated, balance.trained, balance.dropped) == (5, 2, {"filtered": 1})
    assert balance.ok
    assert ledger.life("g2", "math").score == 0.5


def test_a_run_is_looked_into_as_it_is(copy):
    folder = copy("run")
    assert "a ledger's state has version 3, got 1" in run("buffer", "inspect", folder).output
    assert "groups, by the ledger's own account" in run("ledger", folder).output


def test_a_run_is_refused_for_the_keys_of_its_run_file(copy):
    pytest.importorskip("torch")
    refused = run("train", "--resume", copy("run"), exit_code=2).stderr
    assert "unknown key 'model.dtype', of an earlier version" in " ".join(refused.split())
