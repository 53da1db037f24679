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
sys.meta_path.insert(0, Missing())
"""


def say(extra: str, program: str, folder: Path) -> str:
    """The last line that `program` says where the libraries of `extra` are not installed."""
    code = BLOCK.format(modules=EXTRAS[extra]) + program
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode
    return " ".join(done.stderr.split("Error: ")[-1].split())


def command(*words: str) -> str:
    return f"sys.argv = {['forebay', *words]!r}; from forebay.cli import main; main()"


@pytest.mark.parametrize(
    ("extra", "program"),
    [
        ("train", command("train", str(ROOT / "recipes/demo_tiny.toml"))),
        ("train", command("replay", "runs/none")),
        (
            "train",
            command(
                "simulate",
                str(ROOT / "recipes/demo_separate.toml"),
                "--cluster",
                str(ROOT / "recipes/clusters/example.toml"),
            ),
        ),
        ("train", "from forebay.train import TrainController"),
        ("train", "from forebay.engines import TransformersEngine"),
        ("train", "from forebay.runs import build_run"),
        ("pandas", "from forebay.replay import PandasStorage; PandasStorage().frame"),
        ("sql", "from forebay.replay import SQLStorage"),
        ("tasks", "from forebay.judges import MathVerifyJudge; MathVerifyJudge()"),
        ("tasks", "from forebay.produce import *; load_prompts(DataConfig(source='reasoning_gym:countdown'))"),
        ("fragments", "from forebay.fragments import FragmentStore; FragmentStore('fragments')"),
        ("environments", command("train", str(ROOT / "recipes/cartpole_fragments.toml"))),
        ("http", "from forebay.judges import LLMJudge; LLMJudge(base_url='http://x', model='m')"),
        ("ray", "from forebay.cluster.library import import_ray; import_ray()"),
        (
            "trackers",
            "from pathlib import Path; from forebay.metrics import MetricsConfig; "
            "MetricsConfig(sinks=['tensorboard']).build(Path('.'))",
        ),
    ],
)
def test_what_is_missing_is_named_with_its_extra(extra: str, program: str, tmp_path: Path) -> None:
    assert f"which is not installed: pip install 'forebay[{extra}]'" in say(extra, program, tmp_path)


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
