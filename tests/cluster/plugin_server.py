"""A scripted vLLM server as a program that a run starts: its workers have Forebay's plug-in.

What it is given is written to the folder `GIVEN`, a file for each version. While a file ``stuck`` is there, it takes
no bucket, which it says by a file ``waits``, but one for each file ``one``.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import sys
import traceback
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1]))
spec = importlib.util.spec_from_file_location("http_fakes", Path(__file__).parents[1] / "engines/http/conftest.py")
fakes = importlib.util.module_from_spec(spec)
sys.modules["http_fakes"] = fakes
spec.loader.exec_module(fakes)

GIVEN = Path(os.environ["GIVEN"])


class PluginServer(fakes.FarVLLM):
    """It maps buckets, or, told of a sender, is sent them."""

    def __init__(self, port: int, context: int) -> None:
        super().__init__()
        self.port, self.context, self.is_sent = port, context, False
        self.token = lambda job: random.randrange(3, 30)

    async def start(self) -> None:
        # It is healthy once they are there.
        await self.start_workers()
        await fakes.FakeVLLM.start(self)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await super()._serve(reader, writer)
        except Exception:
            traceback.print_exc()
            raise

    async def _ask_workers(self, path: str, body: Any) -> str | None:
        if path == "/init_weight_transfer_engine":
            self.is_sent = "backend" in body["init_info"]
        if path == "/update_weights":
            if (GIVEN / "stuck").exists():
                (GIVEN / "waits").touch()
            while (GIVEN / "stuck").exists() and not (GIVEN / "one").exists():
                await asyncio.sleep(0.01)
            (GIVEN / "one").unlink(missing_ok=True)
            if not self.is_sent:
                return await self._tell("update", lambda _: body["update_info"])
        return await super()._ask_workers(path, body)

    def control(self, path: str, query: dict[str, str], body: Any) -> Any:
        answer = super().control(path, query, body)
        if path == "/update_weight_version":
            named = {"version": self.version, "is_sent": json.dumps(self.is_sent), "pid": str(os.getpid())}
            file = GIVEN / f"{self.version}.safetensors"
            save_file({name: value.clone() for name, value in self.received.items()}, f"{file}.part", named)
            Path(f"{file}.part").rename(file)
        return answer


async def main(options: list[str]) -> None:
    port, context = (int(options[options.index(name) + 1]) for name in ("--port", "--max-model-len"))
    assert '{"backend": "forebay"}' in options
    server = PluginServer(port, context)
    await server.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
