"""Tools that a model may call while it answers: a calculator, Python, search, and functions of your own."""

from forebay.tools.base import FunctionTool as FunctionTool
from forebay.tools.calculator import Calculator as Calculator
from forebay.tools.contract import Tool as Tool
from forebay.tools.contract import ToolError as ToolError
from forebay.tools.contract import ToolUnavailableError as ToolUnavailableError
from forebay.tools.python import Python as Python
from forebay.tools.search import Search as Search
