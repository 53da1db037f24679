"""The sizes and habits that keep the code readable, checked on the source itself.

``python tests/test_style.py`` prints the figures, room by room. Ruff, mypy and import-linter hold their part
(`make check`); this page holds the rest.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import pkgutil
import re
import statistics
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

from pydantic import BaseModel

import forebay
from forebay.agents.build import AGENTS
from forebay.agents.environments import ENVIRONMENTS
from forebay.cluster.arguments import RayArguments
from forebay.config import Component, StrictModel
from forebay.engines.build import ENGINE_ARGUMENTS
from forebay.engines.process.host import EngineRecipe
from forebay.evaluate import TaskEvalConfig
from forebay.judges.build import JUDGE_ARGUMENTS, JudgeConfig, PartConfig
from forebay.produce.prompts.orders import SAMPLERS
from forebay.produce.prompts.sources import SOURCE_ARGUMENTS
from forebay.replay.config import BufferConfig
from forebay.tools.base import TOOLS
from forebay.train import WarmupConfig
from forebay.types import SampleParams
from house_figures import (
    FILES,
    ROOT,
    SOURCE,
    code_lines,
    contracts,
    empty_docstrings,
    files_by_folder,
    import_circles,
    late_beginnings,
    nobody_sentences,
    nodes_of,
    print_figures,
    tree_of,
    what_sentences,
)
from key_reference import models_of

MODULES = [path for path in FILES if path.name != "__init__.py"]

MAX_FILE_LINES, MEDIAN_FILE_LINES = 500, 210
MAX_FUNCTION_LINES, MEAN_FUNCTION_LINES = 80, 15
MAX_CLASS_DEPTH = 2
MAX_CONFIG_KEYS = 180
MAX_FIRST_KEYS = 20
"""Of the run file that `forebay init own_task` writes."""
MAX_CODE_LINES = 38_000
"""Of `src/forebay`: no blank line, comment or docstring."""
MAX_CONTRACTS = 26
MAX_IMPORT_CIRCLES = 0
MAX_FILES_IN_A_FOLDER = 16
MAX_LATE_BEGINNINGS = 12
MAX_WHAT_SENTENCES = 8
MAX_EMPTY_DOCSTRINGS = 5
FORBIDDEN_WORDS = {"util", "utils", "misc", "common", "helper", "helpers"}
"""Words of a module name that say nothing about what is in it."""


@cache
def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


@cache
def functions() -> dict[str, int]:
    """Lines of every function, docstring included, by ``file:name``."""
    return {
        f"{path.relative_to(SOURCE)}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_files_are_short() -> None:
    lengths = {str(path.relative_to(SOURCE)): lines_of(path) for path in MODULES}
    assert not {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES}
    assert statistics.median(lengths.values()) <= MEDIAN_FILE_LINES


def test_the_source_stays_within_its_size() -> None:
    assert sum(map(code_lines, FILES)) <= MAX_CODE_LINES
    assert len(contracts()) <= MAX_CONTRACTS, contracts()
    assert not {name: count for name, count in files_by_folder().items() if count > MAX_FILES_IN_A_FOLDER}
    assert len(import_circles()) <= MAX_IMPORT_CIRCLES, import_circles()


def test_a_reader_meets_the_point_early_and_in_plain_sentences() -> None:
    assert len(late_beginnings()) <= MAX_LATE_BEGINNINGS, late_beginnings()
    assert sum(what_sentences().values()) <= MAX_WHAT_SENTENCES, what_sentences()
    assert not nobody_sentences()
    assert len(empty_docstrings()) <= MAX_EMPTY_DOCSTRINGS, empty_docstrings()


def test_functions_are_short() -> None:
    assert not {name: lines for name, lines in functions().items() if lines > MAX_FUNCTION_LINES}
    assert statistics.mean(functions().values()) <= MEAN_FUNCTION_LINES


def test_classes_inherit_from_few_of_our_own() -> None:
    bases = {
        node.name: [name for base in node.bases if (name := _simple_name(base))]
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef)
    }

    def depth(name: str) -> int:
        return 1 + max(map(depth, bases[name]), default=0) if name in bases else 0

    assert not {name: depth(name) for name in bases if depth(name) > MAX_CLASS_DEPTH}


def _simple_name(base: ast.expr) -> str | None:
    """``Name`` of ``Name``, ``module.Name`` and ``Name[Parameter]``."""
    if isinstance(base, ast.Subscript):
        return _simple_name(base.value)
    if isinstance(base, ast.Attribute):
        return base.attr
    return base.id if isinstance(base, ast.Name) else None


def test_module_names_say_what_is_inside() -> None:
    parts = {part for path in FILES for part in (*path.relative_to(SOURCE).parts[:-1], path.stem)}
    assert not {part for part in parts if FORBIDDEN_WORDS & set(part.split("_"))}


def test_the_source_is_ascii() -> None:
    assert not [
        f"{path.relative_to(SOURCE)}:{number}"
        for path in FILES
        for number, line in enumerate(path.read_bytes().splitlines(), start=1)
        if not line.isascii()
    ]


def test_every_module_says_what_it_is() -> None:
    assert not [str(path.relative_to(SOURCE)) for path in MODULES if not ast.get_docstring(tree_of(path))]


def test_packages_only_re_export() -> None:
    assert not [
        f"{path.relative_to(SOURCE)}: {ast.unparse(node)}"
        for path in set(FILES) - set(MODULES)
        for node in _statements(tree_of(path))
        if not _is_re_export(node)
    ]


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements of a module, those under ``if TYPE_CHECKING:`` among them."""
    for node in tree.body:
        if isinstance(node, ast.If) and _simple_name(node.test) == "TYPE_CHECKING":
            yield from node.body
        else:
            yield node


def _is_re_export(node: ast.stmt) -> bool:
    """An import, a docstring, a constant such as ``__all__``, or the hook for lazy imports."""
    if isinstance(node, ast.FunctionDef):
        return node.name in ("__getattr__", "__dir__")
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return all((_simple_name(target) or "").startswith("_") for target in targets)
    return isinstance(node, ast.Import | ast.ImportFrom)


def config_keys() -> dict[str, list[str]]:
    """The keys of run files, by the model or the kind of component that has them."""
    for module in pkgutil.walk_packages(forebay.__path__, "forebay."):
        # Triton comes with torch for GPUs alone.
        if not module.name.endswith(("__main__", "triton_kernels")):
            importlib.import_module(module.name)
    # Of a kind of component, agents for example, a key that several take is one key to learn.
    kinds: dict[str, list[type[BaseModel]]] = {
        "engines": [*ENGINE_ARGUMENTS.values()],
        "agents": [*models_of(AGENTS).values()],
        "judges": [*JUDGE_ARGUMENTS.values(), JudgeConfig, PartConfig],
        "clusters": [RayArguments],
        "samplers": [*SAMPLERS.values()],
    }
    # What tools, environments and data sources take is not in every run file's reach: a kind within a kind.
    # An `EngineRecipe` is in no run file: the run tells it to an engine's process.
    inner = [*models_of(TOOLS).values(), *models_of(ENVIRONMENTS).values(), *SOURCE_ARGUMENTS.values()]
    elsewhere = {model for models in [*kinds.values(), inner, [EngineRecipe]] for model in models}
    keys = {
        model.__name__: sorted(_own_fields(model))
        for base in (StrictModel, Component, BufferConfig, TaskEvalConfig, WarmupConfig)
        for model in (base, *_subclasses(base))
        if model not in elsewhere
    }
    keys["SampleParams"] = sorted(field.name for field in dataclasses.fields(SampleParams))
    for kind, models in kinds.items():
        keys[kind] = sorted({name for model in models for name in _own_fields(model)})
    return keys


def keys_of_the_first_run_file() -> list[str]:
    """By their paths; of a table of tables only what holds a value."""
    return sorted(_paths(tomllib.loads((ROOT / "recipes" / "own_task" / "run.toml").read_text())))


def _paths(value: object, path: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _paths(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        for number, inner in enumerate(value):
            yield from _paths(inner, f"{path}.{number}")
    else:
        yield path


def test_a_run_file_has_few_keys() -> None:
    keys = config_keys()
    count = sum(map(len, keys.values()))
    assert count <= MAX_CONFIG_KEYS, f"{count} keys: " + ", ".join(
        f"{name} {len(fields)}" for name, fields in sorted(keys.items())
    )
    first = keys_of_the_first_run_file()
    assert len(first) <= MAX_FIRST_KEYS, first


def _subclasses(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Ours only: tests define models too."""
    for subclass in model.__subclasses__():
        if subclass.__module__.partition(".")[0] == forebay.__name__:
            yield subclass
        yield from _subclasses(subclass)


def _own_fields(model: type[BaseModel]) -> set[str]:
    inherited = {name for base in model.__bases__ for name in getattr(base, "model_fields", {})}
    # The name of a table is a heading: what counts is what is under it.
    tables = {name for name, field in model.model_fields.items() if _names_a_table(field.annotation)}
    return set(model.model_fields) - inherited - tables


def _names_a_table(annotation: object) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel | SampleParams):
        return True
    return any(map(_names_a_table, get_args(annotation)))


def test_constraints_pin_versions_and_name_no_place_to_download_from() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert lines
    # No `--index-url`, no `name @ http...`: where packages come from is for whoever installs them to say.
    assert not [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+]+", line)]


if __name__ == "__main__":
    print_figures()
    num_keys, num_first = sum(map(len, config_keys().values())), len(keys_of_the_first_run_file())
    print(f"run-file keys    {num_keys} in all, {num_first} in a first run file")
