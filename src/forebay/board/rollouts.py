"""Questions about the rollouts and activities of a run, answered by DuckDB over the files of its history.

::

    RUN/history/*/rollouts_*.parquet --list_parts--> a view in DuckDB --SQL with bound values--> JSON values

Nothing is loaded ahead: a question reads the columns that it names. All runs share one DuckDB, and so its
bound on memory. Texts in lists are cut (`PREVIEW`); a group or a rollout that is asked for comes whole.
"""

import json
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from forebay.board.folder import hide_in_text
from forebay.extras import needed_by
from forebay.runs.record.columns import NUMBERS, TEXTS, TOKENS
from forebay.runs.record.grams import SEARCHED, rows_with
from forebay.runs.record.history import ROLLOUTS, SPANS, Part, list_parts

with needed_by("forebay board"):
    import duckdb

Answer = TypeVar("Answer")
Row = dict[str, Any]
Rows = Mapping[Path, Sequence[tuple[int, int]] | None]

PREVIEW = 280
"""Characters of a prompt or response in a list: some three lines on the page."""
MAX_ROWS = 500
"""Lines of one answer; a page shows far fewer."""
MAX_COUNTED = 1000
"""Rollouts with a text; ten thousand or a million are as many to a reader."""
MEMORY = "100MB"
"""The memory of DuckDB for all questions about all runs; a larger one goes through a temporary file."""
NUM_THREADS = 4
"""The threads of DuckDB: a run may need the other cores, and each thread takes memory."""
MAX_SPANS = 1500
"""Activities of one stage in a timeline; more cannot be told apart on a screen, and are counted instead."""
NUM_BUCKETS = 400
NUM_BINS = 24

# A browser's numbers have 53 bits.
LISTED = (*TEXTS, *(name for name in NUMBERS if name != "prompt_hash"), "prompt_hash::VARCHAR AS prompt_hash")
_CUT = ", ".join(f"left({name}, {PREVIEW}) AS {name}" for name in ("prompt", "response", "truth", "error"))
# Of any version: an older file has no images.
_WHOLE = "* EXCLUDE (file_row_number, {}) REPLACE (prompt_hash::VARCHAR AS prompt_hash)"
SPAN = "start_s, end_s, stage, name, task, group_id, note"


class Rollouts:
    """The history of one run. Safe for calls from several threads.

    ::

        Rollouts(Path("runs/demo"), Database()).search(text="42", task="math")["rows"]
    """

    def __init__(self, folder: Path, database: "Database") -> None:
        self._folder, self._database = folder, database
        self.damaged: set[Path] = set()
        """Files that cannot be read; what they hold is left out."""

    def search(
        self, *, text: str = "", order: str = "newest", limit: int = 50, offset: int = 0, **where: str
    ) -> dict[str, Any]:
        """Rollouts that hold `text` (upper and lower case alike) and fit `where`, cut to a preview.

        `where` may have the columns of `EQUALS`, equal to a value; ``tool``, the name of a tool that was
        called; and ``NAME_min`` and ``NAME_max`` of `RANGES`.

        Raises:
            ValueError: an unknown condition or order, or a bound that is no number.
        """
        if order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)}; got {order!r}")
        condition, values = _conditions(text, where)
        # By place at last: among equal rollouts, too, a page goes on where the one before ended.
        sort = f"{ORDERS[order]}, {_PLACE}"
        limit = min(max(limit, 1), MAX_ROWS)

        def ask(cursor: "duckdb.DuckDBPyConnection", parts: list[Part]) -> dict[str, Any]:
            keys: list[tuple[str, int]] = []
            # One more than is shown says whether there is a next page.
            wanted = max(offset, 0) + limit + 1
            # The newest first, and no further than needed. Other orders have to see everything.
            for some in _newest_first(parts) if order == "newest" else [parts]:
                source = _source(ROLLOUTS, some, _rows_with(some, text))
                query = f"SELECT {_PLACE} FROM {source} WHERE {condition} ORDER BY {sort} LIMIT ?"
                keys += cursor.execute(query, [*values, wanted - len(keys)]).fetchall()
                if len(keys) >= wanted:
                    break
            shown = keys[max(offset, 0) :][:limit]
            # Texts are read of these alone: among many equal scores a sort would carry those of most.
            rows: dict[Path, list[tuple[int, int]]] = {}
            for path, number in shown:
                rows.setdefault(Path(path), []).append((number, number))
            source = _source(ROLLOUTS, [part for part in parts if part.path in rows], rows)
            query = f"SELECT {', '.join(LISTED)}, {_CUT} FROM {source} ORDER BY {sort}"
            return {"rows": _rows(cursor, query) if shown else [], "more": len(keys) >= wanted}

        return self._ask(ROLLOUTS, ask, {"rows": [], "more": False})

    def count(self, *, text: str = "", **where: str) -> dict[str, Any]:
        """How many rollouts `search` would find, and their means; ``solved`` is of their prompts.

        Where train steps are asked for, ``solved`` is the mean score of those prompts in all other steps, and
        None if they were tried in no other.
        With a text at most `MAX_COUNTED`, and the means are of those: to count all, every text would be read.
        """
        condition, values = _conditions(text, where)
        # With the tries of these steps a step of bad answers would make its own prompts look hard.
        steps, bounds = _conditions("", {name: where[name] for name in where if "train_step" in name})
        solved = _SOLVED.replace("GROUP", f"AND NOT ({steps}) GROUP") if bounds else _SOLVED

        def ask(cursor: "duckdb.DuckDBPyConnection", parts: list[Part]) -> dict[str, Any]:
            found = (
                "SELECT group_id, prompt_hash, finish_reason, score, num_tokens, staleness "
                f"FROM {_source(ROLLOUTS, parts, _rows_with(parts, text))} WHERE {condition} "
                f"{f'LIMIT {MAX_COUNTED}' if text else ''}"
            )
            return _rows(
                cursor,
                "SELECT count(*) AS rollouts, count(DISTINCT group_id) AS groups, avg(score) AS score, "
                "avg(num_tokens) AS num_tokens, avg(solved) AS solved, avg(staleness) AS staleness, "
                "avg((finish_reason = 'length')::INT) AS truncated "
                f"FROM ({found}) LEFT JOIN {solved} USING (prompt_hash)",
                [*values, *bounds],
            )[0]

        return self._ask(ROLLOUTS, ask, {"rollouts": 0, "groups": 0})

    def choices(self) -> dict[str, list[Row]]:
        """The values of each column that can be chosen, with their counts, the most frequent first."""

        def ask(cursor: "duckdb.DuckDBPyConnection", _: list[Part]) -> dict[str, list[Row]]:
            return {
                name: _rows(
                    cursor,
                    f"SELECT {name} AS value, count(*) AS rollouts FROM rollouts WHERE {name} <> '' "
                    f"GROUP BY {name} ORDER BY rollouts DESC LIMIT 50",
                )
                for name in ("task", "outcome", "reason", "status", "finish_reason")
            }

        return self._ask(ROLLOUTS, ask, {})

    def group(self, group_id: str) -> list[Row]:
        """Every rollout of a group with its texts, without tokens; each time that the group left the run."""
        columns = _WHOLE.format(", ".join(("filename", *TOKENS)))
        return self._lines([columns], "group_id = ? ORDER BY time_s, member", group_id)

    def rollout(self, rollout_id: str) -> list[Row]:
        """Everything of a rollout, tokens too; a line for each time that its group left the run."""
        return self._lines([_WHOLE.format("filename")], "rollout_id = ? ORDER BY time_s", rollout_id)

    def prompts(self, *, order: str = "hardest", limit: int = 50, offset: int = 0) -> list[Row]:
        """Prompts by how they were answered: tries, scores at first and at last.

        Each line also has how many ``prompts`` there are, and how many of them ``never`` earned anything.

        Raises:
            ValueError: an unknown order.
        """
        orders = {
            "hardest": "best, score, rollouts DESC",
            "easiest": "score DESC, rollouts DESC",
            "often": "rollouts DESC",
            "improved": "last_score - first_score DESC NULLS LAST",
            "worsened": "last_score - first_score NULLS LAST",
            "varied": "spread DESC NULLS LAST",
        }
        if order not in orders:
            raise ValueError(f"order must be one of {', '.join(orders)}; got {order!r}")
        query = (
            f"SELECT prompt_hash::VARCHAR AS prompt_hash, any_value(task) AS task, "
            f"left(any_value(prompt), {PREVIEW}) AS prompt, count(*) AS rollouts, "
            f"count(DISTINCT group_id) AS groups, avg(score) AS score, max(score) AS best, "
            f"stddev_pop(score) AS spread, avg(num_tokens) AS num_tokens, min(train_step) AS first_step, "
            f"max(train_step) AS last_step, arg_min(score, time_s) AS first_score, "
            "arg_max(score, time_s) AS last_score, count_if(max(score) <= 0) OVER () AS never, "
            # A rollout that is trained on again is one try.
            "count(*) OVER () AS prompts FROM rollouts WHERE score IS NOT NULL AND outcome <> 'reused' "
            f"GROUP BY prompt_hash ORDER BY {orders[order]}, prompt_hash LIMIT ? OFFSET ?"
        )
        values = [min(max(limit, 1), MAX_ROWS), max(offset, 0)]
        return self._ask(ROLLOUTS, lambda cursor, _: _rows(cursor, query, values), [])

    def prompt(self, prompt_hash: str) -> list[Row]:
        """The rollouts of one prompt through training, oldest first, with whole responses."""
        try:
            number = int(prompt_hash)
        except ValueError:
            raise ValueError(f"a prompt's number is expected, got {prompt_hash!r}") from None
        columns = (*LISTED, "prompt", "response", "truth")
        return self._lines(columns, "prompt_hash = ? ORDER BY train_step, member", number)

    def bias(self, task: str = "") -> dict[str, Any]:
        """Dropped against trained rollouts, by task: length, time, score, how often their prompt was solved.

        Of `task` alone, if it is given.

        ``staleness`` has the trained rollouts by their age: a bound of n would have dropped those of more.
        ``spread`` has, for each of `SPREAD`, both outcomes in `NUM_BINS` parts of the range.
        """

        def ask(cursor: "duckdb.DuckDBPyConnection", _: list[Part]) -> dict[str, Any]:
            cursor.execute(_SEEN, [task])
            measured = (*SPREAD, "score")
            means = ", ".join(f"avg({name}) AS {name}" for name in measured)
            deviations = ", ".join(f"stddev_samp({name}) AS {name}_spread" for name in measured)
            return {
                "means": _rows(
                    cursor,
                    f"SELECT task, outcome, reason, count(*) AS rollouts, {means}, {deviations}, "
                    "quantile_cont(num_tokens, 0.9) AS num_tokens_90 "
                    "FROM seen GROUP BY ALL ORDER BY task, outcome DESC, rollouts DESC",
                ),
                "spread": {name: _rows(cursor, _BINS.format(name=name)) for name in SPREAD},
                "staleness": _rows(
                    cursor,
                    f"SELECT task, staleness, count(*) AS rollouts, {means} FROM seen "
                    "WHERE outcome = 'trained' GROUP BY task, staleness ORDER BY task, staleness",
                ),
            }

        return self._ask(ROLLOUTS, ask, {"means": [], "spread": {}, "staleness": []})

    def evaluated(self, train_step: int | None = None) -> list[Row]:
        """An evaluation, by default the last; for each prompt the step, the mean score and an example."""
        query = (
            "SELECT prompt_hash::VARCHAR AS prompt_hash, any_value(train_step) AS train_step, "
            "any_value(task) AS task, any_value(prompt) AS prompt, avg(score) AS score, "
            "any_value(response) AS response, any_value(rollout_id) AS rollout_id FROM rollouts "
            "WHERE outcome = 'evaluated' AND train_step = coalesce(?, "
            "(SELECT max(train_step) FROM rollouts WHERE outcome = 'evaluated')) GROUP BY prompt_hash"
        )
        return self._ask(ROLLOUTS, lambda cursor, _: _rows(cursor, query, [train_step]), list[Row]())

    def timeline(self, start_s: float | None = None, end_s: float | None = None) -> dict[str, Any]:
        """The activities between two unix times, by default of the last two minutes; and when all were.

        ``busy`` has every stage: how often, and for how long it was going on at all. Stages with more than
        `MAX_SPANS` activities are in ``crowded`` instead of ``spans``: how many at once, in `NUM_BUCKETS`
        parts of the time.
        """

        def ask(cursor: "duckdb.DuckDBPyConnection", _: list[Part]) -> dict[str, Any]:
            whole = _rows(cursor, "SELECT min(start_s) AS start_s, max(end_s) AS end_s FROM spans")[0]
            end = end_s if end_s is not None else whole["end_s"]
            start = start_s if start_s is not None else max(whole["start_s"], end - 120)
            busy = _rows(cursor, _BUSY, [start, end, start, end])
            crowded = [row["stage"] for row in busy if row["times"] > MAX_SPANS]
            spans = _rows(
                cursor,
                f"SELECT {SPAN} FROM spans WHERE end_s >= ? AND start_s <= ? "
                "AND NOT list_contains(?, stage) ORDER BY start_s",
                [start, end, crowded],
            )
            answer = {"from_s": start, "to_s": end, "whole": whole, "busy": busy, "spans": spans}
            width = (end - start) / NUM_BUCKETS
            found = cursor.execute(_CROWD, {"from": start, "to": end, "width": width, "stages": crowded})
            counts: dict[str, list[float]] = {stage: [0.0] * NUM_BUCKETS for stage in crowded}
            for stage, bucket, count in found.fetchall():
                counts[stage][bucket] = count
            return {**answer, "crowded": counts}

        return self._ask(SPANS, ask, {"from_s": None, "spans": [], "busy": [], "crowded": {}})

    def spans_of(self, names: Sequence[str]) -> list[Row]:
        """The activities that are named after these rollouts or groups."""
        return self._lines([SPAN], "list_contains(?, name) ORDER BY start_s", list(names), kind=SPANS)

    def _lines(self, columns: Sequence[str], where: str, value: Any, kind: str = ROLLOUTS) -> list[Row]:
        query = f"SELECT {', '.join(columns)} FROM {kind} WHERE {where} LIMIT {MAX_ROWS}"
        return self._ask(kind, lambda cursor, _: _rows(cursor, query, [value]), [])

    def _ask(
        self, kind: str, ask: "Callable[[duckdb.DuckDBPyConnection, list[Part]], Answer]", nothing: Answer
    ) -> Answer:
        """The answer of `ask` with the view of this kind up to date; `nothing` where there is no file."""
        problem: Exception | None = None
        for _ in range(3):
            listed = list_parts(self._folder, kind, self.damaged)
            if not (parts := [part for part in listed if part.path not in self.damaged]):
                return nothing
            try:
                with self._database.cursor() as cursor:
                    cursor.execute(f"CREATE TEMP VIEW {kind} AS SELECT * FROM {_source(kind, parts)}")
                    return ask(cursor, parts)
            except duckdb.Error as error:
                # Files were put together, or removed, since they were listed; or some are damaged.
                problem = error
                self.damaged |= {part.path for part in parts if _is_damaged(part.path)}
        raise UnreadableError(f"the history cannot be read: {problem}")


class Database:
    """DuckDB in memory, and a folder for what does not fit. Safe for calls from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: tuple[duckdb.DuckDBPyConnection, tempfile.TemporaryDirectory[str]] | None = None

    def cursor(self) -> "duckdb.DuckDBPyConnection":
        """A cursor for one question, with views of its own."""
        with self._lock:
            if self._opened is None:
                # Not before the first question: most runs of a list are never looked into.
                spilled = tempfile.TemporaryDirectory(prefix="forebay-board-")
                bounds = {"memory_limit": MEMORY, "threads": str(NUM_THREADS)}
                opened = duckdb.connect(":memory:", config={**bounds, "temp_directory": spilled.name})
                self._opened = opened, spilled
            return self._opened[0].cursor()

    def close(self) -> None:
        """Free the memory."""
        with self._lock:
            if self._opened is not None:
                self._opened[0].close()
                self._opened[1].cleanup()
            self._opened = None


class UnreadableError(Exception):
    """A file of the history is damaged, or cannot be read; the message names it."""


ORDERS = {
    "newest": "time_s DESC",
    "oldest": "time_s",
    "best": "score DESC NULLS LAST, time_s DESC",
    "worst": "score NULLS LAST, time_s DESC",
    "longest": "num_tokens DESC",
    "shortest": "num_tokens",
    "stalest": "staleness DESC, time_s DESC",
}
_PLACE = "filename, file_row_number"
"""The place of a line: no other has the same."""
_READING = "union_by_name = true, filename = true, file_row_number = true, hive_partitioning = false"
"""A folder named ``task=math`` above a run is no column."""
EQUALS = ("task", "outcome", "reason", "status", "finish_reason", "group_id")
RANGES = ("train_step", "score", "num_tokens", "staleness", "generate_s")


def _is_damaged(path: Path) -> bool:
    import pyarrow.parquet as pq

    try:
        pq.read_metadata(path)
    except (OSError, ValueError) as error:
        return not isinstance(error, FileNotFoundError)
    return False


def _rows_with(parts: Sequence[Part], text: str) -> Rows:
    return {part.path: rows_with(part.path, _spellings(text)) for part in parts} if text else {}


def _source(kind: str, parts: Sequence[Part], rows: Rows | None = None) -> str:
    """All lines of these files that count; of one that `rows` names only the lines from first to last.

    Files with the same conditions are read together.
    """
    files: dict[str, list[str]] = {}
    for part in parts:
        # Activities that were undone did happen.
        counts = "true" if part.until is None or kind == SPANS else f"train_step <= {part.until}"
        if (ranges := (rows or {}).get(part.path)) is not None:
            between = [f"file_row_number BETWEEN {first} AND {last}" for first, last in ranges]
            counts += f" AND ({' OR '.join(between) or 'false'})"
        files.setdefault(counts, []).append(str(part.path).replace("'", "''"))
    selects = []
    for counts, paths in files.items():
        listed = ", ".join(f"'{path}'" for path in paths)
        selects.append(f"SELECT * FROM read_parquet([{listed}], {_READING}) WHERE {counts}")
    return f"({' UNION ALL BY NAME '.join(selects)})"


SPREAD = ("num_tokens", "generate_s", "solved")
_SOLVED = (
    "(SELECT prompt_hash, avg(score)::FLOAT AS solved FROM rollouts WHERE outcome <> 'reused' GROUP BY prompt_hash)"
)
"""``solved``: the mean score of all tries of a prompt, so how easy it is."""
_SEEN = f"""
CREATE TEMP TABLE seen AS
SELECT task, outcome, reason, staleness, num_tokens, generate_s, score::FLOAT AS score, solved
FROM rollouts JOIN {_SOLVED} USING (prompt_hash) WHERE outcome IN ('trained', 'dropped') AND ? IN ('', task)
"""
_BINS = f"""
WITH most AS (
  SELECT min({{name}}) AS low,
    greatest(quantile_cont({{name}}, 0.99) - min({{name}}), 1e-9) / {NUM_BINS} AS width FROM seen
)
SELECT outcome, least(floor(({{name}} - low) / width), {NUM_BINS})::INT AS bin, any_value(low) AS low,
  any_value(width) AS width, count(*) AS rollouts
FROM seen, most WHERE {{name}} IS NOT NULL GROUP BY outcome, bin ORDER BY outcome, bin
"""
_BUSY = """
WITH shown AS (
  SELECT stage, greatest(start_s, ?) AS first, least(end_s, ?) AS last FROM spans
  WHERE end_s >= ? AND start_s <= ?
), ordered AS (
  SELECT *, max(last) OVER (
    PARTITION BY stage ORDER BY first ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
  ) AS until FROM shown
)
SELECT stage, count(*) AS times, max(last - first) AS longest_s,
  sum(greatest(0, last - greatest(first, coalesce(until, first)))) AS busy_s
FROM ordered GROUP BY stage ORDER BY stage
"""
"""Seconds in which anything of a stage was going on: what overlaps counts once."""


_CROWD = f"""
WITH cut AS (
  SELECT stage, (greatest(start_s, $from) - $from) / $width AS first,
    (least(end_s, $to) - $from) / $width AS last
  FROM spans WHERE end_s >= $from AND start_s <= $to AND list_contains($stages, stage)
), parts AS (
  SELECT *, unnest(range(least(floor(first), {NUM_BUCKETS - 1})::INT, ceil(last)::INT)) AS bucket FROM cut
)
SELECT stage, bucket, round(sum(least(last, bucket + 1) - greatest(first, bucket)), 2)
FROM parts GROUP BY stage, bucket
"""
"""How many activities were going on at once, in the mean of each part of the time."""


def _newest_first(parts: list[Part]) -> Iterator[list[Part]]:
    """The files from the last on, in lots that grow: most questions end with the first."""
    end, size = len(parts), 2
    while end > 0:
        yield parts[max(0, end - size) : end]
        end, size = end - size, 4 * size


def _spellings(text: str) -> list[str]:
    """`text`, and as a conversation has it: in JSON, in earlier histories of ASCII only."""
    return [text, *(json.dumps(text, ensure_ascii=only)[1:-1] for only in (False, True))] if text else []


def _conditions(text: str, where: Mapping[str, str]) -> tuple[str, list[Any]]:
    conditions, values = ["true"], list[Any]()
    if text:
        # DuckDB's own search without regard to case takes twice the time of this.
        *plain, _ = searched = SEARCHED
        conditions.append(f"({' OR '.join(f'regexp_matches({name}, ?)' for name in searched)})")
        values += [f"(?i){re.escape(text)}"] * len(plain)
        values.append(f"(?i){'|'.join(map(re.escape, dict.fromkeys(_spellings(text)[1:])))}")
    for name, given in where.items():
        column, _, side = name.rpartition("_")
        if name in EQUALS:
            conditions.append(f"{name} = ?")
            values.append(given)
        elif name == "tool":
            conditions.append("contains(conversation, ?)")
            values.append(f'"name":"{given}"')
        elif side in ("min", "max") and column in RANGES:
            try:
                values.append(float(given))
            except ValueError:
                raise ValueError(f"{name} must be a number, got {given!r}") from None
            conditions.append(f"{column} {'>=' if side == 'min' else '<='} ?")
        else:
            known = ", ".join((*EQUALS, "tool", *(f"{column}_min" for column in RANGES)))
            raise ValueError(f"unknown condition {name!r}; known: {known}, and _max for _min")
    return " AND ".join(conditions), values


_ERRORS = ("error", "note")
"""Columns with what judges, engines and tools said when they failed: it may name the credential."""


def _rows(cursor: "duckdb.DuckDBPyConnection", query: str, values: Sequence[Any] = ()) -> list[Row]:
    result = cursor.execute(query, list(values))
    names = [column[0] for column in result.description or ()]
    rows = [dict(zip(names, line, strict=True)) for line in result.fetchall()]
    return [row | {name: hide_in_text(row[name]) for name in _ERRORS if row.get(name)} for row in rows]
