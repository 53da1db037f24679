"""Which weights an inference server has, and giving it others: whole ones, or LoRA adapters on whole ones.

::

    take(written)   whole weights:   load the folder                         label: version
                    adapters:        load their base, unless it is there     label: version of the base
                                     load the adapters                       label: version of base + adapters
                                       | refused: AdaptersRefusedError, the server goes on as it was

    has(written)    asks the server for its label: somebody else may have restarted it

The server must be paused for `take`: the engine does that, and sees to the requests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from forebay.engines.servers.dialects import Call
from forebay.engines.servers.link import Refused, ServerLink
from forebay.engines.weights.files import WrittenWeights
from forebay.models.starting_weights import AdapterConfig, AdaptersRefusedError


class ServerWeights:
    """The weights of one server.

    Invariants: `model_step` and `adapters` are those of the last weights that the server took over whole; a
    server whose loading failed half way counts as one that `has` nothing.

    >>> weights = ServerWeights(link, lora_rank=16)                                    # doctest: +SKIP
    >>> if not await weights.has(written):                                             # doctest: +SKIP
    ...     await weights.take(written)
    """

    def __init__(self, link: ServerLink, *, lora_rank: int = 0, model_step: int = 0) -> None:
        """`lora_rank` is the highest that the server takes; 0: it takes no adapters."""
        self._link, self._dialect = link, link.dialect
        self._lora_rank = lora_rank
        self.model_step = model_step
        """Of the weights that make the next token."""
        self.adapters: str | None = None
        """The version of the adapters that requests must name; None: they use the whole weights."""
        self._label = ""
        """The server's name of its weights, when it was last known."""
        self._is_half_loaded = False
        """Whether it may have part of new weights under the name of the old ones."""
        self._was_refused = False

    @property
    def takes_adapters(self) -> bool:
        """Whether adapters may be tried: the server was started for them, and has never refused any."""
        return self._lora_rank > 0 and not self._was_refused

    def check(self, config: AdapterConfig) -> None:
        """Raise unless servers compute what adapters of this kind mean.

        Raises:
            AdaptersRefusedError: they do not, or the rank is too high.
            ValueError: the config lacks rank or alpha.
        """
        # It needs torch, which a server's client has no other use for.
        from forebay.engines.weights.takeover import scale_of

        scale_of(config)
        if config["r"] > self._lora_rank:
            raise AdaptersRefusedError(
                f"adapters of rank {config['r']}, but {self._link} takes them up to {self._lora_rank}"
            )

    async def has(self, written: WrittenWeights) -> bool:
        """Whether the server says that it has these; if not, `take` gives it what it lacks.

        Raises:
            EngineLost: it does not answer.
        """
        answer = await self._link.do([self._dialect.version])
        self._label = answer.get("weight_version") or ""
        self.adapters = self._label if "+" in self._label else None
        if has := self._has(written):
            self.model_step = written.model_step
        return has

    def _has(self, written: WrittenWeights) -> bool:
        return not self._is_half_loaded and self._label == written.version

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
        has_base = base.is_start or self._label.partition("+")[0] == base.version
        if written.base is None or not has_base:
            await self._load(base, dialect.load(str(base.folder), base.version))
        if written.base is None:
            return
        try:
            await self._load(written, dialect.load_adapters(str(written.folder), written.version))
        except Refused as error:
            self._is_half_loaded, self._was_refused = False, True
            raise AdaptersRefusedError(f"{error}; {dialect.lora_help}") from error

    async def _load(self, written: WrittenWeights, calls: Iterable[Call]) -> None:
        if self._is_half_loaded:
            await self._drop(written.version)
        self._is_half_loaded = True
        # Limited by the caller: a load takes minutes where a model is large.
        await self._link.do(calls, takes_long=True)
        self._is_half_loaded = False
        former, self.adapters = self.adapters, None if written.base is None else written.version
        self._label, self.model_step = written.version, written.model_step
        if former is not None and former != self.adapters:
            await self._drop(former)

    async def _drop(self, adapters: str) -> None:
        # Refused where the server has none of that name any more.
        with contextlib.suppress(Refused):
            await self._link.do(self._dialect.drop_adapters(adapters))
