"""The code in docs/replay.md runs and does what the page says."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

from replay_factory import make_group, names

from forebay.replay import IndexedStorage, ReplayBuffer, SyncReplayBufferConfig
from forebay.types import Status

PAGE = Path(__file__).parents[2] / "docs" / "replay.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def defined(name):
    """What a block of the page defines under that name."""
    (block,) = [block for block in BLOCKS if re.search(rf"^(async def|def|class) {name}\b", block, re.MULTILINE)]
    scope = {}
    exec(block, scope)
    return scope[name]


def test_the_example_prints_what_it_says():
    example = BLOCKS[0]
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == re.findall(r"\)  # (\{.*|\d+)$", example, re.MULTILINE)


async def test_the_waiting_consumer():
    buffer = SyncReplayBufferConfig().build()
    waiting = asyncio.create_task(defined("next_batch")(buffer, {"math": 1}, 1))
    await asyncio.sleep(0)
    await buffer.put(make_group("a"), "math")
    groups, _ = await waiting
    assert names(groups["math"]) == ["a"]


async def test_changed_priorities():
    buffer = SyncReplayBufferConfig().build()
    for level in (0, 2):
        await buffer.put(make_group(level), "math", tags={"level": level})
    for kind in ("solved", "open"):
        await buffer.put(make_group(kind), "code", tags={"kind": kind})
    await defined("prefer_hard_prompts")(buffer)
    rows = await buffer.storage.get({}, rows_only=True)
    assert [row.priority for row in rows] == [1.0, 3.0, 0.0, 3.0]


async def test_the_policy_of_ones_own():
    buffer = ReplayBuffer(defined("NewestFirst")(), IndexedStorage())
    for name in "abc":
        await buffer.put(make_group(name), "math")
    assert names(await buffer.get(2, "math", Status.COMPLETED)) == ["c", "b"]


async def test_the_analysis_with_pandas(tmp_path):
    buffer = SyncReplayBufferConfig().build()
    for length in (1, 3):
        await buffer.put(make_group(length, num_tokens=length), "math", model_step=1, current_train_step=4)
    await buffer.put(make_group(5, num_tokens=5), "math", model_step=3)
    await buffer.save(tmp_path)
    assert defined("mean_length_by_staleness")(tmp_path).to_dict() == {0: 5.0, 2: 2.0}


def test_the_store_of_ones_own(tmp_path):
    example = next(block for block in BLOCKS if "TestMyStorage" in block)
    (tmp_path / "test_my_storage.py").write_text(example)
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert re.search(r"1\d passed", done.stdout)
