"""Conversations as examples: which tokens are trained, checked against the chat template's own text."""

import json
import re

import pytest
from chat_families import SMOLLM2, make_tokenizer

from forebay.config import ConfigError
from forebay.produce import DataConfig
from forebay.produce.prompts.conversations import Demonstrations, load_conversations

CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Assistant or user?"},
    {"role": "assistant", "content": "assistant"},
    {"role": "user", "content": "Say: hello\n\n"},
    {"role": "assistant", "content": "hello\n"},
    {"role": "user", "content": "no answer to this"},
]


def conversations(tmp_path, *chats, **changes):
    rows = tmp_path / "chats.jsonl"
    rows.write_text("".join(json.dumps({"messages": chat, "id": 1}) + "\n" for chat in chats))
    return load_conversations(DataConfig(source=str(rows), **changes), seed=0)


@pytest.mark.parametrize(
    "family",
    ["chatml", pytest.param("smollm2", marks=pytest.mark.skipif(not SMOLLM2.exists(), reason="not here"))],
)
def test_the_mask_is_on_what_the_assistant_says_and_nothing_else(tmp_path, family):
    tokenizer = make_tokenizer(family)
    ((prompt,), held_out) = conversations(tmp_path, CHAT)
    assert held_out == []
    prompt_ids, response_ids, mask = Demonstrations(tokenizer).conversation(prompt)
    ids = [*prompt_ids, *response_ids]
    # By hand: in the template's text a turn is what stands between these two signs, the latter included.
    text = tokenizer.apply_chat_template(CHAT[:-1], tokenize=False)
    turns = list(re.finditer(r"(?<=<\|im_start\|>assistant\n).*?<\|im_end\|>", text, re.DOTALL))
    assert tokenizer.decode(ids) == text[: turns[-1].end()]
    trained = [tokenizer.decode([one]) for one, kept in zip(response_ids, mask, strict=True) if kept]
    assert "".join(trained) == "".join(turn[0] for turn in turns)


def test_calls_of_tools_are_trained_as_the_template_writes_them(tmp_path):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chat = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "assistant", "content": "One."},
    ]
    tokenizer = make_tokenizer("qwen")
    ((prompt,), _) = conversations(tmp_path, chat)
    (asked, called), (seen, answer) = Demonstrations(tokenizer).examples(prompt)
    assert json.loads(re.search(r"<tool_call>(.*)</tool_call>", tokenizer.decode(called), re.DOTALL)[1]) == {
        "name": "add",
        "arguments": {"a": 1},
    }
    assert seen[: len(asked) + len(called)] == [*asked, *called]
    assert "one" in tokenizer.decode(seen[len(asked) + len(called) :])
    assert tokenizer.decode(answer) == "One." + tokenizer.eos_token


def test_a_twentieth_is_held_out_and_no_copy_of_it_is_trained_on(tmp_path):
    chats = [[{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "a"}] for i in range(40)]
    training, held_out = conversations(tmp_path, *chats, *chats[:20])
    texts = [{prompt.message[0]["content"] for prompt in part} for part in (training, held_out)]
    assert len(held_out) == 3
    assert texts[0] & texts[1] == set()
    assert texts[0] | texts[1] == {str(i) for i in range(40)}
    assert conversations(tmp_path, *chats, *chats[:20])[1][0].message == held_out[0].message


@pytest.mark.parametrize(
    ("chat", "said"),
    [
        (CHAT[:2], "line 2: a conversation has messages of .*got system, user"),
        (CHAT[2:], "line 2: a conversation has .*got assistant, user, assistant"),
        ([*CHAT, {"role": "judge", "content": "1"}], "line 2: a conversation has .*judge"),
        ("hello", "line 2: a conversation has .*got user"),
        (None, "line 2: column 'messages' must hold"),
        ([*CHAT[:2], {"role": "assistant", "content": [{"type": "image"}]}], "line 2: "),
    ],
)
def test_a_row_that_is_no_conversation_is_one_sentence(tmp_path, chat, said):
    with pytest.raises(ConfigError, match=said) as caught:
        conversations(tmp_path, CHAT, chat)
    assert "\n" not in str(caught.value)


def test_two_turns_on_end_are_named_with_their_row(tmp_path):
    ((prompt,), _) = conversations(tmp_path, [*CHAT[:3], CHAT[2]])
    with pytest.raises(ConfigError, match=r"line 1: the assistant's messages .* replies between them"):
        Demonstrations(make_tokenizer("chatml")).conversation(prompt)
