"""docs/keys.md and ``forebay keys`` say what every key of a run file means; the models say it once.

``python tests/test_keys.py`` writes the page anew.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forebay.cli.commands import app
from forebay.cli.keys import find_keys
from forebay.config import ConfigError
from key_reference import reference

PAGE = Path(__file__).parent.parent / "docs" / "keys.md"


def as_page() -> str:
    """The reference as Markdown."""
    parts = [
        "# Keys of a run file",
        "Made from the config models by `python tests/test_keys.py`; `forebay keys PATTERN` shows some of\n"
        "it. A key is written as a path, as in an override (`train.lr=1e-4`); `tasks.0` is the first\n"
        "`[[tasks]]` table. A default of `none`: the key is left out. Times end in `_s` and are seconds.\n"
        "What becomes of a row of data: [judges](judges.md#from-a-row-of-data-to-a-rollout).",
    ]
    for title, keys in reference().items():
        lines = ["| key | values | default | meaning |", "|---|---|---|---|"]
        for key in keys:
            default = f"`` {key.default} ``".replace("|", "\\|") if key.default else ""
            lines.append(f"| `{key.path}` | {key.values} | {default} | {key.meaning} |")
        parts.append(f"## {title}\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def test_the_page_is_what_the_models_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == as_page(), "run: python tests/test_keys.py"


def test_every_key_has_a_meaning() -> None:
    assert not [key.path for keys in reference().values() for key in keys if len(key.meaning) < 5]


def test_keys_of_components_stand_beside_those_of_the_run_file() -> None:
    paths = {(key.path, key.of) for keys in reference().values() for key in keys}
    assert paths >= {
        ("train.lr", ""),
        ("tasks.0.sample.max_tokens", ""),
        ("engine.arguments.max_batch", "engine transformers"),
        ("engine.arguments.servers", "engine sglang"),
        ("cluster.arguments.num_workers", "cluster ray"),
        ("tasks.0.judge.arguments.limits.wall_s", "judge code"),
        ("tasks.0.judge.arguments.parts.0.weight", "judge composed"),
        ("environment.id", "run in environments"),
    }


def test_the_command_knows_every_key_of_the_page() -> None:
    shown = [(key.path, key.values, key.default, key.meaning) for key in find_keys("")]
    models = [key for keys in reference().values() for key in keys]
    assert shown == [(key.path, key.values, key.default, key.meaning) for key in models]


def test_a_pattern_is_looked_for_in_paths_and_then_in_meanings() -> None:
    (lr, *_) = find_keys("train.lr")
    assert (lr.default, lr.values) == ("1e-06", "number > 0")
    assert {key.path for key in find_keys("tasks.3.weight")} == {"tasks.0.weight"}
    assert "produce.filter" in {key.path for key in find_keys("dynamic sampling")}
    with pytest.raises(ConfigError, match=r"did you mean '.*max_staleness'"):
        find_keys("max_stalenes_")


def test_the_command_prints_one_line_a_key_into_a_pipe() -> None:
    said = CliRunner().invoke(app, ["keys", "token_budget"])
    assert said.exit_code == 0
    assert said.stdout.splitlines()[0].startswith("train.token_budget (A run file): Most tokens")
    assert "default: 16384]" in said.stdout
    assert CliRunner().invoke(app, ["keys", "no such thing"]).exit_code == 2


def test_the_command_and_the_board_load_no_heavy_library() -> None:
    code = (
        "import sys; from forebay.cli.keys import find_keys; find_keys(''); import forebay.board.server; "
        "print({'torch', 'transformers', 'ray', 'gymnasium'} & set(sys.modules))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert said.stdout == "set()\n"


if __name__ == "__main__":
    PAGE.write_text(as_page(), encoding="utf-8")
