"""A scripted vLLM server that can sleep, as a package that `python -m vllm.entrypoints.openai.api_server` runs.

It notes in a file whether it sleeps, and in another one beside it what it was asked.
"""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

HTTP_TESTS = Path(__file__).parent / "engines/http"

PROGRAM = """
import asyncio, json, os, random, sys
from pathlib import Path
sys.path.insert(0, {folder!r})
from conftest import FakeVLLM

class Server(FakeVLLM):
    def _control(self, path, query, body):
        answer = super()._control(path, query, body)
        self.note(path)
        return answer

    async def _generate(self, body, reader, writer):
        self.note("generate" if not self.asleep else "generate while it sleeps")
        return await super()._generate(body, reader, writer)

    def note(self, path):
        state = {{"pid": os.getpid(), "asleep": sorted(self.asleep), "lacks_weights": self.lacks_weights}}
        target = Path(os.environ["STATE"].replace("GPUS", os.environ["CUDA_VISIBLE_DEVICES"]))
        target.with_suffix(".new").write_text(json.dumps(state))
        target.with_suffix(".new").rename(target)
        if path not in ("/health", "/v1/models"):
            with target.with_suffix(".calls").open("a") as file:
                print(path, file=file)

def option(name):
    return int(sys.argv[sys.argv.index(name) + 1])

async def main():
    server = Server()
    server.port = option("--port")
{set_up}
    await server.start()
    server.note("started")
    await asyncio.Event().wait()

asyncio.run(main())
"""


def write_server(folder: Path, state: str, set_up: str) -> dict[str, str]:
    """Write the package into `folder`; the environment of such servers.

    Each notes its state in the file `state`, in which ``GPUS`` is those that it sees. `set_up` are further lines of
    the program, which has ``server`` and ``option``.
    """
    package = folder / "lib/vllm/entrypoints/openai"
    package.mkdir(parents=True, exist_ok=True)
    program = PROGRAM.format(folder=str(HTTP_TESTS), set_up=textwrap.indent(textwrap.dedent(set_up).strip(), " " * 4))
    (package / "api_server.py").write_text(program)
    return {"PYTHONPATH": f"{folder / 'lib'}:{os.environ.get('PYTHONPATH', '')}", "STATE": state}
