"""Conversations as examples: which tokens are trained, checked against the chat template's own text."""

import copy
import json
import re
import string
from dataclasses import replace

import numpy as np
import pytest
from chat_families import SMOLLM2, make_tokenizer

from forebay.config import ConfigError
from forebay.models.tiny import character_tokenizer
from forebay.produce import DataConfig
from forebay.produce.prompts.conversations import Demonstrations
from forebay.produce.prompts.dataset import load_conversations

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


GENERATION = (
    "{% for m in messages %}{{ '[' + m.role + ']' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
"""A template that says by itself which text the assistant writes."""


@pytest.mark.parametrize(
    "make",
    [
        lambda: character_tokenizer(string.printable),
        pytest.param(
            lambda: make_tokenizer("smollm2"),
            marks=pytest.mark.skipif(not SMOLLM2.exists(), reason="the tokenizer is not here"),
        ),
    ],
    ids=["characters", "smollm2"],
)
def test_the_mask_is_that_of_a_template_that_marks_the_assistants_text(tmp_path, make):
    # A copy: families are made once for all tests.
    tokenizer = copy.deepcopy(make())
    tokenizer.chat_template = GENERATION
    ((prompt,), held_out) = conversations(tmp_path, CHAT)
    assert len(held_out) == 0
    prompt_ids, response_ids, mask, _ = Demonstrations(tokenizer).example(prompt)
    found = tokenizer.apply_chat_template(
        CHAT[:-1], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert [*prompt_ids, *response_ids] == found["input_ids"]
    assert [0] * len(prompt_ids) + mask.tolist() == found["assistant_masks"]
    assert 0 < mask.sum() < len(mask)


@pytest.mark.parametrize("family", ["chatml", "qwen", "llama3"])
def test_the_mask_is_on_what_each_turn_adds(tmp_path, family):
    """Of templates without such marks: a turn is what follows the text that asks for it, up to its end."""
    tokenizer = make_tokenizer(family)
    chat = CHAT[1:]
    ((prompt,), _) = conversations(tmp_path, chat)
    prompt_ids, response_ids, mask, _ = Demonstrations(tokenizer).example(prompt)
    ids, kept = np.concatenate([prompt_ids, response_ids]), np.pad(mask, (len(prompt_ids), 0))
    borders = np.flatnonzero(np.diff(kept)) + 1
    assert len(borders) == 3
    for place, start, end in ((1, borders[0], borders[1]), (3, borders[2], len(ids))):
        asked = tokenizer.apply_chat_template(chat[:place], tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(ids[:start]) == asked
        assert tokenizer.decode(ids[start:end]) == chat[place]["content"] + tokenizer.eos_token


@pytest.mark.parametrize(
    ("family", "turn", "said"),
    [
        ("chatml", {"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": "{}"}}]}, "tools"),
        ("qwen", {"content": ""}, "neither text nor tool_calls"),
    ],
)
def test_a_turn_of_which_the_template_writes_nothing_is_refused(tmp_path, family, turn, said):
    chat = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": None, **turn}]
    ((prompt,), _) = conversations(tmp_path, chat)
    with pytest.raises(ConfigError, match=said):
        Demonstrations(make_tokenizer(family)).example(prompt)


def test_parts_of_text_are_read_and_a_chat_that_has_its_turn_needs_no_answer(tmp_path):
    chat = [{"role": "user", "content": [{"type": "text", "text": "1?"}]}, {"role": "assistant", "content": "one"}]
    ((prompt,), _) = conversations(tmp_path, chat)
    prompt = replace(prompt, reward_model={"ground_truth": "two"})
    tokenizer = make_tokenizer("chatml")
    prompt_ids, ids, _, _ = Demonstrations(tokenizer).example(prompt)
    assert "1?" in tokenizer.decode(prompt_ids)
    assert "type" not in tokenizer.decode(prompt_ids)
    assert tokenizer.decode(ids) == "one" + tokenizer.eos_token


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
    _, ids, mask, _ = Demonstrations(tokenizer).example(prompt)
    borders = np.flatnonzero(np.diff(mask)) + 1
    called, result, answer = map(tokenizer.decode, np.split(ids, borders))
    assert json.loads(re.search(r"<tool_call>(.*)</tool_call>", called, re.DOTALL)[1]) == {
        "name": "add",
        "arguments": {"a": 1},
    }
    assert "one" in result
    assert answer == "One." + tokenizer.eos_token


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
        ([*CHAT[:3], CHAT[2]], "line 2: a conversation has .*got system, user, assistant, assistant"),
        ([*CHAT, {"role": "judge", "content": "1"}], "line 2: a conversation has .*judge"),
        ("hello", "line 2: a conversation has .*got user"),
        (None, "line 2: column 'messages' must hold"),
        ([*CHAT[:2], {"role": "assistant", "content": [{"type": "image"}]}], "line 2: an image is bytes"),
    ],
)
def test_a_row_that_is_no_conversation_is_one_sentence(tmp_path, chat, said):
    shown = Demonstrations(make_tokenizer("chatml"))
    with pytest.raises(ConfigError, match=said) as caught:
        [*map(shown.example, conversations(tmp_path, CHAT, chat)[0])]
    assert "\n" not in str(caught.value)
