"""A calculator for models: arithmetic that is read, not executed.

::

    "2 * (3 + 4)" --ast.parse--> tree --only numbers, operators and functions below--> "14"

Everything is bounded: the length of the text, the size of integers, so no expression takes long.
"""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from forebay.tools.contract import ToolError, make_schema, only_argument

Number = int | float

MAX_CHARACTERS = 500
"""Far more than a model writes on purpose; the parser's nesting is bounded by it as well."""
MAX_BITS = 4096
"""The size of an integer at most: 1,233 digits, and any operation on two of them takes microseconds."""
MAX_DIGITS = 30
"""The most digits to round to: rounding to a billion of them would compute as many."""

_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_CONSTANTS = {"pi": math.pi, "e": math.e}
_FUNCTIONS: dict[str, Callable[..., Number]] = {
    "abs": abs,
    "round": lambda number, digits=0: round(number, _few(digits)),
    "min": min,
    "max": max,
    **{
        name: getattr(math, name)
        for name in ("sqrt", "exp", "log", "log2", "log10", "floor", "ceil", "gcd", "sin", "cos", "tan")
    },
}


def calculate(expression: str) -> Number:
    """The value of an arithmetic expression.

    Raises:
        ToolError: it is no arithmetic, or has no real value, or one that is too large.

    >>> calculate("(1 + 2) ** 3 / 2")
    13.5
    """
    if len(expression) > MAX_CHARACTERS:
        raise ToolError(f"the expression has {len(expression)} characters, more than {MAX_CHARACTERS}")
    try:
        # `ast.parse` would take blanks at the beginning for an indentation.
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ToolError(f"{expression!r} is not an arithmetic expression") from None
    except (ArithmeticError, ValueError, TypeError) as error:
        raise ToolError(f"{expression!r} has no value: {error}") from None


def _value(node: ast.expr) -> Number:
    match node:
        # True and False are integers to Python, and would pass as numbers.
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float() as number):
            return _bounded(number)
        case ast.BinOp(left, operation, right) if type(operation) in _BINARY:
            first, second = _value(left), _value(right)
            if isinstance(operation, ast.Pow):
                _check_power(first, second)
            return _bounded(_BINARY[type(operation)](first, second))
        case ast.UnaryOp(operation, operand) if type(operation) in _UNARY:
            return _UNARY[type(operation)](_value(operand))
        case ast.Name(name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.Call(ast.Name(name), arguments, keywords) if name in _FUNCTIONS and not keywords:
            return _bounded(_FUNCTIONS[name](*map(_value, arguments)))
    raise ToolError(
        f"{ast.unparse(node)!r} is not arithmetic; there are numbers, + - * / // % **, brackets, "
        f"{', '.join(_CONSTANTS)} and {', '.join(_FUNCTIONS)}"
    )


def _check_power(base: Number, exponent: Number) -> None:
    """Refuse a power that is too large before it is computed, which could take minutes."""
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0:
        if base.bit_length() * exponent > MAX_BITS and abs(base) > 1:
            raise ToolError(f"a power has more than {MAX_BITS} bits")
    elif isinstance(base, float) or isinstance(exponent, float):
        # A negative base would give a complex number.
        math.pow(base, exponent)


def _few(digits: Number) -> int:
    if abs(digits) > MAX_DIGITS:
        raise ToolError(f"round to {MAX_DIGITS} digits at most, not {digits}")
    return int(digits)


def _bounded(value: Any) -> Number:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ToolError(f"a number has more than {MAX_BITS} bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise ToolError("a number is infinite or undefined")
    number: Number = value
    return number


def write_number(value: Number) -> str:
    """`value` as people write it: whole numbers without a point, others with 12 digits at most."""
    # Larger ones have more digits than a float knows, and are written with an exponent.
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value) if isinstance(value, int) else f"{value:.12g}"


class Calculator:
    """Arithmetic on numbers of up to 4,096 bits, and the usual functions.

    >>> import asyncio
    >>> asyncio.run(Calculator().call({"expression": "12 * (3 + 4) / 8"}))
    '10.5'
    """

    name = "calculator"
    schema = make_schema(
        name,
        "Work out an arithmetic expression.",
        expression="for example (12 + 3) * 4 / 7; ** is a power, and there are sqrt, log, exp, min, max, ...",
    )

    async def call(self, arguments: dict[str, Any]) -> str:
        """The value of the expression, as text.

        Raises:
            ToolError: the expression has no value.
        """
        return write_number(calculate(only_argument(self.name, "expression", arguments)))
