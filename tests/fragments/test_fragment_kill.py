"""Killed at any instant (SIGKILL): no lease is lost, nothing is served too often, and no payload leaks."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

from kill_rules import RULES

from forebay.aio import virtual_time
from forebay.fragments import FragmentStore, ReplayBufferActor

ROUNDS = 200 if os.environ.get("FOREBAY_SOAK") == "1" else 4
CHILD = str(Path(__file__).parent / "fragment_kill_child.py")


class Journal:
    """What the killed processes are known to have done."""

    def __init__(self):
        self.leases = {}
        self.uses = Counter()
        self.num_added = 0
        self.releasing = None

    def run_until_killed(self, folder, round_, rng):
        arguments = [folder, str(rng.randrange(10**6)), str(round_), *self.leases]
        child = subprocess.Popen([sys.executable, CHILD, *arguments], stdout=subprocess.PIPE, text=True)
        num_lines = len(self.leases) + rng.randrange(1, 400)
        self.releasing = None
        with child.stdout:
            for number, line in enumerate(child.stdout):
                if number == num_lines:
                    child.send_signal(signal.SIGKILL)
                # What was written before the signal arrived counts as well; a last line may be cut.
                if line.endswith("\n"):
                    self.note(*line.split())
        assert child.wait() == -signal.SIGKILL

    def note(self, when, what, *words):
        match when, what:
            case "end", "renew":
                lease_id, renewed = words
                assert renewed == "True", f"lease {lease_id} was lost"
            case "end", "fetch":
                lease_id, *ids = words
                assert len(set(ids)) == len(ids)
                assert lease_id not in self.leases
                self.leases[lease_id] = ids
                self.uses.update(ids)
                assert max(self.uses[fragment_id] for fragment_id in ids) <= RULES["max_reuse"]
            case "begin", "release":
                self.releasing = words[0]
                del self.leases[words[0]]
            case "end", "add":
                self.num_added += 1

    def check_payloads(self, folder):
        store = FragmentStore(folder, max_bytes=256 << 20)
        for ids in self.leases.values():
            store.get_fragments(ids)


def test_killed_at_any_instant_no_lease_is_lost_and_no_payload_leaks(tmp_path):
    folder, rng, journal = str(tmp_path / "store"), random.Random(3), Journal()
    for round_ in range(ROUNDS):
        journal.run_until_killed(folder, round_, rng)
        journal.check_payloads(folder)
    assert journal.leases
    assert journal.num_added > 10 * ROUNDS

    async def finish():
        config = {"path": folder, "max_bytes": 256 << 20}
        buffer, store = ReplayBufferActor(database_config=config, **RULES), FragmentStore(**config)
        for lease_id in journal.leases:
            assert await buffer.release(lease_id)
        await buffer.update_model_version("over", 0)
        # Fetches whose answer was never read, and payloads that were never announced.
        await asyncio.sleep(RULES["lease_s"] + RULES["orphan_grace_s"] + 1)
        assert store.ids() == []
        assert (await buffer.metrics())["held_fragments"] == 0
        await buffer.close()

    virtual_time.run(finish())
