"""Expressions over the columns of a row: which rows are kept, and the texts of new columns.

::

    where    "level >= 3 and kind == 'algebra'"          one Jinja expression: kept where it is true
    columns  prompt = "question"                         the column of that name
             answer = "{{ answer.split('####')[1] }}"    a Jinja template, which gives a text

They run in Jinja's sandbox: they see the row (columns by name, and all of it as ``row``) and nothing else.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from forebay.config import ConfigError, errors_about
from forebay.extras import needed_by

Row = Mapping[str, Any]


def compile_expression(key: str, expression: str) -> Callable[[Row, str], Any]:
    """The value of an expression of the setting `key`, for a row at a place that messages name.

    Raises:
        ConfigError: it is no expression; the function does, where one does not fit its row.

    >>> compile_expression("data.where", "level >= 3")({"level": 4}, "row 0")
    True
    """
    # False: an undefined name must not become None, or `_evaluate` could not tell it.
    compiled = _compiled(key, expression, lambda jinja: jinja.compile_expression(expression, False))
    return partial(_evaluate, key, expression, compiled)


def compile_column(name: str, text: str) -> Callable[[Row, str], str] | None:
    """The function that renders the column `name` of a row; None: `text` is a column's name, no template.

    Raises:
        ConfigError: as `compile_expression`.
    """
    if "{{" not in text and "{%" not in text:
        return None
    key = f"data.columns.{name}"
    template = _compiled(key, text, lambda jinja: jinja.from_string(text))
    return partial(_evaluate, key, text, template.render)


@cache
def _jinja() -> Any:
    with needed_by("data.where and templates in data.columns"):
        from jinja2 import StrictUndefined
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    # A name that is not there is an error, and not an empty text.
    return ImmutableSandboxedEnvironment(undefined=StrictUndefined)


def _compiled(key: str, text: str, compile_text: Callable[[Any], Any]) -> Any:
    # Before the import below: it says which extra is missing.
    jinja = _jinja()
    from jinja2 import TemplateSyntaxError

    with errors_about(f"{key} = {text!r} is not valid", TemplateSyntaxError):
        return compile_text(jinja)


def _evaluate(key: str, text: str, run: Callable[..., Any], row: Row, place: str) -> Any:
    from jinja2 import TemplateError
    from jinja2.runtime import Undefined

    if not isinstance(row, Mapping):
        raise ConfigError(f"{place}: {key} needs rows with columns, got {type(row).__name__}")
    try:
        value = run({**row, "row": row})
        # A name alone that is not there is told when it is used.
        _ = str(value) if isinstance(value, Undefined) else None
        return value
    except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise ConfigError(f"{place}: {key} = {text!r}: {error}; its columns: {', '.join(row)}") from None
