"""Search for models over texts on this machine: SQLite's full-text index, ranked by BM25.

::

    folder of .txt, .md | .jsonl of {"text", "title"} | documents --once, in memory--> index
                                                                     query --> best documents' passages

It is not a vector search: words are matched by their stems.
"""

import json
import re
import sqlite3
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from forebay.aio.time_limits import CallThreads, OverrunError
from forebay.config import ConfigError, StrictModel
from forebay.tools.contract import ToolError, make_schema, only_argument

Document = tuple[str, str]
"""Title and text."""

_WORD = re.compile(r"\w+")
_MAX_WORDS = 32
"""The words of a query at most; a longer one is a text, not a query."""
_PASSAGE_WORDS = 48
"""The words of a snippet; SQLite gives at most 64."""


class Search:
    """Finds passages in a local corpus.

    Invariants: the best come first, by BM25 over title and text; a query matches documents with any of its
    words. The index is in memory and is built when the tool is made.

    >>> tool = Search([("Oslo", "Oslo is the capital of Norway."), ("Rome", "Rome is in Italy.")])
    >>> import asyncio
    >>> asyncio.run(tool.call({"query": "capital of Norway"}))
    '[1] Oslo: Oslo is the capital of Norway.'

    Args:
        corpus: as in `Arguments`, or (title, text) pairs.
        num_results: see `Arguments`.

    Raises:
        ConfigError: the corpus is missing, empty or malformed.
    """

    name = "search"
    schema = make_schema(name, "Search a collection of documents.", query="the words to look for")

    class Arguments(StrictModel, strict=True):
        """Keys of the tool ``search`` in a run file."""

        corpus: str | Sequence[Document]
        """A folder with ``.txt`` and ``.md`` files, or a ``.jsonl`` file with ``text`` and perhaps ``title``
        in each line."""
        num_results: int = Field(default=3, ge=1)
        """Passages in one answer."""

    def __init__(self, corpus: str | Sequence[Document], *, num_results: int = 3) -> None:
        self._num_results = num_results
        # Its own: a query is short, and must not wait for what fills asyncio's threads.
        self._thread = CallThreads(timeout_s=None, num_threads=1)
        # Built by this thread, then used by one at a time.
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        self._index.execute("CREATE VIRTUAL TABLE documents USING fts5(title, body, tokenize='porter')")
        documents = _read_corpus(Path(corpus)) if isinstance(corpus, str) else corpus
        with self._index:
            added = self._index.executemany("INSERT INTO documents VALUES (?, ?)", documents)
        if not added.rowcount:
            self.close()
            raise ConfigError(f"tool 'search': the corpus {corpus!r} holds no documents")

    async def call(self, arguments: dict[str, Any]) -> str:
        """Titles and passages of the best documents.

        Raises:
            ToolError: the query has no words, or takes too long.
        """
        query = only_argument(self.name, "query", arguments)
        words = _WORD.findall(query)[:_MAX_WORDS]
        if not words:
            raise ToolError(f"the query {query!r} has no words")
        # In quotes, since AND, NOT and NEAR are operators of FTS5.
        query = " OR ".join(f'"{word}"' for word in words)
        try:
            found = await self._thread.run(partial(self._find, query))
        except OverrunError as error:
            raise ToolError(str(error).partition(";")[0]) from None
        if not found:
            return "(nothing was found)"
        return "\n".join(f"[{place}] {title}: {text}" for place, (title, text) in enumerate(found, start=1))

    def close(self) -> None:
        """Free the index."""
        self._index.close()

    def _find(self, query: str) -> list[Document]:
        passage = f"snippet(documents, 1, '', '', '...', {_PASSAGE_WORDS})"
        return self._index.execute(
            f"SELECT title, {passage} FROM documents WHERE documents MATCH ? ORDER BY rank LIMIT ?",
            (query, self._num_results),
        ).fetchall()


def _read_corpus(path: Path) -> Iterator[Document]:
    if path.is_dir():
        for file in sorted(file for file in path.rglob("*") if file.suffix in (".txt", ".md")):
            yield str(file.relative_to(path)), file.read_text(encoding="utf-8")
    elif path.suffix == ".jsonl" and path.is_file():
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _read_line(line, f"{path}, line {number}")
    else:
        raise ConfigError(
            f"tool 'search': no corpus at {str(path)!r}; give a folder of .txt or .md files or a .jsonl file"
        )


def _read_line(line: str, place: str) -> Document:
    try:
        row = json.loads(line)
        return str(row.get("title", "")), str(row["text"])
    except (ValueError, KeyError, AttributeError):
        raise ConfigError(f'{place} is not of the form {{"text": ..., "title": ...}}') from None
