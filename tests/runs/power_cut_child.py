"""A process that writes books and checkpoints until its disk goes; the parent reads what it calls done.

usage: power_cut_child.py FOLDER SEED

::

    stdout: synced BYTES EVENTS    so much of the books is on the disk
            published STEP         so is this checkpoint
"""

import json
import random
import sys
from pathlib import Path

from forebay.io.safe_files import publish, unfinished
from forebay.ledger import Ledger
from forebay.runs.folder import checkpoint_path, list_checkpoints, prune_checkpoints, step_of

BOOKS = "ledger.jsonl"


def main(folder, seed):
    folder, rng = Path(folder), random.Random(int(seed))
    ledger, step = Ledger(folder / BOOKS), 0
    if checkpoints := list_checkpoints(folder):
        step = step_of(checkpoints[-1])
        ledger.restore(json.loads((checkpoints[-1] / "ledger.json").read_text()), folder)
    while True:
        step += 1
        for number in range(rng.randrange(1, 60)):
            name = f"{seed}/{step}/{number}"
            ledger.record(name, "sums", "produced", num_tokens=number)
            if rng.random() < 0.7:
                ledger.record(name, "sums", "trained", train_step=step)
        ledger.sync()
        state = ledger.checkpoint(folder)
        print("synced", state["num_bytes"], state["num_events"], flush=True)
        final = checkpoint_path(folder, step)
        with unfinished(final) as temporary:
            (temporary / "ledger.json").write_text(json.dumps(state))
            for part in range(rng.randrange(1, 5)):
                (temporary / "part").mkdir(exist_ok=True)
                (temporary / "part" / f"{part}.bin").write_bytes(rng.randbytes(rng.randrange(200_000)))
            publish(temporary, final)
        print("published", step, flush=True)
        prune_checkpoints(folder, rng.randrange(1, 4))


main(*sys.argv[1:])
