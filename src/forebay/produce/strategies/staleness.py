"""Rules about rollouts that are, or will be, too old when they are trained on, by name or as objects.

One definition for all of them: a token made by the weights after train step ``m`` and trained at step ``i``
is ``i - m - 1`` stale, a rollout as stale as its oldest generated token, a group as its stalest rollout; time
in the queue counts, because ``i`` is the step that trains it. Too stale is at or over the threshold
``(max_staleness + 1) * sync_weights_interval``.

::

    rule       the buffer                     the producer                        the trainer
    drop       expires, then drops            target + over-sampling              nothing
    requeue    expires, keeps the prompt      expired prompts first               nothing
    admit      as drop                        no more than can still be fresh     nothing
    mask       keeps                          target + over-sampling              stale tokens: loss weight 0
    correct    keeps                          target + over-sampling              importance weights

Whatever the rule, nothing is produced for a train step for which the weights themselves are too old, so the
producer's lead is bounded. This module has the producer's and the buffer's part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


def calculate_stale_threshold(max_staleness: int, sync_weights_interval: int) -> int:
    """The staleness at which a rollout is expired: ``(max_staleness + 1) * sync_weights_interval``.

    `max_staleness` counts sync periods beyond the current one, whose lag cannot be avoided.

    Raises:
        ValueError: a negative `max_staleness` or a non-positive interval.
    """
    if max_staleness < 0:
        raise ValueError(f"max_staleness must not be negative, got {max_staleness}")
    if sync_weights_interval <= 0:
        raise ValueError(f"sync_weights_interval must be positive, got {sync_weights_interval}")
    return (max_staleness + 1) * sync_weights_interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """The groups of one task, counted since the start of the run, on which a rule decides."""

    target: int
    """Groups that should be available: consumed ones and COMPLETED ones in the buffer together."""
    available: int
    in_flight: int
    over_sample: int
    """Groups that the configuration wants in flight beyond the target; 0 in a tail batch."""
    fresh_limit: int
    """The groups that the consumer will have taken by the last train step for which a group started now is
    not too stale; more groups than these would wait until they are."""
    num_expired: int
    """Groups that expired since the start, as far as this producer has seen."""


@dataclass(frozen=True, kw_only=True)
class StalenessRule:
    """The rule `drop`, and the base of the others: override `limit`, or set the fields.

    Invariant for a rule of your own: `limit` must reach ``outlook.target``, or production ends with
    EXPIRED_BATCH, which is right only where newer weights help.

    >>> class NoOverSampling(StalenessRule):
    ...     def limit(self, outlook):
    ...         return outlook.target
    >>> NoOverSampling().limit(Outlook(
    ...     target=8, available=3, in_flight=2, over_sample=4, fresh_limit=16, num_expired=0))
    8
    """

    expires: bool = True
    """Groups at or over the threshold expire in the buffer, their responses wiped."""
    regenerates: bool = False
    """Expired groups stay in the buffer and are generated again, before all others; else they are dropped."""

    def limit(self, outlook: Outlook) -> int:
        """How many groups may be available or in flight."""
        return outlook.target + outlook.over_sample


@dataclass(frozen=True, kw_only=True)
class AdmitRule(StalenessRule):
    """Starts only what can still be fresh enough when it is trained.

    The count is AReaL's (Fu et al. 2025, "AReaL", section 5.1), with absolute numbers of groups. It reaches
    the target of every step for which the weights are fresh enough, so it cannot starve the trainer; what it
    cuts is over-sampling.
    """

    def limit(self, outlook: Outlook) -> int:
        """The target and the over-sampling, cut to the groups that will be fresh enough."""
        return min(outlook.target + outlook.over_sample, outlook.fresh_limit)


STALENESS_RULES: Mapping[str, StalenessRule] = {
    "drop": StalenessRule(),
    "requeue": StalenessRule(regenerates=True),
    "admit": AdmitRule(),
    "mask": StalenessRule(expires=False),
    "correct": StalenessRule(expires=False),
}


def find_staleness_rule(rule: str | StalenessRule) -> StalenessRule:
    """The rule of that name, or the object itself.

    Raises:
        ValueError: there is no rule of that name.
    """
    if isinstance(rule, str):
        if rule not in STALENESS_RULES:
            raise ValueError(
                f"staleness_rule must be one of {', '.join(STALENESS_RULES)} or an object, got {rule!r}"
            )
        return STALENESS_RULES[rule]
    return rule
