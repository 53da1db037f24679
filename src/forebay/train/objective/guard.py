"""`OffPolicyGuard`: watches how far the trained data is from the trained policy, over a few steps.

It measures nothing itself and changes nothing: it reads the metrics of train steps and says what to do. It
needs no torch.

::

    metrics of a step --check--> window of the last steps --median outside its band--> warn
                                                                                    or lower_lag: the caller
                                                                                    or OffPolicyError
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import Field

GuardAction = Literal["off", "warn", "lower_lag", "stop"]
Measure = Literal["ess_token", "ess_sequence", "mismatch_kl", "clip_share"]
Bands = dict[Measure, Annotated[float, Field(gt=0)]]

DEFAULT_BANDS: Bands = {
    # Half of the batch's tokens would have taught as much.
    "ess_token": 0.5,
    # Nats per token. The same weights in another engine differ by 1e-6 (float32) to 1e-3 (bfloat16), weights
    # a few steps old by about 1e-2; past 0.1 the rollouts are of another policy.
    "mismatch_kl": 0.1,
    # PPO at work clips some hundredths of the tokens; where a third has no gradient, the step is too long.
    "clip_share": 0.3,
}


class OffPolicyGuard:
    """Judges each train step's metrics against bands and says ``warn``, ``lower_lag``, or raises.

    Invariants: an alarm needs `MIN_STEPS` measured steps since the last one, so that what was done about it
    can show; a measure that a step lacks, or that is NaN, is left out of that step only.

    A caller that gets ``lower_lag`` brings generation and training closer together: a lower ``max_staleness``
    or over-sampling, or a weight sync after every step.

    >>> guard = OffPolicyGuard("warn", {"mismatch_kl": 0.1})
    >>> [guard.check(step, {"train/mismatch_kl": 0.5}).action for step in (1, 2, 3)]
    ['none', 'none', 'warn']
    """

    def __init__(self, action: GuardAction = "warn", bands: Bands = DEFAULT_BANDS) -> None:
        """ValueError: a measure is unknown, or a bound is no positive number."""
        self._action = action
        known, wrong = get_args(Measure), bands
        if isinstance(bands, Mapping):
            right = [name for name in known if isinstance(bands.get(name), int | float) and bands[name] > 0]
            wrong = {name: bound for name, bound in bands.items() if name not in right}
        if wrong != {}:
            raise ValueError(f"a band is a number above 0 for {', '.join(known)}, not {wrong}")
        self._bands = {name: float(bound) for name, bound in bands.items()}
        self._windows: dict[Measure, deque[float]] = {name: deque(maxlen=WINDOW_STEPS) for name in bands}

    def check(self, train_step: int, metrics: Mapping[str, float]) -> "GuardDecision":
        """Add the metrics (``train/NAME``) of `train_step` and judge the window.

        Raises:
            OffPolicyError: a measure left its band and the action is ``stop``.
        """
        outside = []
        for name, window in self._windows.items():
            value = metrics.get(f"train/{name}", math.nan)
            if not math.isnan(value):
                window.append(value)
            if len(window) >= MIN_STEPS:
                middle, bound = statistics.median(window), self._bands[name]
                if middle < bound if name in LOWER_BOUNDS else middle > bound:
                    outside.append(name)
        if self._action == "off" or not outside:
            return GuardDecision("none", "")
        message = self._message(train_step, outside, metrics)
        if self._action == "stop":
            raise OffPolicyError(message)
        for window in self._windows.values():
            window.clear()
        return GuardDecision(self._action, message)

    def _message(self, train_step: int, outside: list[Measure], metrics: Mapping[str, float]) -> str:
        seen = [
            f"{name} {statistics.median(window):.4g} ("
            f"{'at least' if name in LOWER_BOUNDS else 'at most'} {self._bands[name]:g})"
            for name, window in self._windows.items()
            if window
        ]
        others = ("staleness_mean", "staleness_max", "mismatch_k1", "importance_max", "unknown_logprobs")
        rest = [f"{name} {metrics[f'train/{name}']:.4g}" for name in others if f"train/{name}" in metrics]
        return (
            f"train step {train_step}: the rollouts are too far from the policy that is trained on them; "
            f"{', '.join(outside)} out of band. Medians of the last steps: {', '.join(seen)}. This step: "
            f"{', '.join(rest) or 'nothing else measured'}. Lower the lag (max_staleness, "
            f"sync_weights_interval), use a train.correction, or lower train.lr"
        )

    def state_dict(self) -> dict[str, Any]:
        """The windows, for a checkpoint."""
        return {name: list(window) for name, window in self._windows.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; measures that are not watched any more are left out."""
        for name, window in self._windows.items():
            window.clear()
            window.extend(state.get(name, ()))


WINDOW_STEPS = 5
"""Steps whose median is judged: one odd batch changes nothing, and an alarm comes while it helps."""


MIN_STEPS = 3
"""Fewest measured steps for an alarm: the median of three is no single batch's."""


LOWER_BOUNDS = ("ess_token", "ess_sequence")
"""Measures that must not fall under their band; the others must not exceed theirs."""


class OffPolicyError(RuntimeError):
    """The data is too far from the policy to train on, and the guard was told to stop; all numbers inside."""


class GuardDecision(NamedTuple):
    """The guard's verdict on a train step."""

    action: Literal["none", "warn", "lower_lag"]
    message: str
    """Empty for ``none``; otherwise every measure with its band."""
