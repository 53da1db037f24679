"""A disk that takes no more ends a run with one sentence, and nothing that was saved is lost."""

import asyncio
import contextlib
import errno
import os
import resource
import sqlite3
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy
import torch
from safetensors.torch import save_file
from test_colocated_run import config as run_config
from test_colocated_run import losses
from typer.testing import CliRunner

from forebay.cli.commands import app
from forebay.config import ConfigError
from forebay.io.safe_files import DiskError, disk_errors_named
from forebay.ledger.journal import Journal
from forebay.replay import SQLStorage, StoreBusy
from forebay.replay.stores.sql import connections
from forebay.runs import steps
from forebay.runs.config import to_toml
from forebay.runs.folder import list_checkpoints, saved_config
from forebay.runs.launch import launch
from forebay.train import checkpoint as checkpoint_module


def small_run(output):
    return run_config(output, steps=3, checkpoint_every=1, keep_checkpoints=3, batch_size=2, warmup=None)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    config = small_run(tmp_path_factory.mktemp("whole"))
    asyncio.run(launch(config))
    return losses(config.folder)


class Filling:
    """A writing function whose disk is full after so many calls."""

    def __init__(self, function, calls, error):
        self.function, self.calls, self.error = function, calls, error

    def __get__(self, owner, kind=None):
        return self if owner is None else partial(self, owner)

    def __call__(self, *args, **kwargs):
        self.calls -= 1
        if self.calls < 0:
            raise self.error
        return self.function(*args, **kwargs)


def test_what_safetensors_says_of_a_disk_is_one_sentence_too(tmp_path):
    # The kernel refuses the file: a real error, in the library's own words.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with (
            pytest.raises(DiskError, match=r"^the run cannot be written or read: File too large; allow larger files$"),
            disk_errors_named("the run"),
        ):
            save_file({"weight": torch.zeros(10_000)}, tmp_path / "model.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(ValueError, match="another"), disk_errors_named("the run"):
        raise ValueError("another (os error 9999)")


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
PLACES = {
    "weights": (checkpoint_module, "save_tensors", 5, FULL),
    "facts": (checkpoint_module, "save_json", 2, FULL),
    "books": (Journal, "write", 9, FULL),
    "sync": (os, "fsync", 80, FULL),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_run_on_a_full_disk_is_one_sentence_and_goes_on_later(tmp_path, monkeypatch, undisturbed, place):
    owner, name, calls, error = PLACES[place]
    config = small_run(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, Filling(getattr(owner, name), calls, error))
        with pytest.raises(DiskError) as caught:
            asyncio.run(launch(config))
    message, saved = str(caught.value), list_checkpoints(config.folder)
    assert "\n" not in message
    assert "No space left on device" in message
    assert "free some space" in message
    assert 1 <= len(saved) < 3
    assert f"{saved[-1].name} is saved, go on from it with --resume {config.folder}" in message
    # Nothing half done takes the room.
    assert not list(config.folder.glob("checkpoints/*.tmp"))
    asyncio.run(launch(saved_config(config.folder), resume=config.folder))
    assert losses(config.folder) == undisturbed


@pytest.mark.parametrize(
    ("kind", "said"),
    [(sqlalchemy.exc.OperationalError, "database or disk is full"), (sqlalchemy.exc.DatabaseError, "is malformed")],
)
def test_an_error_of_the_runs_sqlite_file_names_it(tmp_path, monkeypatch, kind, said):
    config = small_run(tmp_path)
    config = config.model_copy(update={"replay": config.replay.model_copy(update={"store": "sqlite"})})
    error = kind("INSERT INTO rows VALUES (1)", {}, sqlite3.OperationalError(said))
    with monkeypatch.context() as patched:
        patched.setattr(SQLStorage, "put_many", Filling(SQLStorage.put_many, 5, error))
        with pytest.raises(DiskError) as caught:
            asyncio.run(launch(config))
    message, file = str(caught.value), config.folder / "buffer.db"
    assert "\n" not in message
    assert f"the replay buffer {str(file)!r} cannot be written or read: {said}; step_000002 is saved" in message
    for name, content in (("is malformed", file.read_bytes()[:100] * 200), ("is not an SQLite database", b"no" * 99)):
        for left in config.folder.glob("buffer.db*"):
            left.unlink()
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=f"{file}.*' cannot be opened: .*{name}"):
            asyncio.run(launch(saved_config(config.folder), resume=config.folder))


@pytest.mark.parametrize("becomes", ["nothing", "a folder", "other text"])
def test_a_ledger_that_is_moved_under_the_run_is_named_and_the_run_goes_on_later(tmp_path, monkeypatch, becomes):
    config, report = small_run(tmp_path), steps.report
    file = config.folder / "ledger.jsonl"

    def disturb(run, train_step, *rest):
        report(run, train_step, *rest)
        if train_step == 2:
            file.rename(tmp_path / "moved")
            if becomes == "a folder":
                file.mkdir()
            elif becomes == "other text":
                file.write_text("hello\n" * 500)

    with monkeypatch.context() as patched:
        patched.setattr(steps, "report", disturb)
        with pytest.raises(DiskError) as caught:
            asyncio.run(launch(config))
    assert "\n" not in str(caught.value)
    assert f"the ledger {str(file)!r} was moved or changed during the run: " in str(caught.value)
    assert f"go on from it with --resume {config.folder}" in str(caught.value)
    if becomes == "a folder":
        file.rmdir()
    (tmp_path / "moved").rename(file)
    asyncio.run(launch(saved_config(config.folder), resume=config.folder))
    assert max(losses(config.folder)) == 3


BUSY = StoreBusy("another process has kept 'buffer.db-turn' locked")
NO_ROOM = sqlalchemy.exc.OperationalError("INSERT", {}, sqlite3.OperationalError("database or disk is full"))


@pytest.mark.parametrize(("said", "error"), [("is full", NO_ROOM), ("locked", BUSY), ("database is locked", None)])
def test_an_sqlite_file_that_is_full_or_locked_at_a_resume_is_named(tmp_path, monkeypatch, said, error):
    config = small_run(tmp_path)
    config = config.model_copy(update={"steps": 1, "replay": config.replay.model_copy(update={"store": "sqlite"})})
    asyncio.run(launch(config))
    file = config.folder / "buffer.db"
    with monkeypatch.context() as patched, contextlib.closing(sqlite3.connect(file)) as rival:
        if error is None:
            patched.setattr(connections, "LIMIT_S", 0.1)
            rival.execute("BEGIN IMMEDIATE")
        else:
            # After the store was opened: where the groups of the checkpoint are put in order.
            patched.setattr(SQLStorage, "delete", Filling(SQLStorage.delete, 0, error))
        result = CliRunner().invoke(app, ["train", "--resume", str(config.folder), "steps=2"])
    assert result.exit_code == 2
    line = result.output.splitlines()[-1]
    assert line.startswith(f"error: the replay buffer {str(file)!r} cannot be written or read: ")
    assert line.endswith(f"{said}; step_000001 is saved, go on from it with --resume {config.folder}")
    asyncio.run(launch(saved_config(config.folder, ["steps=2"]), resume=config.folder))


@pytest.mark.parametrize("place", ["/etc/passwd", "/proc", "/etc/passwd/deeper", "/dev/null"])
def test_a_place_where_no_folder_can_be_is_one_sentence(tmp_path, place):
    file = tmp_path / "run.toml"
    file.write_text(to_toml(small_run(tmp_path)))
    result = CliRunner().invoke(app, ["train", str(file), f"output={place}"])
    assert result.exit_code == 2
    (line,) = result.output.splitlines()
    assert line.startswith(f"error: the run in '{place}/run' cannot be written")
    assert "name another place" in line


def test_a_folder_without_permission_is_one_sentence(tmp_path, monkeypatch):
    def refuse(self, *args, **kwargs):
        # The superuser, who may run this, is refused nothing by the system.
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(DiskError, match=r"Permission denied; allow it, or name another place"):
        asyncio.run(launch(small_run(tmp_path / "new")))
