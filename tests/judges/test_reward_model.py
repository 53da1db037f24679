"""Reward models in a process of their own, against transformers' own scores of single conversations."""

import asyncio
import json
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from forebay.judges import JudgeConfig, RewardModelJudge, build_judge
from forebay.judges.reward import make_reward_scorer
from forebay.models import load_tokenizer, resolve_model
from forebay.types import RolloutState, Status

pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    """A folder with a tiny reward model whose pad is its end token, and scores without a batch."""
    folder = tmp_path_factory.mktemp("reward")
    tokenizer = load_tokenizer(resolve_model("tiny"))
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = (
        "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools') }}"
        "{% endif %}{{ message.role[0] }}{{ message.content }}{{ eos_token }}{% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), num_labels=1, initializer_range=0.5, **shape)
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(folder)

    def alone(state):
        messages = [*state.message, {"role": "assistant", "content": state.response}]
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        with torch.no_grad():
            hidden = model.model(input_ids=torch.tensor([ids])).last_hidden_state
            return float(model.score(hidden[0, -1]))

    return str(folder), alone


def rollouts(*responses):
    return [
        RolloutState([{"role": "user", "content": "2 + 2?"}], rollout_id=text, response=text, status=Status.COMPLETED)
        for text in responses
    ]


def test_a_group_is_scored_as_each_conversation_alone(reward_model):
    folder, alone = reward_model
    states = rollouts("4", "four, which is 2 + 2", "", "5" * 30, "no")
    batches = []

    async def judge_them():
        judge = build_judge(JudgeConfig(name="reward_model", arguments={"model": folder, "device": "cpu"}))
        judge._processes = judge._make_process()
        run = judge._processes.run
        judge._processes.run = lambda asked: batches.append(len(asked)) or run(asked)
        try:
            await judge.judge(states)
            broken = rollouts("fine")
            broken[0].message = [{"role": "tool", "content": "4"}]
            await judge.judge(broken)
        finally:
            await judge.aclose()
        return broken[0]

    broken = asyncio.run(judge_them())
    assert [state.reward["score"] for state in states] == pytest.approx(list(map(alone, states)), abs=1e-5)
    assert batches == [5, 1]
    assert broken.status is Status.FAILED
    assert broken.reward is None
    assert "no tools" in broken.error_msg


def test_one_that_gives_up_leaves_the_others_their_turn(reward_model):
    """The first of three is cancelled while its batch is judged."""
    judge = RewardModelJudge(model="unused")
    asked, release = [], asyncio.Event()

    async def run(conversations):
        asked.append([messages[-1]["content"] for messages in conversations])
        await release.wait()
        return [float(len(text)) for text in asked[-1]]

    async def judge_them():
        judge._processes = SimpleNamespace(run=run)
        first, *others = [asyncio.create_task(judge.score(state)) for state in rollouts("a", "bb", "ccc")]
        while not asked:
            await asyncio.sleep(0)
        first.cancel()
        release.set()
        return await asyncio.gather(*others)

    assert asyncio.run(judge_them()) == [2.0, 3.0]


def test_a_batch_of_those_that_gave_up_fails_no_other(reward_model):
    """Two are judged, the next two are cancelled while they wait, the fifth is in the third batch."""
    judge = RewardModelJudge(model="unused", max_concurrent=2)
    asked, release = [], asyncio.Event()

    async def run(conversations):
        asked.append([messages[-1]["content"] for messages in conversations])
        await release.wait()
        return [float(len(text)) for text in asked[-1]]

    async def judge_them():
        judge._processes = SimpleNamespace(run=run)
        tasks = [asyncio.create_task(judge.score(state)) for state in rollouts("a", "b", "c", "d", "eeeee")]
        while not asked:
            await asyncio.sleep(0)
        for task in tasks[2:4]:
            task.cancel()
        release.set()
        return await asyncio.gather(*tasks[:2], tasks[4])

    assert asyncio.run(judge_them()) == [1.0, 1.0, 5.0]


def test_a_model_that_is_not_there_starts_no_process():
    judge = RewardModelJudge(model="/nope")
    (state,) = rollouts("4")
    asyncio.run(judge.judge([state]))
    assert state.status is Status.FAILED
    assert "no model at '/nope'" in state.error_msg + str(state.extra_fields)
    assert judge._processes is None


def test_a_reward_model_takes_cudnn_out_of_torch_s_choices(reward_model):
    torch.backends.cuda.enable_cudnn_sdp(True)
    make_reward_scorer(reward_model[0], "cpu")
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_a_model_with_several_outputs_is_no_reward_model(tmp_path):
    tokenizer = load_tokenizer(resolve_model("tiny"))
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((resolve_model("tiny") / "config.json").read_text())
    small = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_labels": 2}
    LlamaForSequenceClassification(LlamaConfig(**{**config, **small})).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="2 outputs where one is read"):
        make_reward_scorer(str(tmp_path), "cpu")
