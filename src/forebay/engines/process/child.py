"""The program that a process engine runs in its child: builds the engine, says so, and answers calls.

::

    python -c "from forebay.engines.process.child import main; main()" SOCKET SILENCE_LIMIT_S RECIPE
"""

import asyncio
import os
import socket
import sys
import traceback

from forebay.engines.base import EngineSurroundings
from forebay.engines.build import build_engines
from forebay.engines.pool import EnginePool
from forebay.engines.process.host import MAX_HEADER_BYTES, EngineRecipe, HostSession
from forebay.io.channel import BlockingChannel, Channel
from forebay.io.messages import Note, encode_value
from forebay.models import load_tokenizer


def main() -> None:
    """Serve the parent until the socket closes; the process ends with it."""
    sock, silence_limit_s = socket.socket(fileno=int(sys.argv[1])), float(sys.argv[2])
    recipe = EngineRecipe.model_validate_json(sys.argv[3])
    import torch

    torch.set_num_threads(recipe.threads)
    given = {name: value for name, value in recipe if name not in ("engine", "threads")}
    surroundings = EngineSurroundings(
        **given, tokenizer=load_tokenizer(recipe.model_folder), scratch=recipe.model_folder
    )
    pool = EnginePool(build_engines(recipe.engine, surroundings))
    names = ("max_context_tokens", "max_running", "model_step", "takes_adapters")
    facts = {name: getattr(pool, name) for name in names}
    BlockingChannel(sock).send(Note(encode_value(facts)))

    async def serve() -> None:
        channel = Channel(sock, max_header_bytes=MAX_HEADER_BYTES)
        await HostSession(pool, channel, silence_limit_s=silence_limit_s).run()

    code = 1
    try:
        asyncio.run(serve())
        code = 0
    except BaseException:
        # The parent shows the end of this log.
        traceback.print_exc()
    finally:
        # At once: threads of the engine may be in a forward pass, and their results are of no use now.
        os._exit(code)
