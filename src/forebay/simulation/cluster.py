"""The cluster and the workload that a simulation is for: a small TOML file, or what a real run measured.

::

    engines x slots, tokens/s by running requests --> how long a response takes
    lengths: log-normal | constant | measured     --> how many tokens it has
    seconds to train, sync, judge and save        --> everything else
    failures, engines that join or leave, held-out prompts

Batch, group size, staleness, over-sampling and tasks are not repeated here: the run file says them.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import NormalDist
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, BaseModel, Field, PositiveInt, model_validator

from forebay.config import apply_overrides, parse_config

_Z_99 = NormalDist().inv_cdf(0.99)
# For `quantile`, which counts places from the shortest.
_RISING = AfterValidator(lambda values: tuple(sorted(values)))


class ClusterConfig(BaseModel, extra="forbid", frozen=True):
    """The facts that a simulation needs of engines, trainer and responses.

    >>> cluster = ClusterConfig(slots=64, tokens_per_s=2000, train_s=30, lengths={"constant": 100})
    >>> cluster.decode_rate(32), cluster.generation_s(num_tokens=60_000)
    (1000.0, 30.0)
    """

    engines: int = Field(default=1, ge=1)
    slots: int = Field(ge=1)
    """Requests that one engine decodes together; the rest wait."""
    tokens_per_s: float | tuple[tuple[int, float], ...]
    """Of one engine: with all slots running; or measured, as pairs (running requests, tokens/s)."""
    prompt_tokens: int = Field(default=256, ge=1)
    prefill_tokens_per_s: float | None = Field(default=None, gt=0)
    """Input tokens that a request gets through before its first token. None: prefill takes no time."""
    start_s: float = Field(default=0.0, ge=0)
    """Seconds of a request before its first token that do not depend on its input."""
    lengths: "LengthConfig"
    task_lengths: "dict[str, LengthConfig]" = Field(default_factory=dict)
    """The lengths of tasks, by name, whose responses have others."""
    judge_s: float = Field(default=0.0, ge=0)
    """Seconds from the end of a group's last response to its reward."""
    filtered_share: float = Field(default=0.0, ge=0, lt=1)
    """Groups that the run's filter rejects."""
    trainers: int = Field(default=1, ge=1)
    """Devices that train, so that `split` can give some of them to the engines."""
    train_s: float = Field(default=0.0, ge=0)
    """Seconds of a train step that do not depend on its tokens. Calibrated ones hold what a step takes beside
    rollouts and training too, and so does a report's share of training."""
    train_tokens_per_s: float | None = Field(default=None, gt=0)
    """Response tokens that all trainers together train in a second, besides."""
    sleeping: int = Field(default=0, ge=0)
    """The first engines, so many, share devices with trainers, and sleep while these train."""
    turn_s: float = Field(default=0.0, ge=0)
    """Seconds until trainers have their memory on such devices, and again until they have left."""
    sync_s: float = Field(default=0.0, ge=0)
    """Seconds to hand the weights to the engines."""
    failures_per_hour: float = Field(default=0.0, ge=0)
    """Of one engine, on average, at random: each takes down all that the engine has in flight."""
    restart_s: float = Field(default=0.0, ge=0)
    """Until an engine that failed takes requests again."""
    keeps_tokens: bool = True
    """Whether rollouts of a failed engine go on elsewhere with their tokens, or are generated again."""
    scale: Annotated[tuple[tuple[float, int], ...], _RISING] = ()
    """Pairs (seconds since the start, engines that take requests from then on; below 0: that leave)."""
    checkpoint_s: float = Field(default=0.0, ge=0)
    """For which the loop stands still at each checkpoint, every `checkpoint_every` steps of the run file."""
    held_out: int = Field(default=0, ge=0)
    """Held-out prompts of each task with `eval_data`, tried as the run file says."""

    @model_validator(mode="after")
    def _check(self) -> "ClusterConfig":
        # A single rate is checked as if it were a pair.
        pairs = self.tokens_per_s if isinstance(self.tokens_per_s, tuple) else ((1, self.tokens_per_s),)
        if not pairs or any(number < 1 or rate <= 0 for number, rate in pairs):
            raise ValueError("rates must be positive, and pairs be (running requests >= 1, tokens/s)")
        if any(low[0] >= high[0] for low, high in pairwise(pairs)):
            raise ValueError("measured pairs must be in rising order of running requests")
        if self.train_s == 0 and self.train_tokens_per_s is None:
            raise ValueError("training takes no time: set train_s, train_tokens_per_s or both")
        if min(accumulate((number for _, number in self.scale), initial=self.engines)) < 1:
            raise ValueError(f"scale = {self.scale}: of {self.engines} engines one at least has to stay")
        return self

    def decode_rate(self, running: int) -> float:
        """Tokens per second that one engine makes with so many requests running.

        Pairs are joined by straight lines, the first with (0, 0); after the last the rate stays.
        """
        rate = self.tokens_per_s
        pairs = rate if isinstance(rate, tuple) else ((self.slots, rate),)
        numbers, rates = zip((0, 0.0), *pairs, strict=True)
        return float(np.interp(running, numbers, rates))

    def generation_s(self, num_tokens: float) -> float:
        """Seconds that the engines need for so many tokens if no slot is ever empty."""
        return num_tokens / (self.engines * self.decode_rate(self.slots))

    def training_s(self, num_tokens: float) -> float:
        """Seconds of a train step over so many response tokens."""
        rate = self.train_tokens_per_s
        return self.train_s + (0.0 if rate is None else num_tokens / rate)

    def split(self, engines: int, trainers: int) -> "ClusterConfig":
        """The same devices shared out otherwise; training time falls in proportion to its devices."""
        share, rate = self.trainers / trainers, self.train_tokens_per_s
        return self.model_copy(
            update={
                "engines": engines,
                "trainers": trainers,
                "train_s": self.train_s * share,
                "train_tokens_per_s": None if rate is None else rate / share,
            }
        )


class LengthConfig(BaseModel, extra="forbid", frozen=True):
    """How long responses are, in tokens: one of three ways to say it.

    >>> LengthConfig(p50=500, p99=4000).quantile(0.99)
    4000
    >>> LengthConfig(values=[30, 10, 20]).quantile(0.5)
    20
    """

    p50: float | None = Field(default=None, ge=1)
    """Log-normal: half of the responses are shorter."""
    p99: float | None = Field(default=None, ge=1)
    """Log-normal: one in a hundred is longer."""
    constant: int | None = Field(default=None, ge=1)
    values: Annotated[tuple[PositiveInt, ...], Field(min_length=1), _RISING] | None = None
    """Measured lengths, each as likely as the others."""

    @model_validator(mode="after")
    def _check(self) -> "LengthConfig":
        is_log_normal = self.p50 is not None or self.p99 is not None
        if is_log_normal + (self.constant is not None) + (self.values is not None) != 1:
            raise ValueError("say the lengths in one way: p50 and p99, or constant, or values")
        if is_log_normal and (self.p50 is None or self.p99 is None or self.p99 < self.p50):
            raise ValueError(f"a log-normal needs p50 <= p99, got p50 = {self.p50}, p99 = {self.p99}")
        return self

    def quantile(self, share: float) -> int:
        """The length that this share of the responses, in (0, 1), is not longer than."""
        if values := self.values or (self.constant and (self.constant,)):
            # A share just below 1 may have been rounded to 1.
            return values[min(int(share * len(values)), len(values) - 1)]
        assert self.p50 is not None
        assert self.p99 is not None
        sigma = math.log(self.p99 / self.p50) / _Z_99
        return max(1, round(self.p50 * math.exp(sigma * NormalDist().inv_cdf(share))))


def changed_cluster(cluster: ClusterConfig, overrides: Sequence[str]) -> ClusterConfig:
    """The cluster with ``key=value`` overrides.

    Raises:
        ConfigError: a key or value does not fit.
    """
    table = apply_overrides(cluster.model_dump(mode="json", exclude_none=True), overrides)
    return parse_config(ClusterConfig, table, source="cluster")
