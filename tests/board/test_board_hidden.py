"""Credentials that the files of a run hold: none of them is in an answer of the board, or in its report."""

import asyncio
import json
import tomllib
from concurrent.futures import ThreadPoolExecutor

import pytest
from board_run import CheckedBoard, make_group, open_history, write_run

from forebay.board.export import write_report
from forebay.board.folder import hide_in_text, hide_secrets
from forebay.board.server import ANSWERS

HUSH = "hu5h-hu5h"
"""Planted in a different way in each place, and nowhere else."""
PLACES = {
    "run.toml": f"judge --api-key {HUSH}-run",
    "note": f"judge failed: 401 for http://judge/?apikey={HUSH}-note",
    "stall": f"POST https://me:{HUSH}-stall@grader:8000/v1 does not answer",
    "doing": f'{{"hf_tokens": "{HUSH}-doing"}}',
    "error": f"HTTPError: 403: Authorization: Bearer {HUSH}-error",
    "books": f"password = '{HUSH}-books, and more'",
    "span": f"ConnectionError: AWS_ACCESS_KEY_ID={HUSH}-span",
}


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("runs") / "planted", text="all passwords: open sesame")
    run_file = tomllib.loads((folder / "run.toml").read_text())
    assert run_file["api_key"]
    with (folder / "run.toml").open("a") as file:
        file.write(f'judge = {{ command = "{PLACES["run.toml"]}", apiKey = "{HUSH}-camel" }}\n')
    with (folder / "notes.jsonl").open("a") as file:
        file.write(json.dumps({"unix_time_s": 1.0, "kind": "error", "text": PLACES["note"], "train_step": 2}))
        file.write("\n")
    live = json.loads((folder / "live.json").read_text())
    # The name of a task is no name of a setting: its numbers stay.
    live["stages"] = {"env": 3}
    told = {"stage": "judge", "name": "math/8", "age_s": 1.0, "note": PLACES["doing"], "group": "math/8"}
    live |= {"stall": PLACES["stall"], "oldest": [{**told, "task": "math"}]}
    (folder / "live.json").write_text(json.dumps(live))
    with (folder / "ledger.jsonl").open("a") as file:
        failed = {"event": "retried", "group": "math/8", "task": "math", "time_s": 1.0}
        file.write(json.dumps({**failed, "reason": PLACES["books"]}) + "\n")

    async def write():
        history = open_history(folder)
        group = make_group(8)
        for state in group:
            state.error_msg = PLACES["error"]
        history.left([group], "dropped", reason="failed", train_step=6)
        span = (1.0, 2.0, "judge", "math/8", "math", "math/8", PLACES["span"])
        history._spans += [span, (5.0, 6.0, "judge", "math/8/1", "math", "math/8", PLACES["span"])]
        history.close()

    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, write()).result()
    board = CheckedBoard([folder.parent])
    yield board
    board.close()


def test_no_answer_has_a_credential_that_a_file_holds(board):
    row = board.answer("prompts", {"run": "planted"})[0]
    given = {
        "steps": {"first": "0", "last": "9"},
        "group": {"group_id": "math/8"},
        "rollout": {"rollout_id": "math/8/1"},
        "prompt": {"prompt_hash": row["prompt_hash"]},
        "timeline": {"start_s": "0", "end_s": "9"},
        "compare": {"other": "planted"},
    }
    said = {what: json.dumps(board.answer(what, {"run": "planted", **given.get(what, {})})) for what in ANSWERS}
    assert [what for what, text in said.items() if HUSH in text or "hush" in text] == []
    # What it stood in is told: the page says why a judge failed.
    assert "judge failed: 401 for http://judge/?apikey=(hidden)" in said["overview"]
    assert "https://(hidden)@grader:8000/v1 does not answer" in said["flow"]
    assert "HTTPError: 403: Authorization: (hidden)" in said["rollout"]
    assert "password = (hidden)" in said["group"]
    assert "ConnectionError: AWS_ACCESS_KEY_ID=(hidden)" in said["timeline"]
    assert json.loads(said["flow"])["stages"] == {"env": 3}
    # What a model wrote is as it is.
    assert "all passwords: open sesame" in said["rollouts"]


def test_the_report_has_none_either(board, tmp_path):
    page = write_report(board, tmp_path / "report.html").read_text(encoding="utf-8")
    assert HUSH not in page
    assert "hush" not in page
    assert page.count("(hidden)") > len(PLACES)


NAMES = """
apikey apiKey api_keys hf_tokens pwd db_pwd access_key_id accessKeyId hfToken AWS_SECRET_ACCESS_KEY auth
x-api-key passphrase dbPassword accesstoken secrets
"""


@pytest.mark.parametrize("name", NAMES.split())
def test_keys_that_name_a_credential(name):
    assert hide_secrets({"a": [{name: "hush"}]}) == {"a": [{name: "(hidden)"}]}
    spelled = f"{name}=hush!", f"--{name} hush", f'{{"{name}": "hu sh"}}', f'{{\\"{name}\\": \\"hush\\"}}'
    for text in spelled:
        assert "(hidden)" in hide_in_text(text)
        assert "sh" not in hide_in_text(text).replace(name, "")


CREDENTIALS = """
401: Incorrect API key provided: sk-proj-a1b2c3d4e5f6g7h8
api key: hush
got Bearer hush
pwd: hush
hf_abcdefghij1234567890 is not valid
for AKIAIOSFODNN7EXAMPLE
X-Auth-Token: hush
http://a:hush@b/, and eyJhbGciOiJI.eyJzdWI.x
https://hush@host/x
Authorization: Token hush
authorization=ApiKey hush
Authorization: Digest username="me", realm="a b", response="hush"
auth_tokens: 1hush
github_pat_11hush0123456789_a1b2c3d4
from gho_hush0123456789abcd
glpat-hush0123456789abcd and xoxb-1234567890-hush1234
"""


@pytest.mark.parametrize("text", CREDENTIALS.strip().splitlines())
def test_texts_that_hold_a_credential(text):
    hidden = hide_in_text(text)
    assert "(hidden)" in hidden
    assert not any(part in hidden for part in ("hush", "a1b2", "1234", "AKIA", "eyJ"))


HARMLESS = """
set sample.max_tokens = 64
--max-tokens 5 and 412 tokens
missing key: 'answer', KeyError: 'score'
unexpected token: }
monkey=1, the author=me, keyboard: us, bypass=yes
http://host:80/path?a=b
http://host?mail=me@home
max_tokens: 512, prompt_tokens: 1_000
max_tokens=None, {"max_tokens": null}
num_pass=3, num_keys: 4, --num-keys 4
hf-internal-testing/tiny-random-gpt2
"""


@pytest.mark.parametrize("text", HARMLESS.strip().splitlines())
def test_texts_that_hold_none_stay(text):
    assert hide_in_text(text) == text
    config = {"text": text, "max_tokens": 12, "keyboard": "us"}
    assert hide_secrets(config) == config


@pytest.mark.parametrize("part", ["-", "a", "key", "'\"", "sk-", "eyJ-", "--kex", " ", "a://", "keys "])
def test_long_texts_of_a_model_are_looked_through(part):
    """In steps that grew with the square of the length this would take minutes."""
    assert hide_in_text(part * 30_000) == part * 30_000
