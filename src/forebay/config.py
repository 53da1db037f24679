"""Strict configuration: TOML text and ``key=value`` overrides in, one validated model out.

::

    run.toml --tomllib--> dict --apply_overrides--> dict --Model.model_validate--> config
                                                              | unknown key: the nearest known one is named

Every configurable class has a `StrictModel` beside it; this module knows none of them. It also holds the two
ways to name code in a run file: a word from a literal table, or ``"package.module:Name"``. Modules, data and
models that a run file names are looked for beside it, then in the working folder::

    search_path of the run file, or (its folder, the working folder)
        --parse_config--> sys.path, from which processes that the run starts get theirs
        --locate--------> "data/train.jsonl" becomes "/home/me/project/data/train.jsonl"

The resolved run file has the folders and the absolute paths, so every later command finds the same, from any
working folder.
"""

import copy
import difflib
import glob
import importlib
import inspect
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from forebay.tracebacks import raised_at

_LOOKS_LIKE_PATH = re.compile(r"(?=.*\w)[^:\n]*[./][^:\n]*")
_imported_from: list[str] = []
"""The folders of the run file read last; they are first in ``sys.path``."""


class ConfigError(ValueError):
    """A run file or an override is wrong; the message says where, what was read and what to write."""


class StrictModel(BaseModel):
    """Base of every config model: unknown keys are errors and values do not change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


def locate(text: str, folders: Sequence[Path] | None) -> str:
    """`text` as an absolute path if it names something in one of `folders`; otherwise as it is.

    A pattern such as ``data/*.jsonl`` becomes one for the first folder in which it matches something.
    """
    if not text or "\0" in text or Path(text).expanduser().is_absolute():
        return text
    for folder in folders or ():
        path = str(folder / text)
        # `os.path.exists` says False, and does not raise, for a name that is too long.
        if os.path.exists(path) or (glob.has_magic(text) and glob.glob(text, root_dir=folder, recursive=True)):
            return path
    return text


def _with_paths(value: Any, folders: Sequence[Path] | None) -> Any:
    if isinstance(value, dict):
        return {key: _with_paths(item, folders) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_paths(item, folders) for item in value]
    # Words such as "answer" stay words, even with a file of that name, and "[0-9].*" is no pattern of files.
    is_path = isinstance(value, str) and _LOOKS_LIKE_PATH.fullmatch(value) and not glob.has_magic(value)
    return locate(value, folders) if is_path else value


Located = AfterValidator(lambda text, info: locate(text, info.context))
"""For the type of a text that may name a file or folder: then it becomes absolute."""
ArgumentPaths = AfterValidator(lambda value, info: _with_paths(value, info.context))
"""For the type of a table of arguments: texts in it that name a file or folder become absolute."""


class Component(BaseModel):
    """Which implementation of a part of the run, and its own settings.

    In a run file it is a table, or only the name: ``cluster = "ray"`` is ``cluster = { name = "ray" }``. The
    named thing says what `arguments` may hold: they are its keyword arguments.

    >>> Component.model_validate("transformers") == Component(name="transformers", arguments={})
    True
    """

    model_config = StrictModel.model_config

    name: str
    """The name of a component of this kind, or ``package.module:Name`` of one's own."""
    arguments: Annotated[dict[str, Any], ArgumentPaths] = Field(default_factory=dict)
    """Its keyword arguments, as the sections below list them for each name."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


@contextmanager
def errors_about(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Make errors of these `kinds` a `ConfigError` that begins with what they are about.

    Without `kinds`, only a `ConfigError` is changed. With them, a `ConfigError` passes as it is unless it is
    one of the `kinds`.
    """
    wanted = kinds or (ConfigError,)
    try:
        yield
    except wanted as error:
        if isinstance(error, ConfigError) and ConfigError not in wanted:
            raise
        raise ConfigError(f"{what}: {error}") from error


ModelT = TypeVar("ModelT", bound=BaseModel)


def load_config(model: type[ModelT], path: Path, overrides: Iterable[str] = ()) -> ModelT:
    """Read the TOML file `path`, apply ``key=value`` `overrides`, and validate as `model`.

    Raises:
        ConfigError: the file is missing or not TOML, or a key or value does not fit.
    """
    data = apply_overrides(read_toml(path), overrides)
    return parse_config(model, data, source=str(path), beside=path.parent)


def read_toml(path: Path) -> dict[str, Any]:
    """The file's tables as nested dicts.

    Raises:
        ConfigError: the file is missing or is not TOML.
    """
    try:
        with errors_about(f"{str(path)!r} is not valid TOML", tomllib.TOMLDecodeError, UnicodeDecodeError):
            return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.toml")], n=1)
        hint = f"; did you mean {str(path.parent / near[0])!r}?" if near else ""
        raise ConfigError(f"no file at {str(path)!r}{hint}") from None
    except IsADirectoryError:
        is_run = (path / "run.toml").is_file()
        hint = f"; to go on with that run: --resume {path}" if is_run else ""
        raise ConfigError(f"{str(path)!r} is a folder, which is not a TOML file{hint}") from None


def apply_overrides(data: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of `data` with each ``a.b=value`` set; list entries go by position (``tasks.0.weight=2``).

    The value is read as TOML where it is valid TOML (``3``, ``true``, ``[1, 2]``), else as plain text. The
    order of different keys does not matter: ``engine=vllm`` and ``engine.arguments.servers=2`` go both ways.

    Raises:
        ConfigError: an override has no ``=`` or walks into something that is not a table or list.
    """
    result = copy.deepcopy(dict(data))
    changes: list[tuple[list[str], str, str]] = []
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"override {override!r} is not of the form key=value, for example train.lr=1e-4")
        changes.append((key.strip().split("."), text.strip(), override))
    # A whole table before its parts, which it would wipe; the sort keeps the order of equals.
    for path, text, override in sorted(changes, key=lambda change: len(change[0])):
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        _set_path(result, path, value, override)
    return result


def _set_path(node: Any, path: list[str], value: Any, override: str) -> None:
    for depth, part in enumerate(path):
        key: Any = part
        if isinstance(node, list):
            if not part.isdecimal() or int(part) >= len(node):
                raise ConfigError(
                    f"override {override!r}: {'.'.join(path[:depth])} is a list of {len(node)}; "
                    f"name an entry by its position, counted from 0, not {part!r}"
                )
            key = int(part)
        elif not isinstance(node, dict):
            raise ConfigError(f"override {override!r}: {'.'.join(path[:depth])} is a value, not a table")
        if depth == len(path) - 1:
            node[key] = value
            return
        if isinstance(node, dict):
            node.setdefault(key, {})
        if isinstance(node[key], str) and path[depth + 1] in _COMPONENT_KEYS:
            # The short form of a component: engine = "vllm" is engine = { name = "vllm" }.
            node[key] = {"name": node[key]}
        node = node[key]


# An override may add these to a component (an engine, a judge) that the file only names.
_COMPONENT_KEYS = ("arguments", "attention", "dtype", "shuffle_seed", "timeout_s")


def parse_config(
    model: type[ModelT], data: Mapping[str, Any], *, source: str = "config", beside: Path | None = None
) -> ModelT:
    """Validate `data`, from a file in the folder `beside`, as `model`.

    Modules in the folders of its ``search_path`` can be imported from now on, and paths that are found there
    become absolute.

    Raises:
        ConfigError: one line per problem: where, what was given, and the nearest known key or the rule.
    """
    table = dict(data)
    given = table.get("search_path") or []
    # A wrong value is left to validation.
    usable = isinstance(given, list) and all(isinstance(folder, str) for folder in given)
    base = Path.cwd() if beside is None else beside.resolve()
    named = [base / folder for folder in given] if usable and given else [base, Path.cwd()]
    recorded = list(dict.fromkeys(folder.resolve() for folder in named))
    # The current folder too: a resumed run may be called from elsewhere than the first time.
    folders = list(dict.fromkeys([*recorded, Path.cwd()]))
    if "search_path" in model.model_fields:
        _imported_from[:] = [str(folder) for folder in folders]
        sys.path[:] = [*_imported_from, *(path for path in sys.path if path not in _imported_from)]
        # Written down, so that another working folder finds the same.
        if usable:
            table["search_path"] = recorded
    try:
        return model.model_validate(table, context=folders)
    except ValidationError as error:
        lines = [_explain(model, dict(problem)) for problem in error.errors()]
        raise ConfigError(f"{source}: " + "\n".join(lines)) from None


def _explain(model: type[BaseModel], problem: dict[str, Any]) -> str:
    # Of a union pydantic names the member, too.
    location = [str(part) for part in problem["loc"] if not str(part).startswith("constrained-")]
    where = ".".join(location)
    if (now := getattr(model, "removed_keys", {}).get(where)) is not None:
        return f"unknown key {where!r}, of an earlier version: {now}"
    if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        # The keys accepted there, walking through lists, unions and dataclasses.
        current: list[Any] = [model]
        for part in location[:-1]:
            found = [fields[part] for item in current if part in (fields := _fields_of(item))]
            # A position in a list is no field: the models stay the same there.
            current = [leaf for annotation in found for leaf in _leaves(annotation)] or current
        known = sorted({name for item in current for name in _fields_of(item)})
        # A key of a table that was given without it: `lr` is `train.lr`.
        inside = [
            f"{table}.0.{where}" if get_origin(annotation) is list else f"{table}.{where}"
            for table, annotation in _fields_of(model).items()
            if any(where in _fields_of(leaf) for leaf in _leaves(annotation))
        ]
        near = f"did you mean {' or '.join(map(repr, inside))}?" if inside else did_you_mean(location[-1], known)
        return f"unknown key {where!r}; {near.strip() or 'known keys: ' + ', '.join(known)}"
    if problem["type"] == "missing":
        return f"{where!r} is missing"
    # A rule over several keys of a table names them itself; the table's whole content would hide it.
    own_rule = problem["type"] == "value_error" and isinstance(problem["input"], dict)
    given = "" if own_rule else f" = {problem['input']!r}"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{where!r}{given}: {message}" if where else message


def _fields_of(item: Any) -> dict[str, Any]:
    if isinstance(item, type) and issubclass(item, BaseModel):
        return {name: field.annotation for name, field in item.model_fields.items()}
    return dict.fromkeys(getattr(item, "__dataclass_fields__", {}), None)


def _leaves(annotation: Any) -> Iterator[Any]:
    arguments = get_args(annotation)
    if not arguments:
        yield annotation
    for argument in arguments:
        yield from _leaves(argument)


def look_up(kind: str, name: str, table: Mapping[str, Any]) -> Any:
    """The entry `name` of `table`, or what ``"package.module:Name"`` imports.

    Raises:
        ConfigError: neither; the message names the nearest entry.
    """
    if name in table:
        return table[name]
    if ":" in name:
        return import_object(kind, name)
    hint = did_you_mean(name, table)
    raise ConfigError(f"unknown {kind} {name!r}; {hint}known: {', '.join(sorted(table))}, or 'package.module:Name'")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``"did you mean 'x'? "``, for the middle of a message; empty if nothing `known` is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]!r}? " if near else ""


def check_arguments(
    kind: str, name: str, function: Callable[..., Any], arguments: Mapping[str, Any], *given: str
) -> None:
    """Check that `function` takes `arguments`, besides those named `given`, which the caller fills in.

    A component that a run file names by a word has a `StrictModel` of its arguments, to be given as the
    `function`: then their values are checked, too.

    Raises:
        ConfigError: an argument is unknown, missing, of a wrong value or the caller's; the message lists
            those it takes.
    """
    signature = inspect.signature(function)
    known = [parameter for parameter in signature.parameters if parameter not in given]
    if taken := sorted(set(arguments) & set(given)):
        raise ConfigError(f"{kind} {name!r}: the run itself sets {', '.join(taken)}; leave them out")
    try:
        signature.bind(**dict.fromkeys(given), **arguments)
    except TypeError as error:
        hints = (did_you_mean(key, known) for key in arguments if key not in known)
        hint = next(filter(None, hints), "")
        raise ConfigError(f"{kind} {name!r}: {error}; {hint}its arguments: {', '.join(known) or 'none'}") from None
    if isinstance(function, type) and issubclass(function, StrictModel):
        parse_config(function, arguments, source=f"{kind} {name!r}")


def checked_by(check: Callable[[Any], object]) -> AfterValidator:
    """For a field that holds what it was given, if `check` raises nothing."""

    def checked(value: Any) -> Any:
        check(value)
        return value

    return AfterValidator(checked)


def parse_component(named: str | Mapping[str, Any], *, source: str) -> Component:
    """The component that a name, or a table with ``name`` and ``arguments``, describes.

    Raises:
        ConfigError: it is neither.
    """
    return parse_config(Component, {"name": named} if isinstance(named, str) else named, source=source)


def find_component(kind: str, config: Component, table: Mapping[str, Any], *given: str) -> Any:
    """The class or function that `config` names, which takes its arguments; nothing is made.

    A class may have a model of its arguments, ``Arguments``; otherwise its signature says what it takes.

    Raises:
        ConfigError: the name is unknown, or an argument does not fit.
    """
    factory = look_up(kind, config.name, table)
    model = getattr(factory, "Arguments", None)
    check_arguments(kind, config.name, model or factory, config.arguments, *(() if model else given))
    return factory


def import_object(kind: str, path: str) -> Any:
    """The object that ``"package.module:Name"`` names.

    Raises:
        ConfigError: the module cannot be imported or has no such name.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or module_name.startswith(".") or not attribute:
        raise ConfigError(f"{kind} {path!r} is not of the form 'package.module:Name'")
    try:
        module = importlib.import_module(module_name)
        _check_is_meant(module_name.partition(".")[0])
    except ModuleNotFoundError as error:
        place = ""
        # Only where the module itself is missing: it may be there, and one that it imports may not.
        if error.name == module_name.partition(".")[0]:
            looked = ", ".join(dict.fromkeys([*_imported_from, os.getcwd()]))
            place = f" (looked in {looked}, and among the installed packages)"
        raise ConfigError(f"{kind} {path!r}: cannot import {module_name!r}: {error}{place}") from error
    # The user's module may raise anything while it is imported.
    except Exception as error:
        said = f"{type(error).__name__}: {error}" + (f" ({raised})" if (raised := raised_at(error)) else "")
        raise ConfigError(f"{kind} {path!r}: cannot import {module_name!r}: {said}") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        file = getattr(module, "__file__", None)
        place = f" ({file})" if file else ""
        raise ConfigError(f"{kind} {path!r}: {module_name!r} has no {attribute!r}{hint}{place}") from None


def _check_is_meant(name: str) -> None:
    """Check that the imported top-level module `name` is the one in the run file's folders, if one is there.

    Raises:
        ImportError: another one of that name was imported before.
    """
    found = PathFinder.find_spec(name, _imported_from)
    loaded = getattr(sys.modules.get(name), "__file__", None)
    if found is None or found.origin is None or not isinstance(loaded, str | None):
        return
    if loaded is None or Path(loaded).resolve() != Path(found.origin).resolve():
        raise ImportError(
            f"{found.origin} has the name of a module that is imported already, from "
            f"{loaded or 'Python itself'}; rename your file"
        )
