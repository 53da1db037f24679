"""docs/tree.md has a line for every file, taken from the file's own first line.

``python tests/test_tree.py`` writes it anew.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "tree.md"
FOLDERS = ("src/forebay", "src/forebay_vllm", "examples", "benchmarks")


def first_line(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.split("\n\n")[0].replace("\n", " ").rstrip(".")


def render() -> str:
    parts = ["# Every file", "Made from the first line of each file by `python tests/test_tree.py`."]
    for folder in FOLDERS:
        files = sorted((ROOT / folder).rglob("*.py"), key=lambda path: (str(path.parent), path.name))
        packages: dict[Path, list[str]] = {}
        for path in files:
            if (line := first_line(path)) and ".envs" not in path.parts:
                packages.setdefault(path.parent.relative_to(ROOT), []).append(f"* `{path.name}`: {line}")
        for package, lines in packages.items():
            parts.append(f"## {package}\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def test_the_page_is_what_the_files_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run: python tests/test_tree.py"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
