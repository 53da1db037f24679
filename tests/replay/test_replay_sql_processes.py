"""SQL stores across processes: killed at any instant, and shared by rivals."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import sqlalchemy as sa

from forebay.replay import FIFOReplayPolicy, ReplayBuffer, SQLStorage

SOAK = os.environ.get("FOREBAY_SOAK") == "1"
HERE = Path(__file__).parent
EVERYTHING = {"status": {"$in": ["completed", "archived"]}}


@pytest.fixture(params=["sqlite", "postgres"])
def url(request, tmp_path):
    return str(tmp_path / "buffer.db") if request.param == "sqlite" else request.getfixturevalue("postgres_url")


def start(program, *arguments):
    return subprocess.Popen(
        [sys.executable, str(HERE / program), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


class Journal:
    """What the killed processes are known to have done, and what they may have done."""

    def __init__(self):
        self.live = set()
        self.consumed = {}
        self.committed = set()
        self.step = 0
        self.num_calls = Counter()

    def run_until_killed(self, url, round_, rng):
        """Let a process run for a random time; afterwards `begun` holds the calls that did not return."""
        child = start("kill_child.py", url, rng.randrange(10**6), round_, self.step)
        num_lines = rng.randrange(1, 250)
        self.begun, self.took, self.committing, self.restoring = set(), None, None, None
        lines = []
        with child.stdout:
            for line in child.stdout:
                lines.append(line)
                if len(lines) == num_lines:
                    child.send_signal(signal.SIGKILL)
        child.stdin.close()
        assert child.wait() == -signal.SIGKILL
        for line in lines:
            # The last line may have been cut short; then its call is as good as not noted.
            if line.endswith("\n"):
                self.note(*line.split())

    def note(self, mark, what, *arguments):
        self.num_calls[mark, what] += 1
        if what == "put":
            (self.begun.add if mark == "begin" else self.begun.remove)(arguments[0])
            if mark == "end":
                self.live.add(arguments[0])
            return
        step, *names = arguments
        step = int(step)
        if what == "take":
            self.took = step if mark == "begin" else None
            for name in names:
                # It may have been put by a call that has not returned yet.
                self.live.discard(name)
                self.consumed[name] = step
        elif what == "commit":
            self.step = step
            self.committing = step if mark == "begin" else None
            if mark == "end":
                self.forget(step)
        else:
            self.restoring = step if mark == "begin" else None
            if mark == "end":
                self.revive(step)

    def forget(self, step):
        gone = {name for name, at in self.consumed.items() if at <= step}
        self.committed |= gone
        for name in gone:
            del self.consumed[name]

    def revive(self, step):
        for name in [name for name, at in self.consumed.items() if at > step]:
            del self.consumed[name]
            self.live.add(name)

    def compare(self, live, archived, num_put=None):
        """The content against what is known; afterwards what was in doubt is known too.

        A sequence of PostgreSQL leaves gaps where a transaction was interrupted: it does not tell `num_put`.
        """
        present = Counter([*live, *archived])
        assert set(present.values()) <= {1}, "doubled"
        assert not self.committed & set(present), "came back after a commit"
        if self.restoring is not None and not any(at > self.restoring for at in archived.values()):
            self.revive(self.restoring)
        if self.committing is not None and not any(at <= self.committing for at in archived.values()):
            self.forget(self.committing)
        known = {*self.live, *self.consumed, *self.committed}
        unnoted = self.begun - known
        for name in self.live:
            # A take that had not returned may have archived it, or one whose line was lost.
            assert name in live or archived[name] == self.took, f"lost {name}"
        for name, step in self.consumed.items():
            assert archived[name] == step, f"lost {name}"
        assert set(present) <= known | unnoted, "from nowhere"
        self.live, self.consumed = set(live), dict(archived)
        assert num_put in (None, len(present) + len(self.committed)), "the balance"


async def look(url):
    """``(live names, {archived name: train step}, number of puts)``; every payload is read."""
    buffer = ReplayBuffer(FIFOReplayPolicy(), SQLStorage(url))
    rows = await buffer.storage.get(EVERYTHING)
    for row in rows:
        for state in row.item:
            assert (state.response_ids == range(len(state.response_ids))).all()
            assert len(state.logprobs) == len(state.response_model_steps) == len(state.response_ids)
    archived = {row.item[0].group_id: row.train_step for row in rows if row.train_step is not None}
    live = [row.item[0].group_id for row in rows if row.train_step is None]
    assert len(live) + len(archived) == len(rows)
    num_put = buffer.storage.state_dict()["next_uid"]
    await buffer.close()
    return live, archived, num_put


def wait_for_the_server(url):
    """Until it has noticed that the process is dead, and has ended what that had begun."""
    if url.startswith("postgresql:"):
        engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"), isolation_level="AUTOCOMMIT")
        others = sa.text(
            "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )
        with engine.connect() as connection:
            while connection.scalar(others):
                connection.execute(sa.text("SELECT pg_sleep(0.01)"))
        engine.dispose()


def test_killed_at_any_instant_nothing_is_lost_or_doubled(url):
    is_file = not url.startswith("postgresql:")
    rounds = 200 if SOAK else 5 if is_file else 2
    journal, rng = Journal(), random.Random(None if SOAK else 5)
    for round_ in range(rounds):
        journal.run_until_killed(url, round_, rng)
        wait_for_the_server(url)
        live, archived, num_put = asyncio.run(look(url))
        journal.compare(live, archived, num_put if is_file else None)
    assert journal.num_calls["end", "put"] > 0
    print(f"{rounds} kills, calls that returned: {dict(journal.num_calls)}")


def test_rivals_in_processes_get_every_group_once(url):
    """Two processes, then four, that put and take at the same time."""
    num_groups = 200 if SOAK else 20
    rivals = [start("rival_child.py", url, number, num_groups) for number in range(4)]
    for rival in rivals:
        assert rival.stdout.readline() == "ready\n"
    taken, expected = [], []
    for prefix, num_rivals in (("two", 2), ("four", 4)):
        for rival in rivals[:num_rivals]:
            rival.stdin.write(f"{prefix}\n")
            rival.stdin.flush()
        for rival in rivals[:num_rivals]:
            taken += [line.strip() for line in iter(rival.stdout.readline, "\n")]
        expected += [f"{prefix}-{rival}-{number}" for rival in range(num_rivals) for number in range(num_groups)]
        live, archived, _ = asyncio.run(look(url))
        assert sorted(taken) == sorted(archived)
        assert sorted([*live, *archived]) == sorted(expected)
    for rival in rivals:
        rival.communicate()
        assert rival.returncode == 0
