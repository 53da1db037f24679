"""A made-up register of people, and questions about it that only the search tool can answer.

``register.jsonl`` has three entries for each person: ``the home of kavo is rumi``, ``the work of kavo is
sela`` and ``the boss of kavo is dato``. A question asks for the home or the work of a person
(``home kavo;``), or of that person's boss (``home boss kavo;``), which takes a second search with what the
first has found. All names are made up, so that no model can know an answer. ``python register.py`` writes the
entries again.

Rows carry a demonstration for the supervised warm-up. It calls the tool as ``[home kavo]``, reads
``[1] kavo: the home of kavo is rumi;`` and answers ``it is rumi``. Most demonstrations make a mistake: they
give up at once (``it is none``), search for the other fact, or mix up person and boss. Which way pays is for
the reward to teach.

A decoder made from nothing has to learn to copy before anything else. All words have four letters, and
prompt, calls, results and answers their form, so that a name is always copied from eleven characters before.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from forebay.config import ConfigError

Row = dict[str, Any]
People = dict[str, dict[str, str]]
"""For each name the person's home, work and boss."""

REGISTER = Path(__file__).parent / "register.jsonl"
NUM_TRAINED, NUM_HELD_OUT = 1100, 100
"""People. A boss belongs to the same part, so no held-out name comes up in training."""
NUM_WORDS = 80
"""Homes, and as many kinds of work: enough that a guess earns next to nothing."""
MISTAKES = ("give up", "fact", "person")
SENTENCES = {"home": "Where is the home of {}?", "work": "What is the work of {}?"}


def make_people(seed: int = 0) -> tuple[People, People]:
    """The people of the training questions, and the held-out ones; the same seed gives the same people."""
    draw = random.Random(f"people/{seed}")
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    words = [first + second for first in syllables for second in syllables]
    draw.shuffle(words)
    homes, works, names = words[:NUM_WORDS], words[NUM_WORDS : 2 * NUM_WORDS], words[2 * NUM_WORDS :]
    people: list[People] = []
    for part in (names[:NUM_TRAINED], names[NUM_TRAINED : NUM_TRAINED + NUM_HELD_OUT]):
        # The boss of each is the next in a circle, so nobody is their own.
        bosses = [*part[1:], part[0]]
        people.append(
            {
                name: {"home": draw.choice(homes), "work": draw.choice(works), "boss": boss}
                for name, boss in zip(part, bosses, strict=True)
            }
        )
    return people[0], people[1]


def entry(name: str, fact: str, value: str) -> dict[str, str]:
    """A document of the register.

    Title and text both have the name: by BM25 the entries of a person come before the one that says whose
    boss the person is.
    """
    return {"title": name, "text": f"the {fact} of {name} is {value}"}


def questions(*, part: str = "train", mistakes: float = 0.6, seed: int = 0) -> list[Row]:
    """All questions about one part of the people, as ``{"prompt", "sentence", "answer", "demonstration"}``.

    `part` is ``train`` or ``held_out``; `mistakes` is the share of demonstrations that make one.

    Raises:
        ConfigError: `part` is neither of the two, or `mistakes` is not from 0 to 1.
    """
    if part not in ("train", "held_out") or not 0 <= mistakes <= 1:
        raise ConfigError(f"questions: part is 'train' or 'held_out', mistakes 0 to 1; got {part!r}, {mistakes}")
    people = make_people()[part == "held_out"]
    draw = random.Random(f"questions/{part}/{seed}")
    rows = []
    for name in people:
        for fact in SENTENCES:
            for of_boss in (False, True):
                mistake = draw.choice(MISTAKES) if draw.random() < mistakes else None
                rows.append(_row(people, name, fact, of_boss, mistake))
    draw.shuffle(rows)
    return rows


def _row(people: People, name: str, fact: str, of_boss: bool, mistake: str | None) -> Row:
    asked = people[name]["boss"] if of_boss else name
    turns, said = [], "none"
    if mistake != "give up":
        person, wanted = name, fact
        if of_boss != (mistake == "person"):
            turns += _search(people, name, "boss")
            person = people[name]["boss"]
        if mistake == "fact":
            wanted = "work" if fact == "home" else "home"
        turns += _search(people, person, wanted)
        said = people[person][wanted]
    return {
        "prompt": f"{fact} boss {name};" if of_boss else f"{fact} {name};",
        "sentence": SENTENCES[fact].format(f"the boss of {name}" if of_boss else name),
        "answer": people[asked][fact],
        "demonstration": [*turns, {"role": "assistant", "content": f"it is {said}"}],
    }


def _search(people: People, name: str, fact: str) -> list[dict[str, str]]:
    found = entry(name, fact, people[name][fact])
    return [
        {"role": "assistant", "content": f"[{fact} {name}]"},
        {"role": "user", "content": f"[1] {found['title']}: {found['text']};"},
    ]


def write_register(path: Path) -> None:
    """Write the entries of all people, one document in each line."""
    with path.open("w", encoding="utf-8") as lines:
        for people in make_people():
            for name, facts in people.items():
                lines.writelines(json.dumps(entry(name, *fact)) + "\n" for fact in facts.items())


if __name__ == "__main__":
    write_register(REGISTER)
