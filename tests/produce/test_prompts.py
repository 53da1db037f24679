import json
from datetime import datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay.config import ConfigError
from forebay.models.tiny import character_tokenizer
from forebay.produce.prompts.dataset import (
    DataConfig,
    Prompt,
    check_prompt_lengths,
    hold_out,
    load_prompts,
    num_prompt_tokens,
)

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1), "level": i} for i in range(10)]


def write_jsonl(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_parquet(path: Path, rows) -> str:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return str(path)


def texts(prompts) -> list[str]:
    return [prompt.message[-1]["content"] for prompt in prompts]


# What the sources give


def save_dataset(folder: Path, rows) -> str:
    import datasets

    datasets.Dataset.from_list(list(rows)).save_to_disk(str(folder))
    return str(folder)


@pytest.fixture(params=["jsonl", "parquet", "saved"])
def source(request, tmp_path) -> str:
    if request.param == "jsonl":
        return write_jsonl(tmp_path / "data.jsonl", ROWS)
    if request.param == "parquet":
        return write_parquet(tmp_path / "data.parquet", ROWS)
    return save_dataset(tmp_path / "data", ROWS)


def test_all_tabular_sources_give_the_same_prompts(source) -> None:
    prompts = load_prompts(DataConfig(source=source))
    assert len(prompts) == 10
    assert prompts[3].message == [{"role": "user", "content": "3+1="}]
    assert prompts[3].reward_model == {"ground_truth": "4"}
    assert prompts[3].extra == {"level": 3}
    assert prompts[3].data_source == source


def test_slices_of_one_shuffle_are_disjoint_and_complete(source) -> None:
    whole = texts(load_prompts(DataConfig(source=source, shuffle_seed=3)))
    train = texts(load_prompts(DataConfig(source=source, shuffle_seed=3, start=2)))
    held_out = texts(load_prompts(DataConfig(source=source, shuffle_seed=3, size=2)))
    assert held_out + train == whole
    assert sorted(whole) == [row["prompt"] for row in ROWS]
    assert whole != texts(load_prompts(DataConfig(source=source)))
    assert whole != texts(load_prompts(DataConfig(source=source, shuffle_seed=4)))


def test_a_missing_column_names_the_place_and_the_nearest_column(source) -> None:
    with pytest.raises(ConfigError, match=r"no column 'promt'; did you mean 'prompt'\?.*set columns\.prompt to"):
        load_prompts(DataConfig(source=source, columns={"prompt": "promt"}))
    with pytest.raises(ConfigError, match=r"no column 'level5'; did you mean 'level'\?.*set columns\.answer to"):
        load_prompts(DataConfig(source=source, columns={"answer": "level5"}))


def test_more_prompts_than_there_are_is_an_error(source) -> None:
    with pytest.raises(ConfigError, match="has 10 prompts, but start = 8 and size = 3"):
        load_prompts(DataConfig(source=source, start=8, size=3))
    with pytest.raises(ConfigError, match="has 10 prompts, but start = 10"):
        load_prompts(DataConfig(source=source, start=10))


def test_chats_keep_their_roles_and_get_a_system_prompt_only_if_they_have_none(tmp_path) -> None:
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    rows = [{"prompt": own}, {"prompt": own[1:]}, {"prompt": "hi"}]
    path = write_jsonl(tmp_path / "chat.jsonl", rows)
    prompts = load_prompts(DataConfig(source=path, columns={"answer": ""}, system_prompt="be brief"))
    brief = {"role": "system", "content": "be brief"}
    assert [prompt.message for prompt in prompts] == [own, [brief, own[1]], [brief, own[1]]]
    assert prompts[0].reward_model is None


def test_parquet_chats_lose_the_nulls_that_arrow_adds(tmp_path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho", "name": "a"}]
    path = write_parquet(tmp_path / "chat.parquet", [{"prompt": chat, "answer": 1}])
    assert load_prompts(DataConfig(source=path))[0].message == chat


@pytest.mark.parametrize(("write", "name"), [(write_parquet, "data.parquet"), (save_dataset, "data")])
def test_values_that_json_lacks_become_text(tmp_path, write, name) -> None:
    when = datetime(2024, 2, 29, 12, 30)
    rows = [{"prompt": "p", "answer": Decimal("1.50"), "seen": {"first": when, "days": [when.date()]}}]
    prompt = load_prompts(DataConfig(source=write(tmp_path / name, rows)))[0]
    assert prompt.reward_model == {"ground_truth": "1.50"}
    assert prompt.extra == {"seen": {"first": "2024-02-29 12:30:00", "days": ["2024-02-29"]}}


def test_reward_model_tools_and_data_source_columns_are_taken_over(tmp_path) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    row = {"prompt": "p", "reward_model": {"ground_truth": "x", "style": "rule"}, "data_source": "d"}
    path = write_jsonl(tmp_path / "a.jsonl", [{**row, "tools": [tool]}, {**row, "tools": json.dumps([tool])}])
    for prompt in load_prompts(DataConfig(source=path)):
        assert prompt.reward_model == {"ground_truth": "x", "style": "rule"}
        assert prompt.data_source == "d"
        assert prompt.tools == [tool]
        assert prompt.extra == {}


@pytest.mark.parametrize(("suffix", "write"), [("jsonl", write_jsonl), ("parquet", write_parquet)])
def test_several_files_and_patterns_are_one_dataset(tmp_path, suffix, write) -> None:
    first = write(tmp_path / f"a.{suffix}", ROWS[:4])
    second = write(tmp_path / f"b.{suffix}", ROWS[4:])
    by_list = load_prompts(DataConfig(source=[first, second]))
    by_pattern = load_prompts(DataConfig(source=str(tmp_path / f"*.{suffix}")))
    assert texts(by_list) == texts(by_pattern) == [row["prompt"] for row in ROWS]


def test_a_folder_of_parquet_parts_is_one_file(tmp_path) -> None:
    folder = tmp_path / "data.parquet"
    folder.mkdir()
    write_parquet(folder / "part-0.parquet", ROWS[:4])
    write_parquet(folder / "part-1.parquet", ROWS[4:])
    assert len(load_prompts(DataConfig(source=str(folder)))) == 10


def test_an_error_in_a_later_file_names_that_file_and_its_row(tmp_path) -> None:
    first = write_parquet(tmp_path / "a.parquet", ROWS[:4])
    second = write_parquet(tmp_path / "b.parquet", [ROWS[4], {**ROWS[5], "prompt": None}])
    prompts = load_prompts(DataConfig(source=[first, second]))
    with pytest.raises(ConfigError, match=r"b\.parquet, row 1: column 'prompt' must hold a text or a chat"):
        prompts[5]


def test_bad_rows_of_jsonl_are_found_at_once_with_file_and_line(tmp_path) -> None:
    path = tmp_path / "data.jsonl"
    good = json.dumps(ROWS[0])
    path.write_text(f"{good}\n\n{good}\n{{broken\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"data\.jsonl, line 4 is not valid JSON"):
        load_prompts(DataConfig(source=str(path)))
    path.write_text(f'{good}\n\n{{"prompt": ["no chat"], "answer": 1}}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"data\.jsonl, line 3: column 'prompt' must hold .* got \"\['no"):
        load_prompts(DataConfig(source=str(path)))
    path.write_text(f"{good}\n[1]\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"line 2 holds a list"):
        load_prompts(DataConfig(source=str(path)))


def test_a_jsonl_row_may_hold_unicode_line_separators(tmp_path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a\u2028b", "answer": "c"}\n', encoding="utf-8")
    assert texts(load_prompts(DataConfig(source=str(path)))) == ["a\u2028b"]


def test_missing_and_unreadable_files_are_one_clear_error(tmp_path) -> None:
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(ConfigError, match=r"no data file at .*trian\.jsonl'; did you mean .*train\.jsonl'"):
        load_prompts(DataConfig(source=str(tmp_path / "trian.jsonl")))
    with pytest.raises(ConfigError, match="no data file matches"):
        load_prompts(DataConfig(source=str(tmp_path / "*.parquet")))
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(ConfigError, match=r"cannot read .*bad\.parquet' as Parquet"):
        load_prompts(DataConfig(source=str(tmp_path / "bad.parquet")))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match=r"empty\.jsonl' is empty"):
        load_prompts(DataConfig(source=str(tmp_path / "empty.jsonl")))
    with pytest.raises(ConfigError, match=r"all be \.jsonl or all \.parquet"):
        load_prompts(DataConfig(source=[str(tmp_path / "train.jsonl"), str(tmp_path / "bad.parquet")]))
    with pytest.raises(ConfigError, match="holds no dataset saved by"):
        load_prompts(DataConfig(source=str(tmp_path)))
    with pytest.raises(ConfigError, match="take no arguments"):
        load_prompts(DataConfig(source=str(tmp_path / "train.jsonl"), arguments={"split": "train"}))


def test_an_unknown_source_lists_what_a_source_may_be() -> None:
    with pytest.raises(ConfigError, match=r"unknown data source 'adition'; did you mean 'addition'\?"):
        load_prompts(DataConfig(source="adition"))
    with pytest.raises(ConfigError, match=r"A source is a \.jsonl, "):
        load_prompts(DataConfig(source="gsm8k"))


def test_a_saved_dataset_with_splits_needs_one_named(tmp_path) -> None:
    import datasets

    part = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=part, test=part.select([0])).save_to_disk(str(tmp_path / "two"))
    source = str(tmp_path / "two")
    assert len(load_prompts(DataConfig(source=source, arguments={"split": "test"}))) == 1
    with pytest.raises(ConfigError, match=r"has the splits \['test', 'train'\]; .*not 'dev'"):
        load_prompts(DataConfig(source=source, arguments={"split": "dev"}))
    with pytest.raises(ConfigError, match="not None"):
        load_prompts(DataConfig(source=source))
    with pytest.raises(ConfigError, match="takes split as arguments, got"):
        load_prompts(DataConfig(source=source, arguments={"spilt": "test"}))


# Generators and functions


def test_built_in_generators_split_without_overlap() -> None:
    train = load_prompts(DataConfig(source="addition", arguments={"digits": 2}, size=8000))
    held_out = load_prompts(DataConfig(source="addition", arguments={"digits": 2}, start=8000, size=100))
    assert not set(texts(train)) & set(texts(held_out))
    assert train[0].data_source == "addition"
    with pytest.raises(ConfigError, match="unexpected keyword argument 'digit'; did you mean 'digits'"):
        load_prompts(DataConfig(source="addition", arguments={"digit": 2}))


def rows_of(count: int = 3):
    return ROWS[:count]


def prompts_of():
    return [Prompt(message=[{"role": "user", "content": "p"}], extra={"own": True})]


def stream():
    yield from ROWS


def number():
    return 3


def test_functions_may_return_rows_or_prompts() -> None:
    assert len(load_prompts(DataConfig(source=f"{__name__}:rows_of", arguments={"count": 5}))) == 5
    assert load_prompts(DataConfig(source=f"{__name__}:prompts_of"))[0].extra == {"own": True}
    with pytest.raises(ConfigError, match="returned a int; it must return rows"):
        load_prompts(DataConfig(source=f"{__name__}:number"))
    with pytest.raises(ConfigError, match="has no 'rows_off'; did you mean 'rows_of'"):
        load_prompts(DataConfig(source=f"{__name__}:rows_off"))
    with pytest.raises(ConfigError, match="is a list, not a function"):
        load_prompts(DataConfig(source=f"{__name__}:ROWS"))


def test_reasoning_gym_prompts_carry_how_to_make_the_problem_again() -> None:
    source = "reasoning_gym:simple_equations"
    config = DataConfig(source=source, arguments={"seed": 5}, start=2, size=4)
    prompts = load_prompts(config)
    assert len(prompts) == 4
    problem = prompts[0].reward_model["reasoning_gym"]
    assert problem == {"name": "simple_equations", "arguments": {"seed": 5, "size": 6}, "index": 2}
    assert json.loads(json.dumps(problem)) == problem
    assert prompts[0].data_source == source
    # Where some are not kept, as many are made as the arguments say.
    kept = {"source": source, "where": "answer|int % 2"}
    part = load_prompts(DataConfig(**kept, arguments={"seed": 5, "size": 40}, size=6))
    assert [int(prompt.reward_model["ground_truth"]) % 2 for prompt in part] == [1] * 6
    # The same index of a longer part is the same problem, so that slices of one seed fit together.
    longer = load_prompts(DataConfig(source=source, arguments={"seed": 5}, size=100))
    assert texts(longer[2:6]) == texts(prompts)


def test_neighboring_reasoning_gym_seeds_share_problems_so_hold_out_is_needed() -> None:
    source = "reasoning_gym:simple_equations"
    train = load_prompts(DataConfig(source=source, arguments={"seed": 0}, size=20))
    other_seed = load_prompts(DataConfig(source=source, arguments={"seed": 1}, size=5))
    assert set(texts(other_seed)) <= set(texts(train))
    assert not set(texts(hold_out(train, other_seed))) & set(texts(other_seed))


def test_a_problem_that_is_held_out_twice_is_not_trained_on_either() -> None:
    def problems(*numbers: int) -> list[Prompt]:
        # A generator of few problems makes some twice, each with its own number.
        truths = [{"ground_truth": "4", "reasoning_gym": {"index": number}} for number in numbers]
        return [Prompt(message=chats("2 + 2 =")[0].message, reward_model=truth) for truth in truths]

    kept = hold_out([*problems(0, 1, 2), *chats("3 + 3 =")], problems(7, 9))
    assert texts(kept) == ["3 + 3 ="]


def test_reasoning_gym_errors_name_the_generator_and_its_arguments() -> None:
    with pytest.raises(ConfigError, match=r"no generator 'countdwon'; did you mean 'countdown'\?"):
        load_prompts(DataConfig(source="reasoning_gym:countdwon"))
    with pytest.raises(ConfigError, match=r"refuses .*min_nums.*its arguments: .*min_numbers"):
        load_prompts(DataConfig(source="reasoning_gym:countdown", arguments={"min_nums": 2}))
    with pytest.raises(ConfigError, match="'countdown' refuses"):
        load_prompts(DataConfig(source="reasoning_gym:countdown", arguments={"min_numbers": 9, "max_numbers": 2}))
    with pytest.raises(ConfigError, match="leave out shuffle_seed = 1"):
        load_prompts(DataConfig(source="reasoning_gym:countdown", shuffle_seed=1))


# Held-out prompts and lengths


def chats(*contents: str) -> list[Prompt]:
    return [Prompt(message=[{"role": "user", "content": content}]) for content in contents]


def test_hold_out_removes_every_copy_of_an_evaluation_prompt() -> None:
    kept = hold_out(chats("a", "b", "a", "c"), chats("a", "z"))
    assert texts(kept) == ["b", "c"]
    with pytest.raises(ConfigError, match="all 2 training prompts are also among the 1 evaluation"):
        hold_out(chats("a", "a"), chats("a"))


def test_a_game_that_begins_alike_for_every_secret_holds_out_secrets() -> None:
    def games(*secrets: str) -> list[Prompt]:
        chat = [{"role": "user", "content": "guess"}]
        return [Prompt(message=chat, reward_model={"ground_truth": secret}) for secret in secrets]

    kept = hold_out(games("ab", "cd", "ef", "gh"), games("cd", "gh"))
    assert [prompt.reward_model for prompt in kept] == [{"ground_truth": "ab"}, {"ground_truth": "ef"}]


class CharacterTokenizer:
    """One token a character, and one for the role."""

    name_or_path = "characters"
    chat_template = "given"

    def apply_chat_template(self, conversation, **kwargs):
        return [0] + [ord(c) for message in conversation for c in message["content"]]

    def decode(self, token_ids, **kwargs):
        return "".join(map(chr, token_ids[1:]))


def test_too_long_prompts_are_an_error_or_dropped(caplog) -> None:
    prompts = chats("ab", "abcd", "abcdef")
    assert check_prompt_lengths(prompts, CharacterTokenizer(), 7) is prompts
    with pytest.raises(ConfigError, match="prompt 1 has 5 tokens, more than the 4"):
        check_prompt_lengths(prompts, CharacterTokenizer(), 4)
    assert texts(check_prompt_lengths(prompts, CharacterTokenizer(), 4, "drop")) == ["ab"]
    assert "2 of 3 prompts are left out: longer than" in caplog.text
    with pytest.raises(ConfigError, match="all 3 prompts are longer than 1 tokens"):
        check_prompt_lengths(prompts, CharacterTokenizer(), 1, "drop")


def test_many_prompts_are_rendered_at_once_and_each_counts_as_it_does_alone() -> None:
    tokenizer = character_tokenizer("abcdef")
    prompts = chats(*("a" * (1 + index % 7) for index in range(700)))
    calls = []
    render = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda *given, **options: calls.append(given) or render(*given, **options)
    alone = [num_prompt_tokens(prompt, tokenizer) for prompt in prompts]
    calls.clear()
    for limit in range(2, 8):
        kept = check_prompt_lengths(prompts, tokenizer, limit, "drop")
        assert texts(kept) == texts([prompts[i] for i in range(700) if alone[i] <= limit])
    assert len(calls) < 30
    with pytest.raises(ConfigError, match="prompt 3 has 5 tokens"):
        check_prompt_lengths(prompts, tokenizer, 4)
    with pytest.raises(ConfigError, match=r"row 501: the model has no token for the character 'z'"):
        check_prompt_lengths(
            [*prompts[:501], Prompt(message=[{"role": "user", "content": "z"}], place="row 501")], tokenizer, 9
        )


def test_a_csv_file_is_text_by_column(tmp_path) -> None:
    path = tmp_path / "d.csv"
    path.write_bytes('\ufeffprompt,answer,note\r\n1+1=,02,"a, b"\r\n\r\n2+2=,4,→\r\n'.encode())
    prompts = load_prompts(DataConfig(source=str(path)))
    assert [prompt.reward_model["ground_truth"] for prompt in prompts] == ["02", "4"]
    assert prompts[0].extra == {"note": "a, b"}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("d.csv", b"prompt,answer\n1,2\n1,2,3\n", r"d\.csv, line 3 has 3 values for the 2 columns"),
        ("d.csv", b"prompt,prompt\n1,2\n", "a name of its own"),
        ("d.csv", b"prompt,answer\n\xff,2\n", "is not UTF-8 text"),
        ("d.csv", b'prompt,answer\n"1,2\n', "is not valid CSV"),
        ("d.csv", b"", r"d\.csv' is empty"),
        ("d.csv", b"question,answer\n1,2\n", "has no column 'prompt'"),
        ("d.json", b"[]", r"d\.json' is empty"),
        ("d.json", b"[1]", "must hold a list of objects"),
        ("d.txt", b"a", r"is a \.txt file, which is not read"),
        ("rows", b"", "is a file without an ending, which is not read"),
    ],
)
def test_a_data_file_that_cannot_be_read_says_why(tmp_path, name, content, said) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        load_prompts(DataConfig(source=str(tmp_path / name)))


def test_a_missing_file_is_not_suggested_for_itself(tmp_path) -> None:
    for name in ("d.csv", "d.json", "d.jsonl", "d"):
        with pytest.raises(ConfigError) as caught:
            load_prompts(DataConfig(source=str(tmp_path / name)))
        assert "did you mean" not in str(caught.value)


def test_a_folder_does_not_hide_a_generator_of_its_name(tmp_path, monkeypatch) -> None:
    (tmp_path / "addition").mkdir()
    monkeypatch.chdir(tmp_path)
    assert len(load_prompts(DataConfig(source="addition", size=3))) == 3
