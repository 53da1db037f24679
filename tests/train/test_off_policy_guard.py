"""The guard on made-up metrics: when it speaks, what it says, and what it remembers."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.train import OffPolicyError, OffPolicyGuard
from forebay.train.objective.guard import DEFAULT_BANDS, LOWER_BOUNDS, MIN_STEPS, WINDOW_STEPS

HEALTHY = {"train/ess_token": 0.99, "train/mismatch_kl": 1e-4, "train/clip_share": 0.02}
SICK = {"ess_token": 0.1, "mismatch_kl": 3.0, "clip_share": 0.9}


def actions(guard, rows):
    return [guard.check(step, row).action for step, row in enumerate(rows, start=1)]


@pytest.mark.parametrize("name", DEFAULT_BANDS)
@pytest.mark.parametrize("action", ["warn", "lower_lag"])
def test_each_measure_alarms_after_the_fewest_steps_and_then_has_time_to_recover(name, action):
    rows = [{**HEALTHY, f"train/{name}": SICK[name]}] * (2 * MIN_STEPS)
    quiet = ["none"] * (MIN_STEPS - 1)
    assert actions(OffPolicyGuard(action), rows) == [*quiet, action, *quiet, action]


def test_a_single_odd_batch_is_no_alarm():
    odd = {f"train/{name}": value for name, value in SICK.items()}
    rows = [HEALTHY, odd, HEALTHY, HEALTHY, odd, HEALTHY]
    assert set(actions(OffPolicyGuard("stop"), rows)) == {"none"}


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "train/ess_token": st.floats(DEFAULT_BANDS["ess_token"], 1),
                "train/mismatch_kl": st.floats(0, DEFAULT_BANDS["mismatch_kl"]),
                "train/clip_share": st.floats(0, DEFAULT_BANDS["clip_share"]),
            }
        ),
        max_size=12,
    )
)
def test_inside_the_bands_is_never_an_alarm(rows):
    assert set(actions(OffPolicyGuard("stop"), rows)) <= {"none"}


def test_missing_and_nan_measures_are_passed_over_from_the_first_step():
    guard = OffPolicyGuard("stop")
    rows = [{}, {"train/ess_token": math.nan}, {"train/mismatch_kl": math.nan}, {}] * 2
    assert set(actions(guard, rows)) == {"none"}
    sick = {"train/mismatch_kl": math.inf}
    with pytest.raises(OffPolicyError):
        actions(guard, [sick, {}, sick, {}, sick])


def test_stopping_states_every_number():
    guard = OffPolicyGuard("stop", {**DEFAULT_BANDS, "ess_sequence": 0.01})
    row = {**HEALTHY, "train/mismatch_kl": 0.75, "train/staleness_max": 6.0, "train/ess_sequence": 0.4}
    with pytest.raises(OffPolicyError) as error:
        actions(guard, [row] * MIN_STEPS)
    for part in (
        "train step 3",
        "mismatch_kl out of band",
        "mismatch_kl 0.75 (at most 0.1)",
        "ess_token 0.99 (at least 0.5)",
        "ess_sequence 0.4 (at least 0.01)",
        "clip_share 0.02 (at most 0.3)",
        "staleness_max 6",
    ):
        assert part in str(error.value)


def test_off_says_nothing():
    row = {f"train/{name}": value for name, value in SICK.items()}
    assert set(actions(OffPolicyGuard("off"), [row] * 9)) == {"none"}


def test_what_is_not_in_the_bands_is_not_watched():
    row = {f"train/{name}": value for name, value in SICK.items()}
    assert set(actions(OffPolicyGuard("stop", {"ess_sequence": 0.1}), [row] * 9)) == {"none"}


WRONG = [("ess", 0.5), ("clip_share", 0.0), ("clip_share", math.nan), ("clip_share", None), ("clip_share", "0.1")]


@pytest.mark.parametrize(
    ("bands", "wrong"), [(None, None), *(({"mismatch_kl": 0.1, name: bound}, {name: bound}) for name, bound in WRONG)]
)
def test_a_band_that_is_none_is_one_sentence(bands, wrong):
    said = f"a band is a number above 0 for ess_token, ess_sequence, mismatch_kl, clip_share, not {wrong}"
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        OffPolicyGuard("warn", bands)


def test_a_restored_guard_goes_on_where_it_was():
    guard, other = OffPolicyGuard("lower_lag"), OffPolicyGuard("lower_lag")
    row = {"train/mismatch_kl": 1.0}
    actions(guard, [row] * (MIN_STEPS - 1))
    other.load_state_dict(guard.state_dict())
    assert other.check(MIN_STEPS, row) == guard.check(MIN_STEPS, row)
    assert other.state_dict() == guard.state_dict()
    narrower = OffPolicyGuard("warn", {"clip_share": 0.5})
    narrower.load_state_dict({"mismatch_kl": [1.0], "clip_share": [0.1]})
    assert narrower.state_dict() == {"clip_share": [0.1]}


def test_the_constants_fit_together():
    assert MIN_STEPS <= WINDOW_STEPS
    assert set(LOWER_BOUNDS) & set(DEFAULT_BANDS) == {"ess_token"}
    for wrong in ({"ess": 0.5}, {"mismatch_kl": 0.0}, {"mismatch_kl": math.nan}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            OffPolicyGuard("warn", wrong)
