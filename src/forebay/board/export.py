"""A run, or several, as one HTML file that needs no server: the page with the answers it asks for first."""

import html
import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec

from forebay.board.server import STATIC, Board
from forebay.io.safe_files import write_text

MAX_READ = 40
"""Rollouts, groups and prompts of each run that can be opened in the report."""


def write_report(board: Board, path: Path) -> Path:
    """Write the report of all runs of `board` to `path`.

    It holds every number of the overview, the flow, what was dropped, and the newest rollouts.
    """
    answers: dict[str, Any] = {"runs?": board.runs()}
    for run in answers["runs?"]:
        _collect(board, run["id"], answers)
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    script, style = ((STATIC / name).read_text(encoding="utf-8") for name in ("board.js", "board.css"))
    script = script.replace("</script", "<\\/script")
    # Script and style are in the file itself: no other script runs, and nothing is fetched from elsewhere.
    allowed = b64encode(sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{allowed}'; style-src 'unsafe-inline'; img-src data:"
    # Nothing that a model wrote may end the element that holds it.
    data = msgspec.json.encode(answers).decode().replace("<", "\\u003c")
    head = f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}"><style>{style}</style>'
    body = f'<script type="application/json" id="answers">{data}</script><script type="module">{script}</script>'
    page = re.sub(r'<script type="module"[^>]*></script>|<link rel="stylesheet"[^>]*>', "", page)
    page = page.replace("</head>", f"{head}</head>").replace("</body>", f"{body}</body>")
    write_text(path, page)
    return path


def _collect(board: Board, run: str, answers: dict[str, Any]) -> None:
    def ask(what: str, **given: Any) -> Any:
        asked = {"run": run, **{name: str(value) for name, value in given.items()}}
        answers[f"{what}?{urlencode(sorted(asked.items()))}"] = found = board.answer(what, asked)
        return found

    found = {what: ask(what) for what in ("overview", "flow", "bias", "choices", "timeline", "count")}
    columns = [found["overview"]["metrics"].get(name, ()) for name in ("train_step", "eval/score")]
    if tried := [step for step, score in zip(*columns, strict=False) if score is not None]:
        ask("compare", other=run, step=tried[-1], other_step=tried[0])
    rows = ask("rollouts", order="newest", limit=MAX_READ)["rows"]
    for row in rows:
        ask("rollout", rollout_id=row["rollout_id"])
    for group_id in dict.fromkeys(row["group_id"] for row in rows):
        ask("group", group_id=group_id)
    for row in ask("prompts", order="hardest", limit=MAX_READ):
        ask("prompt", prompt_hash=row["prompt_hash"])
