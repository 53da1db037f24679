"""The sampler: it chooses the group that is generated next, from the replay buffer or the prompt dataset.

It generates nothing and stores nothing; it only hands out groups and remembers its place.

::

    sample(task, [EXPIRED, ABORTED])
        |-- buffer.get(1, task, EXPIRED) --> group, responses wiped, INIT
        |-- buffer.get(1, task, ABORTED) --> group as it is: the agent loop continues it or starts it over
        `-- next prompt of the epoch's plan, k times --> new group, INIT
                end of the plan --> the next epoch, another plan (all prompts shuffled, or as an `Order` says)

Ids are names, not numbers that are drawn: ``task/seed/epoch/index`` for a group, with ``/j`` for its j-th
rollout. The same place in the data always gets the same id, so a sampler that was put back to a checkpoint
can ask whether a group is already held somewhere and skip it.
"""

import asyncio
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from forebay.aio.time_limits import contained
from forebay.config import ConfigError, errors_about
from forebay.io.safe_files import write_text
from forebay.produce.prompts.dataset import Prompt
from forebay.produce.prompts.orders import Order, Tried
from forebay.produce.prompts.sequences import LazySequence, permutation
from forebay.replay import ReplayBuffer
from forebay.replay.stores.archiving import COPY_STEP
from forebay.types import RolloutState, SampleParams, Status, reset_rollout_response

_FORMAT = "forebay-sampler/1"


@dataclass(eq=False, repr=False)
class Sampler:
    """Hands out the groups of one task.

    Invariants: every epoch visits every prompt of its plan once; without an `order` these are all, as `seed`
    and the epoch alone decide; the ids of new groups are unique; two samplers with equal `state_dict`, and
    equal books where there is an `order`, continue alike.

    >>> from forebay.replay import SyncReplayBufferConfig
    >>> prompts = [Prompt(message=[{"role": "user", "content": f"{i}+{i}="}]) for i in range(100)]
    >>> buffer = SyncReplayBufferConfig().build()
    >>> sampler = Sampler(prompts, buffer, task_name="math", prompt_repeat_k=8, seed=1, shuffle=False)
    >>> group = asyncio.run(sampler.sample("math", [Status.EXPIRED, Status.ABORTED]))
    >>> len(group), group[0].group_id, group[0].rollout_id
    (8, 'math/1/0/0', 'math/1/0/0/0')
    """

    prompts: Sequence[Prompt]
    """The dataset; at least one prompt."""
    replay_buffer: ReplayBuffer
    """Holds the interrupted and expired groups."""
    _: KW_ONLY
    task_name: str
    """The task whose groups these are."""
    prompt_repeat_k: int
    """Rollouts in a group."""
    seed: int = 0
    """Chooses the order of the prompts; ids have it too."""
    shuffle: bool = True
    """False takes the prompts as they come, in every epoch."""
    order: Order | None = None
    """Chooses the prompts of an epoch from the books; every epoch but the first is planned in a thread. None:
    all prompts."""
    order_name: str = ""
    """Tells `order` from others when a sampler is resumed; empty: its ``repr``."""
    score_of: Callable[[str], float | None] = lambda group_id: None
    """The mean score of a group by its id, from the books, in any thread; None: it has none."""
    sample_params: SampleParams | None = None
    """Sampling of every rollout; None leaves it to the agent loop."""
    leaves_copies: bool = False
    """An interrupted group that is taken up again stays in the buffer, as a copy that is no live row."""

    def __post_init__(self) -> None:
        if len(self.prompts) == 0:
            raise ValueError(f"task {self.task_name!r} has no prompts; a dataset holds at least one")
        if self.prompt_repeat_k < 1:
            raise ValueError(f"prompt_repeat_k must be at least 1, got {self.prompt_repeat_k}")
        self._asking = asyncio.Lock()
        self._is_known: Callable[[str, str], object] = lambda name, task_name: False
        """Whether store or books have a group already, as the latest `catch_up` was told."""
        self._again: deque[tuple[int, int]] = deque()
        """Epochs and indices of groups that come before the next new one."""
        self._empty_at: dict[Status, int | None] = {}
        """The version of the buffer at which it held no group of that status."""
        self.epoch: int
        """The epoch of the latest new prompt, counted from 0."""
        self.position: int
        """How many prompts of this epoch were handed out or skipped."""
        self._start_epoch(0)

    async def sample(self, task_name: str, group_status: Status | list[Status] | None = None) -> list[RolloutState]:
        """A group from the buffer with the first of the statuses that has one, else a new group.

        Raises:
            ValueError: `task_name` is not this sampler's task.
        """
        if task_name != self.task_name:
            raise ValueError(f"this sampler serves task {self.task_name!r}, not {task_name!r}")
        statuses = [group_status] if isinstance(group_status, Status) else group_status or []
        for status in statuses:
            if (group := await self._take(status)) is not None:
                if status is not Status.ABORTED:
                    for state in group:
                        reset_rollout_response(state)
                        state.status = Status.INIT
                return group
        while (new := self._next_group()) is None:
            # One makes the plan, in a thread, since an order reads the books; the others wait for it.
            async with self._asking:
                if self.position == len(self._plan):
                    epoch = self.epoch + 1
                    self._start_epoch(epoch, await asyncio.to_thread(contained(self._plan_of), epoch))
        return new

    async def _take(self, status: Status) -> list[RolloutState] | None:
        """A group with that status from the buffer, if there is one."""
        # One asks at a time: many groups are started together, between two changes of the buffer, and finding
        # nothing is not cheap. Those that had to wait then know the answer, and go on together.
        async with self._asking:
            version: int | None = getattr(self.replay_buffer, "version", None)
            if version is not None and self._empty_at.get(status) == version:
                return None
            for group in await self._get(status):
                return group
            self._empty_at[status] = version
            return None

    async def _get(self, status: Status) -> list[list[RolloutState]]:
        buffer, task = self.replay_buffer, self.task_name
        if not (self.leaves_copies and status is Status.ABORTED):
            return await buffer.get(1, task, status)
        number = min(1, await buffer.count(task, status))
        return (await buffer.take_batch({task: number}, group_status=status, train_step=COPY_STEP))[0][task]

    def catch_up(self, is_known: Callable[[str, str], object], missing: Iterable[str | int]) -> list[str | int]:
        """Go on from an earlier place: skip the known groups, by name and task; hand out the missing ones first.

        Returns those of the missing ones that are not named by this sampler, which cannot be made again.
        """
        prefix, foreign = f"{self.task_name}/{self.seed}/", []
        for group_id in missing:
            place = re.fullmatch(r"(\d+)/(\d+)", str(group_id).removeprefix(prefix))
            if place is None or int(place[2]) >= len(self.prompts):
                foreign.append(group_id)
            else:
                self._again.append((int(place[1]), int(place[2])))
        self._is_known = is_known
        return foreign

    @property
    def num_owed(self) -> int:
        """Groups taken up by an earlier process that were not handed out again so far."""
        return len(self._again)

    def state_dict(self) -> dict[str, Any]:
        """The place in the data and what it is a place in; plain JSON values."""
        place: dict[str, Any] = {"epoch": self.epoch, "position": self.position}
        if self.order is not None:
            place["plan"] = list(self._plan)
        # Without `_again`: those groups are live in the books, so a resume finds again that they are missing.
        return {"format": _FORMAT, **self._identity(), **place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the sampler that made `state` stood.

        Raises:
            ValueError: it had other prompts, another task, seed, order or group size; the message says which.
        """
        if state.get("format") != _FORMAT:
            raise ValueError(f"sampler state has format {state.get('format')!r}, expected {_FORMAT!r}")
        differences = [
            f"{key} was {state.get(key)!r} and is {value!r}"
            for key, value in self._identity().items()
            if state.get(key) != value
        ]
        if differences:
            raise ValueError(
                f"the saved sampler is not this one: {'; '.join(differences)}. "
                f"Resume with the settings of the saved run, or start a new run"
            )
        self._start_epoch(state["epoch"], state.get("plan"))
        self.position = state["position"]

    def save(self, path: str | Path) -> None:
        """Write the state as a small JSON file, whole or not at all."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, json.dumps(self.state_dict()))

    def resume(self, path: str | Path) -> None:
        """Continue from the file that `save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is not a sampler's, or of another sampler (see `load_state_dict`).
        """
        with errors_about(f"{str(path)!r} is not a saved sampler", ValueError):
            state = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(state, dict):
                raise ValueError(f"it holds a {type(state).__name__}")
        self.load_state_dict(state)

    def _identity(self) -> dict[str, Any]:
        return {
            "task_name": self.task_name,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "num_prompts": len(self.prompts),
            "prompt_repeat_k": self.prompt_repeat_k,
            "order": None if self.order is None else self.order_name or repr(self.order),
        }

    def _start_epoch(self, epoch: int, plan: Sequence[int] | None = None) -> None:
        self.epoch = epoch
        self.position = 0
        # A saved plan is not made anew: the books may know more by now.
        self._plan = self._plan_of(epoch) if plan is None else plan

    def _plan_of(self, epoch: int) -> Sequence[int]:
        """The prompts of an epoch, by their indices; any thread may ask."""
        size = len(self.prompts)
        shuffled = LazySequence(permutation(size, f"sampler/{self.seed}/{epoch}"), range(size))
        if self.order is None:
            return shuffled if self.shuffle else range(size)
        chosen = list(self.order.plan(shuffled, self.prompts, partial(self._latest, epoch)))
        if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(size)):
            raise ConfigError(f"a sampler's plan is distinct indices under {size}, not {str(chosen)[:99]}")
        # Saved as JSON, which does not take numbers of numpy.
        return [int(index) for index in chosen]

    def _latest(self, before: int, index: int) -> Tried | None:
        """The latest group of a prompt with a score, in the epochs before that one."""
        for epoch in reversed(range(before)):
            if (score := self.score_of(self._name(epoch, index))) is not None:
                return Tried(epoch, score)
        return None

    def _next_group(self) -> list[RolloutState] | None:
        """The next prompt's group; held ones are skipped. None where an `order` has to plan an epoch first.

        The loop ends: every round makes an id that was never made before, and what is held is finite.
        """
        if self._again:
            return self._group(*self._again.popleft())
        while True:
            if self.position == len(self._plan):
                if self.order is not None:
                    return None
                self._start_epoch(self.epoch + 1)
            index = self._plan[self.position]
            self.position += 1
            name = self._name(self.epoch, index)
            if not self._is_known(name, self.task_name):
                return self._group(self.epoch, index)

    def _name(self, epoch: int, index: int) -> str:
        return f"{self.task_name}/{self.seed}/{epoch}/{index}"

    def _group(self, epoch: int, index: int) -> list[RolloutState]:
        prompt, group_id = self.prompts[index], self._name(epoch, index)
        return [
            RolloutState(
                [dict(message) for message in prompt.message],
                rollout_id=f"{group_id}/{member}",
                group_id=group_id,
                # One session for the group: its members share the prompt, and so an engine's prefix cache.
                session_id=group_id,
                task_name=self.task_name,
                tools=prompt.tools,
                tool_choice=prompt.tool_choice,
                sample_params=self.sample_params,
                data_source=prompt.data_source,
                reward_model=prompt.reward_model,
                # One object for the group, which stores and messages then hold once.
                mm_info=prompt.mm_info,
                extra_fields=dict(prompt.extra),
            )
            for member in range(self.prompt_repeat_k)
        ]
