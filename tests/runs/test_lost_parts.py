"""What a run may save, and believe, when parts of it are lost; and that nobody else works in its folder."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_colocated_run import config

from forebay.config import ConfigError
from forebay.produce import ProductionError
from forebay.runs import launch as launching
from forebay.runs import steps
from forebay.runs.folder import occupied
from forebay.runs.placement import PartLost
from forebay.types import RolloutState, Status


def cluster(lost: str) -> Any:
    return SimpleNamespace(none_is_left=lambda: lost)


def test_an_evaluation_that_failed_for_want_of_engines_is_none() -> None:
    failed, good = ([[RolloutState([], status=status)]] for status in (Status.FAILED, Status.COMPLETED))
    with pytest.raises(PartLost, match="engine 0 is lost"):
        steps.refuse_failed([*good, *failed], cluster("engine 0 is lost"))
    # What was done before the last engine was lost counts, and so does what failed by itself.
    steps.refuse_failed(good, cluster("engine 0 is lost"))
    steps.refuse_failed(failed, cluster(""))
    steps.refuse_failed(failed, None)


@pytest.mark.parametrize(("lost", "num_saved"), [("", 1), ("engine 0 is lost", 0)])
async def test_the_damage_of_lost_engines_is_not_saved(
    lost: str, num_saved: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = []

    async def checkpoint(run: Any) -> Path:
        saved.append(run)
        return tmp_path

    monkeypatch.setattr(steps, "checkpoint", checkpoint)
    run: Any = SimpleNamespace(
        train_step=3,
        cluster=cluster(lost),
        display=SimpleNamespace(warning=lambda text: None),
        live_file=None,
    )
    await steps.rescue(run, ProductionError("too many groups failed"))
    assert len(saved) == num_saved


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


async def test_a_run_keeps_its_folder_until_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
