"""The LLM judge against a real server on the loopback interface that fakes the API, and misbehaves."""

import asyncio
import json
import socket
from collections.abc import Callable

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from forebay.config import ConfigError
from forebay.judges import JudgeConfig, LLMJudge, build_judge
from forebay.judges.base import TransientJudgeError
from forebay.judges.llm import ReplyParser
from forebay.types import RolloutState, Status


def completion(text: object) -> Response:
    return JSONResponse({"choices": [{"message": {"content": text}}], "usage": {"total_tokens": 10}})


class Server:
    """Answers each request with the next of `script`, and the last one ever after."""

    def __init__(self) -> None:
        self.script: list[Response | Callable[[dict], Response]] = []
        self.requests: list[dict] = []
        self.keys: list[str | None] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.gate: asyncio.Event | None = None
        self.url = ""

    async def answer(self, request: Request) -> Response:
        self.requests.append(await request.json())
        self.keys.append(request.headers.get("authorization"))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if self.gate is not None:
                await self.gate.wait()
        finally:
            self.in_flight -= 1
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        return step if isinstance(step, Response) else step(self.requests[-1])


@pytest.fixture
async def server():
    fake = Server()
    paths = ("/v1/chat/completions", "/classify")
    app = Starlette(routes=[Route(path, fake.answer, methods=["POST"]) for path in paths])
    listener = socket.create_server(("127.0.0.1", 0))
    fake.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    config = uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
    service = uvicorn.Server(config)
    service.install_signal_handlers = lambda: None
    task = asyncio.create_task(service.serve(sockets=[listener]))
    yield fake
    if fake.gate is not None:
        fake.gate.set()
    service.should_exit = True
    await task
    listener.close()


@pytest.fixture
async def judge(server):
    """Judges `count` rollouts that differ with a judge of the given options."""
    judges = []

    async def run(count: int = 1, *, group: bool = False, responses=None, **options) -> list[RolloutState]:
        judge = LLMJudge(base_url=server.url, model="m", group=group, **options)
        judges.append(judge)
        return await judge.judge([rollout(text) for text in responses or map(str, range(count))])

    yield run
    for judge in judges:
        await judge.aclose()


def rollout(response: str) -> RolloutState:
    return RolloutState(
        [{"role": "system", "content": "s"}, {"role": "user", "content": "What is 2+2?"}],
        response=response,
        reward_model={"ground_truth": "4"},
        status=Status.COMPLETED,
    )


def rewards(states: list[RolloutState]) -> list[float]:
    assert all(state.status is Status.COMPLETED for state in states), [state.error_msg for state in states]
    return [state.reward["score"] for state in states]


BUSY = PlainTextResponse("busy", 503, headers={"retry-after": "0"})


async def test_the_question_is_the_template_and_the_reply_the_score(server, judge, monkeypatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k1")
    server.script = [completion('I think {"score": 8, "tone": 2}')]
    (state,) = await judge(
        template="{{ prompt }}|{{ response }}|{{ ground_truth }}|{{ messages | length }}",
        system="Be strict.",
        scale=[0, 10],
        api_key_env="JUDGE_KEY",
        parameters={"max_tokens": 5},
    )
    assert state.reward == {"score": 0.8, "tone": 2.0}
    assert server.requests == [
        {
            "model": "m",
            "temperature": 0.0,
            "max_tokens": 5,
            "messages": [
                {"role": "system", "content": "Be strict."},
                {"role": "user", "content": "What is 2+2?|0|4|2"},
            ],
        }
    ]
    assert server.keys == ["Bearer k1"]


async def test_the_environment_names_a_proxy_and_a_netrc_file_replaces_no_key(
    server, judge, monkeypatch, tmp_path
) -> None:
    (tmp_path / "netrc").write_text("default login somebody password else")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("JUDGE_KEY", "k1")
    server.script = [completion('{"score": 1}')]
    assert rewards(await judge(api_key_env="JUDGE_KEY")) == [1.0]
    assert server.keys == ["Bearer k1"]
    # As a proxy, the server is asked for a host that is not there.
    monkeypatch.setenv("http_proxy", server.url.removesuffix("/v1"))
    server.url = "http://judge.invalid/v1"
    assert rewards(await judge()) == [1.0]
    monkeypatch.setenv("no_proxy", "judge.invalid")
    (state,) = await judge(max_retries=0)
    assert "Cannot connect to host judge.invalid" in state.error_msg


async def test_the_built_in_question_holds_question_answer_and_reference(server, judge) -> None:
    server.script = [completion('{"score": 1}')]
    assert rewards(await judge(responses=["it is {{ four }}"])) == [1.0]
    text = server.requests[0]["messages"][0]["content"]
    assert "What is 2+2?" in text
    assert "it is {{ four }}" in text
    assert "Reference answer:\n4" in text


@pytest.mark.parametrize(
    "trouble",
    [
        PlainTextResponse("oops", 500),
        PlainTextResponse("slow down", 429, headers={"retry-after": "0"}),
        BUSY,
        PlainTextResponse("not json"),
        JSONResponse({"choices": []}),
        JSONResponse([1]),
        completion(None),
        completion("no verdict at all"),
        completion('{"score": "high"}'),
        completion('{"score": 7}'),
    ],
)
async def test_what_may_pass_is_tried_again(server, judge, trouble, monkeypatch) -> None:
    monkeypatch.setattr("forebay.judges.base._FIRST_PAUSE_S", 0.0)
    server.script = [trouble, completion('{"score": 0.5}')]
    assert rewards(await judge(scale=[0, 1])) == [0.5]
    server.script = [trouble]
    (state,) = await judge(scale=[0, 1], max_retries=2)
    assert state.status is Status.FAILED
    assert "(tried 3 times)" in state.error_msg
    assert len(server.requests) == 5


async def test_a_refusal_is_final(server, judge) -> None:
    server.script = [JSONResponse({"error": "who are you?"}, 401)]
    (state,) = await judge()
    assert "HTTP 401" in state.error_msg
    assert "who are you?" in state.error_msg
    assert len(server.requests) == 1


async def test_a_server_that_is_silent_or_gone_fails_the_rollout(server, judge) -> None:
    server.script, server.gate = [completion('{"score": 1}')], asyncio.Event()
    (state,) = await judge(timeout_s=0.2, max_retries=0)
    assert "no reply within 0.2 s" in state.error_msg
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
    judge = LLMJudge(base_url=nobody, model="m", max_retries=0)
    state = await judge.judge(rollout("x"))
    await judge.aclose()
    assert "Cannot connect" in state.error_msg


async def test_the_same_question_is_asked_once_and_what_cannot_be_read_again(server) -> None:
    server.script = [completion("garbage"), completion('{"score": 0.25}')]
    judge = LLMJudge(base_url=server.url, model="m", max_retries=0)
    assert (await judge.judge(rollout("0"))).status is Status.FAILED
    for _ in range(2):
        assert rewards(await judge.judge([rollout(text) for text in "012"])) == [0.25] * 3
    assert len(server.requests) == 1 + 3
    await judge.aclose()


def longer_wins(request: dict) -> Response:
    """Which of the two answers is longer; the first place is worth 0.25 in a tie."""
    lines = request["messages"][-1]["content"].splitlines()
    first, second = (lines[lines.index(f"Answer {place}:") + 1] for place in (1, 2))
    share = 0.75 if len(first) == len(second) else float(len(first) > len(second))
    return completion(f'I think {{"score": {share}}}')


async def test_a_group_is_judged_by_pairs(server, judge) -> None:
    server.script = [longer_wins]
    states = await judge(group="pairs", responses=["aa", "a", "bb"])
    # Both longer ones beat the short one; between them the second stands first, which the model favors.
    assert rewards(states) == [(1 + 0.25) / 2, 0.0, (1 + 0.75) / 2]
    assert len(server.requests) == 3
    assert rewards(await judge(group="pairs", responses=["alone"])) == [0.5]
    server.script = [completion('{"score": 7}')]
    states = await judge(group="pairs", responses=["a", "b"], max_retries=0)
    assert {state.status for state in states} == {Status.FAILED}
    assert "the score 7 is not within 0 .. 1" in states[0].error_msg


async def test_of_a_group_of_pairs_only_the_one_that_failed_is_asked_again(monkeypatch) -> None:
    judge = LLMJudge(base_url="http://nowhere.invalid", model="m", group="pairs")
    asked = []

    async def post(url, request, read):
        asked.append(request)
        if len(asked) == 1:
            raise TransientJudgeError("busy", after_s=0.0)
        await asyncio.sleep(0.01)
        return '{"score": 0.5}'

    monkeypatch.setattr(judge._server, "post", post)
    states = [RolloutState([], response=text) for text in ("aa", "a", "bb", "b")]
    with pytest.raises(TransientJudgeError, match="busy"):
        await judge.score_group(states)
    assert list(await judge.score_group(states)) == [0.5] * 4
    assert len(asked) == 6 + 1


async def test_a_rubric_is_the_weighted_mean_of_its_criteria(server, judge) -> None:
    rubric = {"The answer is right.": 3.0, "Its steps are shown.": 1.0}
    server.script = [completion('{"1": 1} or rather {"1": 1, "2": 0.5}')]
    (state,) = await judge(rubric=rubric)
    assert state.reward == {"score": 0.875, "The answer is right.": 1.0, "Its steps are shown.": 0.5}
    asked = server.requests[0]["messages"][-1]["content"]
    assert "Criterion 1: The answer is right.\nCriterion 2: Its steps are shown.\n" in asked
    # A criterion without a grade is no zero.
    server.script = [completion('{"1": 1}')]
    (state,) = await judge(rubric=rubric, max_retries=1)
    assert (state.status, state.reward) == (Status.FAILED, None)
    assert "2 criteria, but the scores are {'1': 1}" in state.error_msg
    assert len(server.requests) == 3


async def test_requests_in_flight_are_bounded(server, judge) -> None:
    server.script, server.gate = [completion('{"score": 1}')], asyncio.Event()
    judging = asyncio.create_task(judge(12, max_concurrent=3))
    asyncio.get_running_loop().call_later(0.2, server.gate.set)
    assert rewards(await judging) == [1.0] * 12
    assert 1 <= server.most_in_flight <= 3


async def test_a_used_up_budget_fails_what_is_left(server, judge) -> None:
    server.script = [completion('{"score": 1}')]
    states = await judge(6, max_concurrent=1, max_calls=4)
    failed = [state for state in states if state.status is Status.FAILED]
    assert len(failed) == 2
    told = "the budget is used up: 4 of max_calls = 4; raise it"
    assert all(told in state.error_msg for state in failed)
    assert len(server.requests) == 4


async def test_a_group_is_judged_by_one_question(server, judge) -> None:
    server.script = [completion('{"scores": [1, 0.5]}'), completion('{"scores": [0.1, 0.2, 0.3]}')]
    states = await judge(3, group=True, max_retries=1)
    assert rewards(states) == [0.1, 0.2, 0.3]
    text = server.requests[0]["messages"][0]["content"]
    assert all(f"Answer {number + 1}:\n{number}\n" in text for number in range(3))
    server.script = [completion('{"scores": [1]}')]
    assert rewards(await judge(1, group=True)) == [1.0]
    server.script = [completion('{"scores": [1]}')]
    assert {state.status for state in await judge(2, group=True, max_retries=0)} == {Status.FAILED}


# Without a server


async def test_a_template_is_checked_when_it_is_compiled_and_its_names_when_it_is_used() -> None:
    with pytest.raises(ValueError, match="template, line 1"):
        LLMJudge(base_url="http://x", model="m", template="{{ response")
    judge = LLMJudge(base_url="http://x", model="m", template="{{ respones }}")
    state = await judge.judge(rollout("x"))
    assert "'respones' is undefined" in state.error_msg


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"api_key_env": "NO_SUCH_KEY"}, "variable NO_SUCH_KEY is not set"),
        ({"scale": [1, 1]}, r"scale must be \[lowest, highest\]"),
        ({"parse": "([0-9]+"}, "not a regular expression"),
        ({"parse": "no.such:function"}, "cannot import 'no.such'"),
        ({"max_concurrent": 0}, "'max_concurrent' = 0: .*greater than or equal to 1"),
        ({"rubric": {"good": 0.0}}, "takes weights over 0"),
        ({"rubric": {"good": 1.0}, "group": "pairs"}, "and no group"),
        ({"max_calls": 0}, "'max_calls' = 0: .*greater than or equal to 1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_the_run(options, message) -> None:
    arguments = {"base_url": "http://x", "model": "m", **options}
    with pytest.raises(ConfigError, match=message):
        build_judge(JudgeConfig(name="llm", arguments=arguments))


def letters(reply: str) -> list[float]:
    return [float(len(word)) for word in reply.split()]


@pytest.mark.parametrize(
    ("parse", "reply", "expected"),
    [
        ("number", "of 10 points: 7.5", 7.5),
        ("number", "-3", -3.0),
        (r"Grade: (\d)", "Grade: 1 ... Grade: 4", 4.0),
        ("json", '{"score": 1} no: {"score": 2, "why": "x"}', 2.0),
        ("json", '{"a": {"score": 1}} {not json {"score": 3}', 3.0),
        ("json", '```json\n{"score": true}\n```', 1.0),
        (lambda reply: {"score": len(reply), "x": 1}, "abc", {"score": 3.0, "x": 1.0}),
    ],
)
def test_replies_are_read(parse, reply, expected) -> None:
    assert ReplyParser(parse).verdict(reply) == expected


def test_replies_on_groups_are_read() -> None:
    assert ReplyParser(r"#\d: (\d+)", scale=[0, 10]).verdicts("#1: 5 #2: 10", 2) == [0.5, 1.0]
    assert ReplyParser(f"{__name__}:letters").verdicts("a bbb", 2) == [1.0, 3.0]
    for reply in ("#1: 5", "#1: 5 #2: 6 #3: 7"):
        with pytest.raises(ValueError, match="scores where 2 are asked for"):
            ReplyParser(r"#\d: (\d+)").verdicts(reply, 2)


@given(low=st.integers(-5, 5), width=st.integers(1, 10), share=st.floats(0, 1), noise=st.text(max_size=20))
def test_scores_are_scaled_to_0_and_1_and_never_clipped(low, width, share, noise) -> None:
    parser = ReplyParser("json", scale=(low, low + width))
    raw = low + share * width
    reply = noise + json.dumps({"score": raw})
    assert parser.verdict(reply) == pytest.approx(share)
    with pytest.raises(ValueError, match="is not within"):
        parser.verdict(noise + json.dumps({"score": low + width + 1}))


async def test_a_server_scores_by_its_reward_model(server):
    # As vLLM answers; without an activation "probs" are the numbers of the model.
    found = {"object": "list", "data": [{"index": 0, "label": None, "probs": [-3.5], "num_classes": 1}]}
    several = {"data": [{"probs": [0.2, 0.8], "num_classes": 2}]}
    busy = PlainTextResponse("wait", status_code=503, headers={"retry-after": "0"})
    server.script = [busy, JSONResponse(found), JSONResponse(several)]
    arguments = {"model": "rm", "base_url": server.url.removesuffix("/v1")}
    judge = build_judge(JudgeConfig(name="reward_model", arguments=arguments))
    judge.max_retries = 1
    (good,), (bad,) = [await judge.judge([rollout(text)]) for text in ("yes", "no")]
    await judge.aclose()
    assert good.reward == {"score": -3.5}
    assert server.requests[0]["messages"][-1] == {"role": "assistant", "content": "yes"}
    assert server.requests[0]["use_activation"] is False
    assert bad.status is Status.FAILED
    assert "another form of reply" in bad.error_msg
