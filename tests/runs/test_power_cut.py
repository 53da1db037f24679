"""Power cuts and failing disks at any instant: what was said to be safe is there, and what follows is right.

::

    store    processes put, take and commit on SQLite with synchronous=full, or on PostgreSQL whose files are on
             that disk: no call that returned is undone
    starved  the same on a disk whose writes and fsyncs begin to fail before the cut
    healed   they fail for a moment: the next process goes on with the store without a cut
    panic    on PostgreSQL: they fail until the server panics; it recovers of itself, or by the next cut
    files    books that were synced stand, event by event; a published checkpoint is there, whole
    run      a separate run on a store, cut again and again until it is finished: every group trained once,
             dropped by name or live, and the books balance

Everything of a round but the instants follows from its seed. ``FOREBAY_POWER_CUTS=40:80`` tries those.
"""

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import scripted_run
import sqlalchemy as sa
from test_killed_separate_run import Nursery, check_scripted_run, kill_until_finished

from forebay.io.safe_files import check, sync
from forebay.ledger import Ledger
from forebay.replay import SQLStorage
from forebay.runs.folder import list_checkpoints, step_of
from postgres_server import Server, empty_place
from power_cut import disk, halt

sys.path.append(str(Path(__file__).parents[1] / "replay"))
from test_replay_sql_processes import Journal, look

HERE = Path(__file__).parent
NUM_ROUNDS = 10
CUTS = 5 if os.environ.get("FOREBAY_SOAK") == "1" else 1
"""Of a disk, at least; a run is cut until it is finished."""
FULL = "?synchronous=full"
FAILURES = ("I/O error", "Errno 5", "Errno 28", "No space left", "Read-only file system")
"""Of the disk, as a process tells of it, or of a database whose server is gone or in recovery."""
LOST = ("the connection is lost", "server closed the connection", "connection failed", "terminating connection")


def wanted_seeds():
    first, _, end = os.environ.get("FOREBAY_POWER_CUTS", f"0:{NUM_ROUNDS}").partition(":")
    return range(int(first), int(end or int(first) + 1))


def lines_until_cut(made, rng, command, *, most, starve=None):
    """The whole lines of a process whose disk goes after a random number of them.

    It may end before if `starve` was called.
    """
    num_lines = rng.randrange(1, most)
    starved_at = None if starve is None else rng.randrange(min(num_lines, 250))
    child = subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # Also if it ends before, of a disk that fails.
    errors = []
    reading = threading.Thread(target=lambda: errors.append(child.stderr.read()))
    reading.start()
    lines = []
    with child.stdout, child.stderr:
        try:
            for line in child.stdout:
                lines.append(line)
                if starved_at is not None and len(lines) == starved_at + 1:
                    starve()
                if len(lines) == num_lines:
                    # First it stops: a power cut ends the programs too, while a call that is in the kernel
                    # when a file system is shut down may come back as if nothing had been.
                    halt(child.pid)
                    made.cut()
                    child.kill()
        finally:
            child.kill()
        reading.join()
    code = child.wait()
    assert code == -9 or any(text in errors[0] for text in (*FAILURES, *LOST)), errors
    assert made.is_cut or starve is not None, errors
    return [line.split() for line in lines if line.endswith("\n")]


class CutJournal(Journal):
    """What processes are known to have done that lost their disk."""

    def read(self, lines):
        self.begun, self.took, self.committing, self.restoring = set(), None, None, None
        for line in lines:
            self.note(*line)


def cut_store(made, rng, starve=None):
    """With a `starve` of its own the disk is well again afterwards, and what used it may go on."""
    journal, round_, heals = CutJournal(), 0, starve not in (None, made.starve)
    url = made.server.url if made.server else f"sqlite:///{made.folder / 'buffer.db'}{FULL}"
    while made.num_cuts < CUTS:
        child = [HERE.parent / "replay" / "kill_child.py", url, rng.randrange(10**6), round_, journal.step]
        # It prints on while the disk fails, and ends by that before a cut, or after one.
        journal.read(lines_until_cut(made, rng, child, most=2000 if heals else 250, starve=starve))
        if not made.is_cut and not (heals and recovers(made.server)):
            made.cut()
        if made.is_cut:
            made.restore()
        # Before anything was acknowledged there may be no file, or one without tables.
        live, archived, num_put = asyncio.run(look(url))
        journal.compare(live, archived, None if made.server else num_put)
        round_ += 1
    if round_ > made.num_cuts:
        print(f"{round_ - made.num_cuts} times the store went on without a cut")


def fail_a_while(made):
    """Have the disk fail for a time in which a store writes."""
    made.starve()
    time.sleep(0.3)
    made.feed()


def fail_until_panic(made):
    """Have the disk fail until the server has panicked."""
    seen = made.server.log.read_text().count("PANIC")
    engine = sa.create_engine(
        made.server.url.replace("postgresql:", "postgresql+psycopg:"),
        poolclass=sa.NullPool,
        isolation_level="AUTOCOMMIT",
    )
    made.starve()
    while made.server.log.read_text().count("PANIC") == seen:
        with contextlib.suppress(sa.exc.DBAPIError), engine.connect() as connection:
            connection.execute(sa.text("CHECKPOINT"))
    made.feed()


def recovers(server):
    """Whether it does after a panic, of itself; a file needs nothing for it."""
    while server and "ready to accept connections" not in server.log.read_text().rpartition("PANIC")[2]:
        if server.has_ended():
            return False
        time.sleep(0.05)
    return True


@contextlib.contextmanager
def served(made, rng):
    """A database on the disk: a small one, with checkpoints every few megabytes."""
    with tempfile.TemporaryDirectory(prefix="forebay-postgres-", dir="/tmp") as folder:
        size = rng.choice(["4MB", "16MB"])
        server = Server(Path(folder), made.folder / "postgres", min_wal_size="2MB", max_wal_size=size)
        server.make("--wal-segsize=1")
        server.start()
        made.server = server
        try:
            yield
        finally:
            server.kill()


def cut_files(made, rng):
    books = made.folder / "ledger.jsonl"
    place, published = None, 0
    for _ in range(CUTS):
        child = [HERE / "power_cut_child.py", made.folder, rng.randrange(10**6)]
        for what, *numbers in lines_until_cut(made, rng, child, most=30):
            if what == "synced":
                place = tuple(map(int, numbers))
            else:
                published = int(numbers[0])
        made.restore()
        if place is not None:
            num_bytes, num_events = place
            ledger = Ledger.read(books, num_bytes=num_bytes, num_events=num_events)
            assert ledger.lost_events == 0
            assert ledger.balance(ledger.count_live()).ok
            # What came after may be torn; it is read, and what is missing is counted.
            Ledger.read(books)
        checkpoints = list_checkpoints(made.folder)
        assert published <= (step_of(checkpoints[-1]) if checkpoints else 0)
        for path in checkpoints:
            check(path, deep=True)
        if checkpoints:
            state = json.loads((checkpoints[-1] / "ledger.json").read_text())
            ledger = Ledger.read_checkpoint(state, made.folder)
            assert ledger.lost_events == 0
            assert ledger.balance(ledger.count_live()).ok


class PowerCuts(Nursery):
    """Starts runs, and cuts the power of their disk."""

    made = None

    def run(self, *arguments, until="@end", after_s=0.0):
        self.was_cut, self.cuts = False, until != "@end"
        finished = super().run(*arguments, until=until, after_s=after_s)
        if self.was_cut:
            self.made.restore()
        return finished

    def end(self, pid):
        # Not of one that has made its last checkpoint: nobody would make again what is lost.
        state = halt(pid)
        checkpoints = list_checkpoints(self.folder)
        is_done = bool(checkpoints) and step_of(checkpoints[-1]) == scripted_run.STEPS
        if self.cuts and state == "T" and not is_done:
            self.made.cut()
            self.was_cut = True
        super().end(pid)

    def may_end(self, endings):
        # Of the disk's errors, or well, an instant before the kill.
        return super().may_end(endings) or self.was_cut


@pytest.fixture(scope="module")
def nursery(warm):
    with PowerCuts() as nursery:
        yield nursery


def cut_runs(made, rng, kind, nursery):
    number = 0
    nursery.made = made
    while made.num_cuts < CUTS:
        folder, number = made.folder / f"run{number}", number + 1
        folder.mkdir()
        nursery.folder = folder
        with contextlib.ExitStack() as stack:
            if made.server:
                store = stack.enter_context(empty_place(made.server.url))
            else:
                store = "memory" if kind == "memory" else f"sqlite:///{folder / 'buffer.db'}{kind}"
            if store != "memory":
                # The disk may go before a run has opened it.
                SQLStorage(store).close()
            sync(folder)
            sync(made.folder)
            command = ["scripted", folder, store, rng.choice([1, 2, 4])]
            kill_until_finished(nursery, rng, folder, scripted_run.STEPS, command, command, 0.05, store)
            check_scripted_run(folder, store)


KINDS = {
    "store": lambda made, rng, nursery: cut_store(made, rng),
    "starved": lambda made, rng, nursery: cut_store(made, rng, made.starve),
    "healed": lambda made, rng, nursery: cut_store(made, rng, lambda: fail_a_while(made)),
    "files": lambda made, rng, nursery: cut_files(made, rng),
    "run, memory": lambda made, rng, nursery: cut_runs(made, rng, "memory", nursery()),
    "run, sqlite": lambda made, rng, nursery: cut_runs(made, rng, "", nursery()),
    "run, sqlite in full": lambda made, rng, nursery: cut_runs(made, rng, FULL, nursery()),
    "postgresql": lambda made, rng, nursery: cut_store(made, rng),
    "postgresql, starved": lambda made, rng, nursery: cut_store(made, rng, made.starve),
    "postgresql, panic": lambda made, rng, nursery: cut_store(made, rng, lambda: fail_until_panic(made)),
    "run, postgresql": lambda made, rng, nursery: cut_runs(made, rng, "postgresql", nursery()),
}


def cut_round(seed, kind, request):
    """The number of cuts."""
    rng = random.Random(seed)
    # Else ext4 forgets what it has synced, where a write of the same page had failed once.
    options = ["dioread_lock"] if kind in ("healed", "postgresql, panic") else []
    with disk(rng, *options) as made, served(made, rng) if "postgresql" in kind else contextlib.nullcontext():
        KINDS[kind](made, rng, lambda: request.getfixturevalue("nursery"))
        print(f"FOREBAY_POWER_CUTS={seed}: {kind}, {made.options}: {made.num_cuts} cuts", flush=True)
        return made.num_cuts


def test_what_was_said_to_be_safe_is_there_after_a_power_cut(request):
    cut_round(3, "files", request)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_the_power_cut_takes(kind, request, warm):
    assert sum(cut_round(seed, kind, request) for seed in wanted_seeds())
