"""What notes the events of a run: each stands in front of a component and is otherwise like it.

::

    RecordedSampler      admit       group, tries, tokens it brings
    RecordedEngine       generate    request, seed, tokens, weights, finish reason, from when to when
    RecordedJudge       judge       scores or errors, from when to when
    RecordedReplayBuffer put (of each group), get, take, commit, restore, refresh, priorities
    steps.fit            train       what the trainer was given
    steps.checkpoint     checkpoint

A buffer's event is noted when the call has succeeded, before anything else can run. The stores in memory that
runs use never hand over to another task half-way through, so the order of events is the order in which they
took effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack, cast

from forebay.agents import AgentLoop
from forebay.agents.base import GroupJudge
from forebay.engines import RolloutController
from forebay.engines.base import Completion, Engine, GenerateRequest
from forebay.produce import AgentLoopManager
from forebay.produce.tasks import CheckpointedSampler
from forebay.replay import ReplayBuffer
from forebay.replay.arrival import PutKeywords
from forebay.replay.groups import StoredGroup, copy_group
from forebay.replay.stores.contract import TagValue
from forebay.runs.record.writer import Recorder
from forebay.types import RolloutState, Status, get_group_status

Groups = list[list[RolloutState]]


def observe(recorder: Recorder, manager: AgentLoopManager, controller: RolloutController) -> None:
    """Have `recorder` told of everything that the manager's tasks do from now on.

    The manager's buffer is a `RecordedReplayBuffer`.
    """
    buffer = manager.replay_buffer
    assert isinstance(buffer, RecordedReplayBuffer)
    buffer.recorder = recorder
    controller.engines = tuple(
        # Everything that an engine has shows through.
        cast(Engine, RecordedEngine(engine, recorder, number))
        for number, engine in enumerate(controller.engines)
    )
    for runner in manager.task_runners:
        runner.sampler = RecordedSampler(runner.sampler, recorder)
        loop = runner.agent_loop
        if isinstance(loop, AgentLoop) and loop.judge is not None:
            loop.judge = RecordedJudge(loop.judge, recorder)


def note_training(
    recorder: Recorder, train_step: int, groups: Groups, stale_thresholds: Mapping[str, int] | None
) -> None:
    """Note what the trainer is given for `train_step`."""
    recorder.note("train", train_step=train_step, groups=name_groups(groups), thresholds=stale_thresholds)


def name_groups(groups: Iterable[Sequence[RolloutState]]) -> list[str | int | None]:
    """Their ids, in order."""
    return [group[0].group_id for group in groups]


class RecordedReplayBuffer(ReplayBuffer):
    """A replay buffer that tells a recorder what was done to it; without one, a plain buffer.

    >>> buffer = RecordedReplayBuffer.like(config.replay.build())
    >>> buffer.recorder = recorder
    """

    recorder: Recorder | None = None

    @classmethod
    def like(cls, buffer: ReplayBuffer) -> RecordedReplayBuffer:
        """A recorded buffer in place of `buffer`, over the same store."""
        return cls(
            buffer.policy,
            buffer.storage,
            limit=buffer.limit,
            keep_consumed=buffer.keep_consumed,
            on_evict=buffer.on_evict,
        )

    async def put_groups(
        self, groups: Iterable[Sequence[RolloutState]], task_name: str, **arrival: Unpack[PutKeywords]
    ) -> None:
        """See `ReplayBuffer.put_groups`; an event for each group. `put` comes here, too."""
        recorder = self.recorder
        given: list[StoredGroup] = []
        if recorder is not None:
            # Before the put: who is cancelled here has not stored anything.
            await recorder.room()
            groups = [group for group in groups if group]
            # The put labels and ages the rollouts; what it was given is what a replay has to give again.
            given = list(map(_copy, groups))
        num_evicted = sum(self.num_evicted.values())
        await super().put_groups(groups, task_name, **arrival)
        if recorder is None:
            return
        num_evicted = sum(self.num_evicted.values()) - num_evicted
        for place, (copied, group) in enumerate(zip(given, groups, strict=True), start=1):
            recorder.note(
                "put",
                copied,
                task=task_name,
                group=copied[0].group_id,
                status=get_group_status(group).value,
                model_step=arrival.get("model_step"),
                train_step=arrival.get("current_train_step"),
                threshold=arrival.get("stale_threshold"),
                tags=None if (tags := arrival.get("tags")) is None else dict(tags),
                priority=arrival.get("priority"),
                # By all of them together.
                evicted=num_evicted or None if place == len(given) else None,
            )

    async def get(
        self,
        batch_size: int,
        task_name: str,
        group_status: Status,
        *,
        tags: Mapping[str, TagValue] | None = None,
    ) -> Groups:
        """See `ReplayBuffer.get`."""
        groups = await super().get(batch_size, task_name, group_status, tags=tags)
        if self.recorder is not None and groups:
            self.recorder.note(
                "get",
                task=task_name,
                status=Status(group_status).value,
                count=batch_size,
                tags=None if tags is None else dict(tags),
                groups=name_groups(groups),
            )
        return groups

    async def take_batch(
        self,
        task_batch_sizes: Mapping[str, int],
        *,
        group_status: Status = Status.COMPLETED,
        train_step: int | None = None,
    ) -> tuple[dict[str, Groups], dict[str, int]]:
        """See `ReplayBuffer.take_batch`."""
        groups, counts = await super().take_batch(
            task_batch_sizes, group_status=group_status, train_step=train_step
        )
        if self.recorder is not None:
            self.recorder.note(
                "take",
                sizes=dict(task_batch_sizes),
                status=Status(group_status).value,
                train_step=train_step,
                taken={task: name_groups(part) for task, part in groups.items()},
            )
        return groups, counts

    async def commit(self, train_step: int) -> None:
        """See `ReplayBuffer.commit`."""
        await super().commit(train_step)
        if self.recorder is not None:
            self.recorder.note("commit", train_step=train_step)

    async def restore(self, train_step: int) -> None:
        """See `ReplayBuffer.restore`."""
        await super().restore(train_step)
        if self.recorder is not None:
            self.recorder.note("restore", train_step=train_step)

    async def refresh_staleness(
        self,
        task_stale_thresholds: Mapping[str, int],
        current_train_step: int,
        statuses: Iterable[Status] | None = None,
    ) -> dict[str, int]:
        """See `ReplayBuffer.refresh_staleness`."""
        chosen = None if statuses is None else list(statuses)
        expired = await super().refresh_staleness(task_stale_thresholds, current_train_step, chosen)
        if self.recorder is not None:
            self.recorder.note(
                "refresh",
                thresholds=dict(task_stale_thresholds),
                train_step=current_train_step,
                statuses=None if chosen is None else [Status(status).value for status in chosen],
                expired=dict(expired),
            )
        return expired

    async def update_priorities(
        self, priorities: Mapping[Any, float], *, by: str = "uid", task_name: str | None = None
    ) -> int:
        """See `ReplayBuffer.update_priorities`."""
        count = await super().update_priorities(priorities, by=by, task_name=task_name)
        if self.recorder is not None:
            # Pairs, because the keys of a JSON object are all text.
            pairs = [[key, priority] for key, priority in priorities.items()]
            self.recorder.note("priorities", by=by, task=task_name, priorities=pairs, count=count)
        return count


class RecordedSampler:
    """A sampler whose groups are noted as they are handed out.

    >>> runner.sampler = RecordedSampler(runner.sampler, recorder)
    """

    def __init__(self, sampler: CheckpointedSampler, recorder: Recorder) -> None:
        self.sampler = sampler
        self._recorder = recorder

    async def sample(
        self, task_name: str, group_status: Status | list[Status] | None = None
    ) -> list[RolloutState]:
        """See `Sampler.sample`."""
        group = await self.sampler.sample(task_name, group_status)
        self._recorder.note(
            "admit",
            task=task_name,
            group=group[0].group_id,
            status=get_group_status(group).value,
            epoch=getattr(self.sampler, "epoch", None),
            position=getattr(self.sampler, "position", None),
            tries=[state.num_tries for state in group],
            earlier_tokens=[len(state.response_ids) for state in group],
        )
        return group

    def save(self, path: Path, /) -> None:
        """See `Sampler.save`."""
        self.sampler.save(path)

    def resume(self, path: Path, /) -> None:
        """See `Sampler.resume`."""
        self.sampler.resume(path)


class RecordedJudge:
    """A judge whose verdicts are noted.

    >>> agent_loop.judge = RecordedJudge(agent_loop.judge, recorder)
    """

    def __init__(self, judge: GroupJudge, recorder: Recorder) -> None:
        self._judge = judge
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        # What else the judge can do: being closed, wanting whole groups.
        return getattr(self._judge, name)

    async def judge(self, target: list[RolloutState]) -> list[RolloutState]:
        """See `Judge.judge`."""
        start_s = self._recorder.now_s()
        judged = await self._judge.judge(target)
        errors = [state.error_msg for state in target]
        self._recorder.note(
            "judge",
            task=target[0].task_name,
            group=target[0].group_id,
            start_s=start_s,
            rollouts=[state.rollout_id for state in target],
            scores=[_score(state) for state in target],
            errors=errors if any(errors) else None,
        )
        return judged


class RecordedEngine:
    """An engine whose generations are noted; everything else of it shows through.

    >>> controller.engines = (RecordedEngine(engine, recorder, 0),)
    """

    def __init__(self, engine: Engine, recorder: Recorder, number: int) -> None:
        self._engine = engine
        self._recorder = recorder
        self._number = number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `forebay.engines.base`."""
        start_s = self._recorder.now_s()
        completion = await self._engine.generate(request)
        steps = completion.model_steps
        self._recorder.note(
            "generate",
            request=request.request_id,
            engine=self._number,
            seed=request.seed,
            max_tokens=request.max_tokens,
            tokens=len(completion.response_ids),
            # The weights of the first and of the last token: they only get newer.
            model_steps=[int(steps[0]), int(steps[-1])] if len(steps) else None,
            finish=completion.finish_reason,
            start_s=start_s,
            error=completion.error_msg,
        )
        return completion


def _copy(group: Sequence[RolloutState]) -> StoredGroup:
    # Without looking for each member's oldest step, which nobody asks a copy for.
    return copy_group(StoredGroup.with_steps(group, ()))


def _score(state: RolloutState) -> float | None:
    score = (state.reward or {}).get("score")
    return None if score is None else float(score)
