"""The pieces that a run on Ray is made of, each by itself; none needs a cluster."""

import asyncio
import os
import socket
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.aio import virtual_time
from forebay.cluster import buffer, ray_cluster
from forebay.cluster.arguments import RayArguments
from forebay.cluster.buffer import locate
from forebay.cluster.calls import PUSH_EVERY_S, ActorLost, BatchedCalls, CallFailed, NotBuilt, as_they_end, asked
from forebay.cluster.engines import RayEngine
from forebay.cluster.library import Given, why
from forebay.cluster.placement import plan_parts
from forebay.cluster.supervisor import Restarts
from forebay.cluster.trainer import RayTrainer
from forebay.config import ConfigError, parse_config
from forebay.engines import Completion
from forebay.produce import ProductionError
from forebay.replay import ConnectionLost
from forebay.runs.config import RunConfig
from forebay.runs.launch import _lost_part
from forebay.runs.placement import PartLost, num_sharing
from forebay.train.parallel.ranks import RankError, set_interface


async def ended(error):
    """A call of an actor that raises."""
    raise error


def of_ray(name):
    exceptions = pytest.importorskip("ray").exceptions
    return {
        "ActorDiedError": exceptions.ActorDiedError,
        "ObjectLostError": lambda: exceptions.ObjectLostError("", "", ""),
        "NotBuilt": lambda: carried(NotBuilt("a new process")),
    }[name]()


@pytest.mark.parametrize("name", ["ActorDiedError", "ObjectLostError", "NotBuilt"])
async def test_a_call_that_found_no_process_to_answer_is_lost_not_failed(name):
    with pytest.raises(ActorLost):
        await asked(ended(of_ray(name)))


async def test_a_call_that_fails_there_says_why_in_words():
    with pytest.raises(CallFailed, match="OSError: disk full"):
        await asked(ended(carried(OSError("disk full"))))


class Answered:
    """One reference of a stream."""

    def __init__(self, results):
        self._results = results

    def __await__(self):
        yield from ()
        return self._results


def stream_of(work, sizes):
    """An actor's method: `work` for each item; notes how many items came together."""

    async def stream(items):
        sizes.append(len(items))
        async for results in as_they_end([work(item) for item in items]):
            yield Answered(results)

    return stream


async def itself(number):
    return number


async def test_items_of_one_turn_go_together_and_come_back_as_they_end():
    doors = [asyncio.Event() for _ in range(3)]

    async def work(number):
        await doors[number].wait()
        return number * 10

    sizes = []
    calls = BatchedCalls(stream_of(work, sizes))
    given = [asyncio.create_task(calls.ask(number)) for number in range(3)]
    doors[2].set()
    assert await given[2] == 20
    assert not given[0].done()
    # What has its answer is let go of: the slowest of a stream may take hours.
    (receiving,) = [task.get_coro() for task in calls._sent]
    assert 2 not in receiving.cr_frame.f_locals["batch"]
    doors[0].set()
    doors[1].set()
    assert await asyncio.gather(*given) == [0, 10, 20]
    assert sizes == [3]


def test_how_far_items_are_is_told_as_long_as_it_changes_and_they_are_waited_for():
    async def main():
        begun_s = asyncio.get_running_loop().time()
        told, sizes = [], []

        async def work(seconds):
            await asyncio.sleep(seconds)
            return seconds

        def how_far(number):
            # The second one stands still after seven seconds.
            return int(min(asyncio.get_running_loop().time() - begun_s, 7 if number else 100))

        async def stream(items):
            async for some in as_they_end([work(item) for item in items], how_far):
                sizes.append(len(some))
                yield Answered(some)

        calls = BatchedCalls(stream, lambda item, far: told.append((item, far)))
        given = [asyncio.create_task(calls.ask(item)) for item in (1000, 21, 22)]
        await asyncio.sleep(12)
        given[2].cancel()
        assert await given[1] == 21
        pace_s = int(PUSH_EVERY_S)
        assert told == [
            *((item, pace_s) for item in (1000, 21, 22)),
            *[(1000, 2 * pace_s), (21, 7), (22, 7)],
            # Nobody waits for the last one any more.
            *[(1000, 3 * pace_s), (21, 7), (1000, 4 * pace_s), (21, 7)],
        ]
        given[0].cancel()
        assert sizes == [3, 3, 3, 3, 1]

    virtual_time.run(main())


async def test_items_are_sent_also_when_there_is_never_a_quiet_moment():
    sizes = []
    calls = BatchedCalls(stream_of(itself, sizes))
    given = []
    # One more in every turn, so that no turn is quiet before the first answer.
    while not (given and given[0].done()):
        given.append(asyncio.create_task(calls.ask(len(given))))
        assert len(given) < 1000, "nothing was sent"
        await asyncio.sleep(0)
    assert await asyncio.gather(*given) == list(range(len(given)))
    assert sum(sizes) == len(given)
    assert len(sizes) <= 3


async def test_a_cancelled_item_that_was_not_sent_is_not_sent():
    sizes = []
    calls = BatchedCalls(stream_of(itself, sizes))
    given = [asyncio.create_task(calls.ask(number)) for number in range(2)]
    await asyncio.sleep(0)
    given[0].cancel()
    assert await given[1] == 1
    assert sizes == [1]


async def test_an_abort_ends_a_request_that_was_not_sent_yet():
    pytest.importorskip("ray")
    sent, aborted = [], []

    async def stream(requests, caller):
        sent.extend(request.request_id for request in requests)
        yield Answered([(number, Completion(finish_reason="stop")) for number in range(len(requests))])

    async def abort(names):
        aborted.extend(names)

    generate = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=stream))
    engine = RayEngine(SimpleNamespace(generate=generate, abort=SimpleNamespace(remote=abort)), caller="here")
    requests = [SimpleNamespace(request_id=name) for name in "ab"]
    given = [asyncio.create_task(engine.generate(request)) for request in requests]
    await asyncio.sleep(0)
    await engine.abort(["a"])
    assert [completion.finish_reason for completion in await asyncio.gather(*given)] == ["abort", "stop"]
    assert (sent, aborted) == (["b"], ["a"])


async def test_a_stream_that_ends_early_loses_the_items_without_an_answer():
    async def stream(items):
        yield Answered([(1, "one")])

    calls = BatchedCalls(stream)
    given = [asyncio.create_task(calls.ask(number)) for number in range(2)]
    assert await given[1] == "one"
    with pytest.raises(ActorLost, match="before its time"):
        await given[0]


async def test_an_error_of_a_stream_reaches_every_caller_that_waits():
    async def work(number):
        if number == 1:
            raise OSError("disk full")
        await asyncio.Event().wait()

    calls = BatchedCalls(stream_of(work, []))
    results = await asyncio.gather(*(calls.ask(number) for number in range(3)), return_exceptions=True)
    assert [str(error) for error in results] == ["disk full"] * 3


async def test_a_caller_that_stops_listening_ends_the_work():
    ended = []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    stream = as_they_end([itself(1), work()])
    assert await anext(stream) == [(0, 1)]
    await stream.aclose()
    assert ended == [True]


def test_each_part_has_a_bundle_of_its_own():
    asked = RayArguments(num_engines=2, gpus_per_engine=1, gpus_per_trainer=2)
    apart = plan_parts(asked, cpus=0.5)
    engine = {"CPU": 0.5, "GPU": 1}
    trainer, worker = [{"CPU": 0.5, "GPU": 2}], [{"CPU": 0.5}]
    assert apart.bundles == {"trainer": trainer, "engine": [engine, engine], "worker": worker}
    # For evaluations beside production one of two, else one more.
    more = plan_parts(asked, cpus=0.5, least=2)
    assert (more.bundles["engine"], more.bundles["worker"]) == ([engine, engine], worker * 2)
    # The trainer is on the machine of its first rank, which puts weights into memory of both.
    asked = RayArguments(num_engines=2, gpus_per_engine=1, gpus_per_trainer=1)
    ranks = plan_parts(asked, cpus=0.5, num_ranks=2)
    assert ranks.bundles["trainer"] == [{"CPU": 1.0, "GPU": 1}, {"CPU": 0.5, "GPU": 1}]
    rooms = [(room.bundle, room.cpus, room.gpus) for room in (ranks.trainer, *ranks.ranks)]
    assert rooms == [(0, 0.5, 0), (0, 0.5, 1), (1, 0.5, 1)]


def colocated(ranks, engines, each, *, mode="colocated", by_rank=1, engine=None):
    """A run, as far as its layout on Ray depends on it."""
    asked = {"num_engines": engines, "gpus_per_engine": each, "gpus_per_trainer": by_rank}
    engine = engine or {"servers": 1}
    return SimpleNamespace(
        device="cpu",
        cluster=SimpleNamespace(arguments=asked),
        produce=SimpleNamespace(mode=mode),
        train=SimpleNamespace(ranks=ranks),
        engine=SimpleNamespace(name="vllm", arguments=engine),
    )


@pytest.mark.parametrize(
    ("run", "bundles", "apart"),
    [
        # All shared; with tensor parallelism; fewer engines than ranks; more than fit there; some ranks left over.
        (colocated(2, 2, 1), [(1, 1), (1, 1)], []),
        (colocated(1, 1, 1), [(1, 1)], []),
        (colocated(4, 2, 2), [(2, 2), (2, 2)], []),
        (colocated(4, 2, 1), [(1, 1), (1, 1), (1, 0), (1, 0)], []),
        (colocated(2, 3, 1), [(1, 1), (1, 1)], [1]),
        (colocated(3, 2, 2), [(2, 2), (1, 0)], [2]),
        # All apart: the engines are larger than the trainer, are at work meanwhile, run elsewhere or have shares.
        (colocated(2, 1, 4), [(1, 0), (1, 0)], [4]),
        (colocated(2, 2, 1, mode="separate"), [(1, 0), (1, 0)], [1, 1]),
        (colocated(2, 1, 1, engine={"urls": ["http://127.0.0.1:1"]}), [(1, 0), (1, 0)], [1]),
        (colocated(2, 2, 0.5), [(1, 0), (1, 0)], [0.5, 0.5]),
        (colocated(2, 2, 1, by_rank=0.6), [(0.6, 0), (0.6, 0)], [1, 1]),
    ],
)
def test_engines_of_a_colocated_run_are_on_the_gpus_of_their_ranks_as_far_as_these_go(run, bundles, apart):
    """`bundles`: those with ranks, by GPUs and by what an engine there has of them; `apart`: GPUs of other engines."""
    asked, num_ranks = RayArguments(**run.cluster.arguments), run.train.ranks
    plan = plan_parts(asked, cpus=1, num_ranks=num_ranks, sharing=num_sharing(run))
    assert [bundle["GPU"] for bundle in plan.bundles["trainer"]] == [gpus for gpus, _ in bundles]
    there = {room.bundle: room.gpus for room in plan.engines if room.group == "trainer"}
    assert there == {number: each for number, (_, each) in enumerate(bundles) if each}
    assert [room.gpus for room in plan.engines if room.group == "engine"] == apart
    ranks = plan.ranks or (plan.trainer,)
    assert len(ranks) == num_ranks
    lent = [room.lender for room in ranks if room.lender]
    assert lent == [(number, gpu) for number, (_, each) in enumerate(bundles) for gpu in range(each)]
    assert all(room.bundle == plan.engines[room.lender[0]].bundle for room in ranks if room.lender)
    # No part of a bundle waits for another to end.
    for number, bundle in enumerate(plan.bundles["trainer"]):
        parts = {plan.trainer, *plan.ranks, *plan.engines}
        own = [part for part in parts if (part.group, part.bundle) == ("trainer", number)]
        assert sum(part.cpus for part in own) == bundle["CPU"]
        assert sum(part.gpus for part in own if not part.lender) == bundle["GPU"]


def shared_run(**engine):
    task = {"name": "sorting", "data": {"source": "sorting", "size": 8}, "judge": "exact_match"}
    asked = {"num_engines": 2, "gpus_per_engine": 1, "gpus_per_trainer": 1}
    table = {"name": "placed", "steps": 1, "batch_size": 1, "rollouts_per_prompt": 2, "model": {"source": "tiny"}}
    table |= {"tasks": [task], "train": {"ranks": 2}, "cluster": {"name": "ray", "arguments": asked}}
    table["engine"] = {"name": "vllm", "arguments": {"servers": 1, **engine}}
    return parse_config(RunConfig, table, source="test"), asked


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ({}, r"need engine\.arguments\.memory_share, which forebay plan says; gpus_per_trainer = 0\.9"),
        ({"memory_share": 0.4, "offload": "all"}, "takes weights off the device, which is for one rank"),
    ],
)
def test_servers_that_cannot_share_gpus_with_ranks_are_refused_before_anything_starts(engine, says):
    config, asked = shared_run(**engine)
    with pytest.raises(ConfigError, match=says):
        ray_cluster.RayCluster(config, **asked)


@pytest.mark.parametrize(
    "changes", [{"engine": {"name": "transformers"}}, {"produce": {"mode": "separate", "staleness_rule": "drop"}}]
)
def test_a_machine_without_a_gpu_drives_a_run_whose_parts_have_some(changes):
    config, asked = shared_run()
    assert not torch.cuda.is_available()
    table = config.model_dump() | {"device": "cuda"} | changes
    ray_cluster.RayCluster(parse_config(RunConfig, table, source="test"), **asked)


async def test_an_engine_that_shares_gpus_with_ranks_does_not_leave():
    config, asked = shared_run(memory_share=0.4)
    cluster = ray_cluster.RayCluster(config, **asked)
    plan = plan_parts(RayArguments(**asked | {"num_engines": 3}), cpus=1, num_ranks=2, sharing=2)
    own = {"engine": SimpleNamespace(), "is_up": True}
    cluster._engines += [SimpleNamespace(name=f"engine {n}", room=room, **own) for n, room in enumerate(plan.engines)]
    first, *_ = cluster._engines
    first.is_up = False
    with pytest.raises(ValueError, match="engine 0 shares GPUs with ranks, and stays as long as they do"):
        await cluster.scale("engines", "-1")
    assert len(cluster._engines) == 3


def test_ranks_that_would_share_a_gpu_are_refused_at_the_start():
    config = colocated(2, 1, 0)
    with pytest.raises(ConfigError, match=r"= 0.5 may put several of train.ranks = 2 on one GPU"):
        RayArguments(gpus_per_trainer=0.5).check(config)
    # Of more than half there is one on a GPU, beside an engine perhaps.
    for share in (0, 0.6, 1):
        RayArguments(gpus_per_trainer=share).check(config)
    config.train.ranks = 1
    RayArguments(gpus_per_trainer=0.5).check(config)


@pytest.mark.parametrize(
    ("arguments", "device", "warned"),
    [({}, "auto", True), ({"gpus_per_trainer": 1}, "auto", False), ({}, "cpu", False)],
)
async def test_gpus_that_no_part_asks_for_are_warned_of(arguments, device, warned, monkeypatch, caplog):
    fake = SimpleNamespace(cluster_resources=lambda: {"CPU": 8.0, "GPU": 8.0})
    monkeypatch.setattr(ray_cluster, "import_ray", lambda: fake)
    monkeypatch.setattr(ray_cluster, "connect", lambda given, *, num_cpus: False)
    monkeypatch.setattr(ray_cluster, "reserve", lambda *_, **__: {})
    task = {"name": "sorting", "data": {"source": "sorting", "size": 8}, "judge": "exact_match"}
    table = {"name": "placed", "steps": 1, "batch_size": 1, "rollouts_per_prompt": 2, "model": {"source": "tiny"}}
    config = parse_config(RunConfig, table | {"tasks": [task], "device": device}, source="test")
    await ray_cluster.RayCluster(config, **arguments).open()
    assert ("set gpus_per_trainer and gpus_per_engine" in caplog.text) is warned


@given(st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_without_a_trainer_every_other_part_keeps_its_room(num_engines, num_workers, shares_gpu):
    asked = RayArguments(num_engines=num_engines, num_workers=num_workers, gpus_per_engine=1, gpus_per_trainer=1)
    plan, less = (plan_parts(asked, cpus=1, num_ranks=n, sharing=n and shares_gpu) for n in (1, 0))
    for before, after in zip(plan.engines + plan.workers, less.engines + less.workers, strict=True):
        assert (after.cpus, after.gpus, after.lender) == (before.cpus, before.gpus, None)
    assert len(plan.every_bundle) - len(less.every_bundle) == (0 if shares_gpu else 1)


def test_what_ray_says_of_an_end_is_told_in_few_words():
    text = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: A\nThe actor is dead because "
        "its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly "
        "exits with a connection error code 2. End of file. Some common causes include: (1) ..."
    )
    assert why(RuntimeError(text)).startswith("its process has ended: Worker unexpectedly exits")
    text = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: A\n\tpid: 7\n\tip: 10.0.0.2\nThe "
        "actor died because its node has died. Node Id: 0a1b\n\tthe actor's node was terminated unexpectedly: why"
    )
    assert why(RuntimeError(text)) == "its machine, 10.0.0.2, has ended or cannot be reached"
    assert why(RuntimeError("first.\nsecond")) == "first"
    assert why(RuntimeError()) == "RuntimeError"


def carried(cause):
    """`cause` as Ray brings it from another process."""
    ray = pytest.importorskip("ray")
    error = ray.exceptions.RayTaskError("fit", "Traceback: ...", cause, proctitle="ray::Trainer", pid=1, ip="")
    return error.as_instanceof_cause()


def test_what_another_process_raised_is_told_by_its_name():
    assert why(carried(KeyError("no such task"))) == "KeyError: 'no such task'"


@pytest.mark.parametrize(
    ("cause", "raised"),
    [
        (ValueError("a group without rewards"), ValueError),
        (RuntimeError("out of memory"), RuntimeError),
        (RankError("rank 1 of 2 failed in fit: OSError: no\nTraceback: ..."), PartLost),
    ],
)
async def test_what_the_trainer_raises_is_a_loss_only_if_its_process_is_gone(cause, raised):
    error = RayTrainer(None, [1])._error(carried(cause))
    assert type(error) is raised
    assert str(cause) in str(error)


def test_where_a_cluster_is_given(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert Given.find(None) is Given.find("") is Given.find("local") is None
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert Given.find(None) is None
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert Given.find("local") is None
    assert Given.find("auto") == Given("auto", "cluster.arguments.address")
    assert Given.find(None) == Given("10.0.0.1:6379", "RAY_ADDRESS")
    monkeypatch.setenv("RAY_ADDRESS", "ray://10.0.0.1:10001")
    with pytest.raises(ConfigError, match="RAY_ADDRESS must be 'auto' or host:port"):
        Given.find(None)


def test_an_address_where_nobody_answers_is_an_error_at_once():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"RAY_ADDRESS = '{address}': no Ray cluster answers there"):
            Given(address, "RAY_ADDRESS").check()


def test_restarts_without_a_listener_are_told_to_the_next_one():
    restarts, told = Restarts(), []
    restarts.note("engine 1", "first")
    restarts.listen(lambda *what: told.append(what))
    restarts.note("trainer", "second")
    restarts.listen(None)
    restarts.note("engine 0", "third")
    assert told == [("engine 1", "first"), ("trainer", "second")]
    restarts.listen(lambda *what: told.append(what))
    assert told[2:] == [("engine 0", "third")]
    assert restarts.counts == {"engine": 2, "trainer": 1}


def test_books_that_cannot_be_written_are_no_error_of_the_part_that_is_back(caplog):
    def full(part, reason):
        raise OSError("no space left")

    restarts = Restarts()
    restarts.note("engine 0", "first")
    restarts.listen(full)
    restarts.note("engine 0", "second")
    assert restarts.counts == {"engine": 2}
    assert caplog.text.count("could not be noted") == 2


class Place:
    """Ray's handle of a buffer actor that answers with `error`."""

    def __init__(self, error):
        self.place, self._error = self, error

    async def remote(self):
        raise self._error


async def test_a_buffer_that_is_gone_for_good_is_a_lost_connection():
    exceptions = pytest.importorskip("ray").exceptions
    with pytest.raises(ConnectionLost):
        await locate(Place(exceptions.ActorDiedError()))
    # What the actor itself says is not.
    with pytest.raises(exceptions.RayTaskError):
        await locate(Place(carried(ValueError("no such store"))))


async def test_a_buffer_that_does_not_say_where_it_is_is_a_lost_connection(monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setattr(buffer, "LOCATE_LIMIT_S", 0.01)
    hanging = SimpleNamespace(place=SimpleNamespace(remote=asyncio.Event().wait))
    with pytest.raises(ConnectionLost, match=r"did not answer within 0\.01 s"):
        await locate(hanging)


def test_the_network_interface_of_an_address(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "x")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    set_interface("203.0.113.7")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    set_interface("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_which_errors_lead_back_to_a_checkpoint():
    run = SimpleNamespace(config=SimpleNamespace(replay=SimpleNamespace(kind="memory")))
    assert _lost_part(run, PartLost("the trainer is lost")) == "the trainer is lost"
    with pytest.raises(ProductionError):
        _lost_part(run, ProductionError("no group could be generated"))
