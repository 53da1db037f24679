"""PostgreSQL servers of our own, from the system's binaries, each on a socket in a temporary directory."""

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from power_cut import halt

BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
SETTINGS = {"listen_addresses": "", "shared_buffers": "32MB", "max_connections": 60}


class Server:
    """One with its files in `data`, and its socket and log in `folder`."""

    def __init__(self, folder, data, **settings):
        self.folder, self._data, self._user = folder, data, server_user()
        self._settings = [f"--{name}={value}" for name, value in (SETTINGS | settings).items()]
        self.url = f"postgresql://postgres@/postgres?host={folder}"
        self.log = folder / "log"
        self._process = None
        for place in (folder, data):
            place.mkdir(exist_ok=True)
            if self._user:
                shutil.chown(place, "postgres")

    def make(self, *options):
        """A new cluster."""
        places = ["--pgdata", self._data, "--auth=trust", "--username=postgres", "--encoding=UTF8", "--no-locale"]
        made = subprocess.run(
            [BINARIES[-1] / "initdb", *places, *options], capture_output=True, text=True, cwd=self.folder, **self._user
        )
        assert made.returncode == 0, made.stderr

    def start(self):
        """Start it, and wait until it has recovered and answers."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [BINARIES[-1] / "postgres", "-D", self._data, "-k", self.folder, *self._settings],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
                **self._user,
            )
        deadline_s = time.monotonic() + 300
        while not self.answers():
            assert not self.has_ended(), self.log.read_text()[-4000:]
            assert time.monotonic() < deadline_s, self.log.read_text()[-4000:]
            time.sleep(0.05)

    def answers(self):
        """Whether it takes connections now."""
        return (
            subprocess.run(
                [BINARIES[-1] / "pg_isready", "-q", "-h", self.folder, "-U", "postgres"], check=False
            ).returncode
            == 0
        )

    def has_ended(self):
        """Whether it is not there, of itself or because it was killed."""
        return self._process is None or self._process.poll() is not None

    def stop(self):
        """End it at once, as by a crash, but for what its processes do about it."""
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait()

    def kill(self):
        """End all its processes, whatever they are at."""
        # A stopped one starts no other, and its children keep their numbers.
        if not self.has_ended() and halt(self._process.pid) == "T":
            number = self._process.pid
            for child in Path(f"/proc/{number}/task/{number}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
            self._process.kill()
            self._process.wait()


def server_user():
    """Arguments of `subprocess` for a server's programs; skip the test that asks where there is none."""
    if not BINARIES:
        pytest.skip("needs PostgreSQL's server: apt-get install postgresql")
    # The server refuses to run as root.
    if os.geteuid() != 0:
        return {}
    try:
        pwd.getpwnam("postgres")
    except KeyError:
        pytest.skip("needs a user 'postgres' to run PostgreSQL's server as")
    return {"user": "postgres", "group": "postgres", "extra_groups": ()}


_running = {}
"""By folder."""


@contextmanager
def running_server():
    """Yield the URL of its database; skip the test that asks where there is none."""
    server_user()
    folder = Path(tempfile.mkdtemp(prefix="forebay-postgres-", dir="/tmp"))
    try:
        # Nothing here outlives the machine, so nothing is synced.
        server = Server(folder, folder / "data", fsync="off")
        server.make("--no-sync")
        server.start()
        _running[str(folder)] = server
        try:
            yield server.url
        finally:
            _running.pop(str(folder)).stop()
    finally:
        shutil.rmtree(folder)


def restart(url):
    """Have the server of `url` end at once, as by a crash, and start again."""
    server = _running[sa.make_url(url).query["host"]]
    server.stop()
    server.start()


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
