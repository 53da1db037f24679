"""Folders of weights that several runs, living and dead, put into one place."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from forebay.engines.weights.files import WeightFiles

WEIGHTS = [("w", torch.ones(2))]


async def test_two_runs_may_share_a_folder(tmp_path):
    one, other = WeightFiles(tmp_path, tmp_path), WeightFiles(tmp_path, tmp_path)
    folders = [(await files.write(WEIGHTS, 7)).folder for files in (one, other)]
    assert len(set(folders)) == 2
    one.close()
    assert not folders[0].exists()
    assert (folders[1] / "model.safetensors").is_file()
    # After a new start, too.
    assert (await one.write(WEIGHTS, 7)).folder.is_dir()
    for files in (one, other):
        files.close()
    assert not list(tmp_path.iterdir())


PROGRAM = """
import sys
from pathlib import Path
from forebay.engines.weights.files import _Part
part = _Part(Path(sys.argv[1]), "theirs")
(part.folder / "step_000003-1").mkdir()
print(part.folder, flush=True)
sys.stdin.read()
"""


async def test_what_a_killed_run_left_is_deleted_and_what_a_living_one_has_is_not(tmp_path):
    run = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert run.stdout is not None
    theirs = Path((await asyncio.to_thread(run.stdout.readline)).decode().strip())
    living = WeightFiles(tmp_path, tmp_path)
    await living.write(WEIGHTS, 1)
    assert theirs.is_dir()
    run.kill()
    run.communicate()
    # Of another machine nothing is known.
    far = tmp_path / "run-far"
    far.mkdir()
    (far / "lock").write_text(f"not-{socket.gethostname()}")
    next_run = WeightFiles(tmp_path, tmp_path)
    ours = await next_run.write(WEIGHTS, 3)
    assert not theirs.exists()
    assert living.current is not None
    assert living.current.folder.is_dir()
    assert ours.folder.is_dir()
    assert far.is_dir()
    for files in (living, next_run):
        files.close()


async def test_overlapping_writes_of_other_weights_are_two(tmp_path):
    files = WeightFiles(tmp_path, tmp_path)
    newer = [("w", torch.zeros(2))]
    first, again, other = await asyncio.gather(*(files.write(w, 1) for w in (WEIGHTS, WEIGHTS, newer)))
    assert first == again != other
    assert files.current == other
    # Also when nobody waits for the end of the first.
    abandoned = asyncio.create_task(files.write(WEIGHTS, 2))
    await asyncio.sleep(0)
    abandoned.cancel()
    with pytest.raises(asyncio.CancelledError):
        await abandoned
    written = await files.latest()
    assert written is not None
    assert written.model_step == 2
    assert await files.write(WEIGHTS, 2) != written
    files.close()
