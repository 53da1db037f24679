"""What a run file names is found beside it, by every command and from every working folder."""

import json
import sys
from pathlib import Path

import pytest

from forebay.config import Component, ConfigError, load_config, locate
from forebay.environments.config import FragmentRunConfig
from forebay.judges import build_judge
from forebay.produce import DataConfig
from forebay.produce.prompts.dataset import load_prompts
from forebay.runs.config import RunConfig, to_toml
from forebay.runs.folder import saved_config, write_run_file
from forebay.simulation.cluster import ClusterConfig
from forebay.simulation.sweep import combine

ROOT = Path(__file__).parents[1]
RUN_FILE = """
name = "mine"
steps = 1
batch_size = 1
rollouts_per_prompt = 2
model.source = "weights"
[[tasks]]
name = "add"
data.source = "rows/*.jsonl"
eval_data.source = "held_out.csv"
judge.name = "beside_rewards:score"
judge.arguments = { table = "points.json", pattern = ".*", word = "rows" }
"""


@pytest.fixture(autouse=True)
def _imports_of_its_own(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("beside_rewards", None)


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "project"
    (folder / "rows").mkdir(parents=True)
    (folder / "weights").mkdir()
    (folder / "run.toml").write_text(RUN_FILE)
    (folder / "beside_rewards.py").write_text("def score(state, **arguments):\n    return 1.0\n")
    (folder / "points.json").write_text("{}")
    (folder / "rows" / "a.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}))
    (folder / "held_out.csv").write_text("prompt,answer\n2+2=,4\n")
    return folder


def check(config, project):
    (task,) = config.tasks
    assert task.data.source == str(project / "rows/*.jsonl")
    assert task.eval_data.source == str(project / "held_out.csv")
    assert config.model.source == str(project / "weights")
    # A pattern of text is no path, and a word is no folder's name.
    assert task.judge.arguments == {"table": str(project / "points.json"), "pattern": ".*", "word": "rows"}
    build_judge(task.judge)
    assert len(load_prompts(task.data)) == len(load_prompts(task.eval_data)) == 1


def test_everything_beside_the_run_file_is_found_from_elsewhere(project, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    config = load_config(RunConfig, Path("../project/run.toml"))
    check(config, project)
    assert config.search_path == [project, elsewhere]


def test_a_resumed_run_finds_again_what_it_was_started_with(project, tmp_path, monkeypatch):
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    write_run_file(load_config(RunConfig, project / "run.toml"), run)
    # As in another process.
    sys.modules.pop("beside_rewards")
    sys.path.remove(str(project))
    monkeypatch.chdir("/")
    config = saved_config(run)
    check(config, project)
    assert str(project) in sys.path
    assert to_toml(saved_config(run)) == to_toml(config)


def test_a_sweep_finds_the_same(project, monkeypatch):
    monkeypatch.chdir("/")
    table = {
        "name": "mine",
        "steps": 1,
        "batch_size": 1,
        "rollouts_per_prompt": 2,
        "model": {"source": "tiny"},
        "tasks": [{"name": "a", "data": {"source": "rows/a.jsonl"}, "judge": {"name": "beside_rewards:score"}}],
    }
    cluster = load_config(ClusterConfig, ROOT / "recipes/clusters/example.toml")
    (case,) = combine(table, [], cluster, {}, beside=project)
    assert case.config.tasks[0].data.source == str(project / "rows/a.jsonl")


def test_a_recipe_in_environments_finds_modules_beside_it(tmp_path):
    (tmp_path / "run.toml").write_text(
        'name = "mine"\nsteps = 1\nbatch_size = 4\nenvironment = { id = "CartPole-v1" }\n'
    )
    config = load_config(FragmentRunConfig, tmp_path / "run.toml")
    assert config.search_path == [tmp_path, Path.cwd()]
    assert str(tmp_path) in sys.path


def test_what_lies_in_the_working_folder_is_found_after_what_lies_beside(project, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "points.json").write_text("{}")
    (tmp_path / "held_out.csv").write_text("prompt,answer\n")
    (tmp_path / "more.jsonl").write_text("{}")
    source = "tasks.0.data.source=more.jsonl"
    (task,) = load_config(RunConfig, project / "run.toml", [source]).tasks
    assert task.data.source == str(tmp_path / "more.jsonl")
    assert task.eval_data.source == str(project / "held_out.csv")


def test_a_missing_file_is_told_with_the_folder_of_the_run_file(project, monkeypatch):
    monkeypatch.chdir("/")
    config = load_config(RunConfig, project / "run.toml", ["tasks.0.eval_data.source=held_ou.csv"])
    with pytest.raises(ConfigError, match=rf"no data file at .*did you mean '{project}/held_out\.csv'"):
        load_prompts(config.tasks[0].eval_data)


def test_a_module_of_a_name_that_is_taken_is_refused_and_not_mixed_up(project):
    (project / "tomllib.py").write_text("def score(state):\n    return 1.0\n")
    with pytest.raises(ConfigError, match=r"tomllib\.py has the name of a module that is imported already"):
        load_config(RunConfig, project / "run.toml", ["tasks.0.judge=tomllib:score"])


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def score(:\n", r"SyntaxError: .*beside_rewards\.py, line 1"),
        ("x = 1\ny = x / 0\n", r"ZeroDivisionError: division by zero \(.*beside_rewards\.py, line 2\)"),
        ("import nothing_of_the_kind\n", "No module named 'nothing_of_the_kind'"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_sentence(project, code, said):
    (project / "beside_rewards.py").write_text(code)
    with pytest.raises(ConfigError, match=said):
        load_config(RunConfig, project / "run.toml")


def test_locate_leaves_alone_what_is_no_path(tmp_path):
    (tmp_path / "there.txt").write_text("")
    assert locate("there.txt", [tmp_path]) == str(tmp_path / "there.txt")
    for text in ("", "absent.txt", "a\0b", "x" * 5000, "/etc/hosts", "[", "**/*.nothing"):
        assert locate(text, [tmp_path]) == text
    assert locate("there.txt", None) == "there.txt"


def test_models_made_in_python_keep_their_paths():
    assert DataConfig(source="rows/a.jsonl").source == "rows/a.jsonl"
    assert Component(name="x", arguments={"path": "pyproject.toml"}).arguments == {"path": "pyproject.toml"}
