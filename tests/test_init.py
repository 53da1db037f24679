"""``forebay init`` writes what can be trained at once, from a checkout and from a wheel."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from forebay.cli.commands import app
from forebay.cli.init import find_starts, write_start
from forebay.config import ConfigError

MAIN = "from forebay.cli import main; main()"
ROOT = Path(__file__).parent.parent


def test_everything_to_start_from_is_listed_with_a_sentence() -> None:
    lines = CliRunner().invoke(app, ["init"]).stdout.splitlines()
    names = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines[:-2] if line[0] != " "}
    assert set(names) == set(find_starts()) >= {"own_task", "demo_tiny", "cartpole_fragments", "low_level_loop"}
    assert all(len(sentence) > 20 for sentence in names.values())


def test_the_list_breaks_its_sentences_within_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = partial(Console, width=80)
    monkeypatch.setattr("forebay.cli.init.console", narrow)
    lines = CliRunner().invoke(app, ["init"]).stdout.splitlines()
    column = lines[0].index("SmolLM2")
    assert all(len(line) <= 80 and (line[0] != " " or line[:column].isspace()) for line in lines[:-2])
    assert any(line[0] == " " for line in lines[:-2])


@pytest.mark.usefixtures("warm")
def test_a_task_of_ones_own_trains_from_any_folder(tmp_path: Path) -> None:
    runner = CliRunner()
    said = runner.invoke(app, ["init", "own_task", str(tmp_path / "mine")])
    assert said.stdout.splitlines()[-1] == f"next: forebay train {tmp_path / 'mine' / 'run.toml'}"
    changes = ["steps=1", "warmup.steps=1", f"output={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "train", str(tmp_path / "mine" / "run.toml"), *changes],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "own_task" / "model").is_dir()
    # What is there is not overwritten.
    again = runner.invoke(app, ["init", "own_task", str(tmp_path / "mine")])
    assert again.exit_code == 2
    assert "error: there already: " in again.stderr


def test_a_run_file_alone_becomes_run_toml(tmp_path: Path) -> None:
    assert write_start("demo_tiny", tmp_path) == [tmp_path / "run.toml"]
    with pytest.raises(ConfigError, match="did you mean 'demo_tiny'"):
        write_start("demo_tinny", tmp_path)


def test_the_run_files_of_a_folder_keep_their_names(tmp_path: Path) -> None:
    written = {path.name for path in write_start("search", tmp_path)}
    assert written == {"gpu.toml", "register.jsonl", "register.py", "run.toml"}
    assert 'source = "tiny"' in (tmp_path / "run.toml").read_text()


def test_a_wheel_has_recipes_examples_and_the_page_of_keys(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=500)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
        packed.extractall(tmp_path / "site")
    wanted = [*(ROOT / "recipes").rglob("*.toml"), *(ROOT / "examples").glob("*.py")]
    wanted += [*(ROOT / "recipes").rglob("*.jsonl"), ROOT / "recipes" / "own_task" / "rewards.py"]
    assert {f"forebay/{path.relative_to(ROOT)}" for path in wanted} <= names
    questions = (ROOT / "src" / "forebay" / "judges" / "templates").glob("*.jinja")
    assert {f"forebay/judges/templates/{path.name}" for path in questions} <= names
    # As installed: nothing of the checkout is in sight.
    code = (
        "from forebay.cli.init import find_starts; from forebay.cli.keys import find_keys; "
        "print(find_starts()['own_task'], *(key.default for key in find_keys('lora_rank')))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],  # with an option it is a fresh interpreter, which imports anew
        env={"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == f"{tmp_path / 'site' / 'forebay' / 'recipes' / 'own_task'} 0"


def test_wrong_usage_is_one_plain_line_in_a_pipe() -> None:
    command = [sys.executable, "-c", MAIN, "train", "--dryrun", "run.toml"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert said.returncode == 2
    assert said.stderr.splitlines()[-1].startswith("Error: No such option: --dryrun")
    assert said.stderr.isascii()
