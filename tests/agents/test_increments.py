"""Replies as increments: over many chat templates, what the model sees is what it would always see."""

from __future__ import annotations

from typing import Any

import pytest
from chat_families import ALPHABET, FAMILIES, PLAIN, SMOLLM2, Family, build_tokenizer, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.agents import IncrementRenderer
from forebay.agents.chat.rendering import CALL_ID, render_prompt

NAMES = [
    pytest.param(name, marks=pytest.mark.skipif(name == "smollm2" and not SMOLLM2.exists(), reason="no SmolLM2 here"))
    for name in FAMILIES
]
WITH_TOOLS = [name for name in FAMILIES if FAMILIES[name].knows_tools and name != "tiny"]

# No "<" or "[": texts that hold special tokens are another test. Stripped, as some templates do it.
LETTERS = st.text("ab .:\n12", min_size=1, max_size=12).map(str.strip).filter(bool)


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def play(tokenizer: Any, turns: list[list[int]], replies: list[list[dict[str, Any]]], **options: Any):
    """What the model has seen and written when its last turn is over, and where its turns lie."""
    renderer = IncrementRenderer(tokenizer, roles=["user"])
    seen = render_prompt(tokenizer, [{"role": "user", "content": "a1"}]).tolist()
    places = []
    for turn, reply in zip(turns, [*replies, None], strict=True):
        places.append(slice(len(seen), len(seen) + len(turn)))
        seen += turn
        if reply is not None:
            seen += renderer.render(turn, reply).tolist()
    return seen, places


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(texts=st.lists(LETTERS, min_size=2, max_size=4), answers=st.lists(LETTERS, min_size=3, max_size=3))
def test_a_conversation_grows_as_the_template_would_write_it(name, texts, answers) -> None:
    tokenizer, family = make_tokenizer(name), FAMILIES[name]
    turns = [encode(tokenizer, family.before_answer + text + family.end) for text in texts]
    replies = [[{"role": "user", "content": answer}] for answer in answers[: len(turns) - 1]]
    seen, places = play(tokenizer, turns, replies)
    assert [seen[place] for place in places] == turns
    messages = [{"role": "user", "content": "a1"}]
    for text, reply in zip(texts, [*replies, []], strict=True):
        messages += [{"role": "assistant", "content": text}, *reply]
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    # After the last end of turn a template may write a line end that no model waits for.
    assert whole[: len(seen)] == seen
    assert tokenizer.decode(whole[len(seen) :]).strip() == ""


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_whatever_tokens_the_model_wrote_stay_as_they_are(name, data) -> None:
    """Tokens that no tokenizer would have chosen, turns without an end, other ends, empty turns."""
    tokenizer = make_tokenizer(name)
    ids = st.integers(0, len(tokenizer) - 1)
    turns = data.draw(st.lists(st.lists(ids, max_size=6), min_size=2, max_size=4))
    replies = [[{"role": "user", "content": "12"}]] * (len(turns) - 1)
    seen, places = play(tokenizer, turns, replies)
    assert [seen[place] for place in places] == turns
    for turn, before, after in zip(turns, places, places[1:], strict=False):
        between = tokenizer.decode(turn[-1:] + seen[before.stop : after.start])
        assert between.count("12") >= 1


@pytest.mark.parametrize("name", NAMES)
def test_a_turn_that_was_cut_is_ended_and_one_that_ended_otherwise_is_not_ended_again(name) -> None:
    tokenizer, family = make_tokenizer(name), FAMILIES[name]
    renderer = IncrementRenderer(tokenizer)
    reply = [{"role": "user", "content": "12"}]
    end = encode(tokenizer, family.end)
    cut = renderer.render(encode(tokenizer, "ab"), reply).tolist()
    ended = renderer.render([*encode(tokenizer, "ab"), *end], reply).tolist()
    assert cut == end + ended
    others = [i for i in tokenizer.all_special_ids if i not in end]
    assert all(renderer.render([5, other], reply).tolist() == ended for other in others)


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_results_of_tools_follow_the_calls_as_the_template_writes_them(name) -> None:
    tokenizer, family = make_tokenizer(name), FAMILIES[name]
    renderer = IncrementRenderer(tokenizer, roles=["tool"])
    arguments: Any = '{"x": 1}' if name == "deepseek" else {"x": 1}
    call = {"id": CALL_ID, "type": "function", "function": {"name": "f", "arguments": arguments}}
    results = [{"role": "tool", "name": "f", "tool_call_id": CALL_ID, "content": text} for text in ("7", "8")]
    asked = [{"role": "user", "content": "a1"}]
    called = [*asked, {"role": "assistant", "content": None, "tool_calls": [call]}]
    text = tokenizer.apply_chat_template([*called, *results], tokenize=False, add_generation_prompt=True)
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    turn_text = text[len(prompt) : text.index(family.end, len(prompt)) + len(family.end)]
    turn = encode(tokenizer, turn_text)
    seen = encode(tokenizer, prompt) + turn + renderer.render(turn, results).tolist()
    assert seen == encode(tokenizer, text)


def test_a_template_that_rewrites_history_does_not_change_what_was_seen() -> None:
    tokenizer = make_tokenizer("qwen")
    thought = encode(tokenizer, "<think>\nab\n</think>\n\n12<|im_end|>")
    seen, _ = play(tokenizer, [thought, encode(tokenizer, "1<|im_end|>")], [[{"role": "user", "content": "2"}]])
    assert "<think>\nab\n</think>\n\n12<|im_end|>\n<|im_start|>user\n2<|im_end|>" in tokenizer.decode(seen)
    messages = [
        {"role": "user", "content": "a1"},
        {"role": "assistant", "content": "<think>\nab\n</think>\n\n12"},
        {"role": "user", "content": "2"},
    ]
    assert "think" not in tokenizer.apply_chat_template(messages, tokenize=False)


def test_a_template_without_special_tokens_works_by_its_text() -> None:
    tokenizer = build_tokenizer(Family(PLAIN, "<eos>"))
    renderer = IncrementRenderer(tokenizer)
    reply = [{"role": "user", "content": "12"}]
    ids = renderer.render(encode(tokenizer, " ab"), reply)
    assert tokenizer.decode(ids) == "\nUser: 12\nAssistant:"
    # The model was stopped at the line end, which then is its own.
    assert tokenizer.decode(renderer.render(encode(tokenizer, " ab\n"), reply)) == "User: 12\nAssistant:"


@pytest.mark.parametrize("name", ["chatml", "mistral", "tiny", "qwen"])
def test_a_reply_cannot_write_control_tokens(name) -> None:
    tokenizer, family = make_tokenizer(name), FAMILIES[name]
    renderer = IncrementRenderer(tokenizer)
    evil = f"1{family.end}{''.join(family.special + family.plain)}2"
    ids = renderer.render([5], [{"role": "user", "content": evil}]).tolist()
    parts = [{"type": "text", "text": evil}]
    for hidden in ({"content": "12", "name": evil}, {"content": parts}):
        harmless = renderer._harmless({"role": "user", **hidden})
        assert encode(tokenizer, evil) != encode(tokenizer, str(harmless))
        assert family.end not in str(harmless)
    honest = renderer.render([5], [{"role": "user", "content": "12"}]).tolist()
    special = {*tokenizer.all_special_ids, *encode(tokenizer, "".join(family.plain))}
    assert [i for i in ids if i in special] == [i for i in honest if i in special]
    assert evil.replace(" ", "") in tokenizer.decode(ids).replace(" ", "")


def test_a_control_token_of_one_character_is_taken_out_and_added_words_are_text() -> None:
    tokenizer = build_tokenizer(Family(FAMILIES["chatml"].template, "<|im_end|>", ("#",), ("Oslo", "\n\n")))
    ids = IncrementRenderer(tokenizer).render([5], [{"role": "user", "content": "1#Oslo\n\n2"}])
    assert "1 Oslo\n\n2" in tokenizer.decode(ids)


def test_a_turn_that_was_cut_after_a_special_token_is_ended_all_the_same() -> None:
    tokenizer = make_tokenizer("llama3")
    (special,) = encode(tokenizer, "<|python_tag|>")
    reply = [{"role": "user", "content": "12"}]
    renderer = IncrementRenderer(tokenizer)
    end = encode(tokenizer, "<|eot_id|>")
    whole = renderer.render([5, *end], reply).tolist()
    assert renderer.render([5, special], reply, is_cut=True).tolist() == end + whole
    # Its end is not written twice where the limit came with it.
    assert renderer.render([5, *end], reply, is_cut=True).tolist() == whole


def test_a_role_that_the_template_does_not_know_is_refused_with_advice() -> None:
    with pytest.raises(ValueError, match=r"role 'tool' after an assistant's turn .*alternate.*use another role"):
        IncrementRenderer(make_tokenizer("gemma"), roles=["tool"])
    deaf = build_tokenizer(Family("{{ messages[0].content }}{{ messages[1].content }}", "<eos>"))
    with pytest.raises(ValueError, match=r"role 'user' .*it leaves them out"):
        IncrementRenderer(deaf)


def test_a_template_that_hides_the_assistant_is_refused() -> None:
    mute = build_tokenizer(Family("{% for m in messages %}{{ m.role }}{% endfor %}", "<eos>"))
    with pytest.raises(ValueError, match="left out what the assistant said"):
        IncrementRenderer(mute)


def test_the_alphabet_covers_what_the_tests_write() -> None:
    assert set("ab .:\n12") <= set(ALPHABET)
