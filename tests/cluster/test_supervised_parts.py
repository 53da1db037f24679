"""Parts in other processes as the run sees them: lost, hung, back and gone; none needs a cluster."""

import asyncio
from types import SimpleNamespace

import pytest

from forebay.aio import virtual_time
from forebay.cluster import supervisor as supervising
from forebay.cluster.calls import as_one_piece, from_one_piece
from forebay.cluster.engines import PlacedEngine
from forebay.cluster.library import Published
from forebay.cluster.rollout_worker import Report
from forebay.cluster.supervisor import Supervised
from forebay.cluster.workers import ClusterController, PlacedWorker, Workers
from forebay.engines import EngineHealth, EngineLost
from forebay.engines.members import NOTHING
from forebay.models.starting_weights import AdaptersRefusedError
from forebay.produce.background import tell
from forebay.types import RolloutState
from forebay.watching.stalls import StallError

exceptions = pytest.importorskip("ray").exceptions


class Method:
    """A method of an actor, as Ray's handle has it."""

    def __init__(self, call):
        self.remote = call

    def options(self, **_):
        return self


class Ref:
    """Ray's reference of a result."""

    def __init__(self, result):
        self._result = result

    def __await__(self):
        yield from ()
        return self._result


class Signs:
    """Ray's stream of what an actor says: a wait for its next item may be cancelled."""

    def __init__(self, actor, end):
        self._actor, self._end = actor, end

    async def __anext__(self):
        saying, is_first = asyncio.ensure_future(self._actor.said.get()), True
        while is_first or self._actor.is_frozen:
            is_first = False
            await asyncio.wait(
                [saying, self._end], timeout=supervising.BEAT_EVERY_S, return_when=asyncio.FIRST_COMPLETED
            )
            if self._end.done():
                await self._end
            if saying.done():
                return Ref(saying.result())
        saying.cancel()
        return Ref(("", NOTHING, NOTHING))


class Actor:
    """Ray's handle of an actor whose process `kill` ends, and that is then another process at once."""

    def __init__(self, **methods):
        self.pid = 1
        self.is_dead = False
        self._end = asyncio.get_running_loop().create_future()
        self.__ray_ready__ = Method(self._ready)
        self.live = Method(lambda: Signs(self, self._end))
        self.is_frozen = False
        self.said = asyncio.Queue()
        for name, call in methods.items():
            setattr(self, name, Method(call))

    async def _ready(self):
        if self.is_dead:
            raise exceptions.ActorDiedError()

    def kill(self, *, no_restart=True):
        self._end.set_exception(exceptions.ActorDiedError())
        # Seen, whoever waits for it.
        self._end.exception()
        self.is_dead = no_restart
        self.pid += 1
        self._end = asyncio.get_running_loop().create_future()


@pytest.fixture(autouse=True)
def kill(monkeypatch):
    ray = SimpleNamespace(
        exceptions=exceptions, kill=lambda actor, **how: actor.kill(**how), cancel=lambda stream: None
    )
    monkeypatch.setattr(supervising, "import_ray", lambda: ray)


class Watched(Supervised):
    def __init__(self, actor, set_up, **told):
        super().__init__(SimpleNamespace(name="engine 0"), **told)
        self.begin(actor, actor.pid)
        self._set_up = set_up


def watched(actor, set_up, **told):
    part = Watched(actor, set_up, **told)
    part.watch()
    return part


def test_a_part_that_cannot_be_set_up_gets_another_process_and_then_another_with_growing_pauses():
    async def main():
        loop = asyncio.get_running_loop()
        actor, told, starts = Actor(), [], []

        async def set_up():
            starts.append((actor.pid, loop.time()))
            if len(starts) == 1:
                # It ends while it is set up.
                actor.kill(no_restart=False)
                raise exceptions.ActorDiedError()
            if len(starts) < 5:
                raise EngineLost("the server does not start")
            return actor.pid

        part = watched(actor, set_up, on_restart=lambda *what: told.append(what))
        await asyncio.sleep(1)
        actor.kill(no_restart=False)
        await asyncio.sleep(1000)
        pause_s = supervising.BEAT_EVERY_S
        assert starts == [(2, 1), (4, 1), (5, 1 + pause_s), (6, 1 + 3 * pause_s), (7, 1 + 6 * pause_s)]
        assert (part.is_up, part.pid, part.incarnation) == (True, 7, 1)
        assert [part for part, _ in told] == ["engine 0"]
        await part.stop()

    virtual_time.run(main())


@pytest.mark.parametrize("begins", [True, False])
def test_an_actor_that_ray_makes_no_more_is_replaced_at_once_and_one_that_joins_is_set_up(begins):
    async def main():
        actors, told = [Actor(), Actor()], []

        async def set_up():
            assert part.actor is actors[1]
            return part.actor.pid + 10

        part = Watched(actors[0], set_up, on_restart=lambda *what: told.append(what))
        part.in_place = lambda: part.use(actors[1])
        if not begins:
            part.pid, part.is_up = 0, False
            part.in_place()
        part.watch()
        await asyncio.sleep(1)
        if begins:
            actors[0].kill()
            await asyncio.sleep(0.1)
        assert (part.is_up, part.pid, len(told)) == (True, 11, begins)
        await part.stop()

    virtual_time.run(main())


def test_a_frozen_process_is_killed_and_replaced():
    async def main():
        actor, told = Actor(), []

        async def set_up():
            return actor.pid

        kill = actor.kill

        def kill_and_thaw(**how):
            actor.is_frozen = False
            kill(**how)

        actor.kill = kill_and_thaw
        part = watched(actor, set_up, on_restart=lambda *what: told.append(what))
        await asyncio.sleep(3600)
        assert not told
        actor.is_frozen = True
        await asyncio.sleep(supervising.SILENCE_LIMIT_S + 1)
        assert told == [("engine 0", "engine 0 was to give a sign of life: no answer within 120 s")]
        assert (part.is_up, part.pid) == (True, 2)
        await part.stop()

    virtual_time.run(main())


class EngineProcess(Actor):
    """An engine's; the first process does not answer `hangs`."""

    def __init__(self, hangs=""):
        self.hangs = hangs
        self.calls = []
        named = ("pause", "resume", "load_weights")
        super().__init__(
            **{name: lambda *_, name=name: self._answer(name) for name in named},
            start=self._start,
            health=self._health,
            generate=None,
            abort=None,
        )

    async def _start(self, spec):
        return self.pid

    async def _answer(self, name):
        self.calls.append((self.pid, name))
        if self.pid == 1 and name == self.hangs:
            await asyncio.Event().wait()

    async def _health(self):
        if self.hangs == "health":
            raise exceptions.ActorDiedError()
        return EngineHealth(ok=True, num_running=0, num_waiting=0, model_step=0)


def placed(number, **options):
    engine = PlacedEngine(SimpleNamespace(name=f"engine {number}"))
    engine.begin(EngineProcess(**options), 1)
    return engine


@pytest.mark.parametrize("hangs", ["pause", "resume", "load_weights"])
def test_an_engine_that_hangs_is_started_again_and_the_run_goes_on(hangs):
    async def main():
        engines = [placed(0, hangs=hangs), placed(1)]
        controller = ClusterController(engines, Workers([]), None)
        await controller.update_weights(Published(None, 1), 1)
        await tell(controller, "pause")
        await tell(controller, "go on")
        await asyncio.sleep(1)
        assert [engine.pid for engine in engines] == [2, 1]
        assert controller.engines_up == dict(enumerate(engines))
        assert controller.away() == ""
        engines[1].is_up = False
        assert controller.away() == "engine 1"
        # It was told all that is wanted of it.
        last = {name for pid, name in engines[0].actor.calls if pid == 2}
        assert last >= {"load_weights", "resume"}
        for engine in engines:
            await engine.stop()

    virtual_time.run(main())


def test_a_stall_in_an_engines_process_is_that_engines_alone_and_not_the_trainers():
    async def main():
        engines = [placed(0), placed(1)]
        load = engines[0].actor.load_weights.remote
        stall = exceptions.RayTaskError("load_weights", "", StallError("no answer")).as_instanceof_cause()

        async def stall_once(*told):
            if engines[0].actor.pid == 1:
                raise stall
            await load(*told)

        engines[0].actor.load_weights = Method(stall_once)
        controller = ClusterController(engines, Workers([]), None)
        # An error of this call would be taken for one of the trainer, which gives the weights.
        await controller.update_weights(Published(None, 1), 1)
        assert controller.away() == "engine 0"
        await asyncio.sleep(1)
        assert [engine.pid for engine in engines] == [2, 1]
        for engine in engines:
            await engine.stop()

    virtual_time.run(main())


def test_only_a_part_that_is_paused_is_told_to_go_on():
    async def main():
        engine = placed(0)
        told = engine.actor.calls
        await engine.resume()
        # It is kept going from then on all the same.
        assert engine._task is not None
        await asyncio.gather(engine.pause(), engine.resume())
        await engine.resume()
        await engine.pause()
        assert told == [(1, "pause"), (1, "resume"), (1, "pause")]
        # A process in its place learns of the pause by itself.
        engine.actor.kill(no_restart=False)
        await asyncio.sleep(1)
        assert told[3:] == [(2, "pause")]
        await engine.resume()
        assert told[4:] == [(2, "resume")]
        await engine.stop()

    virtual_time.run(main())


def test_adapters_that_are_refused_have_been_tried_by_all_and_are_refused_from_then_on():
    async def main():
        ends = []

        async def refuse(*_):
            raise AdaptersRefusedError("whole weights only")

        async def load(*_):
            await asyncio.sleep(10)
            ends.append("loaded")

        engines = [placed(0), placed(1)]
        engines[0].actor.load_weights, engines[1].actor.load_weights = Method(refuse), Method(load)
        controller = ClusterController(engines, Workers([]), None)
        assert controller.takes_adapters
        # Else whole weights, which are given next, would be loaded beside these adapters.
        with pytest.raises(AdaptersRefusedError):
            await controller.update_weights(Published(None, 1, {"r": 1}), 1)
        assert ends == ["loaded"]
        assert not controller.takes_adapters
        for engine in engines:
            await engine.stop()

    virtual_time.run(main())


def test_an_engine_that_starts_again_and_refuses_adapters_waits_for_whole_weights():
    async def main():
        async def refuse(*_):
            raise AdaptersRefusedError("whole weights only")

        engine = placed(0)
        engine.weights, engine.actor.load_weights = Published(None, 1, {"r": 1}), Method(refuse)
        assert await engine._set_up() == 1
        assert not engine.takes_adapters

    virtual_time.run(main())


def test_the_controller_follows_engines_that_join_and_leave():
    async def main():
        engines = [placed(0), placed(1)]

        async def scale(parts, change):
            engines.append(placed(2))
            raise ValueError("no room for another")

        controller = ClusterController(engines, Workers([]), scale)
        await controller.update_weights(Published(None, 1), 1)
        engines.pop()
        # A change may take minutes: the one that leaves holds nothing up meanwhile.
        await controller.update_weights(Published(None, 2), 2)
        assert controller.model_step == 2
        with pytest.raises(ValueError, match="no room"):
            await controller.scale("engines", "+2")
        assert controller.engines == tuple(engines)
        # One that joins does as the first does: that is known at once.
        for begun in (controller.update_weights(Published(None, 3), 3), controller.pause_generation()):
            task = asyncio.ensure_future(begun)
            await asyncio.sleep(0)
            assert engines[0].weights.model_step == 3
            assert engines[0].is_paused is (begun.__name__ == "pause_generation")
            await task
        for engine in engines:
            await engine.stop()

    virtual_time.run(main())


def test_a_worker_that_leaves_is_paused_like_the_others_and_its_tokens_stay_counted():
    async def main():
        def worker(number):
            paused = asyncio.Event()

            async def generate(told):
                await paused.wait()
                return as_one_piece(from_one_piece(told)[0])

            async def pause():
                paused.set()

            placed = PlacedWorker(SimpleNamespace(name=f"worker {number}"))
            placed.begin(actor := Actor(generate=generate, pause=pause), 1)
            notes = {f"rollout {number}": ("9 tokens, generate", 20.0)}
            actor.said.put_nowait(Report(1, notes, 100, 1, 50.0))
            return placed

        first, second = them = worker(0), worker(1)
        workers = Workers(them)
        running = [
            asyncio.create_task(workers.generate(("task", False), [group], enable_partial_rollout=False))
            for group in (RolloutState([], group_id=0), RolloutState([], group_id=1))
        ]
        await asyncio.sleep(1)
        assert sum(worker.num_tokens_made for worker in workers.ever) == 200
        assert sum(worker.num_retries for worker in workers.ever) == 2
        leaving = asyncio.create_task(workers.leave(second))
        await asyncio.sleep(10)
        assert workers.all == [first]
        assert not leaving.done()
        # Thirty seconds when it said so, by its own clock, and eleven since.
        assert workers.note_of("rollout 1") == "9 tokens, generate for 41 s"
        assert workers.note_of("rollout 2") == ""
        await workers.pause()
        await leaving
        assert [state.group_id for (state,) in await asyncio.gather(*running)] == [0, 1]
        await second.stop()
        second.is_up = False
        assert sum(worker.num_tokens_made for worker in workers.ever) == 200
        assert sum(worker.num_retries for worker in workers.ever) == 2
        await first.stop()

    virtual_time.run(main())


def test_what_is_told_of_an_engine_that_does_not_serve():
    async def main():
        engines = [placed(0), placed(1), placed(2, hangs="health")]
        controller = ClusterController(engines, Workers([]), None)
        engines[0].is_up = False
        assert (await engines[0].health()).detail == "starting again"
        assert list(controller.engines_up) == [1, 2]
        with pytest.raises(EngineLost):
            await engines[2].health()
        health = await controller.health()
        assert not health.ok
        assert health.detail.startswith("engine 0: starting again; engine 2: ")

    virtual_time.run(main())
