"""The board's answers against what was written; requests that it refuses; folders that are damaged."""

import asyncio
import base64
import hashlib
import json
import math
import socket
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import pytest
from board_run import ANSWERS as SCHEMA
from board_run import HOSTILE, CheckedBoard, conforms, make_group, write_run
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from forebay.board import rollouts as rollouts_module
from forebay.board import server
from forebay.board.export import write_report
from forebay.board.folder import MAX_NOTES, RunFolder, hide_secrets
from forebay.board.rollouts import Database, Rollouts
from forebay.board.server import ANSWERS, POLICY, Board, make_app
from forebay.config import ConfigError
from forebay.metrics import JsonlSink
from forebay.runs.record import history as record
from forebay.runs.record.grams import rows_with
from forebay.runs.record.history import History, list_parts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "planted")


@pytest.fixture(scope="module")
def client(folder):
    board = CheckedBoard([folder.parent])
    with TestClient(make_app(board), base_url="http://localhost:7331") as client:
        yield client
    board.close()


def ask(client, what, **given):
    response = client.get(f"/api/{what}?{urlencode({'run': 'planted', **given})}")
    assert response.status_code == 200, response.text
    return response.json()


def test_a_run_is_found_and_its_overview_told(client):
    (run,) = client.get("/api/runs").json()
    assert (run["id"], run["state"], run["train_step"], run["steps"]) == ("planted", "finished", 6, 6)
    overview = ask(client, "overview")
    assert overview["metrics"]["train_step"] == [1, 2, 3, 4, 5, 6]
    assert overview["metrics"]["reward"][-1] == 1.0
    assert overview["notes"][0]["text"] == "look: " + HOSTILE
    assert ask(client, "flow")["books"]["math"]["dropped"] == {"expired": 2}


def test_every_answer_has_a_type_on_the_page_and_nothing_else_passes_for_it(client):
    questions = json.loads(SCHEMA.read_text())["definitions"]["Answers"]["properties"]
    assert set(questions) == {*ANSWERS, "runs", "events"}
    overview = ask(client, "overview")
    without = {name: value for name, value in overview.items() if name != "live"}
    for other in (without, {**overview, "names": None}, {**overview, "more": 1}):
        with pytest.raises(ValueError, match=r"overview: \$"):
            conforms("overview", other)


def test_credentials_never_reach_the_page(client):
    assert "hush" not in json.dumps(ask(client, "overview"))


def test_values_below_some_keys_and_after_options_are_hidden():
    config = {
        "env": {"A": "hush", "deeper": {"b": ["hush", 1234]}},
        "headers": ["X: hush"],
        "judge": {"environment": {"C": "hush"}, "HF_AUTH": "hush", "db_pass": "hush"},
        "arguments": ["--api-key", "hush", "--port", "80", "--hf-token=hush", "HF_TOKEN=hush"],
        "command": "serve --api-key hush --max-tokens 5 http://host/?token=hush",
        "environment": "calculator",
    }
    hidden = json.dumps(hide_secrets(config))
    assert "hush" not in hidden
    assert "1234" not in hidden
    for kept in ('"--port", "80"', "--max-tokens 5 http://host/", "calculator"):
        assert kept in hidden


def test_a_file_that_is_rewritten_twice_between_two_looks_is_read_anew(tmp_path):
    """File systems give the number of a deleted file to the next one."""
    sink, run = JsonlSink(tmp_path / "metrics.jsonl"), RunFolder(tmp_path)
    for step in range(1, 12):
        sink.log(step, {"reward": step})
    run.metrics()
    inode = (tmp_path / "metrics.jsonl").stat().st_ino
    for step in range(2, 9):
        sink.log(step, {"eval/score": step})
        assert (tmp_path / "metrics.jsonl").stat().st_ino != inode, "it is not held"
    assert run.metrics()["eval/score"][1:8] == list(range(2, 9))
    sink.close()


@pytest.fixture
def live(tmp_path, monkeypatch):
    """What the next events of a run say, and a sink of its metrics at any time."""
    monkeypatch.setattr(server, "WATCH_S", 0.01)
    monkeypatch.setattr(server, "HEARTBEAT_S", 0.05)
    (tmp_path / "live.json").write_text('{"state": "running", "unix_time_s": 0}')
    run = RunFolder(tmp_path)

    def follow(since, *seen):
        stream = server._changes(run, since, *seen)

        async def said(wanted):
            while True:
                id_line, _, data = (await anext(stream)).partition(b"\ndata: ")
                change = json.loads(data)
                # The notes of some tests are less than those of a run.
                conforms("events", {**change, "notes": []})
                if change[wanted]:
                    return change | {"id": int(id_line.removeprefix(b"id: "))}

        return said

    return follow, lambda **resumed: JsonlSink(tmp_path / "metrics.jsonl", **resumed)


async def test_an_evaluation_that_joins_its_row_reaches_an_open_page(live):
    follow, open_sink = live
    sink = open_sink()
    sink.log(1, {"reward": 0.5})
    sink.log(2, {"reward": 0.6})
    said = follow(2)
    assert (await said("metrics"))["metrics"]["train_step"] == [2]
    sink.log(2, {"eval/score": 0.25})
    assert (await said("metrics"))["metrics"]["eval/score"] == [0.25]
    sink.log(3, {"reward": 0.7})
    change = await said("metrics")
    assert change["metrics"]["train_step"] == [2, 3]
    assert not change["replace"]
    sink.close()


async def test_steps_that_were_undone_leave_an_open_page_and_a_killed_run_is_lost(live):
    follow, open_sink = live
    sink = open_sink()
    for step in range(1, 5):
        sink.log(step, {"reward": 0.5})
    said, every_row = follow(4), follow(math.inf)
    await said("metrics")
    assert not (await every_row("live"))["metrics"]
    sink.close()
    open_sink(resume_step=2).close()
    change = await said("replace")
    assert change["metrics"]["train_step"] == [1, 2]
    # Nothing is written any more: the state comes all the same.
    change = await said("live")
    assert (change["live"]["state"], change["metrics"]) == ("lost", {})


async def test_ten_viewers_of_a_run_cost_one_look_at_it(live, monkeypatch):
    follow, open_sink = live
    monkeypatch.setattr(server, "HEARTBEAT_S", 60.0)
    looks, look = [], RunFolder.live
    monkeypatch.setattr(RunFolder, "live", lambda run: (looks.append(run), look(run))[1])
    sink = open_sink()
    sink.log(1, {"reward": 0.5})
    viewers = [follow(1) for _ in range(10)]
    told = [await said("metrics") for said in viewers]
    assert told == told[:1] * 10
    # A second may end among them.
    assert len(looks) <= 3
    sink.close()


async def test_notes_beyond_those_that_a_page_begins_with_are_told(live, tmp_path):
    follow, _ = live
    line = '{"text": "old"}\n' * (MAX_NOTES + 10)
    (tmp_path / "notes.jsonl").write_text(line)
    said = follow(0)
    await said("live")
    (tmp_path / "notes.jsonl").write_text(line + '{"text": "new"}\n')
    change = await said("notes")
    assert change["notes"] == [{"text": "new"}]
    # The page was away meanwhile.
    (tmp_path / "notes.jsonl").write_text(line + '{"text": "new"}\n{"text": "missed"}\n')
    again = await follow(0, change["id"])("notes")
    assert (again["notes"], again["id"]) == ([{"text": "missed"}], change["id"] + 1)


async def test_a_browser_that_connects_again_says_what_it_saw(folder, monkeypatch):
    begun = []
    monkeypatch.setattr(server, "_changes", lambda *given: begun.append(given[1:3]) or iter([b"data: {}\n\n"]))
    board = Board([folder.parent])
    with TestClient(make_app(board), base_url="http://localhost:7331") as client:
        for headers in ({}, {"Last-Event-ID": "3"}):
            client.get("/api/events?run=planted&since=2", headers=headers)
    board.close()
    assert begun == [(2.0, sys.maxsize), (2.0, 3)]


def test_a_run_that_nobody_asked_about_has_no_database(folder):
    board = Board([folder.parent])
    board.runs()
    _, rollouts = board.run("planted")
    assert board.database._opened is None
    assert rollouts.count()["rollouts"]
    assert _setting(board, "memory_limit") == "95.3 MiB"
    used = Path(_setting(board, "temp_directory"))
    assert used.is_dir()
    board.close()
    assert not used.exists()


def _setting(board, name):
    return board.database.cursor().execute(f"SELECT current_setting('{name}')").fetchone()[0]


def test_all_runs_share_one_database_and_its_bound_on_memory(tmp_path, monkeypatch):
    opened, connect = [], rollouts_module.duckdb.connect
    monkeypatch.setattr(rollouts_module.duckdb, "connect", lambda *a, **k: (opened.append(k), connect(*a, **k))[1])
    for number in range(1, 9):
        write_run(tmp_path / f"run_{number}", steps=number)
    board = Board([tmp_path])
    runs = [board.run(f"run_{number}")[1] for number in range(1, 9)]
    # In turns, and several at once: each has the lines of its own run.
    asked = [*runs, *reversed(runs)] * 4
    with ThreadPoolExecutor(8) as threads:
        counts = list(threads.map(lambda run: run.count(outcome="trained")["rollouts"], asked))
    assert counts == [4 * number for number in [*range(1, 9), *range(8, 0, -1)] * 4]
    assert [given["config"]["memory_limit"] for given in opened] == [rollouts_module.MEMORY]
    board.close()


def test_rollouts_are_found_by_what_is_known_of_them(client):
    assert ask(client, "count")["rollouts"] == 6 * 2 * 2 + 2 * 2 + 2 * 4 * 2
    assert ask(client, "count", outcome="dropped", reason="expired")["rollouts"] == 4
    assert ask(client, "count", train_step_min=2, train_step_max=3, outcome="trained")["rollouts"] == 8
    assert ask(client, "count", score_min=0.99)["rollouts"] == 2 + 2 + 4
    rows = ask(client, "rollouts", text="ANSWER 1 TO 7", limit=10)["rows"]
    assert [row["rollout_id"] for row in rows] == ["math/7/1"]
    first = ask(client, "rollouts", limit=5, outcome="trained", order="oldest")
    second = ask(client, "rollouts", limit=5, offset=5, outcome="trained", order="oldest")
    ids = [row["rollout_id"] for row in first["rows"] + second["rows"]]
    assert first["more"]
    assert len(set(ids)) == 10


@pytest.mark.parametrize("order", rollouts_module.ORDERS)
def test_pages_hold_every_rollout_once_also_where_all_are_equal(equal_runs, order):
    pages = [equal_runs.search(order=order, limit=7, offset=start)["rows"] for start in range(0, 60, 7)]
    ids = [row["rollout_id"] for page in pages for row in page]
    assert len(ids) == len(set(ids)) == 60


@pytest.fixture(scope="module")
def database():
    database = Database()
    yield database
    database.close()


@pytest.fixture(scope="module")
def equal_runs(tmp_path_factory, database):
    """Sixty rollouts that left at one moment, in six files below a folder that is named like a column."""
    folder = tmp_path_factory.mktemp("runs") / "task=other" / "run"

    async def write():
        history = History(folder, limit_bytes=10**9)
        for number in range(30):
            history.left([make_group(number, score=0.0)], "trained", train_step=1)
            if number % 5 == 4:
                history._flush()
        history.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record.time, "time", lambda: 1000.0)
        asyncio.run(write())
    return Rollouts(folder, database)


def test_a_folder_named_like_a_column_is_no_column(equal_runs):
    assert {row["task"] for row in equal_runs.search()["rows"]} == {"math"}


def test_frequent_texts_are_counted_up_to_a_bound(client, monkeypatch):
    monkeypatch.setattr(rollouts_module, "MAX_COUNTED", 7)
    assert ask(client, "count", text="answer")["rollouts"] == 7
    assert ask(client, "count", text="answer 1 to 8")["rollouts"] == 1
    # Only texts cost anything.
    assert ask(client, "count")["rollouts"] == 44


def test_steps_can_be_held_against_the_score_of_their_prompts(client):
    through = {row["prompt_hash"]: row for row in ask(client, "prompts")}
    every = ask(client, "rollouts", limit=500)["rows"]
    at_two = {"train_step_min": 2, "train_step_max": 2, "outcome": "trained"}
    rows = ask(client, "rollouts", **at_two, order="worst")["rows"]
    assert [row["score"] for row in rows] == sorted(row["score"] for row in rows)
    expected = []
    for row in rows:
        tries = [one for one in every if one["prompt_hash"] == row["prompt_hash"] and one["train_step"] != 2]
        expected.append(sum(one["score"] for one in tries) / len(tries))
    found = ask(client, "count", **at_two)
    assert found["solved"] == pytest.approx(sum(expected) / len(expected))
    assert found["solved"] != pytest.approx(sum(through[row["prompt_hash"]]["score"] for row in rows) / len(rows))
    # Nothing is known of prompts that no other step tried.
    assert ask(client, "count", train_step_min=0, train_step_max=6)["solved"] is None
    best = [row["best"] for row in through.values()]
    assert {row["never"] for row in through.values()} == {sum(score <= 0 for score in best)}
    assert {row["prompts"] for row in through.values()} == {len(best)}


def test_one_rollout_comes_with_tokens_numbers_and_life(client):
    found = ask(client, "rollout", rollout_id="math/8/1")
    (line,) = found["lines"]
    assert line["logprobs"] == pytest.approx([-0.1, -0.5, -2.0])
    assert line["trainer_logprobs"] == pytest.approx([-0.5] * 3)
    assert line["model_steps"] == [8, 8, 9]
    assert [event["event"] for event in found["life"]] == ["produced", "trained"]
    group = ask(client, "group", group_id="math/8")
    assert [row["member"] for row in group["members"]] == [0, 1]


async def test_images_are_beside_the_conversation_and_once_a_group_in_the_file(tmp_path, database):
    pictures = np.random.default_rng(0).bytes(200_000), b"small"
    group = make_group(1, size=8)
    shown = np.random.default_rng(1).bytes(100_000)
    for state in group:
        # The last one's reply was taken off.
        state.mm_info = {"images": list(pictures), "reply_images": [[1, b"first"], [2, shown], [3, b"off"]]}
    history = History(tmp_path, limit_bytes=10**9)
    history.left([group, make_group(2, text="no image")], "trained", train_step=1)
    history.close()
    rollouts = Rollouts(tmp_path, database)
    (whole,), members = rollouts.rollout(group[5].rollout_id), rollouts.group(group[0].group_id)
    for row in (whole, *members):
        for name, expected in (("images", pictures), ("reply_images", (b"first", shown))):
            urls = [url.removeprefix("data:image/png;base64,") for url in row[name].split(" ")]
            assert tuple(base64.b64decode(url) for url in urls) == expected
    assert len(members) == 8
    assert len(whole["token_ids"]) == 3
    assert "token_ids" not in members[0]
    assert [row["images"] + row["reply_images"] for row in rollouts.group("math/2")] == ["", ""]
    (part,) = list_parts(tmp_path, "rollouts")
    assert part.path.stat().st_size < 420_000


def test_prompts_bias_timeline_and_comparison(client):
    prompts = ask(client, "prompts", order="often")
    assert sum(row["rollouts"] for row in prompts) == ask(client, "count")["rollouts"]
    through = ask(client, "prompt", prompt_hash=prompts[0]["prompt_hash"])
    assert len(through) == prompts[0]["rollouts"]
    means = {row["outcome"]: row for row in ask(client, "bias")["means"]}
    assert (means["trained"]["rollouts"], means["dropped"]["rollouts"]) == (24, 4)
    assert ask(client, "steps", first=2, last=4)["train_step"] == [2, 3, 4]
    timeline = ask(client, "timeline")
    assert [span["name"] for span in timeline["spans"]] == [f"step {step}" for step in range(1, 7)]
    assert timeline["busy"] == [
        {"stage": "train", "times": 6, "longest_s": pytest.approx(0.5), "busy_s": pytest.approx(3.0)}
    ]
    compared = ask(client, "compare", other="planted", step=6, other_step=0)
    assert {(row["train_step"], row["score"]) for row in compared["here"]} == {(6, 0.5)}
    assert {(row["train_step"], row["score"]) for row in compared["there"]} == {(0, 0.0)}
    last = ask(client, "compare", other="planted")
    assert {row["train_step"] for row in last["here"]} == {6}


def test_every_question_has_an_answer_for_a_run_without_a_history(tmp_path):
    (tmp_path / "run.toml").write_text('name = "x"\nsteps = 3\n')
    board = CheckedBoard([tmp_path])
    needed = {
        "group": {"group_id": "a"},
        "prompt": {"prompt_hash": "1"},
        "compare": {"other": tmp_path.name},
        "steps": {"first": 1, "last": 2},
    }
    for what in ANSWERS:
        asked = {"run": tmp_path.name, **needed.get(what, {})}
        if what == "rollout":
            with pytest.raises(KeyError, match="no rollout 'a'"):
                board.answer(what, {**asked, "rollout_id": "a"})
        else:
            board.answer(what, asked)
    board.close()


letters = st.sampled_from("aAbB %_\\'\"().*+?[]{}^$|\n\u00e4\u00c4\u00df")
texts = st.text(letters, max_size=6) | st.text(st.sampled_from("aAbB\u00e4\u00c4"), max_size=9)


@given(texts, st.lists(st.text(letters, max_size=20) | texts, min_size=1, max_size=6), st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_text_is_found_wherever_it_is_and_nowhere_else(tmp_path_factory, database, wanted, responses, is_indexed):
    folder = tmp_path_factory.mktemp("run")

    async def write():
        history = History(folder, limit_bytes=10**9)
        for number, text in enumerate([*responses, wanted]):
            group = make_group(number, size=1, text=text)
            group[0].message = []
            history.left([group], "trained", train_step=number)
            history._flush()
        history.close()

    with pytest.MonkeyPatch.context() as patch:
        # A row group for each line, and an index of the file that they are put into.
        patch.setattr(record, "TEXT_BYTES", 0)
        patch.setattr(record, "LEAST_BYTES", 0 if is_indexed else 10**9)
        asyncio.run(write())
    (part,) = list_parts(folder, "rollouts")
    assert part.path.with_suffix(".grams").exists() == is_indexed
    rollouts = Rollouts(folder, database)
    found = {row["group_id"] for row in rollouts.search(text=wanted)["rows"]}
    count = rollouts.count(text=wanted)["rollouts"]
    assert count == len(found)
    assert found == {
        f"math/{number}" for number, text in enumerate([*responses, wanted]) if wanted.lower() in text.lower()
    }
    rows = rows_with(part.path, ["nowhere"])
    assert (rows == []) == is_indexed


@pytest.mark.parametrize("text", ["Gr\u00f6\u00dfe", "\u6570\u5b57", 'say "no"', "C:\\n"])
async def test_a_text_of_any_script_is_found_in_a_conversation(tmp_path, database, text):
    history = History(tmp_path, limit_bytes=10**9)
    for step, content in enumerate([f"so: {text}.", "else\n"]):
        group = make_group(step, size=1)
        group[0].extra_fields["conversation"] = [{"role": "assistant", "content": content}]
        history.left([group], "trained", train_step=step)
    history.close()
    rollouts = Rollouts(tmp_path, database)
    assert [row["group_id"] for row in rollouts.search(text=text)["rows"]] == ["math/0"]


async def test_lines_that_were_undone_do_not_count(tmp_path, database):
    history = History(tmp_path, limit_bytes=10**9)
    for step in (1, 2, 3):
        history.left([make_group(step, size=1)], "trained", train_step=step)
    history.close()
    history = History(tmp_path, limit_bytes=10**9, resumed_from=1)
    history.left([make_group(20, size=1)], "trained", train_step=2)
    history.close()
    rollouts = Rollouts(tmp_path, database)
    assert [row["group_id"] for row in rollouts.search(order="oldest")["rows"]] == ["math/1", "math/20"]


@pytest.mark.parametrize(
    ("address", "status", "says"),
    [
        ("/api/overview?run=../../etc", 404, "no '../../etc'"),
        ("/api/nothing?run=planted", 404, "no 'nothing'"),
        ("/api/rollouts?run=planted&score_min=much", 400, "score_min must be a number, got 'much'"),
        ("/api/rollouts?run=planted&order=score;DROP", 400, "order must be one of"),
        ("/api/rollouts?run=planted&1=1", 400, "unknown condition '1'"),
        ("/api/prompt?run=planted&prompt_hash=x", 400, "a prompt's number is expected"),
        ("/api/rollout?run=planted&rollout_id=zz", 404, "no rollout 'zz'"),
        ("/api/rollout?run=planted", 404, "rollout_id"),
    ],
)
def test_questions_that_do_not_fit_are_one_sentence(client, address, status, says):
    response = client.get(address)
    assert response.status_code == status
    assert says in response.json()["error"]


def test_only_the_page_itself_may_ask(client, folder):
    assert client.get("/api/runs", headers={"host": "evil.example"}).status_code == 421
    assert client.post("/api/runs").status_code == 405
    page = client.get("/api/runs")
    assert page.headers["content-security-policy"] == POLICY
    assert page.headers["content-type"] == "application/json"
    assert "script-src 'self';" in POLICY
    board = Board([folder])
    with TestClient(make_app(board, token="secret", hosts=("*",)), base_url="http://10.0.0.7:7331") as other:
        assert other.get("/api/runs").status_code == 403
        assert other.get("/api/runs?token=wrong").status_code == 403
        assert other.get("/api/runs?token=secret").status_code == 200
        # Nor is it taken for a condition of the question.
        assert other.get("/api/bias?run=planted&token=secret").status_code == 200
        # The cookie stands for the token from now on.
        assert other.get("/api/runs").status_code == 200
    board.close()


def test_the_page_is_there(client):
    page = client.get("/")
    assert page.status_code == 200
    assert 'src="./board.js"' in page.text
    assert client.get("/board.js").status_code == 200


def test_a_report_holds_its_answers_and_no_markup_of_a_model(tmp_path):
    folder = write_run(tmp_path / "hostile", text=HOSTILE)
    board = Board([folder])
    page = write_report(board, tmp_path / "report.html").read_text(encoding="utf-8")
    board.close()
    assert "<script>alert(1)" not in page
    assert "<img src=x" not in page
    start = page.index('id="answers">') + len('id="answers">')
    answers = json.loads(page[start : page.index("</script>", start)])
    assert answers["rollouts?limit=40&order=newest&run=hostile"]["rows"][-1]["response"] == HOSTILE
    script = page[page.index('<script type="module">') + len('<script type="module">') :]
    allowed = base64.b64encode(hashlib.sha256(script[: script.index("</script>")].encode()).digest()).decode()
    assert f"default-src 'none'; script-src 'sha256-{allowed}';" in page.replace("&#x27;", "'")


def test_damage_is_told_and_the_rest_is_shown(tmp_path):
    folder = write_run(tmp_path / "damaged")
    (folder / "live.json").write_text("{")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('garbage\n{"train_step": 7, "unix')
    part = list_parts(folder, "rollouts")[0].path
    part.write_bytes(part.read_bytes()[:100])
    board = Board([folder])
    with TestClient(make_app(board), base_url="http://localhost") as client:
        overview = client.get("/api/overview?run=damaged").json()
        assert overview["metrics"]["train_step"] == [1, 2, 3, 4, 5, 6]
        # The only file of rollouts: there is none left; the overview names it.
        assert client.get("/api/rollouts?run=damaged").json() == {"rows": [], "more": False}
        assert part.name in client.get("/api/overview?run=damaged").json()["facts"]["problem"]
        assert client.get("/api/timeline?run=damaged").status_code == 200
        (folder / "run.toml").write_text("name = [")
        assert "run.toml cannot be read" in client.get("/api/overview?run=damaged").json()["facts"]["problem"]
    board.close()


async def test_a_damaged_segment_is_left_out_and_named(tmp_path):
    folder = write_run(tmp_path / "damaged")
    history = History(folder, limit_bytes=10**9)
    history.left([make_group(20, size=1)], "trained", train_step=7)
    history.close()
    segment = folder / "history/segment_000/segment.json"
    board = CheckedBoard([folder])
    for text in ("{", "[]", '{"format": "forebay-history/9", "resumed_from": null}'):
        segment.write_text(text)
        rows = board.answer("rollouts", {"run": "damaged"})["rows"]
        assert [row["group_id"] for row in rows] == ["math/20"]
        assert board.answer("timeline", {"run": "damaged"})["spans"] == []
        problem = board.answer("overview", {"run": "damaged"})["facts"]["problem"]
        assert problem == "damaged, and left out: segment_000/segment.json"
        # One file of one run is asked for: then it is an error.
        with pytest.raises(ConfigError, match=r"segment\.json' cannot be read"):
            list(record.read_spans(folder))
    board.close()


async def test_rows_without_a_train_step_are_passed_over(live, tmp_path):
    follow, _ = live
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for row in ({"train_step": 1}, {"reward": 2}, {"train_step": None}, {"train_step": "3"}, {"train_step": 4}):
            file.write(json.dumps({"unix_time_s": 1.0, **row}) + "\n")
    assert (await follow(1)("metrics"))["metrics"]["train_step"] == [1, 4]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"reward": 5}\n')
    run = RunFolder(tmp_path)
    assert run.facts()["train_step"] == 4
    assert run.metrics()["train_step"] == [1, 4]


def test_a_board_beside_a_run_ends_with_it(folder):
    start = "from forebay.cli import main; main()"
    command = [sys.executable, "-c", start, "board", str(folder), "--port", "0", "--beside"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, **pipes, text=True) as board:
        said = board.stdout.readline()
        assert said.startswith("board: http://127.0.0.1:")
        # It can be reached as soon as it says where.
        port = int(said.strip().rstrip("/").rsplit(":", 1)[1])
        socket.create_connection(("127.0.0.1", port)).close()
        viewers = [urllib.request.urlopen(f"{said.split()[1]}api/events?run={folder.name}") for _ in range(3)]
        for viewer in viewers:
            assert viewer.readline()
        board.stdin.close()
        assert board.wait(timeout=300) == 0
        assert board.stderr.read() == "", "the run's terminal shows it"


def test_a_folder_without_a_run_is_one_sentence(tmp_path):
    start = "from forebay.cli import main; main()"
    command = [sys.executable, "-c", start, "board", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert "there is no run at or below" in done.stderr + done.stdout


def test_a_port_that_is_none_is_refused_in_a_sentence(tmp_path):
    from typer.testing import CliRunner

    from forebay.cli.commands import app

    made = CliRunner().invoke(app, ["board", str(tmp_path), "--port", "65536"])
    assert made.exit_code == 2
    assert "Invalid value for '--port'" in made.output
