"""A run folder as a run leaves it, made without a run."""

import asyncio
import base64
import json
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import jsonschema
import msgspec
import numpy as np

from forebay.board.server import Board
from forebay.ledger import Ledger
from forebay.runs.record.history import History
from forebay.train import TrainBatch
from forebay.types import RolloutState, Status

DOT = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)> </script> \u202e ${1} {{7*7}} '\";--"

ANSWERS = Path(__file__).parents[2] / "src/forebay/board/web/answers.json"


@cache
def schema_of(what):
    """Of the answers to one question, as the page's types have it (web/src/types.ts)."""
    types = json.loads(ANSWERS.read_text())
    schema = types["definitions"]["Answers"]["properties"][what]
    return jsonschema.Draft7Validator({**schema, "definitions": types["definitions"]})


def conforms(what, answer):
    """`answer` as the page gets it.

    Raises:
        ValueError: a field is missing, is of another kind, or is in no type of the page.
    """
    sent = json.loads(msgspec.json.encode(answer))
    for error in schema_of(what).iter_errors(sent):
        raise ValueError(f"{what}: {error.json_path}: {error.message[:300]}")
    return sent


class CheckedBoard(Board):
    """A board whose every answer is of the type that the page takes it for."""

    def answer(self, what, given):
        found = super().answer(what, given)
        conforms(what, found)
        return found


def make_group(number, *, score=1.0, text=None, size=2, task="math"):
    return [
        RolloutState(
            [{"role": "user", "content": f"prompt {number % 5} of {task}"}],
            rollout_id=f"{task}/{number}/{member}",
            group_id=f"{task}/{number}",
            task_name=task,
            prompt_ids=[1],
            mm_info=None if text else {"images": [DOT]},
            response=f"answer {member} to {number}" if text is None else text,
            response_ids=[5, 6, 7],
            logprobs=[-0.1, -0.5, -2.0],
            response_mask=[1, 1, 1],
            response_model_steps=[number, number, number + 1],
            reward={"score": score if member else 0.0},
            reward_model={"ground_truth": "42"},
            finish_reason="stop",
            status=Status.COMPLETED,
        )
        for member in range(size)
    ]


def open_history(folder, **arguments):
    """A history that is told of activities by the system's clock."""
    history = History(folder, limit_bytes=10**9, **arguments)
    history._files._to_unix_s = 0.0
    return history


def write_run(folder, *, steps=6, state="finished", text=None, engines=()):
    """`steps` steps of two groups; at every third one more is dropped; evaluated at both ends."""
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(
        'name = "planted"\nsteps = 6\napi_key = "hush"\n'
        '[replay]\nurl = "postgresql://me:hush@db/x"\n[[tasks]]\nname = "math"\n'
    )
    ledger = Ledger(folder / "ledger.jsonl")
    now = time.time()

    async def write():
        history = open_history(folder)
        with (folder / "metrics.jsonl").open("w") as metrics:
            for step in range(1, steps + 1):
                groups = [make_group(2 * step + place, score=step / steps, text=text) for place in range(2)]
                for group in groups:
                    ledger.record(group[0].group_id, "math", "produced", num_tokens=6, latency_s=0.5, score=0.5)
                    ledger.record(group[0].group_id, "math", "trained", train_step=step)
                batch = TrainBatch.from_groups(groups)
                batch.advantages = np.linspace(-1, 1, batch.num_response_tokens).astype(np.float32)
                batch.trainer_logprobs = np.full(batch.num_response_tokens, -0.5, np.float32)
                history.left(groups, "trained", train_step=step, learned=batch)
                if step % 3 == 0:
                    dropped = make_group(100 + step, text="x" * 50)
                    ledger.record(dropped[0].group_id, "math", "dropped", reason="expired")
                    history.left([dropped], "dropped", reason="expired", train_step=step)
                history._spans.append((now + step, now + step + 0.5, "train", f"step {step}", "", "", ""))
                for engine in engines:
                    rollout = f"math/{2 * step}/1"
                    history._spans.append((now + step, now + step + 1, f"engine {engine}", rollout, "", "", ""))
                row = {"train_step": step, "unix_time_s": now + step, "reward": step / steps, "step_s": 1.0}
                metrics.write(json.dumps({**row, "samples": 4.0, "response_tokens": 3.0, "train/loss": None}) + "\n")
        for step in (0, steps):
            held_out = [make_group(1000 + number, score=step / steps) for number in range(4)]
            history.left(held_out, "evaluated", train_step=step)
        history.close()

    # The browser's driver may have a loop in this thread.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, write()).result()
    note = {"unix_time_s": now, "kind": "warning", "text": "look: " + HOSTILE, "train_step": 3}
    (folder / "notes.jsonl").write_text(json.dumps(note) + "\n")
    books = {"generated": 14, "trained": 12, "dropped": {"expired": 2}, "live": 0, "retried": 0, "left": 0}
    live = {"unix_time_s": now, "state": state, "train_step": steps, "steps": steps, "model_step": steps}
    live |= {"tasks": {}, "stages": {}, "oldest": [], "doing": [], "busy": {}, "books": {"math": books}}
    (folder / "live.json").write_text(json.dumps(live))
    ledger.close()
    return folder
