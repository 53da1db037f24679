"""Whatever damages a checkpoint is one sentence that names the file, and the older one to go on from."""

import asyncio
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_colocated_run import config as run_config
from typer.testing import CliRunner

from forebay.cli.commands import app
from forebay.config import ConfigError
from forebay.runs import launch as launching
from forebay.runs.folder import list_checkpoints, saved_config, step_of
from forebay.runs.launch import launch, launch_evaluation

NEWEST, OLDER = "step_000002", "step_000001"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A real run of two steps, with a checkpoint after each."""
    output = tmp_path_factory.mktemp("run")
    settings = run_config(output, steps=2, checkpoint_every=1, keep_checkpoints=2, batch_size=2)
    asyncio.run(launch(settings))
    return settings.folder


@pytest.fixture
def damaged(run_folder, tmp_path):
    """A copy to be damaged."""
    return shutil.copytree(run_folder, tmp_path / "run")


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def resume(folder):
    """The error of a resume."""
    with pytest.raises(ConfigError) as caught:
        asyncio.run(launch(saved_config(folder, ["steps=3"]), resume=folder))
    return str(caught.value)


def assert_told(message, folder, file):
    assert "\n" not in message
    assert repr(str(file)) in message
    assert f"{OLDER} is whole" in message
    assert f"delete {str(folder / 'checkpoints' / NEWEST)!r}" in message


def truncate(file, other):
    file.write_bytes(file.read_bytes()[:-1])


def flip(file, other):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def remove(file, other):
    file.unlink()


def empty(file, other):
    file.write_bytes(b"")


def swap(file, other):
    mine, theirs = file.read_bytes(), other.read_bytes()
    file.write_bytes(theirs)
    other.write_bytes(mine)


def fill_with_zeros(file, other):
    file.write_bytes(bytes(file.stat().st_size))


def garbage(file, other):
    file.write_bytes(b'{"files": {"run.json": [1, 2]}, "crc32": "\xff\x00')


def replace_by_a_folder(file, other):
    file.unlink()
    file.mkdir()


KINDS = (truncate, flip, remove, empty, swap, fill_with_zeros, garbage, replace_by_a_folder)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_file_of_a_checkpoint_is_missed_or_found_damaged(damaged, kind):
    checkpoint = damaged / "checkpoints" / NEWEST
    files = files_of(checkpoint)
    assert len(files) >= 12
    for file, other in zip(files, [*files[1:], files[0]], strict=True):
        before = file.read_bytes()
        if kind is swap and other.read_bytes() == before:
            continue
        theirs = other.read_bytes()
        kind(file, other)
        message = resume(damaged)
        # With two files swapped, the first that is looked at.
        blamed = other if kind is swap and repr(str(file)) not in message else file
        assert_told(message, damaged, blamed)
        if file.is_dir():
            file.rmdir()
        file.write_bytes(before)
        other.write_bytes(theirs)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_flipped_bit_is_accepted(damaged, data):
    file = data.draw(st.sampled_from(files_of(damaged / "checkpoints" / NEWEST)))
    before = file.read_bytes()
    place = data.draw(st.integers(0, len(before) - 1))
    content = bytearray(before)
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    assert_told(resume(damaged), damaged, file)
    file.write_bytes(before)


def test_the_older_checkpoint_is_gone_on_from_as_the_message_says(damaged):
    newest = damaged / "checkpoints" / NEWEST
    flip(newest / "trainer" / "state" / "shard-00000.safetensors", None)
    runner = CliRunner()
    # With a step to go: a finished run has no use for its checkpoint.
    result = runner.invoke(app, ["train", "--resume", str(damaged), "steps=3"])
    assert result.exit_code == 2
    assert result.output.count("error:") == 1
    assert "Traceback" not in result.output
    shutil.rmtree(newest)
    asyncio.run(launch(saved_config(damaged), resume=damaged))
    assert newest.is_dir()


def test_without_a_whole_checkpoint_nothing_is_offered(damaged):
    for name in (NEWEST, OLDER):
        empty(damaged / "checkpoints" / name / "run.json", None)
    message = resume(damaged)
    assert "neither is an older one whole (1 looked at)" in message
    assert "--overwrite" in message


def test_what_an_evaluation_reads_is_checked_too(damaged):
    flip(damaged / "model" / "model.safetensors", None)
    with pytest.raises(ConfigError, match=r"model\.safetensors' is damaged.*step_000002 is whole.*--model"):
        asyncio.run(launch_evaluation(saved_config(damaged)))
    shutil.rmtree(damaged / "model")
    flip(damaged / "checkpoints" / NEWEST / "trainer" / "model" / "config.json", None)
    with pytest.raises(ConfigError, match=r"config\.json' is damaged.*step_000001 is whole"):
        asyncio.run(launch_evaluation(saved_config(damaged)))


@pytest.mark.parametrize("moment", ["check", "build_rollouts"])
def test_a_checkpoint_that_its_run_deletes_while_it_is_evaluated_is_named(damaged, monkeypatch, moment):
    shutil.rmtree(damaged / "model")
    work = getattr(launching, moment)

    def late(*args, **keywords):
        # As the run does that has written others since.
        shutil.move(damaged / "checkpoints" / NEWEST, damaged / "checkpoints" / f"{NEWEST}.tmp")
        return work(*args, **keywords)

    with monkeypatch.context() as patched:
        patched.setattr(launching, moment, late)
        result = CliRunner().invoke(app, ["eval", str(damaged)])
    said = f"error: {damaged / 'checkpoints' / NEWEST} was deleted meanwhile, by the run at work: try again\n"
    assert (result.exit_code, result.stderr) == (2, said)
    assert CliRunner().invoke(app, ["eval", str(damaged)]).exit_code == 0


def test_a_damaged_warm_up_is_named(damaged):
    flip(damaged / "warmup" / "model.safetensors", None)
    message = resume(damaged)
    assert repr(str(damaged / "warmup" / "model.safetensors")) in message
    assert "delete" in message


def test_a_checkpoint_under_another_name_is_refused(damaged):
    newest, older = damaged / "checkpoints" / NEWEST, damaged / "checkpoints" / OLDER
    shutil.rmtree(newest)
    older.rename(newest)
    assert "train step 1" in resume(damaged)


def test_checkpoints_are_in_the_order_of_their_steps_beyond_six_digits_too(tmp_path):
    for step in (1_000_000, 12, 999_999):
        (tmp_path / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [12, 999_999, 1_000_000]
