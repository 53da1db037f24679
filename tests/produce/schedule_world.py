"""The real producer of a random schedule, and an independent record of everything that happens in it.

::

    RecordedSampler -> RecordedAgent -> RolloutController -> RecordedEngine      (scripted, with faults)
          |                 |                                     |
          '-----------------+------> Record <---------------------'
                                       ^
    RecordedBuffer --------------------'      manager, strategies, controller, ledger: as they are

Every token that an engine makes has a number of its own, so the record knows which weights made it, for which
rollout, and where it ends up.
"""

import asyncio
import copy
import random
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from schedule_plan import Plan

from forebay.agents.base import AgentLoop
from forebay.engines import RolloutController
from forebay.engines.base import Completion
from forebay.engines.scripted import ScriptedEngine
from forebay.judges.base import Judge
from forebay.ledger import Ledger
from forebay.produce import AgentLoopManager, Prompt, Sampler, TaskRunner
from forebay.produce.strategies.rules import GroupRules
from forebay.replay import FIFOReplayPolicy, IndexedStorage, ReplayBuffer, StalenessReplayPolicy
from forebay.types import SampleParams, Status
from forebay.watching.activity import Activities

TERMINAL = [Status.FILTERED, Status.FAILED, Status.SKIPPED]
"""What nobody will train or generate again, whatever the strategy."""


def now():
    return asyncio.get_running_loop().time()


@dataclass
class Piece:
    """The tokens that one request got, and the steps of the weights that may have made each."""

    offset: int
    ids: list
    steps: list
    """For each token the steps of the weights that were there when it was made: two at the very instant."""
    finish_reason: str


@dataclass
class Record:
    """What happened, by group id and rollout id; kept by the test, not by the ledger."""

    members: dict = field(default_factory=dict)
    """Rollout ids and prompt of every group that was ever taken up, by group id."""
    task_of: dict = field(default_factory=dict)
    out: set = field(default_factory=set)
    """Groups that are in flight."""
    generating: set = field(default_factory=set)
    dropped: dict = field(default_factory=dict)
    """Reasons, by group id."""
    trained: dict = field(default_factory=dict)
    """Train steps, by group id."""
    terminal: set = field(default_factory=set)
    """Groups that were in the buffer for nothing when the latest batch was taken."""
    failed: set = field(default_factory=set)
    """Rollouts that their agent returned failed, or in a state that cannot be trained."""
    left: dict = field(default_factory=lambda: defaultdict(list))
    """Rollouts that left their group, by group id."""
    pieces: dict = field(default_factory=lambda: defaultdict(list))
    """What engines returned for each rollout, in order."""

    def copied(self):
        """As it is now, except that in the copy nothing is in flight."""
        assert not self.out, self.out
        return copy.deepcopy(self)

    def take_up(self, task_name, group, group_size):
        group_id, ids = group[0].group_id, [state.rollout_id for state in group]
        assert group_id not in self.out, f"{group_id} is in flight already"
        assert group_id not in self.trained, f"{group_id} was trained in step {self.trained[group_id]}"
        assert group_id not in self.dropped, f"{group_id} was dropped: {self.dropped[group_id]}"
        if group_id not in self.members:
            assert len(set(ids)) == group_size
            self.members[group_id] = (ids, [state.message for state in group])
            self.task_of[group_id] = task_name
        self.check_members(group)
        self.out.add(group_id)

    def check_members(self, group):
        """Those that it was taken up with, in their order, but for those that left."""
        group_id = group[0].group_id
        ids, messages = self.members[group_id]
        kept = [i for i, name in enumerate(ids) if name not in self.left[group_id]]
        messages = [messages[i] for i in kept]
        assert [state.rollout_id for state in group] == [ids[i] for i in kept]
        assert [state.message for state in group] == messages
        assert all(message == messages[0] for message in messages)
        assert {state.group_id for state in group} == {group[0].group_id}

    def release(self, group, members):
        """Find out who left a group that is stored: only who failed may, and only from enough others."""
        here, group_id = {state.rollout_id for state in group}, group[0].group_id
        gone = [name for name in self.members[group_id][0] if name not in {*here, *self.left[group_id]}]
        assert members is not None or not gone
        assert set(gone) <= self.failed
        assert not gone or len(here) >= members.min_members
        self.left[group_id] += gone
        num_failed = sum(state.status is Status.FAILED for state in group)
        assert members is None or not num_failed or len(here) - num_failed < members.min_members

    def store(self, group):
        self.check_members(group)
        assert group[0].group_id in self.out, f"{group[0].group_id} was stored twice"
        self.out.remove(group[0].group_id)

    def drop(self, group, reason):
        group_id = group[0].group_id
        assert group_id not in self.dropped
        assert group_id not in self.trained
        self.dropped[group_id] = reason

    def response_of(self, rollout_id):
        """The pieces that its response must consist of: the last that began at 0, and what followed."""
        pieces = self.pieces[rollout_id]
        start = max(i for i, piece in enumerate(pieces) if piece.offset == 0)
        return pieces[start:]


class RecordedBuffer(ReplayBuffer):
    """The real buffer, whose puts and gets are recorded.

    Samplers have a way of their own to get groups; besides them only who drops groups gets any.
    """

    record: Record
    plan: Plan

    async def put(self, items, task_name, **settings):
        if items:
            self.record.release(items, self.plan.members)
        await self.take_time()
        if items:
            self.record.store(items)
        await super().put(items, task_name, **settings)

    async def get(self, batch_size, task_name, group_status, **settings):
        groups = await super().get(batch_size, task_name, group_status, **settings)
        for group in groups:
            self.record.drop(group, group_status.value)
        return groups

    async def take_batch(self, task_batch_sizes, **settings):
        taken = await super().take_batch(task_batch_sizes, **settings)
        rows = await self.storage.get({"status": {"$in": TERMINAL}})
        self.record.terminal = {row.item[0].group_id for row in rows}
        return taken

    async def take_time(self):
        """As a store on a disk, or at the other end of a wire, would."""
        if self.plan.store_s:
            await asyncio.sleep(self.plan.store_s)

    async def groups(self, query):
        """The ids of the groups that match, one for each row."""
        return [row.item[0].group_id for row in await self.storage.get(query)]


class SamplerSource:
    """The buffer as samplers see it."""

    def __init__(self, buffer):
        self.buffer = buffer

    async def get(self, batch_size, task_name, group_status):
        await self.buffer.take_time()
        return await ReplayBuffer.get(self.buffer, batch_size, task_name, group_status)


class RecordedSampler(Sampler):
    record: Record

    async def sample(self, task_name, group_status=None):
        group = await super().sample(task_name, group_status)
        self.record.take_up(task_name, group, self.prompt_repeat_k)
        return group


class RecordedEngine(ScriptedEngine):
    """Numbers its tokens, fails and hangs as planned, and notes which weights made which token."""

    def __init__(self, plan, numbers):
        super().__init__(
            self._script, request_latency_s=self._latency, token_latency_s=plan.token_s, max_running=plan.max_running
        )
        self.plan, self.numbers = plan, numbers
        self.record = None
        self.loads = [(-1.0, 0)]
        self.first_token_s = {}

    def _script(self, request):
        plan, done = self.plan, request.num_earlier
        if plan.chance(plan.faults.engine_error):
            raise ConnectionResetError("the engine's fault")
        name, tries, _ = request.request_id.rsplit(":", 2)
        wanted = random.Random(f"{plan.seed}/{name}/{tries}").randint(1, plan.longest)
        ids = [next(self.numbers) for _ in range(max(1, wanted - done))]
        if plan.chance(plan.faults.odd_reason):
            return Completion(response_ids=np.asarray(ids[: request.max_tokens], np.int32), finish_reason="odd")
        return ids

    def _latency(self, request):
        plan = self.plan
        evaluates = request.request_id.startswith("eval/")
        hangs = not evaluates and plan.chance(plan.faults.engine_hangs)
        seconds = float("inf") if hangs else plan.seconds(plan.latency)
        self.first_token_s[request.request_id] = now() + seconds
        return seconds

    async def generate(self, request):
        if self.plan.chance(self.plan.faults.engine_raises):
            raise BrokenPipeError("the way to the engine is broken")
        completion = await super().generate(request)
        if self.record is not None:
            self._note(request, completion)
        return completion

    async def load_weights(self, weights, model_step):
        await super().load_weights(weights, model_step)
        self.loads.append((now(), model_step))

    def _note(self, request, completion):
        first_s = self.first_token_s.pop(request.request_id, 0.0)
        made_s = [first_s + (i + 1) * self.plan.token_s for i in range(len(completion.response_ids))]
        piece = Piece(
            request.num_earlier,
            completion.response_ids.tolist(),
            [self._weights_at(second) for second in made_s],
            completion.finish_reason,
        )
        for label, steps in zip(completion.model_steps.tolist(), piece.steps, strict=True):
            assert label in steps, (label, steps)
        self.record.pieces[request.request_id.rsplit(":", 2)[0]].append(piece)

    def _weights_at(self, second):
        around = [step for at_s, step in self.loads if abs(at_s - second) < 1e-6]
        before = [step for at_s, step in self.loads if at_s <= second - 1e-6]
        return {before[-1], *around}


class NumbersJudge(Judge):
    """The score follows from the response; sometimes late, broken or silent."""

    def __init__(self, plan):
        super().__init__(timeout_s=30.0)
        self.plan = plan

    async def score(self, state):
        plan = self.plan
        if seconds := plan.seconds(plan.judge_s):
            await asyncio.sleep(seconds)
        if plan.chance(plan.faults.judge_hangs):
            await asyncio.Event().wait()
        if plan.chance(plan.faults.judge_raises):
            raise ZeroDivisionError("the judge's fault")
        return score_of(state)


def score_of(state):
    return sum(state.response_ids.tolist()) % 89 / 88


class RecordedAgent(AgentLoop):
    """One response per prompt; sometimes raises or hangs. No group is ever generated twice at once."""

    def __init__(self, plan, controller, judge, activities, record):
        super().__init__(controller, judge, activities=activities)
        self.plan, self.record = plan, record

    async def generate_group(self, states, *, enable_partial_rollout=False):
        group_id = states[0].group_id
        assert group_id not in self.record.generating, f"{group_id} is generated twice at once"
        self.record.generating.add(group_id)
        try:
            group = await super().generate_group(states, enable_partial_rollout=enable_partial_rollout)
        finally:
            self.record.generating.remove(group_id)
        if self.plan.chance(self.plan.faults.group_raises):
            raise EOFError("the agent's fault, after its rollouts had ended")
        for state in group:
            if state.status is Status.COMPLETED and self.plan.chance(self.plan.faults.no_score):
                state.reward = {"note": "the agent has lost the score"}
            if state.status is Status.FAILED or why_untrainable(self.plan, state):
                self.record.failed.add(state.rollout_id)
            else:
                self.record.failed.discard(state.rollout_id)
        return group

    async def generate_sample(self, state):
        plan = self.plan
        if len(state.prompt_ids) == 0:
            state.prompt_ids = [1 + int(state.message[0]["content"])]
        if len(state.tokens) == 0:
            state.tokens = state.prompt_ids
        if plan.chance(plan.faults.agent_raises):
            raise OSError("the agent's fault")
        if plan.chance(plan.faults.agent_hangs):
            await asyncio.Event().wait()
        return await self.rollout_controller.generate_sample(state)


def why_untrainable(plan, state):
    if plan.members is None:
        return None
    if "score" not in (state.reward or {}):
        return "no score"
    return "too long" if len(state.response_ids) > plan.members.most_tokens else None


class ScheduleWorld:
    """Everything of a run, built for a plan inside the event loop; what happens goes into `record`."""

    def __init__(self, plan, record, numbers):
        self.plan, self.record = plan, record
        self.activities = Activities()
        self.engines = [RecordedEngine(plan, numbers) for _ in range(plan.num_engines)]
        for engine in self.engines:
            engine.record = record
        self.controller = RolloutController(
            self.engines, seed=plan.seed, activities=self.activities, time_limit_s=plan.time_limit_s
        )
        self.buffer = RecordedBuffer(
            FIFOReplayPolicy() if plan.fifo else StalenessReplayPolicy(),
            IndexedStorage(),
            limit=plan.limit,
            on_evict=lambda row: record.drop(row.item, "evicted"),
        )
        self.buffer.record, self.buffer.plan = record, plan
        self.manager = AgentLoopManager(
            task_runners=[self._runner(name, task) for name, task in plan.tasks.items()],
            replay_buffer=self.buffer,
            rollout_controller=self.controller,
            ledger=Ledger(clock=lambda: 0.0),
            stall_watch=plan.stall_watch(self.activities, self.controller),
            activities=self.activities,
            rules=plan.members
            and GroupRules(
                why_untrainable=partial(why_untrainable, plan),
                min_members=plan.members.min_members,
                max_failed_groups=plan.members.max_failed_groups,
            ),
        )
        self.strategies = {r.task_name: r.produce_strategy for r in self.manager.task_runners}

    def _runner(self, name, task):
        plan = self.plan
        prompts = [Prompt(message=[{"role": "user", "content": str(i)}]) for i in range(task.num_prompts)]
        sampler = RecordedSampler(
            prompts,
            SamplerSource(self.buffer),
            task_name=name,
            prompt_repeat_k=task.group_size,
            seed=plan.seed,
            sample_params=SampleParams(max_tokens=plan.max_tokens),
        )
        sampler.record = self.record
        return TaskRunner(
            task_name=name,
            agent_loop=RecordedAgent(plan, self.controller, NumbersJudge(plan), self.activities, self.record),
            produce_strategy=task.strategy.build(
                sync_weights_interval=plan.interval, rollout_controller=self.controller
            ),
            sampler=sampler,
            weight=task.weight,
        )
