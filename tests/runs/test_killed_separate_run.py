"""Separate runs that are killed at any instant, again and again: nothing is lost or trained twice."""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import scripted_run

from forebay.agents.extra_fields import TURNS_KEY
from forebay.config import load_config
from forebay.ledger import Ledger
from forebay.ledger.journal import read_events
from forebay.metrics import read_jsonl
from forebay.produce import Sampler
from forebay.produce.prompts.dataset import load_prompts
from forebay.produce.unfinished import COPIES
from forebay.replay import AsyncReplayBufferConfig, SQLStorage
from forebay.replay.format.packed import GroupCodec
from forebay.replay.stores.archiving import COPY_STEP
from forebay.runs.config import RunConfig
from forebay.runs.folder import list_checkpoints, prune_checkpoints, step_of
from forebay.types import EPISODE_KEY, Status
from postgres_server import empty_place, restart, running_server

STEPS, BATCH_SIZE, STALE_FROM = 8, 3, 2
SOAK_SEED = int(os.environ.get("FOREBAY_SOAK_SEED", "1"))
"""Another seed kills at other instants: a thousand kills are made in parts."""

RUN_FILE = f"""
name = "run"
seed = 5
steps = {STEPS}
batch_size = {BATCH_SIZE}
rollouts_per_prompt = 2
model = {{ source = "tiny", tiny = {{ hidden_size = 16, num_layers = 1, num_heads = 1 }} }}
train = {{ lr = 1e-3 }}

[produce]
mode = "separate"
max_staleness = {STALE_FROM - 1}
staleness_rule = "drop"
over_sample_threshold = 1.0
enable_partial_rollout = true
filter = "reward_variance"

[[tasks]]
name = "sorting"
data = {{ source = "sorting", arguments = {{ length = 3, letters = 5 }}, size = 120 }}
judge = {{ name = "exact_match", arguments = {{ partial_credit = true }} }}
sample = {{ max_tokens = 6 }}
"""


class Nursery:
    """Starts runs in processes of their own, and kills them."""

    def __init__(self):
        self.num_kills = 0
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("nursery.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()

    def run(self, *arguments, until="@end", after_s=0.0):
        """Kill the run `after_s` seconds after a line that begins with `until`, or after its start for None;
        whether it ended before."""
        self.tell(json.dumps([part if isinstance(part, dict) else str(part) for part in arguments]))
        pid = int(self.read_to("@pid")[-1].split()[1])
        lines = [] if until is None else self.read_to(until, "@end")
        time.sleep(after_s)
        self.end(pid)
        self.tell("reap")
        lines += self.read_to("@exit")
        endings = [line for line in lines if line.startswith("@end")]
        assert not endings or self.may_end(endings), "".join(lines)
        self.num_kills += not endings
        return bool(endings)

    def end(self, pid):
        os.kill(pid, signal.SIGKILL)

    def may_end(self, endings):
        return endings == ["@end 0\n"]

    def tell(self, line):
        print(line, file=self.process.stdin, flush=True)

    def read_to(self, *beginnings):
        """The lines up to one whose first word begins like this."""
        lines = [""]
        while not lines[-1].startswith(beginnings):
            line = self.process.stdout.readline()
            assert line, f"the nursery has died: {lines}"
            lines.append(line.lstrip(" "))
        return lines[1:]


@pytest.fixture(scope="module")
def nursery(warm):
    with Nursery() as nursery:
        yield nursery


def kill_until_finished(nursery, rng, folder, steps, start, resume, within_s, store="memory", most_kills=1000):
    """Kill the run again and again until it is left to finish, at any instant from its start to its end.

    After so many kills of the nursery it is left.
    In a durable `store`, what is finished at the instant of a kill is not generated again by the next start.
    """
    finished, num_bytes = set(), 0
    while True:
        checkpoints = list_checkpoints(folder)
        check_checkpoints(checkpoints)
        books = folder / "ledger.jsonl"
        if store != "memory" and checkpoints:
            assert not finished & taken_up_since(books, num_bytes)
            finished, num_bytes = asyncio.run(finished_groups(store)), books.stat().st_size
        done = step_of(checkpoints[-1]) if checkpoints else 0
        arguments = resume if checkpoints else start
        kind = rng.random()
        if kind < 0.2 or done >= steps or nursery.num_kills >= most_kills:
            assert nursery.run(*arguments)
            assert not finished & taken_up_since(books, num_bytes)
            return
        if kind < 0.35:
            # While it starts, goes back to its checkpoint, or makes its first step.
            nursery.run(*arguments, until=None, after_s=rng.uniform(0, 5 * within_s))
        else:
            line = f"{rng.randint(done + 1, steps)}/{steps}"
            nursery.run(*arguments, until=line, after_s=rng.uniform(0, within_s))


async def finished_groups(store):
    """The ids of the groups in the database that are made, and not to be made again.

    Those of task b are, once they have expired.
    """
    storage = SQLStorage(store)
    try:
        rows = await storage.get({"status": {"$in": ["completed", "archived", "filtered"]}}, rows_only=True)
        rows = [row for row in rows if row.train_step != COPY_STEP]
    finally:
        storage.close()
    return {row.tags["group"] for row in rows if row.task_name != "b"}


def taken_up_since(books, num_bytes):
    """The groups that were taken up to be generated, by the lines after the first `num_bytes` of the file."""
    with books.open("rb") as file:
        file.seek(num_bytes)
        lines = [line for line in file if line.endswith(b"}\n") and line.startswith(b'{"number"')]
    events = map(json.loads, lines)
    return {event["group"] for event in events if event["event"] in ("admitted", "retried") and "found" not in event}


def check_checkpoints(checkpoints):
    """What has the name of a checkpoint has all its parts, each with something in it."""
    for path in checkpoints:
        files = [part for part in path.rglob("*") if part.is_file()]
        assert (path / "manager" / "manager.json") in files
        assert all(part.stat().st_size for part in files), files
        json.loads((path / "manager" / "manager.json").read_text())


def check_books(folder, samplers, used, steps, batch_size, store="memory"):
    """Every prompt up to the samplers' places is trained, dropped or live, once; the batches are whole.

    `used` is what the trainer says: group ids by train step, with those that were used before.
    """
    checkpoint = list_checkpoints(folder)[-1]
    assert step_of(checkpoint) == steps
    assert {step: len(groups) for step, groups in used.items()} == dict.fromkeys(range(1, steps + 1), batch_size)
    assert all(len(set(groups)) == batch_size for groups in used.values())
    trained = first_uses(used)
    ledger = Ledger.read(folder / "ledger.jsonl")
    assert ledger.balance({}).reused == batch_size * steps - sum(map(len, trained.values()))
    booked = [event["group"] for event in read_events(folder / "ledger.jsonl") if "group" in event]
    handed_out, (live, failed) = [], asyncio.run(live_groups(checkpoint, store))
    # After a kill that came after the last step: groups that another step would generate again. The failed
    # ones are among them, and lie in a checkpoint on `memory` as well.
    owed = folder / "owed.json"
    live += {*failed, *(json.loads(owed.read_text()) if owed.exists() else [])}
    for sampler in samplers:
        name = sampler.task_name
        sampler.resume(checkpoint / "manager" / f"sampler-{name}.json")
        taken = asyncio.run(first_groups(sampler))
        if store != "memory":
            # After a kill it has yet to come to groups that were finished, which it will pass over.
            taken = list(dict.fromkeys([*taken, *(group for group in booked if group.startswith(f"{name}/"))]))
        handed_out += taken
        places = {group: ledger.life(group, name).place for group in taken}
        assert ledger.balance({}).by_task[name].generated == len(taken)
        assert {g for g, place in places.items() if place == "trained"} == {
            g for groups in trained.values() for g in groups if g.startswith(f"{name}/")
        }
        assert {g for g, place in places.items() if place in ("live", "admitted")} == {
            g for g in live if g.startswith(f"{name}/")
        }
    counts = Counter([*live, *(group for groups in trained.values() for group in groups)])
    assert set(counts.values()) == {1}
    assert set(counts) <= set(handed_out)
    assert len(set(handed_out)) == len(handed_out)
    assert ledger.balance(Counter(group.split("/")[0] for group in live)).ok


def first_uses(used):
    """Of the groups by train step, those that no earlier step had."""
    seen, first = set(), {}
    for step in sorted(used):
        first[step] = [group for group in used[step] if group not in seen]
        seen.update(used[step])
    return first


async def first_groups(sampler):
    """The ids of the groups that a sampler hands out before it stands where this one does."""
    place = sampler.epoch, sampler.position
    fresh = Sampler(
        sampler.prompts, sampler.replay_buffer, task_name=sampler.task_name, prompt_repeat_k=1, seed=sampler.seed
    )
    groups = []
    while (fresh.epoch, fresh.position) != place:
        groups.append((await fresh.sample(sampler.task_name))[0].group_id)
    return groups


async def live_groups(checkpoint, store):
    """The ids of the groups in the buffer of a checkpoint, or in the database: the failed ones last."""
    buffer = AsyncReplayBufferConfig().build(None if store == "memory" else SQLStorage(store))
    if store == "memory":
        await buffer.resume(checkpoint / "manager" / "buffer")
    rows = await buffer.storage.get({})
    await buffer.close()
    groups = [(row.item[0].group_id, row.status is Status.FAILED) for row in rows]
    return tuple([group for group, has_failed in groups if has_failed is kind] for kind in (False, True))


# -- A real model and a real engine


def check_real_run(folder, store, steps=STEPS, batch_size=BATCH_SIZE):
    check_real_books(folder, store, steps, batch_size)
    rows = [row for row in read_jsonl(folder / "metrics.jsonl") if "train/loss" in row]
    assert [row["train_step"] for row in rows] == list(range(1, steps + 1))
    assert all(0 <= row["staleness"] < STALE_FROM for row in rows)


def check_real_books(folder, store, steps=STEPS, batch_size=BATCH_SIZE):
    config = load_config(RunConfig, folder / "run.toml")
    samplers = [
        Sampler(
            load_prompts(task.data),
            AsyncReplayBufferConfig().build(),
            task_name=task.name,
            prompt_repeat_k=config.rollouts_per_prompt,
            seed=config.seed,
        )
        for task in config.tasks
    ]
    trained = {}
    for event in read_events(folder / "ledger.jsonl"):
        if event["event"] in ("trained", "reused"):
            trained.setdefault(event["train_step"], []).append(event["group"])
    check_books(folder, samplers, trained, steps, batch_size, store)


def kill_real_runs(nursery, places, tmp_path, min_kills, seed, kinds, most_kills=1000):
    """How many runs were finished, and how many kills it took."""
    (tmp_path / "run.toml").write_text(RUN_FILE)
    rng, number, nursery.num_kills = random.Random(seed), 0, 0
    while nursery.num_kills < min_kills:
        folder, kind, number = tmp_path / f"{number}" / "run", rng.choice(kinds), number + 1
        store = {"memory": "memory", "sqlite": str(folder / "buffer.db")}.get(kind) or places()
        environment = {"FOREBAY_REPLAY_URL": store}
        changes = [f"checkpoint_every={rng.choice([1, 2, 4])}", f"replay.store={kind}"]
        if rng.random() < 0.3:
            changes.append("produce.in_flight_update=true")
        output = f"output={folder.parent}"
        start = ["train", tmp_path / "run.toml", output, *changes, "--overwrite", environment]
        resume = ["train", "--resume", folder, environment]
        kill_until_finished(nursery, rng, folder, STEPS, start, resume, 0.25, store, most_kills)
        check_real_run(folder, store)
    return number, nursery.num_kills


def test_a_separate_run_with_a_real_model_survives_kills(nursery, tmp_path):
    kill_real_runs(nursery, None, tmp_path, min_kills=2, seed=3, kinds=["sqlite"], most_kills=4)


def copies(store):
    """The members of each unfinished group as they lie in the database."""
    storage = SQLStorage(store)
    storage.use_codec(GroupCodec())
    try:
        return {row.tags["group"]: list(row.item) for row in asyncio.run(storage.get(COPIES))}
    finally:
        storage.close()


def kill_long_episodes(nursery, place, store):
    """Start a run of long episodes, and kill it in their midst; the unfinished rollouts that it leaves."""
    folder, arguments = place / "run", f"arguments = {{ folder = '{place}' }}"
    plays = f"max_turns = 30, environment = {{ name = 'slow_episodes:Replies', {arguments} }}"
    agent = f"agent = {{ name = 'multi_turn', arguments = {{ {plays} }} }}"
    engine = f"engine = {{ name = 'slow_episodes:build', {arguments} }}"
    run_file = RUN_FILE.replace(
        "judge = {", f"{agent}\njudge = {{ name = 'forebay.agents:episode_reward' }}\n# "
    ).replace("seed = 5", f"seed = 5\n{engine}")
    place.mkdir()
    (place / "run.toml").write_text(run_file)
    changes = [
        f"output={place}",
        "checkpoint_every=1",
        f"replay.store={'postgresql' if store.startswith('postgresql') else 'sqlite'}",
        "produce.staleness_rule=correct",
        "produce.in_flight_update=true",
        "produce.filter=none",
        "produce.save_partial_every_s=0.4",
        "tasks.0.sample.max_tokens=400",
    ]
    nursery.tell(json.dumps(["train", str(place / "run.toml"), *changes, {"FOREBAY_REPLAY_URL": store}]))
    pid = int(nursery.read_to("@pid")[-1].split()[1])
    lines = nursery.read_to(f"1/{STEPS}", "@end")
    assert not lines[-1].startswith("@"), "".join(lines)
    while not (
        (checkpoints := list_checkpoints(folder))
        and any(3 < num_turns(state) < 9 for group in copies(store).values() for state in group)
    ):
        if checkpoints and step_of(checkpoints[-1]) == STEPS:
            break
        time.sleep(0.02)
    nursery.end(pid)
    nursery.tell("reap")
    nursery.read_to("@exit")
    # A copy may outlive its group for a moment.
    over = asyncio.run(finished_groups(store))
    return {
        state.rollout_id: state
        for name, group in copies(store).items()
        for state in group
        if name not in over and state.status is Status.ABORTED
    }


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.soak)])
def test_long_episodes_go_on_from_their_turns_after_a_kill(nursery, tmp_path, kind, request):
    going_on, number = {}, 0
    # On a busy machine the episodes may be over before they are seen, and the run with them.
    while max(map(num_turns, going_on.values()), default=0) <= 3:
        place, number = tmp_path / f"{number}", number + 1
        folder = place / "run"
        store = str(folder / "buffer.db") if kind == "sqlite" else request.getfixturevalue("places")()
        going_on = kill_long_episodes(nursery, place, store)
    # The first line of each rollout after this says where it went on.
    files = [place / "engine.jsonl", place / "environment.jsonl"]
    sizes = [file.stat().st_size for file in files]
    assert nursery.run("train", "--resume", folder, {"FOREBAY_REPLAY_URL": store})
    inputs, replies = map(first_lines, files, sizes)
    for name, state in going_on.items():
        # Of a turn that was finished, and not replied to, the reply comes first.
        is_turn_whole = state.extra_fields[EPISODE_KEY]["awaits_reply"]
        prefix = [*state.prompt_ids, *state.response_ids]
        assert inputs[name][: len(prefix)] == prefix
        assert replies[name] == num_turns(state) + (not is_turn_whole)
        assert is_turn_whole or len(inputs[name]) == len(prefix)
    check_real_books(folder, store)


def first_lines(file, start):
    """What is first said of each rollout from this byte on."""
    lines = file.read_bytes()[start:].splitlines()
    return dict(reversed([json.loads(line) for line in lines]))


def num_turns(state):
    return state.extra_fields.get(TURNS_KEY, 0)


@pytest.mark.soak
def test_separate_runs_with_a_real_model_survive_forty_kills(nursery, places, tmp_path):
    kinds = ["memory", "sqlite", "postgresql"]
    num_runs, num_kills = kill_real_runs(nursery, places, tmp_path, min_kills=40, seed=SOAK_SEED, kinds=kinds)
    print(f"{num_runs} runs with a real model, {num_kills} kills: nothing lost, nothing trained twice")


class RestartingNursery(Nursery):
    """Restarts the database at random instants while a run is at work, which is killed as well."""

    def __init__(self, database, seed):
        super().__init__()
        self._database, self._rng = database, random.Random(seed)
        self.num_restarts, self.num_starts_without, self._left_s = 0, 0, 1.0

    def run(self, *arguments, **until):
        """As a nursery; a start that finds no database tells of it and is made again."""
        while True:
            over, self._lines = threading.Event(), []
            restarting = threading.Thread(target=self._restart, args=(over,))
            restarting.start()
            try:
                ended = super().run(*arguments, **until)
            finally:
                over.set()
                restarting.join()
            if not ended or "@end 0\n" in self._lines:
                return ended
            self.num_starts_without += 1

    def read_to(self, *beginnings):
        lines = super().read_to(*beginnings)
        self._lines += lines
        return lines

    def may_end(self, endings):
        has_begun = any(re.match(r"\d+/\d", line) for line in self._lines)
        tells = any(re.match("error: (the database says|replay.store)", line) for line in self._lines)
        return super().may_end(endings) or (endings == ["@end 2\n"] and tells and not has_begun)

    def _restart(self, over):
        # A run ends that loses its database four times without a step in between.
        while True:
            before = time.monotonic()
            if over.wait(self._left_s):
                self._left_s = max(0, self._left_s - (time.monotonic() - before))
                return
            restart(self._database)
            self.num_restarts += 1
            self._left_s = self._rng.uniform(3, 9)


@pytest.mark.soak
def test_separate_runs_survive_kills_while_their_database_is_restarted(warm, tmp_path):
    with running_server() as url, contextlib.ExitStack() as stack, RestartingNursery(url, SOAK_SEED) as nursery:
        make = lambda: stack.enter_context(empty_place(url))  # noqa: E731
        num_runs, num_kills = kill_real_runs(nursery, make, tmp_path, 40, SOAK_SEED, kinds=["postgresql"])
        print(f"{num_runs} runs, {num_kills} kills, {nursery.num_restarts} restarts of PostgreSQL: nothing lost")
        print(f"{nursery.num_starts_without} starts found no database, and were made again")


@pytest.fixture(scope="module")
def places():
    """Makes URLs, each of a place of its own in a PostgreSQL server."""
    with running_server() as url, contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(empty_place(url))


# -- A scripted engine, and a trainer that only remembers


def check_scripted_run(folder, store):
    used = scripted_run.read_trained(list_checkpoints(folder)[-1])
    first = first_uses(used)
    assert all(0 <= used[step][group] < scripted_run.STALE_FROM for step in first for group in first[step])
    ages = [age for groups in used.values() for age in groups.values()]
    assert scripted_run.STALE_FROM <= max(ages) < scripted_run.REUSE.stale_threshold
    counts = Counter(group for groups in used.values() for group in groups)
    # How often the third use comes before a group is too old is up to the kills.
    assert 2 <= max(counts.values()) <= scripted_run.REUSE.times
    samplers = [scripted_run.build_sampler(name, AsyncReplayBufferConfig().build()) for name in scripted_run.TASKS]
    used = {step: list(groups) for step, groups in used.items()}
    check_books(folder, samplers, used, scripted_run.STEPS, scripted_run.BATCH_SIZE, store)


def kill_scripted_runs(nursery, make_store, tmp_path, min_kills, seed):
    """How many runs were finished, and how many kills it took."""
    rng, number, nursery.num_kills = random.Random(seed), 0, 0
    while nursery.num_kills < min_kills:
        folder, number = tmp_path / f"{number}", number + 1
        store = make_store(folder)
        command = ["scripted", folder, store, rng.choice([1, 2, 4])]
        kill_until_finished(nursery, rng, folder, scripted_run.STEPS, command, command, 0.05, store)
        check_scripted_run(folder, store)
    return number, nursery.num_kills


STORES = {
    "memory": lambda request: lambda folder: "memory",
    "sqlite": lambda request: lambda folder: str(folder / "buffer.sqlite"),
    "postgresql": lambda request: lambda folder: request.getfixturevalue("places")(),
}


@pytest.mark.parametrize("kind", STORES)
def test_separate_runs_with_a_scripted_engine_survive_kills(nursery, tmp_path, kind, request):
    # With those of real models, episodes and colocated runs, over twenty instants in all.
    assert kill_scripted_runs(nursery, STORES[kind](request), tmp_path, min_kills=6, seed=0)[1] >= 6


@pytest.mark.soak
@pytest.mark.parametrize("kind", STORES)
def test_separate_runs_with_a_scripted_engine_survive_a_hundred_kills(nursery, tmp_path, kind, request):
    make_store = STORES[kind](request)
    num_runs, num_kills = kill_scripted_runs(nursery, make_store, tmp_path, min_kills=100, seed=SOAK_SEED)
    print(f"{num_runs} runs on {kind}, {num_kills} kills: nothing lost, nothing trained twice")


def test_a_failed_group_that_a_resumed_run_owes_is_live(tmp_path):
    async def settle():
        run = scripted_run.Run(tmp_path, str(tmp_path / "buffer.sqlite"))
        group = await run.runners["a"].sampler.sample("a")
        for state in group:
            state.status = Status.FAILED
        await run.buffer.put(group, "a", tags={"group": group[0].group_id})
        run.manager.ledger.record(group[0].group_id, "a", "admitted")
        await run.manager.settle(0)
        try:
            assert await run.manager.count_live() == {"a": 1, "b": 0}
            assert run.manager.ledger.balance(await run.manager.count_live()).ok
            assert await run.owed() == [group[0].group_id]
            assert await run.manager.count_live() == {"a": 0, "b": 0}
        finally:
            run.manager.ledger.close()
            await run.buffer.close()

    asyncio.run(settle())


def test_a_deletion_that_is_cut_off_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        part = tmp_path / "checkpoints" / f"step_{step:06d}" / "part"
        part.parent.mkdir(parents=True)
        part.write_text("x")

    def cut_off(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patches:
        patches.setattr("shutil.rmtree", cut_off)
        with pytest.raises(KeyboardInterrupt):
            prune_checkpoints(tmp_path, keep=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000003"]
    prune_checkpoints(tmp_path, keep=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000003"]
