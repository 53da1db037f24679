"""What a run may save, and believe, when parts of it are lost; and that nobody else works in its folder."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from test_colocated_run import config

from forebay.config import ConfigError
from forebay.runs import launch as launching
from forebay.runs.folder import occupied


def occupying(folder: Path) -> list[str]:
    """A program that occupies `folder` until it is given a line."""
    return [
        sys.executable,
        "-c",
        "import sys, pathlib; from forebay.runs.folder import occupied\n"
        "with occupied(pathlib.Path(sys.argv[1])): print('mine', flush=True); input()",
        str(folder),
    ]


async def test_a_run_does_not_begin_where_another_process_is_at_work(tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "output" / "run")
    pipe = asyncio.subprocess.PIPE
    other = await asyncio.create_subprocess_exec(*occupying(tmp_path / "link"), stdin=pipe, stdout=pipe)
    assert other.stdout is not None
    assert await other.stdout.readline() == b"mine\n"
    run = config(tmp_path / "output")
    for resume in (None, run.folder):
        with pytest.raises(ConfigError, match=rf"at work in .*process {other.pid}\)"):
            await launching.launch(run, resume=resume)
    assert not run.folder.exists()
    await other.communicate(b"\n")
    with occupied(run.folder):
        pass


async def test_a_run_keeps_its_folder_until_it_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, pipe = config(tmp_path), asyncio.subprocess.PIPE
    said = []

    @contextlib.asynccontextmanager
    async def opened(config: Any) -> AsyncIterator[None]:
        other = await asyncio.create_subprocess_exec(*occupying(config.folder), stderr=pipe)
        said.append((await other.communicate())[1].decode())
        raise ConfigError("far enough")
        yield

    monkeypatch.setattr(launching, "opened_cluster", opened)
    with pytest.raises(ConfigError, match="far enough"):
        await launching.launch(run)
    assert "a run is at work in" in said[0]
