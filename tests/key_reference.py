"""The keys of run files, read from the models, for docs/keys.md.

::

    RunConfig, arguments of named components --keys_of--> Key, Key, ... --test_keys.py--> docs/keys.md

The meaning of a key stands once, in the docstring below its field.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from forebay.config import Component
from forebay.types import SampleParams


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of a run file."""

    path: str
    """As an override has it; ``tasks.0`` stands for any task."""
    of: str = ""
    """The component whose argument it is; empty: every run file may have it."""
    values: str
    """The values that it may have."""
    default: str
    meaning: str


COMPONENTS = (
    ("engine.arguments", "engine", "forebay.engines.build:ENGINE_ARGUMENTS"),
    ("cluster.arguments", "cluster", "forebay.runs.config:CLUSTER_ARGUMENTS"),
    ("tasks.0.data.arguments", "data source", "forebay.produce.prompts.sources:SOURCE_ARGUMENTS"),
    ("tasks.0.sampler.arguments", "sampler", "forebay.produce.prompts.orders:SAMPLERS"),
    ("tasks.0.agent.arguments", "agent", "forebay.agents.build:AGENTS"),
    ("tasks.0.agent.arguments.environment.arguments", "environment", "forebay.agents.environments:ENVIRONMENTS"),
    ("tasks.0.agent.arguments.tools.0.arguments", "tool", "forebay.tools.base:TOOLS"),
    ("tasks.0.judge.arguments", "judge", "forebay.judges.build:JUDGE_ARGUMENTS"),
)
"""Where the arguments of named components stand, and the table of their models, or of what has one."""


def models_of(components: Mapping[str, Any]) -> dict[str, Any]:
    """The models of the components' arguments; one without takes none."""
    return {name: made.Arguments for name, made in components.items() if hasattr(made, "Arguments")}


@cache
def reference() -> Mapping[str, Sequence[Key]]:
    """All keys, by the title of the section in which they stand."""
    from forebay.environments.config import FragmentRunConfig
    from forebay.runs.config import RunConfig

    sections = {"A run file": tuple(keys_of(RunConfig))}
    for path, kind, table in COMPONENTS:
        found = resolve_name(table)
        for name, model in (models_of(found) or found).items():
            model = resolve_name(model) if isinstance(model, str) else model
            if keys := tuple(keys_of(model, f"{path}.", of=f"{kind} {name}")):
                sections[f"Arguments of the {kind} `{name}`"] = keys
    of_fragments = tuple(keys_of(FragmentRunConfig, of="run in environments"))
    return sections | {"A run file with an `[environment]` table": of_fragments}


def keys_of(model: Any, prefix: str = "", *, of: str = "") -> Iterator[Key]:
    """The keys of a model or dataclass, those of the tables in it after each table's own."""
    meanings = field_docstrings(model)
    for name, annotation, default in _fields(model):
        path = f"{prefix}{name}"
        table, is_list = _table_in(annotation)
        meaning = meanings.get(name) or (inspect.getdoc(table) or "" if table else "").split("\n")[0]
        # One line; names of code in single backticks.
        plain = re.sub(r"\s+", " ", meaning.replace("``", "`")).strip()
        yield Key(path=path, of=of, values=_values(annotation), default=_shown(default), meaning=plain)
        if table is not None:
            yield from keys_of(table, f"{path}.0." if is_list else f"{path}.", of=of)


@cache
def field_docstrings(model: Any) -> Mapping[str, str]:
    """The docstring below each field of a class and of our own that it derives from, by the field's name."""
    own = [base for base in model.__bases__ if base.__module__.startswith("forebay.")]
    inherited = {name: text for base in own for name, text in field_docstrings(base).items()}
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(tree, ast.ClassDef)
    return inherited | {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _fields(model: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, annotation and default of each field."""
    if issubclass(model, BaseModel):
        for name, field in model.model_fields.items():
            # The bounds of a number stand beside its type.
            annotation = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
            yield name, annotation, field.get_default(call_default_factory=True)
        return
    annotations = inspect.get_annotations(model, eval_str=True)
    for field in fields(model):
        yield field.name, annotations[field.name], field.default


def _table_in(annotation: Any) -> tuple[Any, bool]:
    """The model of the table that a key holds, and whether it holds a list of them."""
    origin = get_origin(annotation)
    if origin is list:
        return _table_in(get_args(annotation)[0])[0], True
    for part in get_args(annotation) if origin else [annotation]:
        if isinstance(part, type) and issubclass(part, BaseModel | SampleParams):
            return part, False
        if get_origin(part) is not None and (found := _table_in(part))[0] is not None:
            return found
    return None, False


_WORDS = {bool: "true, false", int: "whole number", float: "number", str: "text", Path: "path", Any: "text or table"}


def _values(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bounds = [
            f"{sign} {bound}"
            for constraint in arguments[1:]
            for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
            if (bound := getattr(constraint, name, None)) is not None
        ]
        return " ".join([_values(arguments[0]), *bounds])
    if origin in (Union, types.UnionType):
        parts = [_values(part) for part in arguments if part is not type(None)]
        return " or ".join(dict.fromkeys(parts))
    if origin is Literal:
        return ", ".join(str(value) for value in arguments)
    if origin in (list, Sequence):
        return f"list of {_values(arguments[0])}"
    if origin is tuple:
        return f"list of {_values(arguments[0])}" if arguments[-1] is ... else f"{len(arguments)} values"
    if isinstance(annotation, type) and issubclass(annotation, Component):
        return "text or table"
    return _WORDS.get(annotation, "table")


def _shown(default: Any) -> str:
    if default is PydanticUndefined:
        return "required"
    if default is None:
        return "none"
    if default == sys.executable:
        return "the run's own"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, Component):
        return default.name
    if isinstance(default, BaseModel | SampleParams):
        return ""
    return str(list(default) if isinstance(default, tuple) else default).replace("\n", "\\n")
