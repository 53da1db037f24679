"""`RunAlarms`: says, once, that a run learns nothing or the wrong thing, with what usually helps.

::

    row of a step or of an evaluation --see--> last rows --an alarm's condition holds--> its message, once
                                                 '-- has not held for `REST_STEPS` --> may be said again

It reads rows as ``metrics.jsonl`` has them and keeps nothing else, so that a recorded run gives the alarms it
gave when it ran, and a resumed run is brought up to date by its history. `forebay.train.objective.guard`
tells of rollouts too far from the policy, `forebay.produce.batches` of tasks without a share of the batches.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping

from forebay.metrics import EVAL_SCORE, REWARD
from forebay.runs.config import RunConfig
from forebay.runs.show.status import JUDGE_FAILED, LENGTH_BIAS

ALARM_PREFIX = "alarm/"
"""``alarm/<name>`` is 1 in the row of each step at which the alarm holds."""

KEEPING_RULE = "correct"
"""The staleness rule that drops nothing (docs/async.md)."""

ALARMS = ("no_signal", "truncated", "judge", "failed", "entropy", "held_out", "drops_long")
"""Each has a method below, which gives its message while its condition holds."""

WINDOW_STEPS = 10
"""Train steps that are judged together: odd batches change nothing, and 10 of 16 groups are enough to be sure
(where one prompt in twenty gave a signal, 10 such batches without any would come once in 3,000)."""
REST_STEPS = 20
"""Train steps without the condition after which an alarm is news again: a share that moves around its bound
does not repeat it."""
TRUNCATED_SHARE = 0.5
"""Most responses: what they would have been worth is not known, and short ones are what is rewarded."""
FAILED_SHARE = 0.2
"""The share of groups that failed: one in a hundred is a service that restarts, one in five a defect."""
FAILING_STEPS, JUDGE_FAILED_SHARE = 3, 0.05
"""Of what a judge was given, on end: rollouts without a verdict are not trained on, and which those are is
seldom chance."""
ENTROPY_SHARE = 0.02
"""The share of the first steps' entropy. A model that has learned its task keeps some hundredths."""
ENTROPY_NATS = 0.02
"""Besides: 98% of the tokens' probability on one choice. A low start is no collapse."""
FIRST_STEPS = 5
"""Train steps whose median is what a run began with."""
HELD_OUT_FALL = 0.1
"""Share of the best held-out score that is lost: twice the standard error of 100 answers right or wrong."""
HELD_OUT_EVALUATIONS = 2
"""Evaluations on end so far under the best: one of them is noise."""

Row = Mapping[str, float | None]


class RunAlarms:
    """Looks at each row of metrics and says what is wrong with the run.

    Invariants: an alarm is said when its condition begins to hold, and not again before it was gone for
    `REST_STEPS` train steps; a number that a row lacks raises no alarm.

    >>> from forebay.runs import RunConfig
    >>> task = {"name": "sums", "data": {"source": "addition"}, "judge": {"name": "exact_match"}}
    >>> config = RunConfig(
    ...     name="a", steps=9, batch_size=4, rollouts_per_prompt=8, model={"source": "tiny"}, tasks=[task])
    >>> alarms = RunAlarms(config)
    >>> for step in range(1, 11):
    ...     new = alarms.see({"train_step": step, "reward": 0.0, "train/equal_score_groups": 1.0})
    >>> list(new)
    ['no_signal']
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._rows: deque[Row] = deque(maxlen=WINDOW_STEPS)
        self._first: deque[Row] = deque(maxlen=FIRST_STEPS)
        self._evaluations: list[tuple[float, float | None]] = []
        """Held-out score, and the mean reward of the steps before; None before the first step."""
        self.judge_failure = ""
        """The last failure of a judge, with its name; rows have numbers only."""
        self._since_held: dict[str, int] = {}
        """Train steps since each alarm that was said held last."""

    @property
    def held(self) -> dict[str, float]:
        """``alarm/<name>``: 1 for each alarm whose condition held at the last row."""
        return {f"{ALARM_PREFIX}{name}": 1.0 for name, steps in self._since_held.items() if steps == 0}

    def see(self, row: Row) -> dict[str, str]:
        """Take in a row of a train step, an evaluation, or both; the messages that are new, by alarm."""
        is_step = row.get(REWARD) is not None
        if is_step:
            self._rows.append(row)
            if len(self._first) < FIRST_STEPS:
                self._first.append(row)
        # It is NaN where every rollout failed.
        if (score := row.get(EVAL_SCORE)) is not None and not math.isnan(score):
            rewards = self._column(REWARD)
            self._evaluations.append((score, sum(rewards) / len(rewards) if rewards else None))
        new = {}
        for name in ALARMS:
            message: str | None = getattr(self, f"_{name}")()
            if message is not None:
                if name not in self._since_held:
                    new[name] = message
                self._since_held[name] = 0
            # An evaluation alone is no train step of rest.
            elif name in self._since_held and is_step:
                self._since_held[name] += 1
                if self._since_held[name] >= REST_STEPS:
                    del self._since_held[name]
        return new

    def catch_up(self, history: Iterable[Row], evaluations: Iterable[Row]) -> None:
        """Take in what a resumed run did before, without saying it again."""
        # An evaluation comes after the step that it is of.
        for row in sorted([*history, *evaluations], key=lambda row: row["train_step"] or 0.0):
            self.see(row)

    def _column(self, name: str, rows: Iterable[Row] | None = None) -> list[float]:
        """The values of the last steps, or of `rows`, that have one."""
        return [value for row in (self._rows if rows is None else rows) if (value := row.get(name)) is not None]

    def _if_lost(self, is_lost: bool) -> str:
        """The first thing to try where the model could do before what it cannot do now."""
        first = f"It was better before: first lower train.lr (now {self._config.train.lr:g}) and go back to "
        return f"{first}a checkpoint, as updates that are too large do this. " if is_lost else ""

    def _steps(self) -> str:
        return f"train steps {self._rows[0]['train_step']:.0f} to {self._rows[-1]['train_step']:.0f}"

    def _no_signal(self) -> str | None:
        config = self._config
        compares = config.rollouts_per_prompt > 1 and not config.train.uses_critic
        # A critic, or a group of one, needs scores that differ anywhere; the others within a group.
        values = self._column("train/equal_score_groups" if compares else "train/score_std")
        if len(values) < WINDOW_STEPS or any(value != (1.0 if compares else 0.0) for value in values):
            return None
        rewards = self._column(REWARD)
        if min(rewards) == max(rewards):
            return (
                f"{self._steps()}: every score was {rewards[-1]:g}, so there is nothing to learn from. "
                f"{self._if_lost(rewards[-1] <= 0 < max(self._column(REWARD, self._first)))}"
                f"Read some in forebay board: is the judge right? Prompts that are never solved need easier "
                f"data, a [warmup], partial credit or more rollouts_per_prompt (now "
                f"{config.rollouts_per_prompt}); prompts that are always solved need harder data"
            )
        return (
            f"{self._steps()}: in every group all rollouts had the same score, so there is nothing to learn "
            f"from. Raise tasks.sample.temperature (now {config.tasks[0].sample.temperature:g}) or "
            f"rollouts_per_prompt (now {config.rollouts_per_prompt}), give partial credit, or take data of "
            f"mixed difficulty"
        )

    def _truncated(self) -> str | None:
        values = self._column("truncated")
        if len(values) < WINDOW_STEPS or (share := sum(values) / len(values)) <= TRUNCATED_SHARE:
            return None
        return (
            f"{self._steps()}: {share:.0%} of the responses were cut off by their budget (finish_reason "
            f"length), so what is rewarded is to be short. "
            f"{self._if_lost(min(values) < ENDING_SHARE)}Raise tasks.sample.max_tokens (now "
            f"{self._config.tasks[0].sample.max_tokens}) and, where it is the limit, model.max_context"
        )

    def _judge(self) -> str | None:
        values = self._column(JUDGE_FAILED)[-FAILING_STEPS:]
        share = sum(values) / FAILING_STEPS
        # A single step with many failures may be one bad moment: each of these has some.
        if len(values) < FAILING_STEPS or not min(values) or share <= JUDGE_FAILED_SHARE:
            return None
        return (
            f"a judge failed in {share:.0%} of the groups of the {FAILING_STEPS} steps up to "
            f"{self._rows[-1]['train_step']:.0f}; such rollouts are not trained on. The last: "
            f"{self.judge_failure or 'see forebay ledger'}. Mend it, or raise tasks.judge.timeout_s"
        )

    def _failed(self) -> str | None:
        if len(self._rows) < WINDOW_STEPS:
            return None
        # Counted since the start of the run; a reason has no number before its first group.
        first, last = (row.get("dropped/failed") or 0.0 for row in (self._rows[0], self._rows[-1]))
        failed, trained = last - first, self._config.batch_size * (WINDOW_STEPS - 1)
        if failed <= FAILED_SHARE * (failed + trained):
            return None
        return (
            f"{self._steps()}: {failed:.0f} groups failed for good beside {trained} that were trained on. "
            f"`forebay ledger {self._config.folder}` gives the reasons; for a slow judge raise "
            f"tasks.judge.timeout_s, for one that fails now and then produce.max_retries"
        )

    def _entropy(self) -> str | None:
        values = self._column("train/entropy")[-FIRST_STEPS:]
        first = self._column("train/entropy", self._first)
        if len(first) < FIRST_STEPS or len(values) < FIRST_STEPS:
            return None
        now, before = statistics.median(values), statistics.median(first)
        if now >= min(ENTROPY_NATS, ENTROPY_SHARE * before):
            return None
        train, (kl_coef, entropy_coef) = self._config.train, self._config.train.penalties
        return (
            f"{self._steps()}: the entropy has collapsed from {before:.3g} to {now:.3g} nats per token: all "
            f"samples of a prompt become the same, and nothing new is tried. Lower train.lr (now "
            f"{train.lr:g}), raise train.entropy_coef (now {entropy_coef:g}) or train.kl_coef (now "
            f"{kl_coef:g}), or the upper end of train.clip (now {train.clip_high:g})"
        )

    def _held_out(self) -> str | None:
        scores = [score for score, _ in self._evaluations]
        if len(scores) <= HELD_OUT_EVALUATIONS:
            return None
        best = max(range(len(scores)), key=scores.__getitem__)
        later = scores[best + 1 :][-HELD_OUT_EVALUATIONS:]
        bound = scores[best] - HELD_OUT_FALL * abs(scores[best])
        if len(later) < HELD_OUT_EVALUATIONS or max(later) >= bound:
            return None
        # Nothing was trained before the evaluation at the start: its reward is that of the first steps.
        first = self._column(REWARD, self._first)
        before = self._evaluations[best][1]
        before = sum(first) / len(first) if before is None and first else before
        now = self._evaluations[-1][1]
        # Greedy answers to held-out prompts can get worse for a while as the samples get better; what was
        # learned by heart shows in the prompts trained on being answered better than the others.
        if before is None or now is None:
            return None
        fell = now < before - HELD_OUT_FALL * abs(before)
        if not fell and now <= max(before, scores[-1]):
            return None
        why = "the model learns its prompts by heart, or what the judge overlooks"
        if fell:
            why = "training makes the model worse, most often by updates that are too large"
        return (
            f"the held-out score fell from {scores[best]:.3g} to {scores[-1]:.3g} while the reward of "
            f"training {'fell' if fell else 'rose'} from {before:.3g} to {now:.3g}: {why}. "
            f"Read some in forebay board; use more data or fewer steps, lower "
            f"train.lr (now {self._config.train.lr:g}), or raise train.kl_coef (now "
            f"{self._config.train.penalties[0]:g})"
        )

    def _drops_long(self) -> str | None:
        last = self._rows[-1] if self._rows else {}
        found = [(value or 0.0, name) for name, value in last.items() if name.endswith(f"/{LENGTH_BIAS}")]
        if not found:
            return None
        ratio, name = max(found)
        task = name.removeprefix("dropped/").removesuffix(LENGTH_BIAS).rstrip("/")
        counts = {reason: last.get(f"dropped/{reason}") or 0.0 for reason in ("expired", "evicted")}
        total = sum(counts.values())
        share = total / (total + self._config.batch_size * (last["train_step"] or 0.0))
        produce = self._config.produce
        return (
            f"{f'task {task}: ' if task else ''}groups that were dropped because they grew too old or did "
            f"not fit the buffer have {ratio:.2g} times the tokens of those that were trained on "
            f"({total:.0f} groups, {share:.0%} of all), so long responses are trained on less often than "
            f"short ones. Set produce.staleness_rule = {KEEPING_RULE!r} (now {produce.staleness_rule!r}), or "
            f"raise produce.max_staleness (now {produce.max_staleness})"
        )


ENDING_SHARE = 0.1
"""From less than this to most within `WINDOW_STEPS`: responses that grow because it pays take longer."""
