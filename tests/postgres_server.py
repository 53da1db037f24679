"""A PostgreSQL server of our own, from the system's binaries, on a socket in a temporary directory."""

import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))


@contextmanager
def running_server():
    """Yield the URL of its database; skip the test that asks where there is none."""
    if not BINARIES:
        pytest.skip("needs PostgreSQL's server: apt-get install postgresql")
    # The server refuses to run as root.
    as_user = []
    if os.geteuid() == 0:
        try:
            pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("needs a user 'postgres' to run PostgreSQL's server as")
        as_user = ["runuser", "-u", "postgres", "--"]
    folder = Path(tempfile.mkdtemp(prefix="forebay-postgres-", dir="/tmp"))
    if as_user:
        shutil.chown(folder, "postgres")

    def run(program, *arguments):
        command = [*as_user, str(BINARIES[-1] / program), "--pgdata", str(folder / "data"), *arguments]
        # No pipes: the server would keep them open.
        with open(os.devnull, "w") as nowhere:
            subprocess.run(command, check=True, cwd=folder, stdout=nowhere, stderr=nowhere)

    # Nothing here outlives the machine, so nothing is synced.
    settings = f"-k {folder} -c listen_addresses= -c fsync=off -c shared_buffers=32MB -c max_connections=60"
    try:
        run("initdb", "--auth=trust", "--username=postgres", "--encoding=UTF8", "--no-locale", "--no-sync")
        run("pg_ctl", "--wait", "--log", str(folder / "log"), "--options", settings, "start")
        try:
            yield f"postgresql://postgres@/postgres?host={folder}"
        finally:
            run("pg_ctl", "--wait", "--mode=immediate", "stop")
    finally:
        shutil.rmtree(folder)


def restart(url):
    """Have the server of `url` end at once, as by a crash, and start again."""
    folder = Path(sa.make_url(url).query["host"])
    as_user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    command = [*as_user, str(BINARIES[-1] / "pg_ctl"), "--pgdata", str(folder / "data"), "--wait"]
    with open(os.devnull, "w") as nowhere:
        subprocess.run(
            [*command, "--mode=immediate", "--log", str(folder / "log"), "restart"],
            check=True,
            cwd=folder,
            stdout=nowhere,
            stderr=nowhere,
        )


_numbers = itertools.count()


@contextmanager
def empty_place(server_url):
    """Yield the URL of a new place of its own in the server's database; it is dropped afterwards."""
    name = f"place_{next(_numbers)}"
    # No pool: tests wait until nobody else is connected.
    engine = sa.create_engine(server_url.replace("postgresql:", "postgresql+psycopg:"), poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.execute(sa.schema.CreateSchema(name))
    yield f"{server_url}&options=-csearch_path%3D{name}"
    with engine.begin() as connection:
        connection.execute(sa.schema.DropSchema(name, cascade=True))
