"""``forebay buffer`` and ``forebay ledger``, on snapshots, checkpoints and databases."""

import asyncio
import io
import json

import pyarrow.parquet as pq
import pytest
from rich.console import Console
from typer.testing import CliRunner

from forebay.cli.buffer import still_there
from forebay.cli.commands import app
from forebay.cli.source import open_database
from forebay.cli.views import group_view, histogram, plain, version_spans
from forebay.io.address import hide_password
from forebay.ledger import Ledger
from forebay.replay import AsyncReplayBufferConfig, PrioritizedReplayPolicy, ReplayBuffer, SyncReplayBufferConfig
from forebay.replay.stores.contract import StorageItem
from forebay.replay.stores.indexed import IndexedStorage
from forebay.types import RolloutState, Status

HOSTILE = "[bold red]model text[/] :smile: \x1b[31mred\x07 \ud800"


def run(*arguments, exit_code=0):
    result = CliRunner().invoke(app, [str(one) for one in arguments], catch_exceptions=False)
    assert result.exit_code == exit_code, result.output
    return result


def error_of(*arguments):
    """The one message on the error stream."""
    result = run(*arguments, exit_code=2)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def make_group(name, size=2, *, status=Status.COMPLETED, step=3, num_tokens=4):
    group = []
    for member in range(size):
        state = RolloutState(
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"prompt {name}"}],
            group_id=name,
            rollout_id=f"{name}/{member}",
            status=status,
            response=f"response {member} {HOSTILE}",
            reward={"score": 0.5 * member},
            finish_reason="stop",
        )
        state.append(list(range(num_tokens)), model_step=step)
        state.append([7, 8], mask=0)
        state.append([9], model_step=step + 1)
        group.append(state)
    return group


async def fill(buffer):
    await buffer.put(make_group("a"), "math", current_train_step=6, tags={"level": 3, "kind": "add"})
    await buffer.put(make_group("b", step=1, num_tokens=90), "math", tags={"level": True})
    await buffer.put(make_group("c", status=Status.ABORTED), "code [bold]")
    await buffer.put(make_group("d"), "math")
    await buffer.take_batch({"math": 1}, train_step=6)
    return buffer


@pytest.fixture
def snapshot(tmp_path):
    async def save():
        buffer = await fill(SyncReplayBufferConfig().build())
        await buffer.save(tmp_path / "snapshot")

    asyncio.run(save())
    return tmp_path / "snapshot"


@pytest.fixture(params=["snapshot", "database"])
def place(request, snapshot, tmp_path):
    """The same content in a snapshot and in a database."""
    if request.param == "snapshot":
        return snapshot
    pytest.importorskip("sqlalchemy")
    run("buffer", "migrate", snapshot, tmp_path / "buffer.db")
    return tmp_path / "buffer.db"


def words(text):
    return [line.split() for line in text.splitlines()]


def test_inspect_shows_counts_staleness_ages_and_sizes(place):
    output = run("buffer", "inspect", place).output
    assert str(place) in output.splitlines()[0]
    lines = words(output)
    assert ["task", "completed", "aborted", "archived", "live"] in lines
    assert ["math", "2", ".", "1", "2"] in lines
    assert ["code", "[bold]", ".", "1", ".", "1"] in lines
    assert ["all", "2", "1", "1", "3"] in lines
    # Two groups of step 3 and one of step 1, at train step 6; the task "code" has no train step yet.
    bars = {line[0]: line[1] for line in lines if len(line) > 1 and line[0].isdigit()}
    assert bars == {"0": "1", "1": "0", "2": "1", "3": "0", "4": "1"}
    assert ["math", "6", "1", "3", "2", "3.0", "4"] in lines
    assert ["math", "3", "6", "214", "35.7", "93"] in lines
    assert "ledger" not in output


def test_inspect_of_an_empty_buffer(tmp_path):
    asyncio.run(SyncReplayBufferConfig().build().save(tmp_path / "empty"))
    assert "none" in run("buffer", "inspect", tmp_path / "empty").output
    assert "0 groups" in run("buffer", "query", tmp_path / "empty").output
    assert "no group with uid 3" in error_of("buffer", "show", tmp_path / "empty", 3)
    run("buffer", "export", tmp_path / "empty", tmp_path / "empty.parquet")
    assert pq.read_table(tmp_path / "empty.parquet").num_rows == 0


def test_show_shows_prompt_responses_rewards_and_versions(place):
    output = run("buffer", "show", place, 1).output
    for part in ("prompt b", "Be brief.", "b/0: completed, score 0.0", "b/1: completed, score 0.5"):
        assert part in output
    assert "weights: step 1 for 0-89, environment for 90-91, step 2 for 92-92" in output
    assert 'reward {"score": 0.5}' in output
    assert "level=true" in output
    archived = run("buffer", "show", place, 0).output
    assert "train step 6, was completed" in archived
    assert 'kind="add" level=3' in archived


def test_model_text_is_never_obeyed(place):
    output = run("buffer", "show", place, 1).output
    assert "[bold red]model text[/] :smile: \\x1b[31mred\\x07 \\ud800" in output
    assert "\x1b" not in output
    assert "\x1b" not in show(RolloutState([{"role": HOSTILE, "content": HOSTILE}], finish_reason=HOSTILE))
    assert plain("a\tb\nc\r\u2028").plain == "a\tb\nc\\r\\u2028"


def show(*group):
    """What `show` prints of a group."""
    row = StorageItem(list(group), 0, 0, "t", Status.COMPLETED, 0)
    console = Console(width=300, file=io.StringIO(), color_system=None)
    console.print(group_view(row, group))
    return console.file.getvalue()


CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TURNS = [
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "name": "f", "tool_call_id": "call00000", "content": HOSTILE + "y" * 3000},
    {"role": "assistant", "content": "It is 7."},
]


@pytest.mark.parametrize("key", ["conversation", "chat_record"])
def test_show_shows_every_turn_and_the_prompts_of_further_trajectories(key):
    asked = [{"role": "user", "content": "What is it?"}]
    noted = {"conversation": TURNS, "chat_record": {"messages": [*asked, *TURNS]}}[key]
    counts = {"turns": 2, "num_tool_calls": 1, "num_tool_errors": 0, "episode": {"ended_by": "max_turns"}}
    first = RolloutState(asked, response="It is 7.", extra_fields={key: noted, **counts})
    sub_agent = RolloutState([{"role": "user", "content": "Look it up!"}], response="7")
    output = show(first, sub_agent)
    assert output.count("What is it?") == 1
    assert [line.strip() for line in output.splitlines()].count("It is 7.") == 1
    for part in ('"arguments": {"x": 1}', "\\x1b[31mred", "characters left out)", "Look it up!"):
        assert part in output
    assert "\x1b" not in output
    assert "turns 2, num_tool_calls 1, num_tool_errors 0, ended_by max_turns" in output


@pytest.mark.parametrize(
    "noted",
    [
        {"conversation": "talk", "episode": 3, "chat_record": 7},
        {"conversation": [None, {"content": None}, {"role": 3, "tool_calls": {(1, 2): "x"}}]},
        {"chat_record": {"messages": {"role": "user"}}, "turns": {1: {2}}},
    ],
)
def test_show_bears_whatever_an_agent_left_behind(noted):
    assert "the answer" in show(RolloutState([], response="the answer", extra_fields=noted))


@pytest.mark.parametrize(
    ("arguments", "uids"),
    [
        (["{}"], ["1", "2", "3"]),
        (['{"staleness": {"$gte": 2}}', "--order=-staleness"], ["1", "3"]),
        (['{"status": "archived"}'], ["0"]),
        (['{"tags.level": true}'], ["1"]),
        (["{}", "--order", "-timestamp_id", "--limit", "2"], ["3", "2"]),
    ],
)
def test_query_lists_what_matches(place, arguments, uids):
    output = run("buffer", "query", place, *arguments).output
    lines = words(output)
    assert [line[0] for line in lines[1:-1]] == uids
    shown = "3 groups; showing the first 2" if "--limit" in arguments else f"{len(uids)} group"
    assert shown in output


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ('{"staleness": {"$gte": 2}', "character 26"),
        ('{"stalenes": 2}', "'stalenes'"),
        ('{"uid": {"$like": 2}}', "'$like'"),
        ('{"uid": {"$between": [2, 1]}}', "[2, 1]"),
        ("[1]", "'[1]'"),
        ("", "character 1"),
    ],
)
def test_a_wrong_query_names_the_wrong_part(place, query, named):
    assert named in error_of("buffer", "query", place, query)


def test_a_wrong_order_or_uid_is_one_message(place):
    assert "'reward'" in error_of("buffer", "query", place, "{}", "--order", "reward")
    assert "uid 77" in error_of("buffer", "show", place, 77)


def test_what_is_no_buffer_is_one_message(tmp_path):
    assert "nothing at" in error_of("buffer", "inspect", tmp_path / "missing")
    assert "holds no buffer" in error_of("buffer", "inspect", tmp_path)
    assert "no file" in error_of("buffer", "inspect", tmp_path / "missing.db")
    (tmp_path / "text.db").write_text("hello, this is no database at all" * 99)
    assert "text.db" in error_of("buffer", "inspect", tmp_path / "text.db")
    assert "no ledger" in error_of("ledger", tmp_path)


def test_a_damaged_snapshot_is_one_message(snapshot):
    (file,) = snapshot.glob("rollouts-*.arrow")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    for command in (("inspect", snapshot), ("show", snapshot, 1), ("query", snapshot)):
        assert "damaged" in error_of("buffer", *command)


def test_export_has_a_line_per_rollout_with_the_columns_of_both(place, tmp_path):
    target = tmp_path / "out.parquet"
    assert "3 groups, 6 rollouts" in run("buffer", "export", place, target).output.replace("\n", " ")
    table = pq.read_table(target)
    lines = table.to_pylist()
    assert [line["uid"] for line in lines] == [1, 1, 2, 2, 3, 3]
    assert [line["rollout_id"] for line in lines[:2]] == ["b/0", "b/1"]
    assert (lines[0]["status"], lines[2]["rollout_status"], lines[2]["task_name"]) == (
        "completed",
        "aborted",
        "code [bold]",
    )
    assert (lines[0]["staleness"], lines[1]["score"], len(lines[0]["response_ids"])) == (4, 0.5, 93)
    assert json.loads(lines[0]["fields"])["message"][1]["content"] == "prompt b"
    assert "--overwrite" in error_of("buffer", "export", place, target)
    run("buffer", "export", place, target, "--overwrite", "--query", '{"status": "archived"}')
    assert pq.read_table(target).column("uid").to_pylist() == [0, 0]
    assert ".parquet" in error_of("buffer", "export", place, tmp_path / "out.csv")
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


def test_files_have_the_rights_of_any_new_file(snapshot, tmp_path):
    (tmp_path / "any").touch()
    run("buffer", "export", snapshot, tmp_path / "out.parquet")
    modes = {path.stat().st_mode for path in (tmp_path / "any", tmp_path / "out.parquet", *snapshot.iterdir())}
    assert len(modes) == 1
    assert "there is no folder" in error_of("buffer", "export", snapshot, tmp_path / "no" / "out.parquet")


def test_a_database_may_have_any_name_and_be_in_use(snapshot, tmp_path):
    storage = pytest.importorskip("forebay.replay.stores.sql.store").SQLStorage(tmp_path / "x.db")
    buffer = asyncio.run(fill(ReplayBuffer(SyncReplayBufferConfig().build().policy, storage)))
    (tmp_path / "plain").symlink_to("x.db")
    assert "SQL store" in run("buffer", "inspect", tmp_path / "plain").stdout
    rows = asyncio.run(storage.get({}, rows_only=True))
    asyncio.run(buffer.get(9, "math", Status.COMPLETED))
    # What was taken between two questions is left out.
    source = open_database(str(tmp_path / "x.db"), tmp_path / "x.db")
    digests = asyncio.run(source.digests([row.uid for row in rows]))
    assert [row.task_name for row in still_there(rows, digests)] == ["code [bold]"]
    with pytest.raises(ValueError, match="taken out"):
        asyncio.run(source.group(rows[0].uid))
    assert source.num_bytes > (tmp_path / "x.db").stat().st_size
    source.storage.close()
    storage.close()


def test_a_damaged_database_is_one_message(snapshot, tmp_path):
    pytest.importorskip("sqlalchemy")
    run("buffer", "migrate", snapshot, tmp_path / "x.db")
    content = (tmp_path / "x.db").read_bytes()
    (tmp_path / "x.db").write_bytes(content[:40_000] + b"A" * (len(content) - 40_000))
    assert "the database says" in error_of("buffer", "inspect", tmp_path / "x.db")


def test_migrate_moves_everything_and_overwrites_nothing(place, tmp_path):
    copy = tmp_path / "copy"
    assert "3 live and 1 archived groups" in run("buffer", "migrate", place, copy).output
    assert "is there already" in error_of("buffer", "migrate", place, copy)

    async def resumed():
        buffer = SyncReplayBufferConfig().build()
        await buffer.resume(copy)
        await buffer.restore(5)
        return [group[0].group_id for group in await buffer.get(9, "math", Status.COMPLETED)]

    assert asyncio.run(resumed()) == ["a", "b", "d"]
    pytest.importorskip("sqlalchemy")
    run("buffer", "migrate", copy, tmp_path / "other.db")
    assert "holds 4 groups" in error_of("buffer", "migrate", copy, tmp_path / "other.db")


def test_migrate_and_policies(tmp_path):
    pytest.importorskip("sqlalchemy")

    async def save():
        buffer = await fill(ReplayBuffer(PrioritizedReplayPolicy(seed=3), IndexedStorage()))
        await buffer.save(tmp_path / "drawn")

    asyncio.run(save())
    assert "stays behind" in run("buffer", "migrate", tmp_path / "drawn", tmp_path / "a.db").output
    refused = error_of("buffer", "migrate", tmp_path / "drawn", tmp_path / "b", "--policy", "FIFOReplayPolicy")
    assert "keeps the policy" in refused
    assert "Prioritized" in error_of("buffer", "migrate", tmp_path / "a.db", tmp_path / "b", "--policy", "best")
    run("buffer", "migrate", tmp_path / "a.db", tmp_path / "b", "--policy", "StalenessReplayPolicy")
    asyncio.run(AsyncReplayBufferConfig().build().resume(tmp_path / "b"))


async def run_of(folder):
    """A run folder with a ledger and a checkpoint: of four groups, two are live when it is saved."""
    buffer, ledger = SyncReplayBufferConfig().build(), Ledger(folder / "ledger.jsonl")
    for number, (name, num_tokens) in enumerate([("a", 4), ("b", 90), ("c", 8), ("d", 8)]):
        ledger.record(name, "math", "produced", num_tokens=num_tokens, latency_s=1.0 + number, score=0.5)
        await buffer.put(make_group(name), "math")
    (taken,) = await buffer.get(1, "math", Status.COMPLETED)
    ledger.record(taken[0].group_id, "math", "trained", train_step=1)
    await buffer.get(1, "math", Status.COMPLETED)
    ledger.record("b", "math", "dropped", reason="too [red]long")
    for step in (1, 2):
        manager = folder / "checkpoints" / f"step_{step:06d}" / "manager"
        await buffer.save(manager / "buffer")
        state = {"samplers": {}, "ledger": ledger.state_dict()}
        (manager / "manager.json").write_text(json.dumps(state))
    return buffer, ledger


@pytest.mark.parametrize("part", [".", "checkpoints/step_000002", "checkpoints/step_000001/manager"])
def test_inspect_finds_the_buffer_and_the_ledger_of_a_run(tmp_path, part):
    _, ledger = asyncio.run(run_of(tmp_path))
    ledger.close()
    output = run("buffer", "inspect", tmp_path / part).output
    assert ("step_000001" if "1" in part else "step_000002") in output.splitlines()[0]
    assert "balanced: every group is in exactly one place" in output
    assert ["math", "4", "1", "1", "2", *"0000"] in words(output)


def test_a_lost_group_shows(tmp_path):
    buffer, ledger = asyncio.run(run_of(tmp_path))
    ledger.close()
    asyncio.run(buffer.get(1, "math", Status.COMPLETED))
    asyncio.run(buffer.save(tmp_path / "checkpoints" / "step_000002" / "manager" / "buffer"))
    for command in (["buffer", "inspect", tmp_path], ["ledger", tmp_path]):
        assert "NOT balanced" in run(*command).output


def test_a_ledger_nearby_may_have_gone_on(tmp_path):
    buffer, ledger = asyncio.run(run_of(tmp_path))
    asyncio.run(buffer.save(tmp_path / "snapshot"))
    assert "balanced: every" in run("buffer", "inspect", tmp_path / "snapshot").output
    ledger.record("c", "math", "trained", train_step=2)
    ledger.close()
    output = run("buffer", "inspect", tmp_path / "snapshot").output
    assert "may have gone on" in output
    (tmp_path / "ledger.jsonl").write_text("no ledger}\n")
    output = run("buffer", "inspect", tmp_path / "snapshot").output
    assert "not readable" in output
    assert ["math", "2", "2"] in words(output)


def test_groups_that_the_database_of_a_run_lacks_were_in_flight(tmp_path):
    pytest.importorskip("sqlalchemy")
    _, ledger = asyncio.run(run_of(tmp_path))
    run("buffer", "migrate", tmp_path / "checkpoints" / "step_000002", tmp_path / "buffer.db")
    (tmp_path / "checkpoints").rename(tmp_path / "aside")
    for name in "ef":
        ledger.record(name, "math", "admitted")
    output = run("buffer", "inspect", tmp_path).output
    assert "2 groups are not in the database: they are, or were, in flight or in a batch" in output
    # Groups too many in one task are no groups in flight, however many another one lacks.
    ledger.record("g", "code", "trained", train_step=1)
    for name in "cdef":
        ledger.record(name, "math", "trained", train_step=2)
    ledger.close()
    assert "may have gone on" in run("buffer", "inspect", tmp_path).output


def test_the_ledger_report(tmp_path):
    _, ledger = asyncio.run(run_of(tmp_path))
    ledger.close()
    output = run("ledger", tmp_path).output
    lines = words(output)
    assert ["math", "4", "1", "1", "2", *"0000"] in lines
    assert "newest checkpoint (step_000002)" in output
    assert "too [red]long" in output
    assert ["tokens", "trained", "1", "4.00", "4.00"] in lines
    assert ["dropped:", "too", "[red]long", "1", "90.00", "90.00", "+86.00", "-"] in lines
    assert run("ledger", tmp_path / "ledger.jsonl", "--task", "math").output.count("+86.00") == 1
    assert "tasks: math" in error_of("ledger", tmp_path, "--task", "art")
    line = {"number": 5, "time_s": 1, "event": "produced", "task": "math", "group": 1}
    (tmp_path / "ledger.jsonl").write_text(json.dumps(line) + "\n")
    assert "4 events are missing in the file" in " ".join(run("ledger", tmp_path).output.split())
    (tmp_path / "ledger.jsonl").write_text("hello}\n")
    assert "not a ledger's" in error_of("ledger", tmp_path)


def test_a_ledger_without_drops_has_nothing_to_compare(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.record("a", "math", "trained", train_step=1)
    ledger.close()
    assert "nothing to compare" in run("ledger", tmp_path).output


def test_many_ages_share_the_lines_of_the_histogram():
    values = list(range(-5, 200))
    shown = histogram(values)
    assert shown.row_count <= 20
    labels = list(shown.columns[0].cells)
    assert labels[0].plain == "-5..5"
    assert sum(int(count) for count in shown.columns[1].cells) == len(values)


def test_version_spans_of_nothing_and_of_unlabeled_tokens():
    state = RolloutState([])
    assert version_spans(state) == "weights: -"
    state.append([1, 2])
    assert version_spans(state) == "weights: not labeled for 0-1"


def test_passwords_are_not_shown():
    assert hide_password("postgresql://me:secret@host/db") == "postgresql://me@host/db"
    assert hide_password("postgresql://host/db") == "postgresql://host/db"
    assert hide_password("runs/a:b@c.db") == "runs/a:b@c.db"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["tcp://0.0.0.0:0"], "give a token"),
        (["tcp://nowhere"], "an address is a path"),
        (["socket", "--policy", "best"], "fifo, staleness"),
        (["socket", "--limit", "5", "--max-live", "5"], "leave one out"),
        (["socket", "--token-file", "missing"], "missing"),
        (["socket", "--token-file", "file"], "at least 16 characters"),
        (["socket", "--token-file", "empty"], "is empty"),
        (["tcp://no.host.invalid:1", "--token-file", "missing"], "missing"),
        (["s" * 200], "cannot listen at"),
        (["socket", "--store", "."], "unable to open database file"),
        (["socket", "--store", "postgresql://localhost:1/x"], "the database says"),
    ],
)
def test_serve_refuses_in_one_message(tmp_path, monkeypatch, arguments, reason):
    pytest.importorskip("msgspec")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("short")
    (tmp_path / "empty").touch()
    assert reason in error_of("buffer", "serve", *arguments)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["empty", "file"]


def test_the_token_is_in_a_file_or_in_the_environment(tmp_path, monkeypatch):
    server_command = pytest.importorskip("forebay.replay.remote.server")
    monkeypatch.delenv("FOREBAY_BUFFER_TOKEN", raising=False)
    assert server_command.read_token(None) is None
    monkeypatch.setenv("FOREBAY_BUFFER_TOKEN", "of the environment")
    assert server_command.read_token(None) == "of the environment"
    (tmp_path / "token").write_text("of the file\n")
    assert server_command.read_token(tmp_path / "token") == "of the file"
