"""Tools that a model may call while it answers: a calculator, Python, search, and functions of your own."""

from forebay.tools.base import TOOLS, FunctionTool, build_tool, check_tool, schema_of
from forebay.tools.calculator import Calculator
from forebay.tools.contract import Tool, ToolError, ToolUnavailableError
from forebay.tools.python import Python
from forebay.tools.search import Search

__all__ = [
    "TOOLS",
    "Calculator",
    "FunctionTool",
    "Python",
    "Search",
    "Tool",
    "ToolError",
    "ToolUnavailableError",
    "build_tool",
    "check_tool",
    "schema_of",
]
