import re

import pytest

from forebay.config import ConfigError
from forebay.judges import (
    ExactMatchJudge,
    FunctionJudge,
    Judge,
    JudgeConfig,
    MathVerifyJudge,
    ReasoningGymJudge,
    ShuffledJudge,
    build_judge,
)
from forebay.types import RolloutState, Status


def share_of(state: RolloutState, *, letter: str = "a") -> float:
    return state.response.count(letter) / len(state.response)


class Constant(Judge):
    def __init__(self, *, value: float, timeout_s: float | None = None) -> None:
        super().__init__(timeout_s=timeout_s)
        self.value = value

    async def score(self, state: RolloutState) -> float:
        return self.value


NOT_A_JUDGE = 3


@pytest.mark.parametrize(
    ("name", "judge_class"),
    [("exact_match", ExactMatchJudge), ("math_verify", MathVerifyJudge), ("reasoning_gym", ReasoningGymJudge)],
)
def test_the_names_of_the_table_build(name, judge_class) -> None:
    assert isinstance(build_judge(JudgeConfig(name=name)), judge_class)


async def test_functions_and_classes_are_found_by_import_path() -> None:
    state = RolloutState([], response="abba", status=Status.COMPLETED)
    by_function = build_judge(JudgeConfig(name=f"{__name__}:share_of", arguments={"letter": "b"}))
    assert isinstance(by_function, FunctionJudge)
    assert (await by_function.judge(state)).reward == {"score": 0.5}
    by_class = build_judge(JudgeConfig(name=f"{__name__}:Constant", arguments={"value": 0.25}, timeout_s=None))
    assert (await by_class.judge(state)).reward == {"score": 0.25}


def test_arguments_and_timeout_reach_the_judge() -> None:
    judge = build_judge(JudgeConfig(name="exact_match", arguments={"extract": "last_number"}, timeout_s=7))
    assert judge.timeout_s == 7
    control = build_judge(JudgeConfig(name="exact_match", shuffle_seed=4))
    assert isinstance(control, ShuffledJudge)
    assert control.seed == 4


@pytest.mark.parametrize("config", [None, JudgeConfig()])
def test_a_task_without_a_judge_is_told_the_known_names(config) -> None:
    with pytest.raises(ConfigError, match=r"no judge.*exact_match, math_verify, reasoning_gym, reward_model, or"):
        build_judge(config)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("exact_mach", {}, "unknown judge 'exact_mach'; did you mean 'exact_match'"),
        ("exact_match", {"extrakt": "x"}, "did you mean 'extract'? its arguments: extract, partial_credit"),
        ("exact_match", {"extract": "(["}, "judge 'exact_match': extract = "),
        (f"{__name__}:share_of", {"leter": "x"}, "did you mean 'letter'? its arguments: letter"),
        (f"{__name__}:shareof", {}, "has no 'shareof'; did you mean 'share_of'"),
        (f"{__name__}:Constant", {}, "missing a required argument: 'value'"),
        (f"{__name__}:NOT_A_JUDGE", {}, "is a int, not a function or class"),
        ("no.such.module:f", {}, "cannot import 'no.such.module'"),
    ],
)
def test_what_cannot_be_built_is_one_clear_error(name, arguments, message) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_judge(JudgeConfig(name=name, arguments=arguments))
