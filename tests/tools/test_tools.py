"""Tools by themselves: what they answer, what they refuse, and that nothing takes long."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.config import ConfigError
from forebay.sandbox import SandboxUnavailableError
from forebay.tools import Calculator, FunctionTool, Python, Search, ToolError, ToolUnavailableError
from forebay.tools.base import build_tool, schema_of
from forebay.tools.calculator import calculate, write_number
from forebay.tools.contract import make_schema

NUMBERS = st.one_of(st.integers(-99, 99).map(str), st.floats(0, 9, width=16).map(lambda x: f"{x:.3f}"))
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda parts: st.builds(
        lambda a, b, sign: f"({a}) {sign} ({b})", parts, parts, st.sampled_from(["+", "-", "*", "/", "//", "%"])
    ),
    max_leaves=6,
)


@settings(deadline=None)
@given(EXPRESSIONS)
def test_the_calculator_agrees_with_python(expression) -> None:
    try:
        expected = eval(expression)
    except ZeroDivisionError:
        with pytest.raises(ToolError, match="has no value"):
            calculate(expression)
    else:
        assert calculate(expression) == expected


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("2 ** 100", str(2**100)),
        ("-3 ** 2", "-9"),
        ("7 / 2", "3.5"),
        ("8 / 2", "4"),
        (" sqrt(2) * sqrt(2) ", "2"),
        ("1 / 3", "0.333333333333"),
        ("round(2.675, 1) + max(1, 2, pi)", "5.84159265359"),
        ("1e300", "1e+300"),
        ("log(exp(3))", "3"),
    ],
)
async def test_results_are_written_as_people_write_them(expression, text) -> None:
    assert await Calculator().call({"expression": expression}) == text


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("9 ** 9 ** 9 ** 9", "more than 4096 bits"),
        ("2 ** -9 ** 9 ** 9", "more than 4096 bits"),
        ("*".join(["10 ** 600"] * 3), "more than 4096 bits"),
        ("round(5, -10 ** 9)", "30 digits at most"),
        ("1e308 * 10", "infinite"),
        ("(-8) ** 0.5", "no value"),
        ("(-8.0) ** (1 / 3)", "no value"),
        ("10 ** 600 / 3", "no value"),
        ("exp(1000)", "no value"),
        ("sqrt(-1)", "no value"),
        ("0 ** -1", "no value"),
        ("1 +", "is not an arithmetic expression"),
        ("(" * 300 + "1" + ")" * 300, "601 characters"),
        ("(" * 240 + "1" + ")" * 240, "is not an arithmetic expression"),
        ("'a' * 9", "is not arithmetic; there are numbers"),
        ("True + 1", "is not arithmetic"),
        ("__import__('os').getcwd()", "is not arithmetic"),
        ("sqrt(x=1)", "is not arithmetic"),
        ("min(1)", "no value"),
        ("2 ^ 3", "is not arithmetic"),
        ("1 if 1 else 2", "is not arithmetic"),
        ("1\0", "no value|not an arithmetic"),
    ],
)
def test_the_calculator_refuses_what_is_no_arithmetic_or_too_large(expression, message) -> None:
    with pytest.raises(ToolError, match=message):
        write_number(calculate(expression))


async def test_a_call_with_other_arguments_says_what_fits() -> None:
    with pytest.raises(ToolError, match="takes the argument 'expression' and no other, got expr"):
        await Calculator().call({"expr": "1"})


async def test_what_a_function_returns_that_is_no_json_is_an_error_of_the_call() -> None:
    itself: list[Any] = []
    itself.append(itself)
    with pytest.raises(ToolError, match="Circular reference"):
        await FunctionTool(lambda: itself, make_schema("f", "")).call({})


def test_a_tool_that_says_its_schema_is_not_made_for_it() -> None:
    assert schema_of({"name": "search", "arguments": {"corpus": "missing"}}) == Search.schema
    assert schema_of(f"{__name__}:weigh")["function"]["name"] == "weigh"


DOCUMENTS = [
    ("Oslo", "Oslo is the capital of Norway, on a fjord."),
    ("Rome", "Rome is the capital of Italy."),
    ("Bread", "Bread rises because of yeast. " * 40),
]


async def test_search_finds_the_best_documents_by_their_words() -> None:
    tool = Search(DOCUMENTS, num_results=2)
    assert await tool.call({"query": "capitals of norway?"}) == (
        "[1] Oslo: Oslo is the capital of Norway, on a fjord.\n[2] Rome: Rome is the capital of Italy."
    )
    # A passage of a long document, not all of it.
    assert len(await tool.call({"query": "yeast"})) < 400
    assert await tool.call({"query": "quantum"}) == "(nothing was found)"
    # What would be an operator or an error in the query language is only words.
    assert "Rome" in await tool.call({"query": 'Rome" OR NOT NEAR( *'})
    with pytest.raises(ToolError, match="has no words"):
        await tool.call({"query": "?!"})
    answers = await asyncio.gather(*(tool.call({"query": "capital"}) for _ in range(8)))
    assert len(set(answers)) == 1
    tool.close()


async def test_a_corpus_is_read_from_a_folder_or_a_file(tmp_path) -> None:
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "a.txt").write_text("alpha particles")
    (folder / "b.md").write_text("beta decay")
    (folder / "c.bin").write_bytes(b"\xff")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"title": "A", "text": "alpha"}\n\n{"text": "beta"}\n')
    for corpus, found in ((folder, "[1] deep/a.txt: alpha particles"), (rows, "[1] A: alpha")):
        tool = build_tool({"name": "search", "arguments": {"corpus": str(corpus)}})
        assert isinstance(tool, Search)
        assert await tool.call({"query": "alpha"}) == found
        both = await tool.call({"query": "alpha beta"})
        assert "[2]" in both
        assert "[3]" not in both
        tool.close()


def test_a_corpus_that_is_missing_empty_or_malformed_is_refused(tmp_path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"body": "x"}\n')
    for corpus, message in (
        (str(tmp_path / "none"), "no corpus at"),
        (str(tmp_path / "bad.jsonl"), "line 1 is not of the form"),
        ([], "holds no documents"),
    ):
        with pytest.raises(ConfigError, match=message):
            Search(corpus)


async def test_python_runs_programs_in_the_sandbox() -> None:
    tool = Python(limits={"wall_s": 5})
    try:
        assert await tool.call({"code": "print(6 * 7)"}) == "42\n"
    except ToolUnavailableError as error:
        pytest.skip(f"no sandbox here: {error}")
    assert await tool.call({"code": "x = 1"}) == "(nothing was printed)"
    with pytest.raises(ToolError, match="ZeroDivisionError"):
        await tool.call({"code": "1 / 0"})


async def test_a_machine_without_a_sandbox_makes_the_tool_unavailable() -> None:
    class Nowhere:
        async def run_python(self, source: str) -> Any:
            raise SandboxUnavailableError("no sandbox works here")

    with pytest.raises(ToolUnavailableError, match="no sandbox works here"):
        await Python(sandbox=Nowhere()).call({"code": "1"})


def weigh(item: str, times: int = 1) -> dict[str, float]:
    """Weigh something.

    Args:
        item: what
        times: how often
    """
    if item == "air":
        raise LookupError("it floats")
    return {"kg": len(item) * float(times)}


async def slow_name(item: str) -> str:
    """Name something.

    Args:
        item: what
    """
    return f"the {item}" if item != "way out" else sys.exit(3)


def undocumented(item):
    return item


async def test_functions_are_tools() -> None:
    tool = build_tool(weigh)
    assert tool.schema["function"]["name"] == tool.name == "weigh"
    assert tool.schema["function"]["parameters"]["required"] == ["item"]
    assert json.loads(await tool.call({"item": "lead", "times": 2})) == {"kg": 8.0}
    assert await build_tool(f"{__name__}:slow_name").call({"item": "cat"}) == "the cat"
    for arguments, message in (
        ({"thing": "x"}, "weigh: .*missing a required argument: 'item'|unexpected"),
        ({"item": "air"}, "LookupError: it floats"),
    ):
        with pytest.raises(ToolError, match=message):
            await tool.call(arguments)
    with pytest.raises(ToolError, match="SystemExit: 3"):
        await build_tool(slow_name).call({"item": "way out"})


def test_what_is_no_tool_is_refused() -> None:
    for tool, message in (
        ("calculater", "did you mean 'calculator'"),
        ({"name": "search", "arguments": {"corpora": "x"}}, "did you mean 'corpus'"),
        ({"name": f"{__name__}:weigh", "arguments": {"item": "x"}}, "whose arguments the model gives"),
        (undocumented, "needs a type for each parameter"),
        (3, "neither a tool"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_tool(tool)
    assert isinstance(build_tool(slow_name), FunctionTool)
    calculator = Calculator()
    assert build_tool(calculator) is calculator
