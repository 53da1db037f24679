"""An engine and an environment that write down what they do; every fourth group plays for seconds.

::

    RUN/engine.jsonl       a line for each request: rollout, input ids
    RUN/environment.jsonl  a line for each reply: rollout, the how-manieth
"""

import json
import random
from pathlib import Path

from forebay.agents import Environment, Reply
from forebay.config import StrictModel
from forebay.engines import ScriptedEngine

FIRST_TURN, TURN, TOKEN_S = 40, 5, 0.006
"""Tokens of the first turn of a long episode, and of every other turn."""


def is_long(group_id):
    return int(group_id.split("/")[-1]) % 4 == 0


def write(folder, name, *line):
    with (Path(folder) / name).open("a") as file:
        file.write(json.dumps(line) + "\n")


class Replies(Environment):
    """Three replies, or twenty in a long episode."""

    class Arguments(StrictModel, strict=True):
        folder: str

    def __init__(self, folder):
        self.folder = folder

    async def reset(self, state):
        return {"count": 0}

    async def step(self, state, memory, text):
        memory["count"] += 1
        write(self.folder, "environment.jsonl", state.rollout_id, memory["count"])
        if memory["count"] == (20 if is_long(state.group_id) else 2):
            return Reply(done=True, reward=random.Random(state.rollout_id).random())
        return Reply("ab")


class Writing(ScriptedEngine):
    def __init__(self, surroundings, folder):
        self.folder, self.letters = (folder, surroundings.tokenizer.encode("abcdefgh", add_special_tokens=False))
        self.end = surroundings.tokenizer.eos_token_id
        super().__init__(self.script, token_latency_s=TOKEN_S, eos_token_ids=[self.end])

    def script(self, request):
        """The rest of a turn; the tokens made in all say which, for a turn ends with its own token."""
        name, _, length = request.request_id.rsplit(":", 2)
        write(self.folder, "engine.jsonl", name, request.input_ids.tolist())
        is_first = is_long(name.rpartition("/")[0]) and request.num_earlier < FIRST_TURN
        done = request.num_earlier if is_first else (request.num_earlier - FIRST_TURN) % TURN
        left = (FIRST_TURN if is_first else TURN) - done
        ids = [self.letters[(int(length) + place) % len(self.letters)] for place in range(left - 1)]
        return [*ids, self.end]


def build(surroundings, folder):
    return [Writing(surroundings, folder)]
