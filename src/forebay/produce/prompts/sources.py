"""Where rows of prompts come from: files, datasets on disk, generators and functions.

::

    "data/*.jsonl", "a.csv", ["a.parquet", "b.parquet"]       }
    "folder"           saved by datasets.save_to_disk         }
    "owner/name"       a dataset of the hub, or its copy here }
    "addition"         a word of the table GENERATORS         } -> Rows: row i, and where row i stands
    "reasoning_gym:countdown"                                 }
    "package.module:function"                                 }

A row is a mapping from column to value; what the columns mean is not decided here. Parquet and Arrow rows
stay in their columns until they are asked for, generated rows are made anew each time. A stream, of the hub
or of a function that returns an iterator, is read as far as it is wanted. Every problem with a source is a
`ConfigError` that says which file, line or argument.
"""

import csv
import difflib
import glob
import inspect
import io
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, time, timedelta
from decimal import Decimal
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq

from forebay.config import ConfigError, StrictModel, check_arguments, did_you_mean, errors_about, locate, look_up
from forebay.extras import needed_by
from forebay.produce.prompts import demo_tasks
from forebay.produce.prompts.sequences import LazySequence


@dataclass(frozen=True)
class Rows:
    """An opened source."""

    rows: Any
    """A sequence; row i is a mapping from column to value, or, from a function, whatever it returns."""
    place: Callable[[int], str]
    """The name of row i's place, for error messages."""
    in_memory: bool = False
    """The rows are Python objects already, so that looking at each of them is cheap."""
    no_shuffle: str = ""
    """Why the rows cannot be shuffled, and the advice for it; empty: they can."""


GENERATORS: dict[str, Callable[..., Sequence[Any]]] = {"addition": demo_tasks.addition, "sorting": demo_tasks.sorting}
SOURCE_ARGUMENTS: dict[str, type[StrictModel]] = {
    "addition": demo_tasks.AdditionArguments,
    "sorting": demo_tasks.SortingArguments,
}
"""The ``arguments`` of each, by its name."""
REASONING_GYM = "reasoning_gym"
DISK_ARGUMENTS = ("split",)
HUB_ARGUMENTS = ("split", "subset", "revision", "streaming", "data_files", "data_dir")
FILE_TYPES = (".jsonl", ".parquet", ".csv", ".json", ".arrow")
_OTHER_FILE_TYPES = (".tsv", ".txt", ".xlsx", ".xls", ".gz", ".zip", ".ndjson", ".yaml")
"""Files of data that people have and this does not read: they are told so, and not of an unknown word."""
_SOURCE_FORMS = (
    "a .jsonl, .csv, .parquet, .json or .arrow file or pattern, a folder written by datasets.save_to_disk, "
    f"owner/name of a dataset of the hub, {', '.join(GENERATORS)}, reasoning_gym:NAME or "
    "package.module:function"
)
_OF_STREAM = "is read from its beginning as far as size says: shuffle it at its source"
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def open_source(
    source: str | Sequence[str],
    arguments: Mapping[str, Any],
    num_wanted: int | None,
    keep: Callable[[Any, str], Any] | None = None,
) -> Rows:
    """The rows of `source` that `keep`, given a row and its place, keeps.

    `num_wanted` is how many are used: a source that can make any number makes so many, unless some of them
    may not be kept; a stream is read so far.

    Raises:
        ConfigError: the source is unknown, missing, empty or malformed, or does not take the arguments.
    """
    # An iterator in place of the sequence is read now.
    opened = _open(source, arguments, num_wanted if keep is None else None)
    rows, place = opened.rows, opened.place
    if not isinstance(rows, Sequence):
        numbered = enumerate(rows)
        wanted = (pair for pair in numbered if keep is None or keep(pair[1], place(pair[0])))
        kept = list(islice(wanted, num_wanted))
        # Two parts would shuffle two beginnings of the stream, and share rows.
        opened = Rows([row for _, row in kept], lambda index: place(kept[index][0]), True, _OF_STREAM)
    elif keep is not None:
        indices = [index for index in range(len(rows)) if keep(rows[index], place(index))]
        opened = replace(
            opened, rows=LazySequence(rows.__getitem__, indices), place=lambda index: place(indices[index])
        )
    if len(opened.rows) == 0:
        left_out = " that data.where keeps" if keep is not None else ""
        raise ConfigError(f"data source {source!r} is empty: it holds no row{left_out}")
    return opened


def _open(source: str | Sequence[str], arguments: Mapping[str, Any], num_wanted: int | None) -> Rows:
    if not isinstance(source, str):
        return _open_files(source, arguments)
    if source.startswith(f"{REASONING_GYM}:"):
        return _open_reasoning_gym(source, arguments, num_wanted)
    path = Path(source)
    # Before folders: a folder named "sorting", a run's own for example, must not hide the generator.
    if source in GENERATORS or (":" in source and not path.exists()):
        found = _find_function(source, arguments)(**arguments)
        if hasattr(found, "__getitem__") and hasattr(found, "__len__"):
            found = LazySequence(found.__getitem__, range(len(found)))
        elif not isinstance(found, Iterable):
            raise ConfigError(
                f"data source {source!r} returned a {type(found).__name__}; "
                f"it must return rows or Prompt, as a sequence, such as a list, or an iterator"
            )
        return Rows(found, lambda index: f"{source}, row {index}")
    if path.suffix in FILE_TYPES:
        return _open_files([source], arguments)
    if path.is_dir():
        return _open_dataset(source, arguments, DISK_ARGUMENTS)
    if path.is_file() or path.suffix in _OTHER_FILE_TYPES:
        kind = f"a {path.suffix} file" if path.suffix else "a file without an ending"
        raise ConfigError(
            f"data source {source!r} is {kind}, which is not read: data files are {', '.join(FILE_TYPES)}, "
            f"by ending; write one JSON object per line, such as "
            f'{{"prompt": ..., "answer": ...}}, into a .jsonl file'
        )
    if _HUB_ID.fullmatch(source) and not _near_paths(path):
        return _open_dataset(source, arguments, HUB_ARGUMENTS)
    near = difflib.get_close_matches(source, GENERATORS, n=1) or _near_paths(path)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(f"unknown data source {source!r}; {hint}A source is {_SOURCE_FORMS}")


def locate_source(source: str | list[str], folders: Sequence[Path] | None) -> str | list[str]:
    """`source` with the paths of files and folders that are found in `folders` as absolute ones.

    A file that is found nowhere is taken for one of the first folder, the run file's.
    """
    if not isinstance(source, str):
        return [str(locate_source(part, folders)) for part in source]
    if source in GENERATORS or source.startswith(f"{REASONING_GYM}:"):
        return source
    found = locate(source, folders)
    is_file = Path(source).suffix in FILE_TYPES and not Path(source).is_absolute() and ":" not in source
    return str(folders[0] / source) if found == source and is_file and folders else found


def _near_paths(path: Path) -> list[str]:
    names = [entry.name for entry in path.parent.glob("*") if entry.name != path.name]
    return [str(path.parent / name) for name in difflib.get_close_matches(path.name, names, n=1)]


def _open_files(patterns: Sequence[str], arguments: Mapping[str, Any]) -> Rows:
    if arguments:
        raise ConfigError(f"data files {list(patterns)} take no arguments, got {sorted(arguments)}")
    paths = [path for pattern in patterns for path in _expand(pattern)]
    if not paths:
        raise ConfigError("the list of data files is empty")
    readers: dict[str, Callable[[Sequence[Path]], Rows]] = {
        ".jsonl": partial(_read_lines, _parse_jsonl),
        ".parquet": partial(_read_tables, pq.read_table, "Parquet"),
        ".csv": partial(_read_lines, _parse_csv),
        ".json": partial(_read_lines, _parse_json),
        ".arrow": partial(_read_tables, _read_arrow, "Arrow"),
    }
    suffixes = {path.suffix for path in paths}
    if len(suffixes) > 1 or not suffixes <= set(readers):
        raise ConfigError(f"data files must all be {' or all '.join(readers)}, got {[str(path) for path in paths]}")
    return readers[suffixes.pop()](paths)


def _expand(pattern: str) -> list[Path]:
    path = Path(pattern)
    # A folder named *.parquet is how Spark writes one dataset; Arrow reads it as one.
    if path.is_file() or (path.is_dir() and path.suffix == ".parquet"):
        return [path]
    if glob.has_magic(pattern):
        found = [Path(match) for match in sorted(glob.glob(pattern, recursive=True))]
        if not found:
            raise ConfigError(f"no data file matches {pattern!r}")
        return found
    near = _near_paths(path)
    hint = f"; did you mean {near[0]!r}?" if near else f"; the working folder is {str(Path.cwd())!r}"
    raise ConfigError(f"no data file at {pattern!r}{hint}")


def _read_lines(parse: Callable[[Path], Iterator[tuple[int, dict[str, Any]]]], paths: Sequence[Path]) -> Rows:
    """All rows of text files at once, each with the number of its line."""
    rows: list[dict[str, Any]] = []
    places: list[tuple[Path, int]] = []
    for path in paths:
        for number, row in parse(path):
            rows.append(row)
            places.append((path, number))
    return Rows(rows, lambda index: "{}, line {}".format(*places[index]), in_memory=True)


def _parse_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    # Bytes, split at newlines only: str.splitlines would also cut a row at U+2028 inside a string.
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        with errors_about(f"{path}, line {number} is not valid JSON", ValueError):
            row = json.loads(line)
        if not isinstance(row, dict):
            kind = type(row).__name__
            raise ConfigError(f"{path}, line {number} holds a {kind}; each line must be an object with columns")
        yield number, row


def _parse_json(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """A list of objects; each is numbered by its place."""
    with errors_about(f"{path} is not valid JSON", ValueError):
        rows = json.loads(path.read_bytes())
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{path} must hold a list of objects with columns; one object a line is a .jsonl file")
    yield from enumerate(rows, start=1)


def _parse_csv(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every value is text, as it stands: a number read as a number would lose its zeros."""
    with errors_about(f"{path} is not UTF-8 text; save it as CSV UTF-8", UnicodeDecodeError):
        # "utf-8-sig": spreadsheets put a mark before the first column's name.
        text = path.read_bytes().decode("utf-8-sig")
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        columns = next(reader, [])
        # An empty line is no row.
        for row in filter(None, reader):
            if len(row) != len(columns) or len(set(columns)) < len(columns):
                raise ConfigError(
                    f"{path}, line {reader.line_num} has {len(row)} values for the {len(columns)} columns "
                    f"{', '.join(columns)} of the first line; put a value with commas in quotes, and give "
                    f"every column a name of its own"
                )
            yield reader.line_num, dict(zip(columns, row, strict=True))
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num} is not valid CSV: {error}") from None


def _read_arrow(path: Path) -> pa.Table:
    """The table of a file or a stream in Arrow's IPC format; `datasets` writes streams."""
    with pa.memory_map(str(path)) as source:
        try:
            return pa.ipc.open_file(source).read_all()
        except pa.ArrowInvalid:
            source.seek(0)
            return pa.ipc.open_stream(source).read_all()


def _read_tables(read: Callable[[Path], pa.Table], kind: str, paths: Sequence[Path]) -> Rows:
    tables = []
    for path in paths:
        with errors_about(f"cannot read {str(path)!r} as {kind}", pa.ArrowException, OSError):
            tables.append(read(path))
    with errors_about(f"the {kind} files {[str(path) for path in paths]} differ", pa.ArrowException):
        table = pa.concat_tables(tables, promote_options="default")
    columns = {name: table.column(name) for name in table.column_names}

    def row(index: int) -> dict[str, Any]:
        return {name: _plain(column[index].as_py()) for name, column in columns.items()}

    first_rows = list(accumulate((part.num_rows for part in tables), initial=0))

    def place(index: int) -> str:
        number = bisect_right(first_rows, index) - 1
        return f"{paths[number]}, row {index - first_rows[number]}"

    return Rows(LazySequence(row, range(table.num_rows)), place)


def _plain(value: Any) -> Any:
    """`value` with dates, durations, decimals and UUIDs as text; a snapshot holds none of them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, (date, time, timedelta, Decimal, UUID)) else value


def _open_dataset(source: str, arguments: Mapping[str, Any], known: Sequence[str]) -> Rows:
    """A folder of `datasets.save_to_disk`, or a dataset of the hub, which takes more arguments."""
    with needed_by(f"data source {source!r}"):
        import datasets
    if unknown := sorted(set(arguments) - set(known)):
        raise ConfigError(f"data source {source!r} takes {', '.join(known)} as arguments, got {unknown}")
    split = arguments.get("split")
    # Datasets are other people's: what is wrong with one, its splits and subsets is said in many ways.
    try:
        found = datasets.load_from_disk(source) if known == DISK_ARGUMENTS else _load_hub(source, arguments)
    except FileNotFoundError:
        raise ConfigError(
            f"folder {source!r} holds no dataset saved by datasets.save_to_disk; "
            f"for a folder of files write a pattern such as {source.rstrip('/') + '/*.parquet'!r}"
        ) from None
    except ValueError as error:
        # The lines after the second are examples.
        said = " ".join(str(error).splitlines()[:2])
        raise ConfigError(f"data source {source!r} with arguments {dict(arguments)}: {said}") from error
    if isinstance(found, dict):
        if split is None and len(found) == 1:
            split = next(iter(found))
        if split not in found:
            raise ConfigError(
                f"data source {source!r} has the splits {sorted(found)}; name one as arguments.split, not {split!r}"
            )
        found = found[split]
    elif split is not None and known == DISK_ARGUMENTS:
        raise ConfigError(f"data source {source!r} has no splits; leave out arguments.split = {split!r}")
    if isinstance(found, datasets.IterableDataset):
        return Rows(map(_plain, found.decode(False)), lambda index: f"{source}, row {index}")
    # As they are kept: images stay the bytes of their files.
    raw = found.with_format("arrow")
    rows = LazySequence(lambda index: _plain(raw[index].to_pylist()[0]), range(len(found)))
    return Rows(rows, lambda index: f"{source}, row {index}")


def _load_hub(source: str, arguments: Mapping[str, Any]) -> Any:
    """A dataset of the hub, or where the hub is out of reach its copy in the hub's cache here."""
    import datasets
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    options: dict[str, Any] = {"name" if key == "subset" else key: value for key, value in arguments.items()}
    revision = options.pop("revision", None)
    try:
        return datasets.load_dataset(source, revision=revision, **options)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise ConfigError(f"data source {source!r}: {error}") from None
    except ConnectionError as error:
        try:
            # Whole repositories, as the command below leaves them, are nothing that `load_dataset` finds.
            folder = snapshot_download(source, repo_type="dataset", revision=revision, local_files_only=True)
        except LocalEntryNotFoundError:
            at = f" --revision {revision}" if revision else ""
            raise ConfigError(
                f"data source {source!r} is not on this machine, and the hub cannot be reached ({error}); "
                f"where it can, run: hf download --repo-type dataset {source}{at}"
            ) from None
        return datasets.load_dataset(folder, **options)


def check_source(source: str | Sequence[str], arguments: Mapping[str, Any]) -> None:
    """Check the arguments of a generator or function; nothing is opened, and other sources say so later.

    Raises:
        ConfigError: it cannot be imported, or an argument does not fit.
    """
    if not isinstance(source, str) or source.startswith(f"{REASONING_GYM}:") or Path(source).exists():
        return
    if source in GENERATORS or (":" in source and Path(source).suffix not in FILE_TYPES):
        _find_function(source, arguments)


def _find_function(source: str, arguments: Mapping[str, Any]) -> Callable[..., Any]:
    function: Callable[..., Any] = look_up("data source", source, GENERATORS)
    if not callable(function):
        raise ConfigError(f"data source {source!r} is a {type(function).__name__}, not a function")
    check_arguments("data source", source, SOURCE_ARGUMENTS.get(source, function), arguments)
    return function


def _open_reasoning_gym(source: str, arguments: Mapping[str, Any], num_wanted: int | None) -> Rows:
    """Rows that carry, for the judge, how to make the problem again rather than the problem.

    A problem's own record holds tuples and other things that do not survive JSON, and some scorers then
    judge it differently; name, arguments and index do survive, and are smaller.
    """
    with needed_by(f"data source {source!r}"):
        from reasoning_gym.factory import DATASETS, create_dataset
    name = source.partition(":")[2]
    if name not in DATASETS:
        raise ConfigError(
            f"reasoning-gym has no generator {name!r}; {did_you_mean(name, DATASETS)}known: "
            f"{', '.join(sorted(DATASETS))}"
        )
    # Without a seed each process would draw problems of its own, and a resumed run others.
    settings = {"seed": 0, **arguments}
    if num_wanted is not None:
        settings["size"] = num_wanted
    try:
        dataset = create_dataset(name, **settings)
    # reasoning-gym checks its settings with assert; a keyword it does not have is a TypeError.
    except (AssertionError, TypeError, ValueError) as error:
        known = ", ".join(inspect.signature(DATASETS[name][1]).parameters)
        raise ConfigError(
            f"reasoning-gym generator {name!r} refuses {settings}: {error}; its arguments: {known}"
        ) from None

    def row(index: int) -> dict[str, Any]:
        problem = dataset[index]
        return {
            "prompt": problem["question"],
            "answer": problem["answer"],
            "data_source": source,
            "reward_model": {REASONING_GYM: {"name": name, "arguments": settings, "index": index}},
        }

    return Rows(
        LazySequence(row, range(len(dataset))),
        lambda index: f"{source}, problem {index}",
        no_shuffle="is random already: set arguments.seed",
    )
