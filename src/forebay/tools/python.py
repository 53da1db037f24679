"""Python for models: a program in, what it printed out; run by `forebay.sandbox`."""

from collections.abc import Mapping
from typing import Any

from forebay.config import StrictModel
from forebay.sandbox import Limits, Sandbox, SandboxError
from forebay.tools.contract import ToolError, ToolUnavailableError, make_schema, only_argument


class Python:
    """Runs a Python program in a sandbox: no network, no files of this machine, limited time and memory.

    Invariants: each call is a program of its own; nothing is kept from one to the next.

    >>> import asyncio
    >>> asyncio.run(Python().call({"code": "print(sum(range(10)))"}))
    '45\\n'

    Args:
        limits: of one program, as `forebay.sandbox.Limits` or its fields.
        sandbox: where to run it; None: a sandbox with these limits.
    """

    name = "python"
    schema = make_schema(
        name, "Run a Python program and read what it prints.", code="the program; it must print its results"
    )

    class Arguments(StrictModel, strict=True):
        """Keys of the tool ``python`` in a run file."""

        limits: Limits | None = None
        """Time, memory and files of one program; None: the defaults of `Limits`."""

    def __init__(self, *, limits: Limits | Mapping[str, float] | None = None, sandbox: Sandbox | None = None) -> None:
        self._sandbox = Sandbox(limits) if sandbox is None else sandbox

    async def call(self, arguments: dict[str, Any]) -> str:
        """The program's output and error output.

        Raises:
            ToolError: the program failed or was ended.
            ToolUnavailableError: there is no sandbox on this machine, or it failed.
        """
        code = only_argument(self.name, "code", arguments)
        try:
            result = await self._sandbox.run_python(code)
        except SandboxError as error:
            raise ToolUnavailableError(f"python: {error}") from error
        if result.reason in ("time", "cpu"):
            raise ToolError(f"{result.stdout}(the program took too long and was ended)")
        if not result.ok:
            said = result.stderr.strip() or f"the program was ended: {result.reason}"
            raise ToolError(f"{result.stdout}{said}")
        return result.stdout or "(nothing was printed)"
