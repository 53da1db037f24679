"""Which weights an inference server has, and giving it others: whole ones, or LoRA adapters on whole ones.

::

    take(written)   whole weights:   load the folder                         label: version
                    buckets:         begin, bucket, bucket, ..., end         label: version, which it confirms
                    adapters:        load their base, unless it is there     label: version of the base
                                     load the adapters                       label: version of base + adapters
                                       | refused: AdaptersRefusedError, the server goes on as it was

    has(written)    asks the server for its label: somebody else may have restarted it

    sleep           its memory is free; weights that are not kept count as half loaded
    wake(part)      the weights' memory, before `take`; that of the cache, before requests

The server must be paused for all but `has`: the engine does that, and sees to the requests.
"""

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from forebay.engines.servers.dialects import CACHE, WEIGHTS, Call
from forebay.engines.servers.link import Refused, ServerFailed, ServerLink
from forebay.engines.servers.sender import Sender
from forebay.engines.weights.files import WrittenWeights
from forebay.models.starting_weights import AdaptersRefusedError

if TYPE_CHECKING:
    from forebay.engines.weights.buckets import Buckets


class ServerWeights:
    """The weights of one server.

    Invariants: `model_step` and `adapters` are those of the last weights that the server took over whole; a
    server whose loading failed half way counts as one that `has` nothing.

    ::

        weights = ServerWeights(link, lora_rank=16)
        if not await weights.has(written):
            await weights.take(written)
    """

    def __init__(self, link: ServerLink, *, lora_rank: int, sender_device: str | None = None) -> None:
        """`lora_rank` is the highest that the server takes; 0: it takes no adapters.

        `sender_device`: buckets are sent to it from there; None: it maps their memory."""
        self._link, self._dialect = link, link.dialect
        self._lora_rank = lora_rank
        self.sender = Sender(link, sender_device)
        self.model_step = 0
        """The step of the weights that make the next token."""
        self.adapters: str | None = None
        """The version of the adapters that requests must name; None: they use the whole weights."""
        self.label = ""
        """The server's name of its weights, when it was last known."""
        self.steps: dict[str, int] = {}
        """The model steps of the weights that it was given, by their names."""
        self.is_half_loaded = False
        """Whether it may have part of new weights, or none, under the name of the old ones."""
        self._is_updating = False
        """Whether it may wait for buckets."""
        self.asleep: tuple[str, ...] = ()
        """The parts of its memory that it does not hold."""
        self._was_refused = False

    @property
    def takes_adapters(self) -> bool:
        """Whether adapters may be tried: the server was started for them, and has never refused any."""
        return self._lora_rank > 0 and not self._was_refused

    async def has(self, written: WrittenWeights) -> bool:
        """Whether the server says that it has these; if not, `take` gives it what it lacks.

        Raises:
            EngineLost: it does not answer.
        """
        answer = await self._link.do([self._dialect.version])
        self.label = answer.get("weight_version") or ""
        self.adapters = self.label if "+" in self.label else None
        if has := self._has(written):
            self.model_step = self.steps[written.version] = written.model_step
        return has

    def _has(self, written: WrittenWeights) -> bool:
        return not self.is_half_loaded and self.label == written.version

    async def take(self, written: WrittenWeights) -> None:
        """Let the paused server take over these weights.

        It does nothing where the server was last known to have them.

        Raises:
            AdaptersRefusedError: it does not take these adapters. It has what it had, or their base.
            EngineLost: it went away, or does not do it.
        """
        if self._has(written):
            return
        dialect, base = self._dialect, written.base or written
        # Loading adapters never touches the base, which lies below whatever the server has.
        has_base = base.is_start or self.label.partition("+")[0] == base.version
        if base.live is not None:
            return await self._receive(base, base.live)
        if written.base is None or not has_base:
            await self._load(base, dialect.load(str(base.folder), base.version))
        if written.base is None:
            return
        try:
            await self._load(written, dialect.load_adapters(str(written.folder), written.version))
        except Refused as error:
            self.is_half_loaded, self._was_refused = False, True
            raise AdaptersRefusedError(f"{error}; {dialect.lora_help}") from error

    async def _load(self, written: WrittenWeights, calls: Iterable[Call]) -> None:
        if self.is_half_loaded:
            await self._drop(written.version)
        self.is_half_loaded = True
        # Limited by the caller: a load takes minutes where a model is large.
        await self._link.do(calls, takes_long=True)
        self.is_half_loaded = False
        former, self.adapters = self.adapters, None if written.base is None else written.version
        self._note(written.version, written.model_step)
        if former is not None and former != self.adapters:
            await self._drop(former)

    def _note(self, version: str, model_step: int) -> None:
        self.label, self.model_step = version, model_step
        self.steps[version] = model_step

    async def _receive(self, written: WrittenWeights, live: "Buckets") -> None:
        """Give it weights in buckets, as they are now: a step later than they were offered, perhaps.

        Raises:
            EngineLost: it went away, does not do it, or calls its weights otherwise afterwards.
        """
        dialect = self._dialect
        self.is_half_loaded = True
        step, hold = None, False
        while step is None:
            if self._is_updating:
                with contextlib.suppress(Refused):
                    await self._link.do(dialect.abandon, takes_long=True)
            self._is_updating = True
            step = await live.send(self._link, self.sender, hold=hold)
            # Train steps that are shorter than a transfer would interrupt each: the next one waits.
            hold = True
        # A server that comes back while the trainer trains gets newer weights than it was offered.
        version = written.version if step == written.model_step else f"{written.version}-at_{step:06d}"
        await self._link.do(dialect.end(version), takes_long=True)
        self._is_updating = False
        named = (await self._link.do([dialect.version])).get("weight_version")
        if named != version:
            raise ServerFailed(f"{self._link} was given the weights {version!r} and says it has {named!r}")
        self.is_half_loaded = False
        self._note(version, step)
        await live.release()

    # Memory

    def forget(self) -> None:
        """The server was started anew: it holds its memory, and what it began with."""
        self.asleep, self.is_half_loaded, self._is_updating = (), False, False

    async def sleep(self, *, keep_weights: bool) -> None:
        """Let the paused server give its memory back.

        Raises:
            EngineLost: it does not.
        """
        await self._link.do(self._dialect.sleep(keep_weights=keep_weights), takes_long=True)
        self.asleep = (WEIGHTS, CACHE)
        self.is_half_loaded |= not keep_weights

    async def wake(self, *parts: str) -> None:
        """Let it take these parts of its memory again, if it does not hold them.

        Raises:
            EngineLost: it does not.
        """
        for part in parts:
            if part in self.asleep:
                await self._link.do([self._dialect.wake(part)], takes_long=True)
                self.asleep = tuple(other for other in self.asleep if other != part)

    async def _drop(self, adapters: str) -> None:
        # Refused where the server has none of that name any more.
        with contextlib.suppress(Refused):
            await self._link.do(self._dialect.drop_adapters(adapters))
