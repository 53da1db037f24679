"""The board's server: answers about runs as JSON, changes as server-sent events, and the page itself.

::

    browser --GET /api/...--> one of `ANSWERS` --in a thread--> RunFolder, Rollouts --> JSON
            --GET /api/events--> what the run has written since, twice a second --> server-sent events
            --GET /---> static/ (built from web/)

It changes nothing and reads only the folders of runs. It answers only requests for an address of its own, so
that a page elsewhere cannot ask through a browser; away from loopback only with the token. A model's text
leaves it as JSON, never as markup, and the page's policy allows no script but its own.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from forebay.board.folder import RunFolder, find_runs
from forebay.board.rollouts import Rollouts, UnreadableError
from forebay.board.tokens import pieces_of
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
WALK_EVERY_S = 1.0
"""A list of all runs asks for each of them: the folders are not walked through for each."""


class Board:
    """The runs below some folders, and the answers about them."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders
        self._lock = threading.Lock()
        self._runs: dict[str, tuple[RunFolder, Rollouts]] = {}
        self._found: dict[str, Path] = {}
        self._walked_s = -math.inf

    def close(self) -> None:
        """Free the memory of all runs."""
        for _, rollouts in self._runs.values():
            rollouts.close()
        self._runs.clear()

    def runs(self) -> list[Values]:
        """Every run that is there now, the one that was written last first."""
        found = [{"id": name, **_summary(self.run(name)[0])} for name in self._paths()]
        return sorted(found, key=lambda run: -(run["unix_time_s"] or 0))

    def run(self, name: str) -> tuple[RunFolder, Rollouts]:
        """The run of this name.

        Raises:
            KeyError: there is none.
        """
        path = self._paths()[name]
        with self._lock:
            if name not in self._runs or self._runs[name][0].folder != path:
                self._runs[name] = RunFolder(path), Rollouts(path)
            return self._runs[name]

    def _paths(self) -> dict[str, Path]:
        with self._lock:
            if time.monotonic() - self._walked_s > WALK_EVERY_S:
                self._found, self._walked_s = find_runs(self._folders), time.monotonic()
            return self._found

    def answer(self, what: str, given: Mapping[str, str]) -> Any:
        """The answer to one question; `given` are the parameters of its address.

        Raises:
            KeyError: no such question or run.
            ValueError: a parameter is not as it should be.
        """
        question, asked = ANSWERS[what], dict(given)
        return question(self, *self.run(asked.pop("run", "")), asked)


def _summary(run: RunFolder) -> Values:
    facts = run.facts()
    return {name: facts[name] for name in ("title", "state", "steps", "train_step", "unix_time_s", "folder")}


def _overview(board: Board, run: RunFolder, rollouts: Rollouts, asked: Values) -> Values:
    facts = run.facts()
    if damaged := rollouts.damaged:
        names = ", ".join(sorted(path.name for path in damaged))
        facts["problem"] = f"{facts['problem']} damaged, and left out: {names}".strip()
    return {"facts": facts, "notes": run.notes(), "metrics": columns(run.metrics()), "live": run.live()}


def columns(rows: list[Values]) -> dict[str, list[Any]]:
    """Rows as columns: half the bytes, and as charts want them.

    >>> columns([{"a": 1.0}, {"a": 2.0, "b": 3.0}])
    {'a': [1.0, 2.0], 'b': [None, 3.0]}
    """
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


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


def _group(board: Board, run: RunFolder, rollouts: Rollouts, asked: Values) -> Values:
    return {"members": rollouts.group(asked["group_id"]), "life": run.life(asked["group_id"])}


def _timeline(board: Board, run: RunFolder, rollouts: Rollouts, asked: Values) -> Values:
    given = {name: float(asked[name]) for name in ("start_s", "end_s") if asked.get(name)}
    return rollouts.timeline(**given)


def _compare(board: Board, run: RunFolder, rollouts: Rollouts, asked: Values) -> Values:
    _, other = board.run(asked.get("other") or asked["run_id"])
    steps = [int(asked[name]) if asked.get(name) else None for name in ("step", "other_step")]
    step_a, ours = rollouts.evaluated(steps[0])
    step_b, theirs = other.evaluated(steps[1])
    both = [(ours[name], theirs[name]) for name in ours if name in theirs]
    return {
        "step": step_a,
        "other_step": step_b,
        "prompts": [
            {
                "prompt_hash": a["prompt_hash"],
                "task": a["task"],
                "prompt": a["prompt"],
                "score": a["score"],
                "other_score": b["score"],
                "response": a["response"],
                "other_response": b["response"],
            }
            for a, b in both
        ],
        "only_here": len(ours) - len(both),
        "only_there": len(theirs) - len(both),
    }


def _paged(asked: Values) -> Values:
    return {**asked, **{name: int(asked[name]) for name in ("limit", "offset") if name in asked}}


Question = Callable[[Board, RunFolder, Rollouts, Values], Any]
ANSWERS: Mapping[str, Question] = {
    "overview": _overview,
    "metrics": lambda board, run, rollouts, asked: columns(run.metrics()),
    "flow": _flow,
    "rollouts": lambda board, run, rollouts, asked: rollouts.search(**_paged(asked)),
    "count": lambda board, run, rollouts, asked: rollouts.count(**asked),
    "choices": lambda board, run, rollouts, asked: rollouts.choices(),
    "group": _group,
    "rollout": _rollout,
    "prompts": lambda board, run, rollouts, asked: rollouts.prompts(**_paged(asked)),
    "prompt": lambda board, run, rollouts, asked: rollouts.prompt(asked["prompt_hash"]),
    "timeline": _timeline,
    "bias": lambda board, run, rollouts, asked: rollouts.bias(),
    "compare": _compare,
}


STATIC = Path(__file__).with_name("static")
WATCH_S = 0.4
"""Between two looks at the files of a run that is being looked at."""
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


def make_app(board: Board, *, token: str | None = None, hosts: tuple[str, ...] = LOOPBACK) -> Starlette:
    """The web application of `board`.

    Args:
        board: what it shows.
        token: without it nothing is answered; None: everyone at an address of `hosts` may look.
        hosts: names that a request may be for.
    """

    async def list_runs(request: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(board.runs))

    async def answer(request: Request) -> Response:
        what = request.path_params["what"]
        try:
            found = await asyncio.to_thread(board.answer, what, dict(request.query_params))
        except KeyError as error:
            # Of a name that is in no table the key alone; of others a sentence.
            named = error.args[0] if " " in str(error.args[0]) else f"no {error.args[0]!r}"
            return JSONResponse({"error": named}, status_code=404)
        except (ValueError, TypeError) as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        except UnreadableError as error:
            return JSONResponse({"error": str(error)}, status_code=500)
        return JSONResponse(found)

    async def events(request: Request) -> Response:
        try:
            run, _ = await asyncio.to_thread(board.run, request.query_params.get("run", ""))
        except KeyError as error:
            return JSONResponse({"error": f"there is no run {error.args[0]!r}"}, status_code=404)
        since = float(request.query_params.get("since", -1))
        return StreamingResponse(_changes(run, since), media_type="text/event-stream")

    routes = [
        Route("/api/runs", list_runs),
        Route("/api/events", events),
        Route("/api/{what}", answer),
        Mount("/", StaticFiles(directory=STATIC, html=True, check_dir=False)),
    ]
    guard = Middleware(_Guard, token=token, hosts=hosts)
    return Starlette(routes=routes, middleware=[guard, Middleware(GZipMiddleware, minimum_size=2000)])


class _Guard(BaseHTTPMiddleware):
    """Refuses requests for other hosts and without the token; adds the headers of every answer."""

    def __init__(self, app: Any, token: str | None, hosts: tuple[str, ...]) -> None:
        super().__init__(app)
        self._token, self._hosts = token, hosts

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        host = request.headers.get("host", "")
        name = host if host.endswith("]") else host.rsplit(":", 1)[0]
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("the board is read-only", status_code=405)
        if "*" not in self._hosts and name not in self._hosts:
            return PlainTextResponse(f"this board does not answer for {name!r}", status_code=421)
        given = request.query_params.get("token") or request.cookies.get(COOKIE) or ""
        if self._token is not None and not hmac.compare_digest(given.encode(), self._token.encode()):
            return PlainTextResponse("open the address with its ?token=...", status_code=403)
        response = await call_next(request)
        response.headers.update(HEADERS)
        if self._token is not None and "token" in request.query_params:
            response.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")
        return response


async def _changes(run: RunFolder, since: float) -> AsyncIterator[bytes]:
    """New rows, notes and the live state, whenever the run has written something and every `HEARTBEAT_S`.

    With ``replace`` the rows are all that there are: the run went back to a checkpoint before `since`.
    """
    stamp: tuple[int, ...] = ()
    told: list[Values] = []
    silent_s, num_notes = 0.0, len(await asyncio.to_thread(run.notes, 0))
    while True:
        if (now := run.stamp()) != stamp or silent_s >= HEARTBEAT_S:
            stamp, silent_s = now, 0.0
            rows = await asyncio.to_thread(run.metrics)
            newest = rows[-1].get("train_step", 0) if rows else -1
            # An endless `since` is of a page that wants no rows.
            replace = newest < since < math.inf
            # The last step again: an evaluation adds to its row.
            changed = rows if replace else [row for row in rows if row.get("train_step", 0) >= since]
            if changed == told and not replace:
                changed = []
            else:
                told, since = rows[-1:], newest
            notes = run.notes(num_notes)
            num_notes += len(notes)
            change = {"metrics": columns(changed), "replace": replace, "live": run.live(), "notes": notes}
            yield f"data: {json.dumps(change)}\n\n".encode()
        await asyncio.sleep(WATCH_S)
        silent_s += WATCH_S


def serve(
    board: Board,
    *,
    host: str = "127.0.0.1",
    port: int = 7331,
    say: Callable[[str], None] = print,
    ends: TextIO | None = None,
) -> None:
    """Serve `board` until Ctrl-C, or until `ends` has nothing more to read; at the next free port if taken.

    Away from loopback a token is made, and the address that is said holds it.

    Raises:
        OSError: the address cannot be bound.
    """
    listening = _bind(host, port)
    is_local = host in LOOPBACK
    token = None if is_local else secrets.token_urlsafe(24)
    app = make_app(board, token=token, hosts=LOOPBACK if is_local else ("*",))
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    if ends is not None:

        def wait() -> None:
            ends.read()
            server.should_exit = True

        threading.Thread(target=wait, name="end", daemon=True).start()
    shown = f"[{host}]" if ":" in host else host
    say(f"board: http://{shown}:{listening.getsockname()[1]}/{'' if token is None else f'?token={token}'}")
    try:
        server.run(sockets=[listening])
    finally:
        board.close()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in range(port, port + 20) if port else [0]:
        listening = socket.socket(family)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, candidate))
        except OSError:
            listening.close()
            if candidate == port + 19 or not port:
                raise
            continue
        # Before the address is said: a browser that comes at once waits for the server.
        listening.listen()
        return listening
    raise AssertionError("not reached")
