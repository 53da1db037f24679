"""Datasets of the hub as they lie in its cache, streams, and expressions over columns."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay.config import ConfigError
from forebay.produce.prompts.dataset import DataConfig, load_prompts

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: hard
  data_files:
  - {split: train, path: hard/train-*}
---
"""


def rows_of(count: int, first: int = 0) -> list[dict]:
    return [
        {"question": f"{i}+1?", "answer": f"one more is\n#### {i + 1:,}", "level": i % 4}
        for i in range(first, first + count)
    ]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset as ``hf download`` leaves it, and no network."""
    import datasets
    import huggingface_hub.constants

    repository = tmp_path / "hub" / "datasets--acme--sums"
    snapshot = repository / "snapshots" / COMMIT
    for name, rows in {
        "main/train-0": rows_of(1200),
        "main/test-0": rows_of(5, 2000),
        "hard/train-0": rows_of(3, 9),
    }.items():
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), snapshot / f"{name}.parquet")
    (snapshot / "README.md").write_text(CARD)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    return repository


def sums(arguments: dict, **settings) -> list:
    columns = {"prompt": "question", "answer": "{{ answer.split('####')[1].strip().replace(',', '') }}"}
    config = DataConfig(source="acme/sums", arguments=arguments, columns=columns, **settings)
    return list(load_prompts(config))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_copy_of_a_hub_dataset_gives_its_rows(hub, streaming) -> None:
    given = {"subset": "main", "split": "train", "streaming": streaming}
    prompts = sums(given, start=1, size=800, where="level > 0")
    kept = [row for row in rows_of(1200) if row["level"] > 0][1:801]
    assert [prompt.message[0]["content"] for prompt in prompts] == [row["question"] for row in kept]
    assert prompts[-1].reward_model == {"ground_truth": "1068"}
    assert prompts[0].extra == {"level": 2}
    assert prompts[0].data_source == "acme/sums"


def test_splits_subsets_and_revisions_are_named(hub) -> None:
    assert len(sums({"subset": "main", "split": "test"})) == 5
    assert len(sums({"subset": "hard", "revision": COMMIT})) == 3
    with pytest.raises(ConfigError, match=r"splits \['test', 'train'\]; name one as arguments.split"):
        sums({"subset": "main"})
    with pytest.raises(ConfigError, match=r"Unknown split \"dev\""):
        sums({"subset": "main", "split": "dev"})
    with pytest.raises(ConfigError, match=r"acme/sums.*[Cc]onfig.*hard"):
        sums({"split": "train"})
    with pytest.raises(ConfigError, match=r"takes split, subset, .* as arguments, got \['name'\]"):
        sums({"name": "main"})


def test_without_a_copy_one_sentence_says_how_to_get_it(hub) -> None:
    with pytest.raises(ConfigError, match=r"run: hf download --repo-type dataset openai/gsm8k$"):
        load_prompts(DataConfig(source="openai/gsm8k", arguments={"subset": "main"}))
    with pytest.raises(ConfigError, match=r"hf download --repo-type dataset acme/sums --revision v2$"):
        sums({"subset": "main", "revision": "v2"})


def test_a_folder_beside_the_run_file_is_no_dataset_of_the_hub(hub, tmp_path, monkeypatch) -> None:
    (tmp_path / "data" / "sums").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"did you mean 'data/sums'\?"):
        load_prompts(DataConfig(source="data/sum"))


# Files and streams


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_arrow_files_are_read_in_both_formats(tmp_path, kind) -> None:
    table, path = pa.Table.from_pylist(rows_of(4)), str(tmp_path / "d.arrow")
    with (pa.ipc.new_file if kind == "file" else pa.ipc.new_stream)(path, table.schema) as writer:
        writer.write_table(table)
    assert len(load_prompts(DataConfig(source=path, columns={"prompt": "question"}))) == 4
    (tmp_path / "bad.arrow").write_text("no arrow")
    with pytest.raises(ConfigError, match=r"cannot read .*bad\.arrow' as Arrow"):
        load_prompts(DataConfig(source=str(tmp_path / "bad.arrow")))


def test_a_list_in_a_json_file_is_read(tmp_path) -> None:
    (tmp_path / "d.json").write_text('[{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]')
    prompts = load_prompts(DataConfig(source=str(tmp_path / "d.json")))
    assert [prompt.reward_model["ground_truth"] for prompt in prompts] == [1, 2]


def endless():
    number = 0
    while True:
        yield {"prompt": str(number), "answer": number}
        number += 1


def test_an_iterator_is_read_as_far_as_it_is_wanted() -> None:
    prompts = load_prompts(DataConfig(source=f"{__name__}:endless", where="answer % 2", start=2, size=3))
    assert [prompt.reward_model["ground_truth"] for prompt in prompts] == [5, 7, 9]
    assert prompts[0].place == f"{__name__}:endless, row 5"
    with pytest.raises(ConfigError, match="shuffle it at its source, and leave out shuffle_seed = 1"):
        load_prompts(DataConfig(source=f"{__name__}:endless", shuffle_seed=1, size=3))


# Expressions


def some():
    return rows_of(8)


def made(**settings) -> list:
    return list(load_prompts(DataConfig(source=f"{__name__}:some", **settings)))


def test_columns_may_be_swapped_renamed_and_made() -> None:
    swapped = made(columns={"prompt": "answer", "answer": "question"})[0]
    assert swapped.message[0]["content"].startswith("one more")
    assert swapped.reward_model == {"ground_truth": "0+1?"}
    prompt = made(columns={"prompt": "Say: {{ question }}", "difficulty": "level"})[3]
    assert prompt.message[0]["content"] == "Say: 3+1?"
    assert prompt.extra == {"question": "3+1?", "difficulty": 3}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"where": "levl > 2"}, r"row 0: data\.where = 'levl > 2': 'levl' is undefined; its columns: question"),
        ({"where": "level >"}, r"data\.where = 'level >' is not valid: "),
        ({"where": "level > 9"}, r"holds no row that data\.where keeps"),
        ({"columns": {"prompt": "{{ question", "answer": ""}}, r"data\.columns\.prompt = .* is not valid"),
        ({"columns": {"prompt": "{{ 1 / level }}"}}, r"row 0: data\.columns\.prompt = .*division by zero"),
        ({"columns": {"prompt": "{{ ''.__class__.__mro__ }}"}}, r"unsafe"),
        ({"where": "row.__init__.__globals__"}, r"unsafe"),
    ],
)
def test_an_expression_that_does_not_fit_says_where_and_why(settings, said) -> None:
    with pytest.raises((ConfigError, ValueError), match=said):
        made(**settings)
