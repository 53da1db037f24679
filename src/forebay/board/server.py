"""The board's server: answers about runs as JSON, changes as server-sent events, and the page itself.

::

    browser --GET /api/...--> one of `ANSWERS` --in a thread--> RunFolder, Rollouts --> JSON
            --GET /api/events--> what the run has written since, at once --> server-sent events
            --GET /---> static/ (built from web/)

It changes nothing and reads only the folders of runs. It answers only requests for an address of its own, so
that a page elsewhere cannot ask through a browser; away from loopback only with the token. A model's text
leaves it as JSON, never as markup, and the page's policy allows no script but its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
import os
import secrets
import socket
import sys
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO

import msgspec

from forebay.board.folder import Columns, RunFolder, find_runs
from forebay.board.rollouts import Database, Rollouts, UnreadableError
from forebay.extras import needed_by

with needed_by("forebay board"):
    import uvicorn
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
    from starlette.middleware.gzip import GZipMiddleware
    from starlette.requests import Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles

Values = dict[str, Any]
TOKENIZER = "tokenizer.json"
WALK_EVERY_S = 1.0
"""A list of all runs asks for each of them: the folders are not walked through for each."""


class Board:
    """The runs below some folders, and the answers about them."""

    def __init__(self, folders: list[Path]) -> None:
        self.folders, self.database = folders, Database()
        self.is_ending: Callable[[], bool] = bool
        """Whether the streams of changes are to end: a server waits for them."""
        self._lock, self._walk = threading.Lock(), threading.Lock()
        self._runs: dict[str, tuple[RunFolder, Rollouts]] = {}

    def close(self) -> None:
        """Free the memory of all runs."""
        self.database.close()
        self._runs.clear()

    def runs(self) -> list[Values]:
        """Every run that is there now, the one that was written last first."""
        found = [{**self.run(name)[0].facts(), "id": name, "config": None} for name in self._paths()]
        return sorted(found, key=lambda run: -(run["unix_time_s"] or 0))

    def run(self, name: str) -> tuple[RunFolder, Rollouts]:
        """The run of this name.

        Raises:
            KeyError: there is none.
        """
        path = self._paths()[name]
        with self._lock:
            if name not in self._runs or self._runs[name][0].folder != path:
                self._runs[name] = RunFolder(path), Rollouts(path, self.database)
            return self._runs[name]

    def _paths(self) -> dict[str, Path]:
        # One viewer walks, the others wait for what it finds.
        with self._walk:
            return _paths_at(self, round(time.monotonic() / WALK_EVERY_S))

    def answer(self, what: str, given: Mapping[str, str]) -> Any:
        """The answer to one question; `given` are the parameters of its address.

        Raises:
            KeyError: no such question or run.
            ValueError: a parameter is not as it should be.
        """
        if what == "runs":
            return self.runs()
        asked = {name: value for name, value in given.items() if name not in ("run", "token")}
        return ANSWERS[what](self, *self.run(given.get("run", "")), asked)


@lru_cache(maxsize=4)
def _paths_at(board: Board, moment: int) -> dict[str, Path]:
    return find_runs(board.folders)


def _overview(board: Board, run: RunFolder, rollouts: Rollouts, asked: Values) -> Values:
    facts = run.facts()
    if damaged := rollouts.damaged:
        names = ", ".join(sorted(f"{path.parent.name}/{path.name}" for path in list(damaged)))
        facts["problem"] = f"{facts['problem']} damaged, and left out: {names}".strip()
    return {
        "facts": facts,
        "notes": run.notes(),
        "metrics": _metrics(board, run, rollouts, asked),
        "names": list(run.metrics(first=sys.maxsize)),
        "live": run.live(),
    }


def _metrics(board: Board, run: RunFolder, rollouts: Rollouts, asked: Values) -> Columns:
    """The columns of ``names``, by commas: of the 90 of a run of days a page shows some 25."""
    return run.metrics(asked["names"].split(",") if asked.get("names") else None)


def _steps(board: Board, run: RunFolder, rollouts: Rollouts, asked: Values) -> Columns:
    """All numbers of the train steps from ``first`` to ``last``."""
    steps = run.metrics(("train_step",)).get("train_step", [])
    low, high = bisect_left(steps, float(asked["first"])), bisect_right(steps, float(asked["last"]))
    return {name: values[: high - low] for name, values in run.metrics(first=low).items()}


def _flow(board: Board, run: RunFolder, rollouts: Rollouts, asked: Values) -> Values:
    live = run.live()
    return live if "books" in live else {**live, "books": run.books()}


def _rollout(board: Board, run: RunFolder, rollouts: Rollouts, asked: Values) -> Values:
    found = rollouts.rollout(asked["rollout_id"])
    if not found:
        raise KeyError(f"no rollout {asked['rollout_id']!r} in the history of this run")
    last = found[-1]
    return {
        "lines": found,
        "pieces": pieces_of(run.folder, last["token_ids"]),
        "life": run.life(last["group_id"]),
        "spans": rollouts.spans_of([last["rollout_id"], last["group_id"]]),
    }


def pieces_of(folder: Path, token_ids: list[int]) -> list[str] | None:
    """The text that each token adds; None where the run has no tokenizer yet.

    Tokens that are parts of one character add nothing until the last of them.
    """
    if (found := _find_tokenizer(folder)) is None:
        return None
    from tokenizers.decoders import DecodeStream

    tokenizer, stream = _read_tokenizer(found, found.stat().st_mtime_ns), DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, token_id) or "" for token_id in token_ids]


def _find_tokenizer(folder: Path) -> Path | None:
    places = [folder / "model", folder / "warmup"]
    places += sorted(folder.glob("checkpoints/step_*/trainer/model"), reverse=True)
    return next((place / TOKENIZER for place in places if (place / TOKENIZER).is_file()), None)


# The time is in the key of the cache: a run may write the file anew.
@lru_cache(maxsize=4)
def _read_tokenizer(path: Path, changed_ns: int) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def _timeline(board: Board, run: RunFolder, rollouts: Rollouts, asked: Values) -> Values:
    given = {name: float(asked[name]) for name in ("start_s", "end_s") if asked.get(name)}
    return rollouts.timeline(**given)


def _compare(board: Board, run: RunFolder, rollouts: Rollouts, asked: Values) -> Values:
    here, there = (int(asked[name]) if asked.get(name) else None for name in ("step", "other_step"))
    return {"here": rollouts.evaluated(here), "there": board.run(asked["other"])[1].evaluated(there)}


def _paged(asked: Values) -> Values:
    return {**asked, **{name: int(asked[name]) for name in ("limit", "offset") if name in asked}}


Question = Callable[[Board, RunFolder, Rollouts, Values], Any]
ANSWERS: Mapping[str, Question] = {
    "overview": _overview,
    "metrics": _metrics,
    "steps": _steps,
    "flow": _flow,
    "rollouts": lambda board, run, rollouts, asked: rollouts.search(**_paged(asked)),
    "count": lambda board, run, rollouts, asked: rollouts.count(**asked),
    "choices": lambda board, run, rollouts, asked: rollouts.choices(),
    "group": lambda board, run, rollouts, asked: {
        "members": rollouts.group(asked["group_id"]),
        "life": run.life(asked["group_id"]),
    },
    "rollout": _rollout,
    "prompts": lambda board, run, rollouts, asked: rollouts.prompts(**_paged(asked)),
    "prompt": lambda board, run, rollouts, asked: rollouts.prompt(asked["prompt_hash"]),
    "timeline": _timeline,
    "bias": lambda board, run, rollouts, asked: rollouts.bias(**asked),
    "compare": _compare,
}


STATIC = Path(__file__).with_name("static")
WATCH_S = 0.35
"""Between two looks at the files of a run that is being looked at, and once more after a change: a step is on
the screen within a second."""
HEARTBEAT_S = 5.0
"""Also where nothing is written: a run that was killed is seen by that, and proxies close silent streams."""
COOKIE = "forebay_board"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")


class _Json(JSONResponse):
    def render(self, content: Any) -> bytes:
        # Ten times as fast as the standard library, and null for numbers that JSON does not have.
        return msgspec.json.encode(content)


def make_app(board: Board, *, token: str | None = None, hosts: tuple[str, ...] = LOOPBACK) -> Starlette:
    """The web application of `board`.

    Args:
        board: what it shows.
        token: without it nothing is answered; None: everyone at an address of `hosts` may look.
        hosts: names that a request may be for.
    """

    async def guard(request: Request, call_next: RequestResponseEndpoint) -> Response:
        # Refuses requests for other hosts and without the token; adds the headers of every answer.
        host = request.headers.get("host", "")
        name = host if host.endswith("]") else host.rsplit(":", 1)[0]
        if "*" not in hosts and name not in hosts:
            return PlainTextResponse(f"this board does not answer for {name!r}", status_code=421)
        given = request.query_params.get("token") or request.cookies.get(COOKIE) or ""
        if token is not None and not hmac.compare_digest(given.encode(), token.encode()):
            return PlainTextResponse("open the address with its ?token=...", status_code=403)
        response = await call_next(request)
        response.headers.update(HEADERS)
        if token is not None and "token" in request.query_params:
            response.set_cookie(COOKIE, token, httponly=True, samesite="strict")
        return response

    async def answer(request: Request) -> Response:
        what = request.path_params["what"]
        return _Json(await asyncio.to_thread(board.answer, what, dict(request.query_params)))

    async def refusal(request: Request, error: Exception) -> Response:
        status = next(status for kind, status in _STATUSES.items() if isinstance(error, kind))
        # Of a name that is in no table the key alone; of others a sentence.
        told = str(error.args[0])
        return _Json({"error": told if " " in told else f"no {told!r}"}, status_code=status)

    async def events(request: Request) -> Response:
        run, _ = await asyncio.to_thread(board.run, request.query_params.get("run", ""))
        since = float(request.query_params.get("since", -1))
        # A browser that connects again sends the id of the last event that it saw.
        seen = int(request.headers.get("last-event-id", sys.maxsize))
        return StreamingResponse(_changes(run, since, seen, board.is_ending), media_type="text/event-stream")

    routes = [
        Route("/api/events", events),
        Route("/api/{what}", answer),
        Mount("/", StaticFiles(directory=STATIC, html=True, check_dir=False)),
    ]
    # A higher level takes longer than the bytes that it saves on any network.
    packed = Middleware(GZipMiddleware, minimum_size=2000, compresslevel=1)
    guarded = Middleware(BaseHTTPMiddleware, dispatch=guard)
    refusals = dict.fromkeys(_STATUSES, refusal)
    return Starlette(routes=routes, middleware=[guarded, packed], exception_handlers=refusals)


_STATUSES: dict[Any, int] = {KeyError: 404, ValueError: 400, TypeError: 400, UnreadableError: 500}


async def _changes(
    run: RunFolder, since: float, seen: int = sys.maxsize, is_ending: Callable[[], bool] = bool
) -> AsyncIterator[bytes]:
    """New rows, notes and the live state, whenever the run has written something and every `HEARTBEAT_S`.

    Notes come from the one after the first `seen` on, at least those that are written from now on.
    """
    stamp: tuple[int, ...] = (0,)
    silent_s, num_notes = 0.0, min(seen, len(await asyncio.to_thread(run.notes, 0)))
    # All that there is, in a thread; what comes later is little.
    await asyncio.to_thread(run.metrics, ())
    while not is_ending():
        if (now := run.stamp()) != stamp or silent_s >= HEARTBEAT_S:
            has_rows, stamp, silent_s = now[0] != stamp[0], now, 0.0
            # Ten viewers of a run cost one look at it.
            moment = now, round(time.monotonic())
            change, since, num_notes = _change(run, moment, since, num_notes, has_rows)
            yield change
            # A run whose steps are short writes all the time: each event is sent to each viewer.
            await asyncio.sleep(WATCH_S)
        await asyncio.sleep(WATCH_S)
        silent_s += WATCH_S


@lru_cache(maxsize=8)
def _change(
    run: RunFolder, moment: tuple[Any, ...], since: float, num_notes: int, has_rows: bool
) -> tuple[bytes, float, int]:
    """An event with what is new at `moment`, its last step and the number of notes, which is its id.

    With ``replace`` the rows are all that there are: the run went back to a checkpoint before `since`.
    """
    steps = run.metrics(("train_step",)).get("train_step", [])
    newest = steps[-1] if steps else -1
    # An endless `since` is of a page that wants no rows.
    replace = newest < since < math.inf
    # The last step again: an evaluation adds to its row.
    first = 0 if replace else bisect_left(steps, since)
    changed = run.metrics(first=first) if has_rows and first < len(steps) else {}
    notes = run.notes(num_notes)
    change = {"metrics": changed, "replace": replace, "live": run.live(), "notes": notes}
    event = b"id: %d\ndata: %b\n\n" % (num_notes + len(notes), msgspec.json.encode(change))
    return event, newest if since < math.inf else since, num_notes + len(notes)


def serve(
    board: Board,
    *,
    host: str = "127.0.0.1",
    port: int = 7331,
    say: Callable[[str], None] = print,
    ends: TextIO | None = None,
) -> None:
    """Serve `board` until Ctrl-C, or until `ends` has nothing more to read; at the next free port if taken.

    With `ends` it is beside a run: where both want a core, the run gets more of it.

    Away from loopback a token is made, and the address that is said holds it.

    Raises:
        OSError: the address cannot be bound.
    """
    listening = _bind(host, port)
    is_local = host in LOOPBACK
    token = None if is_local else secrets.token_urlsafe(24)
    app = make_app(board, token=token, hosts=LOOPBACK if is_local else ("*",))
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    board.is_ending = lambda: server.should_exit
    if ends is not None:
        # Not before: the start takes as long as hundreds of answers.
        os.nice(5)

        def wait() -> None:
            ends.read()
            server.should_exit = True

        threading.Thread(target=wait, name="end", daemon=True).start()
    shown = f"[{host}]" if ":" in host else host
    say(f"board: http://{shown}:{listening.getsockname()[1]}/{'' if token is None else f'?token={token}'}")
    with contextlib.closing(board):
        server.run(sockets=[listening])


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # It listens before the address is said: a browser that comes at once waits for the server.
    for candidate in range(port, port + 19) if port else ():
        with contextlib.suppress(OSError):
            return socket.create_server((host, candidate), family=family)
    return socket.create_server((host, port + 19 if port else 0), family=family)
