import asyncio

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from forebay.agents import SingleTurnAgentLoop
from forebay.agents.chat.rendering import render_prompt
from forebay.judges import ExactMatchJudge
from forebay.types import RolloutState, SampleParams, Status

TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool.name }}{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PARAMS = SampleParams(max_tokens=8)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    special = ["<eos>", "<system>", "<user>", "<assistant>", "<tool>"]
    vocabulary = {token: i for i, token in enumerate([*special, *"0123456789+=abcdefgh"])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, eos_token="<eos>", additional_special_tokens=special[1:], chat_template=TEMPLATE
    )


class ScriptedController:
    """Appends the next of its texts' tokens to what it is given; "|" ends a text as aborted."""

    def __init__(self, tokenizer, *texts: str) -> None:
        self.tokenizer = tokenizer
        self.texts = list(texts)
        self.seen: list[list[int]] = []
        self.num_paused = 0

    async def generate_sample(self, state: RolloutState) -> RolloutState:
        self.seen.append(state.tokens.tolist())
        text = self.texts.pop(0)
        await asyncio.sleep(0)
        aborted = text.endswith("|")
        ids = self.tokenizer.convert_tokens_to_ids(list(text.removesuffix("|")))
        state.append(ids if aborted else [*ids, self.tokenizer.eos_token_id], model_step=0)
        state.finish_reason = "abort" if aborted else "stop"
        state.status = Status.ABORTED if aborted else Status.COMPLETED
        return state

    async def pause_generation(self) -> None:
        self.num_paused += 1


def make_group(count: int, content: str = "12+3=", **fields) -> list[RolloutState]:
    return [
        RolloutState(
            [{"role": "user", "content": content}],
            rollout_id=f"g/{member}",
            reward_model={"ground_truth": "15"},
            **fields,
        )
        for member in range(count)
    ]


async def test_a_group_goes_from_chat_to_judged_text(tokenizer) -> None:
    controller = ScriptedController(tokenizer, "15", "16")
    loop = SingleTurnAgentLoop(controller, ExactMatchJudge(), tokenizer, sample_params=PARAMS)
    group = await loop.generate_group(make_group(2))
    prompt = tokenizer.convert_tokens_to_ids(["<user>", *"12+3=", "<assistant>"])
    assert controller.seen == [prompt, prompt]
    for state in group:
        assert state.prompt_ids.tolist() == prompt
        assert state.tokens.tolist() == prompt + state.response_ids.tolist()
        assert state.sample_params is PARAMS
    assert [state.response for state in group] == ["15", "16"]
    assert [state.reward for state in group] == [{"score": 1.0}, {"score": 0.0}]


async def test_tools_and_own_sample_params_are_used(tokenizer) -> None:
    controller = ScriptedController(tokenizer, "1")
    loop = SingleTurnAgentLoop(controller, None, tokenizer, sample_params=PARAMS)
    own = SampleParams(max_tokens=3)
    (state,) = await loop.generate_group(make_group(1, "a", tools=[{"name": "add"}], sample_params=own))
    assert tokenizer.decode(state.prompt_ids) == "<tool>add<user>a<assistant>"
    assert state.sample_params is own
    assert state.reward is None


async def test_one_prompt_is_tokenized_once_and_another_again(tokenizer, monkeypatch) -> None:
    rendered = []
    render = tokenizer.apply_chat_template

    def count(conversation, **kwargs):
        rendered.append(conversation[-1]["content"])
        return render(conversation, **kwargs)

    monkeypatch.setattr(tokenizer, "apply_chat_template", count)
    controller = ScriptedController(tokenizer, *["1"] * 8)
    loop = SingleTurnAgentLoop(controller, None, tokenizer, sample_params=PARAMS)
    first, second = await asyncio.gather(
        loop.generate_group(make_group(4, "a")), loop.generate_group(make_group(4, "b"))
    )
    assert rendered == ["a", "b"]
    assert first[0].prompt_ids.tolist() != second[0].prompt_ids.tolist()
    # The same list object with another content is another prompt.
    first[0].message[0]["content"] = "c"
    first[0].prompt_ids = first[0].tokens = None
    first[0].status = Status.ABORTED
    controller.texts.append("1")
    await loop.generate_group(first[:1])
    assert rendered == ["a", "b", "c"]


async def test_an_aborted_rollout_has_its_text_and_continues_from_its_tokens(tokenizer) -> None:
    controller = ScriptedController(tokenizer, "1|", "15", "5")
    loop = SingleTurnAgentLoop(controller, ExactMatchJudge(), tokenizer, sample_params=PARAMS)
    group = await loop.generate_group(make_group(2))
    assert [state.status for state in group] == [Status.ABORTED, Status.COMPLETED]
    assert [state.response for state in group] == ["1", "15"]
    assert group[0].reward is None
    cut = group[0].tokens.tolist()

    await loop.generate_group(group, enable_partial_rollout=True)
    assert controller.seen[2] == cut
    assert group[0].response == "15"
    assert [state.reward for state in group] == [{"score": 1.0}, {"score": 1.0}]


async def test_without_partial_rollout_an_aborted_one_starts_over_from_its_prompt(tokenizer) -> None:
    controller = ScriptedController(tokenizer, "999|", "15")
    loop = SingleTurnAgentLoop(controller, ExactMatchJudge(), tokenizer, sample_params=PARAMS)
    group = await loop.generate_group(make_group(1))
    await loop.generate_group(group)
    assert controller.seen[0] == controller.seen[1] == group[0].prompt_ids.tolist()
    assert (group[0].response, group[0].reward) == ("15", {"score": 1.0})


def test_a_tokenizer_without_chat_template_is_refused_at_once(tokenizer) -> None:
    tokenizer.chat_template = None
    tokenizer.name_or_path = "models/base"
    with pytest.raises(ValueError, match=r"'models/base' has no chat template.*put a chat_template\.jinja"):
        SingleTurnAgentLoop(ScriptedController(tokenizer), None, tokenizer, sample_params=PARAMS)
    with pytest.raises(ValueError, match="the given tokenizer, None' has no chat template"):
        SingleTurnAgentLoop(ScriptedController(tokenizer), sample_params=PARAMS)


def test_a_rendered_prompt_is_an_int32_array(tokenizer) -> None:
    ids = render_prompt(tokenizer, [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])
    assert ids.dtype == "int32"
    assert tokenizer.decode(ids) == "<system>a<user>b<assistant>"
