"""``forebay buffer`` on a PostgreSQL database."""

import asyncio
import json

import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa
from replay_factory import make_group
from typer.testing import CliRunner

from forebay.cli.commands import app
from forebay.io.address import hide_password
from forebay.replay import FIFOReplayPolicy, ReplayBuffer, SQLStorage


def run(*arguments, exit_code=0):
    result = CliRunner().invoke(app, ["buffer", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == exit_code, result.output
    return result


async def fill(url):
    buffer = ReplayBuffer(FIFOReplayPolicy(), SQLStorage(url))
    for number in range(4):
        await buffer.put(make_group(f"g{number}", steps=[1, 2]), "math", current_train_step=5, tags={"n": number})
    await buffer.take_batch({"math": 1}, train_step=5)
    await buffer.close()


def test_a_database_is_shown_queried_exported_and_moved(postgres_url, tmp_path):
    asyncio.run(fill(postgres_url))
    shown = run("inspect", postgres_url).stdout
    assert "SQL store" in shown
    assert ["math", "3", "1", "3"] in [line.split() for line in shown.splitlines()]
    assert "prompt g2" in run("show", postgres_url, 2).stdout
    found = run("query", postgres_url, json.dumps({"tags.n": {"$gte": 2}, "staleness": 3})).stdout
    assert "2 groups" in found
    run("export", postgres_url, tmp_path / "out.parquet")
    assert pq.read_table(tmp_path / "out.parquet").num_rows == 6
    for source, target in [(postgres_url, tmp_path / "snapshot"), (tmp_path / "snapshot", tmp_path / "x.db")]:
        assert "3 live and 1 archived groups" in run("migrate", source, target).stdout
    message = run("migrate", tmp_path / "x.db", postgres_url, exit_code=2).stderr
    assert "holds 4 groups already" in message


def test_a_database_is_filled_from_a_file(postgres_url, tmp_path):
    asyncio.run(fill(tmp_path / "x.db"))
    run("migrate", tmp_path / "x.db", postgres_url)
    assert "prompt g3" in run("show", postgres_url, 3).stdout


def test_looking_changes_no_database(postgres_url):
    message = run("inspect", postgres_url, exit_code=2).stderr
    assert "holds no replay store" in message
    engine = sa.create_engine(postgres_url.replace("postgresql:", "postgresql+psycopg:"))
    assert sa.inspect(engine).get_table_names() == []
    engine.dispose()


@pytest.mark.parametrize("url", ["postgresql://me:hush@localhost:1/x", "postgresql://localhost:1/x?password=hush"])
def test_a_server_that_does_not_answer_is_one_message_without_the_password(url):
    message = run("inspect", url, exit_code=2).stderr
    assert message.startswith("error: cannot open the database")
    assert message.count("\n") == 1
    assert "hush" not in message + hide_password(url)
