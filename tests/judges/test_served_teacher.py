"""The recipe for a teacher behind a server, against the same teacher beside the trainer."""

import asyncio
import copy
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from forebay.config import load_config
from forebay.judges import JudgeConfig, build_judge
from forebay.runs.config import RunConfig
from forebay.train import TrainConfig, TrainController
from forebay.types import SampleParams, Status

RECIPE = Path(__file__).parents[2] / "recipes" / "served_teacher"
ONE_STEP = {"max_grad_norm": 0.0, "token_budget": 40}


class Teacher:
    """A server of both dialects that answers with the log probabilities of `model`."""

    def __init__(self, model, change=lambda body: body):
        self.model, self.change, self.asked = model, change, []
        teacher = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["content-length"])))
                teacher.asked.append((self.path, request))
                body = json.dumps(teacher.change(teacher.answer(self.path, request))).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()

    def answer(self, path, request):
        ids = request["prompt"] if path == "/v1/completions" else request["input_ids"]
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        found = logits[range(len(ids) - 1), ids[1:]].tolist()
        if path == "/generate":
            pairs = zip([None, *found], ids, strict=True)
            return {"meta_info": {"input_token_logprobs": [[value, token, None] for value, token in pairs]}}
        best = zip(logits.argmax(-1).tolist(), logits.amax(-1).tolist(), strict=True)
        listed = [
            {str(top): {"logprob": most, "rank": 1}} | {str(token): {"logprob": value, "rank": 9}}
            for (top, most), value, token in zip(best, found, ids[1:], strict=True)
        ]
        return {"choices": [{"text": "x", "prompt_logprobs": [None, *listed]}]}


@pytest.fixture(autouse=True)
def _recipe(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPE))


def judged(states, url, dialect="vllm", **arguments):
    async def ask():
        given = {"base_url": url, "model": "teacher", "dialect": dialect, **arguments}
        judge = build_judge(JudgeConfig(name="teacher:ServedTeacher", arguments=given))
        try:
            await judge.judge(states)
        finally:
            await judge.aclose()

    asyncio.run(ask())
    return states


def models():
    """Student and teacher of the tests of training."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"vocab_size": 23, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = LlamaConfig(**shape, num_attention_heads=2, max_position_embeddings=64, initializer_range=0.3)
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        found.append(LlamaForCausalLM(config).eval())
    return found


def sampled_groups(student):
    """Groups whose logprobs are the student's, as an engine with its weights would have them."""
    from forebay.types import RolloutState

    random, groups = np.random.default_rng(0), []
    for number in range(3):
        prompt, group = random.integers(3, 23, 2 + number), []
        for member in range(4):
            length = int(random.integers(1, 8))
            ids = random.integers(3, 23, length)
            tokens = torch.from_numpy(np.concatenate([prompt, ids]))
            with torch.no_grad():
                shares = student(input_ids=tokens[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            group.append(
                RolloutState(
                    [],
                    rollout_id=f"{number}.{member}",
                    group_id=number,
                    prompt_ids=prompt,
                    response_ids=ids,
                    logprobs=shares[range(length), ids].numpy(),
                    response_mask=random.integers(0, 2, length) if member else np.ones(length),
                    status=Status.COMPLETED,
                )
            )
        groups.append(group)
    return groups


def gradient(trainer, groups):
    """Of one step, which is not taken."""
    found = []
    parameters = list(trainer.model.parameters())
    trainer.learner._optimizer.step = lambda step: found.extend(p.grad.clone() for p in parameters) or 0.0
    trainer.fit(groups)
    return found


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_the_gradient_is_that_of_the_teacher_beside_the_trainer(dialect):
    student, teacher = models()
    local = TrainConfig(advantage="none", kl_estimator="advantage", kl_coef=1.0, **ONE_STEP)
    groups = sampled_groups(student)
    for state in (state for group in groups for state in group):
        state.reward = {"score": 0.0}
    trainer = TrainController(copy.deepcopy(student), local, pad_token_id=0, ref_model=teacher)
    expected = gradient(trainer, groups)

    groups = sampled_groups(student)
    with Teacher(teacher) as server:
        for group in groups:
            judged(group, server.url, dialect)
    states = [state for group in groups for state in group]
    assert [state.status for state in states] == [Status.COMPLETED] * len(states)
    assert all(len(state.reward["turn_rewards"]) == state.response_mask.sum() for state in states)
    served = TrainConfig(advantage="teacher:by_token", **ONE_STEP)
    found = gradient(TrainController(copy.deepcopy(student), served, pad_token_id=0), groups)
    assert any(each.abs().max() > 1e-3 for each in expected)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_the_request_is_the_prompt_and_the_response_by_token():
    student, teacher = models()
    ((state, *_), *_) = sampled_groups(student)
    ids = [*state.prompt_ids.tolist(), *state.response_ids.tolist()]
    with Teacher(teacher) as server:
        judged([state], server.url)
        judged([state], server.url + "/", "sglang")
    (path, request), (other_path, other) = server.asked
    assert (path, request["prompt"], request["prompt_logprobs"]) == ("/v1/completions", ids, 1)
    assert (other_path, other["input_ids"], other["logprob_start_len"]) == ("/generate", ids, 0)


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_another_prompt_and_a_number_that_is_none_fail_the_rollout(dialect, monkeypatch):
    monkeypatch.setattr("forebay.judges.base._FIRST_PAUSE_S", 0.001)
    student, teacher = models()

    def shorter(body):
        for listed in (body.get("choices", [{}])[0].get("prompt_logprobs"), body.get("meta_info")):
            if isinstance(listed, list):
                listed.pop()
            elif listed:
                listed["input_token_logprobs"].pop()
        return body

    def infinite(body):
        return json.loads(re.sub(r"-\d[-.e\d]*", "-Infinity", json.dumps(body)))

    for change, said in ((shorter, "another form of reply"), (infinite, "must be finite")):
        ((state, *_), *_) = sampled_groups(student)
        with Teacher(teacher, change) as server:
            judged([state], server.url, dialect)
        assert state.status is Status.FAILED
        assert said in state.error_msg


def test_another_temperature_is_refused():
    student, _ = models()
    ((state, *_), *_) = sampled_groups(student)
    state.sample_params = SampleParams(temperature=0.7)
    judged([state], "http://127.0.0.1:1")
    assert "answers at temperature 1, and this was sampled at 0.7" in state.error_msg


def test_the_run_file_is_whole():
    config = load_config(RunConfig, RECIPE / "run.toml")
    assert not config.train.uses_reference
    assert config.tasks[0].sample.temperature == 1.0
