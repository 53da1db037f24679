"""A missing optional library is one message that names the extra, wherever it is met first."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from forebay.extras import EXTRAS

ROOT = Path(__file__).parent.parent
CLUSTER = str(ROOT / "recipes/clusters/example.toml")
BLOCK = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {modules!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
assert not sys.modules.keys() & {modules!r}, "one of them is imported already"
sys.meta_path.insert(0, Missing())
"""
# A process for each program, in a folder of its own, forked from one that has what the package always needs.
EACH = """
import os, sys
import msgspec, numpy, pyarrow.parquet, pydantic, rich, tomli_w, typer
for number, program in enumerate(sys.argv[1:]):
    os.makedirs(str(number))
    child = os.fork()
    if child == 0:
        break
    _, status = os.waitpid(child, 0)
    assert status, f"program {number} ended well"
else:
    sys.exit()
os.chdir(str(number))
os.dup2(os.open("said", os.O_CREAT | os.O_WRONLY), 2)
exec(program, {"__name__": "__main__"})
"""


def command(*words: str) -> str:
    return f"sys.argv = {['forebay', *words]!r}; from forebay.cli import main; main()"


PROGRAMS = [
    ("train", command("train", str(ROOT / "recipes/demo_tiny.toml"))),
    ("train", command("replay", "runs/none")),
    ("train", command("simulate", str(ROOT / "recipes/demo_separate.toml"), "--cluster", CLUSTER)),
    ("train", "from forebay.train import TrainController"),
    ("train", "from forebay.engines import TransformersEngine"),
    ("train", "from forebay.runs import build_run"),
    ("pandas", "from forebay.replay import PandasStorage; PandasStorage().frame"),
    ("sql", "from forebay.replay import SQLStorage"),
    ("tasks", "from forebay.judges import MathVerifyJudge; MathVerifyJudge()"),
    ("tasks", "from forebay.produce import *; load_prompts(DataConfig(source='reasoning_gym:countdown'))"),
    ("fragments", "from forebay.fragments import FragmentStore; FragmentStore('fragments')"),
    ("http", "from forebay.judges import LLMJudge; LLMJudge(base_url='http://x', model='m')"),
    ("ray", "from forebay.cluster.library import import_ray; import_ray()"),
    (
        "trackers",
        "from pathlib import Path; from forebay.metrics import MetricsConfig; "
        "MetricsConfig(sinks=['tensorboard']).build(Path('.'))",
    ),
]


NEEDS_TORCH = "environments", command("train", str(ROOT / "recipes/cartpole_fragments.toml"))
"""Imports torch before it comes to what is missing."""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The last line that each program says where the libraries of its extra are not installed."""
    folder = tmp_path_factory.mktemp("programs")
    texts = [BLOCK.format(modules=set(EXTRAS[extra])) + program for extra, program in PROGRAMS]
    subprocess.run([sys.executable, "-c", EACH, *texts], cwd=folder, stdout=subprocess.PIPE, timeout=300, check=True)
    errors = [(folder / str(number) / "said").read_text(encoding="utf-8") for number in range(len(texts))]
    return [" ".join(error.split("Error: ")[-1].split()) for error in errors]


@pytest.mark.parametrize("number", range(len(PROGRAMS)), ids=lambda number: " ".join(PROGRAMS[number])[:60])
def test_what_is_missing_is_named_with_its_extra(number: int, said: list[str]) -> None:
    assert f"which is not installed: pip install 'forebay[{PROGRAMS[number][0]}]'" in said[number]


@pytest.mark.usefixtures("warm")
def test_what_an_environment_lacks_is_named_with_its_extra(tmp_path: Path) -> None:
    extra, program = NEEDS_TORCH
    text = BLOCK.format(modules=set(EXTRAS[extra])) + program
    done = subprocess.run([sys.executable, "-c", text], cwd=tmp_path, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode
    assert f"which is not installed: pip install 'forebay[{extra}]'" in " ".join(done.stderr.split())


def test_every_library_of_an_extra_is_known() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    modules = {
        "psycopg[binary]": "psycopg",
        "reasoning-gym": "reasoning_gym",
        "math-verify[antlr4_13_2]": "math_verify",
        "pillow": "PIL",
    }
    listed = {module for names in EXTRAS.values() for module in names}
    for extra in EXTRAS:
        for line in extras[extra]:
            name = line.partition(">")[0]
            assert name.startswith("forebay[") or modules.get(name, name) in listed, line


def test_the_version_is_that_of_the_package() -> None:
    import forebay

    assert forebay.__version__.count(".") == 2
