"""The store of a run: chosen in the run file, shared with no other run, and gone back to without losses."""

import asyncio
import contextlib
import json
import logging
import shutil
import threading
from types import SimpleNamespace

import pytest
from test_killed_separate_run import (
    RUN_FILE,
    STEPS,
    check_real_books,
    check_real_run,
    finished_groups,
    taken_up_since,
)
from typer.testing import CliRunner

import forebay
from forebay.agents.single_turn import SingleTurnAgentLoop
from forebay.board.export import write_report
from forebay.board.server import ANSWERS, Board
from forebay.cli.commands import app
from forebay.config import ConfigError, load_config
from forebay.io.address import hide_password
from forebay.ledger import Ledger
from forebay.metrics import MetricsConfig, read_jsonl
from forebay.produce.recovery import Cut
from forebay.replay import AsyncReplayBufferConfig, SQLStorage, StorageItem
from forebay.replay.stores.sql import connections
from forebay.runs import checkpoints, steps, store
from forebay.runs.config import RunConfig
from forebay.runs.folder import list_checkpoints, new_folder, saved_config
from forebay.runs.launch import _costs_of_a_kill, launch, try_all
from forebay.runs.placement import PartLost
from forebay.train import TrainController
from forebay.types import Status
from postgres_server import empty_place, restart, running_server

SECRET = "correct-horse-7"


def config(tmp_path, *changes):
    (tmp_path / "run.toml").write_text(RUN_FILE)
    changes = [f"output={tmp_path}", "checkpoint_every=3", *changes]
    return load_config(RunConfig, tmp_path / "run.toml", changes)


@pytest.fixture(scope="module")
def server():
    with running_server() as url:
        yield url


@pytest.fixture
def database(server, monkeypatch):
    """A place of its own, by a URL with a password, which the server does not ask for."""
    with empty_place(server) as url:
        url = url.replace("postgres@", f"postgres:{SECRET}@")
        monkeypatch.setenv(store.URL_VARIABLE, url)
        yield url


def test_a_run_goes_on_after_its_database_was_restarted_and_writes_its_password_nowhere(
    tmp_path, database, monkeypatch, caplog, capsys
):
    run, report, restarted = config(tmp_path, "replay.store=postgresql"), steps.report, []

    def reported(run, train_step, batch, metrics):
        report(run, train_step, batch, metrics)
        if train_step == 5 and not restarted:
            restart(database)
            restarted.append(train_step)

    async def go():
        # Read once the run goes back: then everything that was under way has ended.
        settle, found = store.wait_for_database, []

        def noted(config):
            settle(config)
            books = (run.folder / "ledger.jsonl").stat().st_size
            found.append((asyncio.run(finished_groups(database)), books))

        monkeypatch.setattr("forebay.runs.store.wait_for_database", noted)
        await launch(run)
        return found

    monkeypatch.setattr(steps, "report", reported)
    with caplog.at_level(logging.DEBUG):
        found = asyncio.run(go())
    assert restarted
    # None where nothing was under way in that moment: then the store just connected anew.
    for finished, num_bytes in found:
        assert len(finished) > 5 * 3
        assert not finished & taken_up_since(run.folder / "ledger.jsonl", num_bytes)
    check_real_run(run.folder, database)
    # Nor where the database cannot be reached, or has another owner.
    monkeypatch.setenv(store.URL_VARIABLE, f"postgresql://nobody:{SECRET}@127.0.0.1:9/none?connect_timeout=2")
    with pytest.raises(ConfigError, match="cannot be opened") as unreachable:
        asyncio.run(launch(config(tmp_path, "replay.store=postgresql", "name=other")))
    monkeypatch.setenv(store.URL_VARIABLE, database)
    with pytest.raises(ConfigError, match=f"groups of another run, in '{run.folder}'; name another") as taken:
        asyncio.run(launch(config(tmp_path, "replay.store=postgresql", "name=other")))
    said = [caplog.text, *capsys.readouterr(), str(unreachable.value), str(taken.value)]
    said.append(CliRunner().invoke(app, ["card", str(run.folder)]).output)
    assert "postgresql" in (run.folder / "card" / "README.md").read_text()
    files = [path.read_bytes().decode(errors="replace") for path in run.folder.rglob("*") if path.is_file()]
    assert not [text for text in [*said, *files] if SECRET in text or "postgres:" in text]
    # Nor does the board show it, where a library's message has brought it into the run's notes.
    texts = [f"cannot connect to {database}", f"bad connection string: user=postgres password={SECRET}"]
    with (run.folder / "notes.jsonl").open("a") as notes:
        for text in texts:
            notes.write(json.dumps({"unix_time_s": 1.0, "kind": "warning", "text": text, "train_step": 5}) + "\n")
    shown = board_answers(run.folder, tmp_path / "report.html")
    assert not [text for text in shown if SECRET in text or "postgres:" in text]
    assert "cannot connect to postgresql://(hidden)@" in shown[0]
    assert "user=postgres password=(hidden)" in shown[0]


def board_answers(folder, report):
    """All that the board says of the run in `folder`, and its report."""
    board = Board([folder])
    try:
        row = board.answer("rollouts", {"run": folder.name})["rows"][0]
        given = {
            "steps": {"first": "0", "last": "9"},
            "group": {"group_id": row["group_id"]},
            "rollout": {"rollout_id": row["rollout_id"]},
            "prompt": {"prompt_hash": board.answer("prompts", {"run": folder.name})[0]["prompt_hash"]},
            "timeline": {"start_s": "0", "end_s": "9"},
            "compare": {"other": folder.name},
        }
        said = [json.dumps(board.answer(what, {"run": folder.name, **given.get(what, {})})) for what in ANSWERS]
        return [*said, write_report(board, report).read_text(encoding="utf-8")]
    finally:
        board.close()


def raise_once(monkeypatch, after_step, error):
    """Have a run fail so at the end of that train step, once; the list has the step from then on."""
    report, failed = steps.report, []

    def reported(run, train_step, batch, metrics):
        report(run, train_step, batch, metrics)
        if train_step == after_step and not failed:
            failed.append(train_step)
            raise error

    monkeypatch.setattr(steps, "report", reported)
    return failed


def test_a_durable_run_without_a_checkpoint_begins_again_after_a_lost_part(tmp_path, monkeypatch):
    lost = raise_once(monkeypatch, 3, PartLost("the trainer is lost"))
    run = config(tmp_path, "checkpoint_every=0", "replay.store=sqlite")
    asyncio.run(launch(run))
    assert lost
    check_real_run(run.folder, str(run.folder / "buffer.db"))


def test_a_database_is_known_by_the_id_in_the_folder_of_its_run(tmp_path):
    """Two machines may have runs at the same path; a folder may move, and be replaced."""
    run = config(tmp_path, f"replay.store=sqlite:///{tmp_path / 'groups.db'}")
    aside, copy = tmp_path / "aside", tmp_path / "copy"

    def count_groups(folder, *, is_new):
        with contextlib.closing(store.open_storage(run, folder, is_new=is_new)) as storage:
            return len(storage)

    with new_folder(run, overwrite=False) as folder:
        storage = store.open_storage(run, folder, is_new=True)
        store.begin_anew(storage, folder)
        asyncio.run(storage.put_many([StorageItem(["a group"], -1, -1, "t", Status.COMPLETED, 0)]))
        storage.close()
    folder.rename(aside)
    for is_new in (True, False):
        with pytest.raises(ConfigError, match=f"holds 1 groups of another run, in '{folder}'; name"):
            count_groups(folder, is_new=is_new)
    shutil.rmtree(folder)
    assert count_groups(aside, is_new=False) == 1
    aside.rename(folder)
    shutil.copytree(folder, copy)
    with pytest.raises(ConfigError, match="of another run"):
        count_groups(copy, is_new=False)
    assert count_groups(folder, is_new=False) == 1
    (folder / "metrics.jsonl").write_text("{}")
    with new_folder(run, overwrite=True):
        assert count_groups(folder, is_new=True) == 1
        with contextlib.closing(store.open_storage(run, folder, is_new=True)) as storage:
            store.begin_anew(storage, folder)
            assert len(storage) == 0


def test_a_run_that_is_not_replaced_after_all_keeps_its_groups(tmp_path, monkeypatch):
    """Its folder is put back; a database outside of it is still its own."""
    run = config(tmp_path, f"replay.store=sqlite:///{tmp_path / 'groups.db'}")
    asyncio.run(launch(run))
    with contextlib.closing(store.open_storage(run, run.folder, is_new=False)) as storage:
        kept = [row.uid for row in asyncio.run(storage.get({}, rows_only=True))]
        assert kept

    def refuse(*args, **kwargs):
        raise ConfigError("the sink has no key")

    monkeypatch.setattr(MetricsConfig, "build", refuse)
    with pytest.raises(ConfigError, match="has no key"):
        asyncio.run(launch(run, overwrite=True))
    with contextlib.closing(store.open_storage(run, run.folder, is_new=False)) as storage:
        assert [row.uid for row in asyncio.run(storage.get({}, rows_only=True))] == kept


async def test_a_checkpoint_that_cannot_be_noted_holds_nothing(tmp_path, monkeypatch):
    buffer = AsyncReplayBufferConfig().build()

    async def cut(path, train_step):
        opened = contextlib.AsyncExitStack()
        write = await opened.enter_async_context(buffer.moment())
        return Cut({}, {}, Ledger(), write, opened)

    async def refuse(train_step):
        raise OSError("no room")

    class Run(SimpleNamespace):
        def __getattr__(self, name):
            return SimpleNamespace(state_dict=dict)

    monkeypatch.setattr(checkpoints, "phase", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(checkpoints, "device_fact", lambda config: "cpu")
    parts = {"manager": SimpleNamespace(cut=cut), "record": SimpleNamespace(checkpoint=refuse)}
    values = {"folder": tmp_path, "train_step": 3, "history": [], "evaluations": [], "saving": None}
    with pytest.raises(OSError, match="no room") as error:
        await checkpoints.begin_checkpoint(Run(**parts, **values))
    # While the error is held, with all that its frames hold.
    async with asyncio.timeout(300), buffer.moment():
        del error


async def test_a_checkpoint_that_failed_is_told_once():
    async def fail():
        raise OSError("no room")

    run = SimpleNamespace(saving=asyncio.create_task(fail()))
    with pytest.raises(OSError, match="no room"):
        await checkpoints.checkpoint_written(run)
    await checkpoints.checkpoint_written(run)


async def test_a_checkpoint_that_fails_as_its_run_is_closed_is_told():
    async def fail():
        raise PartLost("the trainer is lost")

    told = []
    run = SimpleNamespace(display=SimpleNamespace(warning=told.append))
    await steps.end_saving(run, asyncio.create_task(fail()))
    assert told == ["the checkpoint that was begun last is not there: the trainer is lost"]


@pytest.mark.parametrize("url", [None, f"mysql://me:{SECRET}@host/name", SECRET])
def test_a_run_without_the_url_of_its_database_says_which_variable_has_it(tmp_path, monkeypatch, url):
    monkeypatch.delenv(store.URL_VARIABLE, raising=False)
    if url is not None:
        monkeypatch.setenv(store.URL_VARIABLE, url)
    with pytest.raises(ConfigError, match="needs the environment variable FOREBAY_REPLAY_URL") as error:
        asyncio.run(launch(config(tmp_path, "replay.store=postgresql")))
    assert SECRET not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("given", ["p@ss:{}@127.0.0.1:9/n", "x@{}@127.0.0.1:9/n", "x@a/{}@127.0.0.1:9/n"])
def test_a_password_that_is_written_wrong_is_in_no_message(tmp_path, monkeypatch, given):
    url = f"postgresql://me:{given.format(SECRET)}"
    monkeypatch.setenv(store.URL_VARIABLE, url)
    file = config(tmp_path).folder.parent / "run.toml"
    commands = [
        ["train", str(file), f"output={tmp_path}", "replay.store=postgresql"],
        # One that never asks for the URL.
        ["train", str(file), f"output={tmp_path}", f"replay.store=sqlite:///{tmp_path}"],
        ["buffer", "inspect", url],
        ["buffer", "serve", str(tmp_path / "socket"), "--store", url],
    ]
    for command in commands:
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2, result.output
        reason = "cannot be opened" if "sqlite" in command[-1] else "write @ : / # of a password as %40 %3A %2F %23"
        assert reason in result.stderr
        assert SECRET not in result.output + str(result.exception)


def test_the_password_of_a_certificate_is_in_no_message(monkeypatch):
    url = f"postgresql://me@127.0.0.1:9/n?sslmode=require&sslpassword={SECRET}"
    monkeypatch.setenv(store.URL_VARIABLE, url)
    assert SECRET not in hide_password(url) + store.plain_reason(ValueError(f"bad option {SECRET}"))
    engine = connections.make_engine(url, create=False)
    assert SECRET not in connections.shown(engine)
    engine.dispose()


@pytest.mark.parametrize(
    ("named", "file", "level"),
    [
        ("sqlite", "run/buffer.db", 1),
        ("sqlite?synchronous=full", "run/buffer.db", 2),
        ("sqlite:///{}/a%20?synchronous=full", "a%20", 2),
    ],
)
def test_sqlite_syncs_each_commit_if_the_run_file_says_so_also_after_a_resume(
    tmp_path, monkeypatch, named, file, level
):
    report, levels = steps.report, []

    def reported(run, *arguments):
        report(run, *arguments)
        with run.manager.replay_buffer.storage._writing() as connection:
            levels.append(connection.exec_driver_sql("PRAGMA synchronous").fetchone()[0])

    monkeypatch.setattr(steps, "report", reported)
    run = config(tmp_path, "steps=2", f"replay.store={named.format(tmp_path)}")
    asyncio.run(launch(run))
    asyncio.run(launch(saved_config(run.folder, ["steps=4"]), resume=run.folder))
    assert levels == [level] * 4
    assert (tmp_path / file).exists()


def test_a_store_that_is_none_is_refused(tmp_path):
    for named in ("sqlite3", "sqlite:///", "sqlite:////a.db?synchronous=off", "postgresql://a@b/c"):
        with pytest.raises(ConfigError, match="is no store: memory, sqlite, sqlite:///PATH"):
            config(tmp_path, f"replay.store={named}")
    with pytest.raises(ConfigError, match=r"'replay\.path', of an earlier version: name the file in replay\.store"):
        config(tmp_path, "replay.store=sqlite", "replay.path=/a.db")
    with pytest.raises(ConfigError, match=r"replay\.store is 'sqlite\?synchronous=full': leave one of the two out"):
        config(tmp_path, "record=true", "replay.store=sqlite?synchronous=full")


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs", "lustre"])
def test_an_sqlite_file_on_a_network_file_system_is_refused(tmp_path, monkeypatch, capsys, kind):
    share, local = tmp_path / "a share", tmp_path / "local"
    share.mkdir()
    mounts = [
        SimpleNamespace(mountpoint=str(at), fstype=of) for at, of in (("/", "ext4"), (share, "ext4"), (share, kind))
    ]
    monkeypatch.setattr("psutil.disk_partitions", lambda all: mounts)
    run = config(tmp_path, f"output={share}", "replay.store=sqlite")
    with pytest.raises(ConfigError, match=rf"run/buffer\.db' is on {kind} at .*set replay\.store"):
        store.open_storage(run, run.folder, is_new=True)
    moved = config(tmp_path, f"output={share}", f"replay.store=sqlite:///{local / 'groups.db'}")
    store.open_storage(moved, moved.folder, is_new=True).close()
    assert (local / "groups.db").exists()
    ray = config(tmp_path, f"output={share}", "cluster=ray")
    assert store.store_of(ray) == "memory"
    assert store.store_of(config(tmp_path, "cluster=ray")) == "sqlite"
    # A run that would have a file there says what it does without.
    asyncio.run(launch(config(tmp_path, f"output={share}", "name=other", "steps=1", "produce.mode=separate")))
    told = f"groups are in memory, as the folder is on {kind} at {share}: set replay.store = 'postgresql' or"
    shown = " ".join("".join(capsys.readouterr()).split())
    assert told in shown
    assert "groups memory" in shown


def test_unfinished_rollouts_are_saved_where_the_run_has_a_durable_store_by_itself(tmp_path, monkeypatch):
    saves = "produce.save_partial_every_s=1", "produce.enable_partial_rollout=true"
    run = config(tmp_path, *saves, "produce.mode=separate")
    store.open_storage(run, tmp_path, is_new=True).close()
    monkeypatch.setattr(store, "network_mount", lambda path: "nfs4 at /mnt")
    (tmp_path / store.STORE_FILE).unlink()
    # Before a warm-up, which would be lost with the new folder.
    for refused in (launch(run), try_all(run, print)):
        with pytest.raises(ConfigError, match=r"save_partial_every_s needs replay\.store = 'sqlite'"):
            asyncio.run(refused)
    assert not run.folder.exists()
    # A trial of a run that may save them, though its own groups are in memory.
    asyncio.run(try_all(config(tmp_path, *saves, "produce.mode=separate", "replay.store=sqlite"), print))
    with pytest.raises(ConfigError, match=r"set replay\.store = 'sqlite'"):
        config(tmp_path, *saves, "replay.store=memory")


def test_production_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """The trainer's part is written only once groups were finished after the cut."""
    save, running, counts = TrainController.save, [], []
    grown = threading.Event()
    begin = steps.begin_checkpoint

    async def begun(run):
        await begin(run)
        version = run.manager.replay_buffer.version

        async def watch():
            await run.manager.replay_buffer.wait_for_change(version)
            counts.append(run.saving is not None and not run.saving.done())
            grown.set()

        running.append(asyncio.create_task(watch()))

    def waiting_save(self, path):
        if "step_000003" in str(path):
            assert grown.wait(300)
        save(self, path)

    monkeypatch.setattr(steps, "begin_checkpoint", begun)
    monkeypatch.setattr(TrainController, "save", waiting_save)
    run = config(tmp_path, "replay.store=memory")
    asyncio.run(launch(run))
    assert counts[0]
    assert [path.name for path in list_checkpoints(run.folder)][-1] == f"step_{STEPS:06d}"
    check_real_run(run.folder, "memory")


def test_a_run_may_change_to_a_durable_store_and_not_back(tmp_path):
    asyncio.run(launch(config(tmp_path, "steps=3", "replay.store=memory")))
    folder = tmp_path / "run"
    asyncio.run(launch(saved_config(folder, [f"steps={STEPS}", "replay.store=sqlite"]), resume=folder))
    check_real_run(folder, str(folder / "buffer.db"))
    assert CliRunner().invoke(app, ["buffer", "inspect", str(folder)]).exit_code == 0
    back = saved_config(folder, [f"steps={2 * STEPS}", "replay.store=memory"])
    with pytest.raises(ConfigError, match=r"the store holds no run: leave replay\.store and its database"):
        asyncio.run(launch(back, resume=folder))


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_run_whose_database_is_lost_goes_on_if_it_is_told_to(tmp_path, monkeypatch, request, capsys, kind):
    """Killed after a checkpoint, with groups consumed since, copies of unfinished ones, and groups used again."""
    file = tmp_path / "lost.db"
    if kind == "postgresql":
        request.getfixturevalue("database")
    named = kind if kind == "postgresql" else f"sqlite:///{file}"
    reuse = "replay.reuse.times=2", "replay.reuse.share=0.4", "replay.reuse.max_staleness=1"
    run = config(tmp_path, f"replay.store={named}", "produce.save_partial_every_s=0.1", *reuse)
    raise_once(monkeypatch, 5, RuntimeError("killed"))
    with pytest.raises(RuntimeError, match="killed"):
        asyncio.run(launch(run))
    assert [path.name for path in list_checkpoints(run.folder)] == ["step_000003"]
    live = sum(Ledger.read_checkpoint(*saved_books(run.folder)).count_live().values())
    with contextlib.ExitStack() as stack:
        if kind == "postgresql":
            url = stack.enter_context(empty_place(request.getfixturevalue("server")))
            monkeypatch.setenv(store.URL_VARIABLE, url)
        else:
            url = str(file)
            for part in tmp_path.glob("lost.db*"):
                part.unlink()
        again = saved_config(run.folder, [])
        with pytest.raises(
            ConfigError, match=r"the store holds no run: leave .* if the database is lost, add --without"
        ):
            asyncio.run(launch(again, resume=run.folder))
        capsys.readouterr()
        if kind == "sqlite":
            result = asyncio.run(forebay.run_async(resume=run.folder, without_groups=True))
            assert not result.interrupted
        else:
            command = ["train", "--resume", str(run.folder), "--without-groups"]
            assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 0
        told = f"the database held no run: {live} groups that were live are generated again"
        assert told in (run.folder / "notes.jsonl").read_text()
        check_real_books(run.folder, url)
        # From now on it is the database of this run.
        asyncio.run(launch(saved_config(run.folder, [f"steps={STEPS + 3}"]), resume=run.folder))
        check_real_books(run.folder, url, STEPS + 3)
    assert any(row.get("produce/past_groups") for row in read_jsonl(run.folder / "metrics.jsonl"))


def saved_books(folder):
    """The state of the books in the newest checkpoint, and its place."""
    manager = list_checkpoints(folder)[-1] / "manager"
    return json.loads((manager / "manager.json").read_text())["ledger"], manager


@pytest.mark.parametrize("recipe", ["demo_tiny", "cartpole_fragments"])
def test_no_groups_are_given_up_at_the_start_of_a_run(recipe):
    result = CliRunner().invoke(app, ["train", f"recipes/{recipe}.toml", "--without-groups"])
    assert result.exit_code == 2
    assert "--without-groups is for --resume" in result.stderr


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_the_database_of_a_run_is_inspected_with_its_books(tmp_path, request, monkeypatch, kind):
    """Of a run that was killed, with groups in flight."""
    url = request.getfixturevalue("database") if kind == "postgresql" else f"sqlite:///{tmp_path / 'groups.db'}"
    report = steps.report

    def reported(run, train_step, batch, metrics):
        report(run, train_step, batch, metrics)
        if train_step == 4:
            raise RuntimeError("killed")

    monkeypatch.setattr(steps, "report", reported)
    run = config(tmp_path, f"replay.store={url if kind == 'sqlite' else kind}")
    with pytest.raises(RuntimeError, match="killed"):
        asyncio.run(launch(run))

    def output(*arguments, exit_code=0):
        result = CliRunner().invoke(app, ["buffer", *map(str, arguments)], catch_exceptions=False)
        assert result.exit_code == exit_code, result.output
        assert SECRET not in result.output
        return result.output

    shown = output("inspect", run.folder)
    assert str(run.folder / "ledger.jsonl") in shown
    ledger = Ledger.read(run.folder / "ledger.jsonl")
    with contextlib.closing(SQLStorage(url, create=False)) as storage:
        live = len(storage)
        balance = ledger.balance({"sorting": live})
        said = f"{balance.difference} groups are not in the database: they are, or were, in flight or in a batch"
        assert balance.difference >= 0
        assert (said if balance.difference else "balanced: every group is in exactly one place") in shown
    assert f"{live} live and" in output("migrate", run.folder, tmp_path / "copy.db")
    if kind == "postgresql":
        assert "ledger (" not in output("inspect", "postgresql")
        assert "groups already" in output("migrate", tmp_path / "copy.db", "postgresql", exit_code=2)
        monkeypatch.delenv(store.URL_VARIABLE)
        for arguments in (["inspect", run.folder], ["serve", tmp_path / "socket", "--store", "postgresql"]):
            assert "needs the environment variable FOREBAY_REPLAY_URL" in output(*arguments, exit_code=2)


def test_a_run_that_replaces_another_does_not_name_its_store(tmp_path, capsys):
    colocated = "produce.mode=colocated", "steps=1", "checkpoint_every=0"
    asyncio.run(launch(config(tmp_path, *colocated, "produce.mode=separate")))
    assert "groups sqlite" in " ".join(capsys.readouterr().out.split())
    run = config(tmp_path, *colocated)
    assert (run.folder / "buffer.db").exists()
    asyncio.run(launch(run, overwrite=True))
    assert not (run.folder / "buffer.db").exists()
    assert "groups memory" in " ".join(capsys.readouterr().out.split())


def test_unfinished_rollouts_are_not_saved_in_the_store_of_the_run_that_is_replaced(tmp_path):
    saves = "produce.save_partial_every_s=1", "produce.enable_partial_rollout=true", "produce.mode=colocated"
    run = config(tmp_path, *saves)
    run.folder.mkdir(parents=True)
    (run.folder / "buffer.db").touch()
    for refused in (launch(run, overwrite=True), try_all(run, print)):
        with pytest.raises(ConfigError, match=r"save_partial_every_s needs replay\.store = 'sqlite'"):
            asyncio.run(refused)


def test_a_trial_leaves_the_database_alone(tmp_path, database):
    storage = SQLStorage(database)
    storage.holder = "another run"
    asyncio.run(try_all(config(tmp_path, "replay.store=postgresql"), lambda line: None))
    assert storage.holder == "another run"
    storage.close()


def test_a_run_names_the_tasks_whose_rollouts_begin_again_after_a_kill(tmp_path):
    program = "tasks.0.agent={name='program', arguments={program='test_run_store:Loop'}}"
    saves = "replay.store=sqlite", "produce.save_partial_every_s=1"
    own = "tasks.0.agent={name='test_run_store:Loop'}"
    for changes, is_told in [((), False), ((own,), True), ((program,), True)]:
        told = list(_costs_of_a_kill(config(tmp_path, *saves, *changes), is_new=True))
        line = "task sorting: its agent cannot go on half-way; its rollouts begin again after a kill"
        assert told == ([line] if is_told else [])
    assert not list(_costs_of_a_kill(config(tmp_path, own), is_new=True))


class Loop(SingleTurnAgentLoop):
    async def generate_sample(self, state):
        return await super().generate_sample(state)
