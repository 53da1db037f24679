"""The figures of the code: size, contracts, sentences. ``python tests/test_style.py`` prints them.

A line of code is a line that is not blank, no comment and no part of a docstring (field notes included).
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "forebay"
FILES = sorted(SOURCE.rglob("*.py"))
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
GENERATED_PAGES = {"tree.md", "keys.md", "log.md"}
"""Pages made from other text, and the log, which keeps its words."""

_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_WHAT = re.compile(r"(?:^|[.!?:;]\s+|\n\s*\n\s*|\n\s*[-*#]+\s+)What\s(?![^.?!]*\?)")
_NOBODY = re.compile(r"\b(nobody|whoever)\b", re.IGNORECASE)
_SEE = re.compile(r"(See|As|As of) `[^`]+`\.?")
_FRAGMENT = re.compile(r"((As|Of|For|By|In|Since|With) [^;:]*|(The|A|An|Its|Their) [\w']+|\w+)\.")
_FRAGMENT_WORDS = 6
"""A longer phrase has room to say what it is about."""


def name_of(path: Path) -> str:
    return str(path.relative_to(SOURCE))


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(path)))


@cache
def tokens_of(path: Path) -> tuple[tokenize.TokenInfo, ...]:
    return tuple(tokenize.generate_tokens(io.StringIO(text_of(path)).readline))


@cache
def docstrings(path: Path) -> tuple[ast.Constant, ...]:
    """Docstrings of modules, classes and functions, and the notes under fields and constants."""
    return tuple(
        statement.value
        for node in nodes_of(path)
        if isinstance(body := getattr(node, "body", None), list)
        for statement in body
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


@cache
def comments(path: Path) -> tuple[str, ...]:
    return tuple(token.string for token in tokens_of(path) if token.type == tokenize.COMMENT)


@cache
def code_lines(path: Path) -> int:
    prose = {line for text in docstrings(path) for line in range(text.lineno, (text.end_lineno or 0) + 1)}
    code: set[int] = set()
    for token in tokens_of(path):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - prose)


def contracts() -> list[str]:
    """Classes that only say what others must do: protocols and abstract base classes."""
    return [
        f"{name_of(path)}:{node.lineno} {node.name}"
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef)
        and any(re.fullmatch(r"(Protocol|ABC)\b.*", ast.unparse(base).split(".")[-1]) for base in node.bases)
    ]


def files_by_folder() -> dict[str, int]:
    return dict(Counter(name_of(path.parent) for path in FILES))


def late_beginnings(limit: int = 60) -> list[str]:
    """Modules whose main definition begins after line `limit`.

    The main one is the longest public class, if it has 30 lines or more; otherwise the first public function.
    """
    late = []
    for path in FILES:
        public = [
            node
            for node in tree_of(path).body
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and not node.name.startswith("_")
        ]
        classes = [node for node in public if isinstance(node, ast.ClassDef) and _length(node) >= 30]
        if public:
            main = max(classes, key=_length) if classes else public[0]
            first = min(main.lineno, *(decorator.lineno for decorator in main.decorator_list), main.lineno)
            if first > limit:
                late.append(f"{name_of(path)}:{first} {main.name}")
    return late


def _length(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


@cache
def prose() -> dict[str, tuple[str, ...]]:
    """Docstrings and comments of each file, and each page as one text."""
    texts = {
        name_of(path): (
            *(str(text.value) for text in docstrings(path)),
            *(comment.lstrip("# ") for comment in comments(path)),
        )
        for path in FILES
    }
    pages = {str(page.relative_to(ROOT)): (text_of(page),) for page in PAGES if page.name not in GENERATED_PAGES}
    return texts | pages


def what_sentences() -> dict[str, int]:
    """How many sentences, no questions, begin with a free "What": by file."""
    return _found(_WHAT)


def nobody_sentences() -> dict[str, int]:
    """How often "nobody" or "whoever" stands for a caller, a process or a part: by file."""
    return _found(_NOBODY)


def _found(pattern: re.Pattern[str]) -> dict[str, int]:
    counts = {name: sum(len(pattern.findall(text)) for text in texts) for name, texts in prose().items()}
    return {name: count for name, count in counts.items() if count}


def empty_docstrings() -> list[str]:
    """Docstrings that only point at another one, or are a bare fragment ("Of all parts.", "k.")."""
    return [
        f"{name_of(path)}:{text.lineno} {text.value}"
        for path in FILES
        for text in docstrings(path)
        if _says_nothing(str(text.value).strip())
    ]


def _says_nothing(text: str) -> bool:
    is_short = len(text.split()) <= _FRAGMENT_WORDS
    return bool(_SEE.fullmatch(text) or (is_short and _FRAGMENT.fullmatch(text)))


def comment_share() -> float:
    """Comments among all lines of the source, in percent."""
    lines = sum(len(text_of(path).splitlines()) for path in FILES)
    return 100 * sum(len(comments(path)) for path in FILES) / lines


def import_circles() -> list[list[str]]:
    """Modules that import each other, at the top of the file or within functions, one list a circle.

    Packages are left out: they re-export, and lazily where it would make a circle.
    """
    modules = {".".join(path.relative_to(SOURCE.parent).with_suffix("").parts): path for path in FILES}
    modules = {name: path for name, path in modules.items() if path.name != "__init__.py"}
    edges = {name: {other for other in _imports(path) if other in modules} for name, path in modules.items()}
    reached = {name: _reachable(name, edges) for name in modules}
    circles: list[list[str]] = []
    for name in sorted(modules):
        circle = sorted(other for other in reached[name] if name in reached[other])
        if circle and circle not in circles:
            circles.append(circle)
    return circles


def _imports(path: Path) -> Iterator[str]:
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _reachable(start: str, edges: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for other in edges[waiting.pop()] - found:
            found.add(other)
            waiting.append(other)
    return found


def print_figures() -> None:
    rooms: Counter[str] = Counter()
    for path in FILES:
        parts = path.relative_to(SOURCE).parts
        rooms[parts[0]] += code_lines(path)
        if len(parts) > 2:
            rooms["/".join(parts[:2])] += code_lines(path)
    print(f"lines of code   {sum(map(code_lines, FILES)):,} in {len(FILES)} files")
    for room, lines in sorted(rooms.items()):
        print(f"    {'    ' * room.count('/')}{room:<28} {lines:>6,}")
    folders = sorted(files_by_folder().items(), key=lambda item: -item[1])
    print("fullest folders ", ", ".join(f"{name} {count}" for name, count in folders[:5]))
    print(f"contracts        {len(contracts())}")
    print(f"import circles   {len(import_circles())}", *import_circles())
    print(f"late beginnings  {len(late_beginnings())} modules")
    whats = what_sentences()
    print(f"'What' sentences {sum(whats.values())}", sorted(whats.items(), key=lambda item: -item[1])[:12])
    print(f"'nobody'         {sum(nobody_sentences().values())}", *nobody_sentences())
    print(f"empty docstrings {len(empty_docstrings())}")
    print(f"comments         {comment_share():.1f}% of the lines")
