"""LoRA adapters for servers, over scripted ones; `test_http_real_vllm.py` has the real one."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from test_engine_adapters import Source

from forebay.config import Component, ConfigError
from forebay.engines import EngineSurroundings, RolloutController, build_engines
from forebay.engines.base import EngineLost
from forebay.engines.servers.dialects import Dialect, SGLang
from forebay.engines.servers.engine import HTTPEngine
from forebay.engines.weights.files import WeightFiles
from forebay.models import ModelConfig, load_model
from forebay.models.config import TinyConfig
from forebay.models.starting_weights import AdaptersRefusedError, BaseDiffersError
from forebay.models.tiny import write_tiny
from forebay.train.weight_sync import sync_weights
from warm_python import stand_in

RANK = 3


@pytest.fixture(params=["FakeVLLM", "FakeSGLang"])
async def server(request, start_fake, fake_kinds) -> Any:
    return await start_fake(fake_kinds[request.param])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder, TinyConfig(hidden_size=16, num_layers=1, num_heads=2), max_context=64, seed=0)
    return folder


@pytest.fixture
def source(tiny) -> Source:
    return Source(load_model(tiny), rank=RANK)


@pytest.fixture
async def engine(server, connect) -> Any:
    engine = connect(server, lora_rank=RANK)
    await engine.bring_up()
    return engine


async def give(engine: Any, source: Source, step: int) -> None:
    await engine.load_adapters(list(source.adapters()), step, config=source.adapter_config)


async def give_base(engine: Any, source: Source) -> None:
    await engine.load_weights(list(source.weights(merged=False)), 0)


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def makes(engine: Any, ask: Any, token: int, step: int) -> None:
    completion = await engine.generate(ask())
    assert completion.response_ids.tolist() == [token] * 4, completion.error_msg
    assert completion.model_steps.tolist() == [step] * 4


async def test_tokens_are_made_and_labeled_by_the_adapters_of_now(engine, server, ask, source):
    assert engine.takes_adapters
    await give_base(engine, source)
    await makes(engine, ask, 10, 0)
    for step in (1, 2, 7):
        await give(engine, source, step)
        await makes(engine, ask, 30 + step, step)
        assert engine.model_step == step
    # One base, and no more adapters on the server than those of now.
    assert len([folder for folder in server.loaded if (folder / "model.safetensors").exists()]) == 1
    assert len(server.adapters) == 1
    # Whole weights put an end to them.
    await engine.load_weights(list(source.weights()), 8)
    await makes(engine, ask, 18, 8)


async def test_running_requests_go_on_under_the_new_adapters(engine, server, ask, source):
    await give_base(engine, source)
    server.auto = False
    request = ask(max_tokens=6)
    running = asyncio.create_task(engine.generate(request))
    for step in (0, 1, 2):
        if step:
            await give(engine, source, step)
        await server.has_jobs(1)
        server.make(2)
    completion = await running
    assert completion.response_ids.tolist() == [10, 10, 31, 31, 32, 32]
    assert completion.model_steps.tolist() == [0, 0, 1, 1, 2, 2]
    assert completion.finish_reason == "length"


async def test_a_server_that_comes_back_gets_the_base_and_the_adapters(engine, server, ask, source):
    await give_base(engine, source)
    await give(engine, source, 1)
    await server.kill()
    assert (await engine.generate(ask())).lost
    for step in (2, 3, 4):
        with pytest.raises(EngineLost):
            await give(engine, source, step)
    assert engine.model_step == 4
    await server.start()
    await engine.bring_up()
    assert (server.step_of_weights, len(server.loaded)) == (0, 2)
    await makes(engine, ask, 34, 4)
    # One that has them already is left alone.
    await engine.bring_up()
    assert len(server.loaded) == 2
    await makes(engine, ask, 34, 4)


async def test_a_load_of_adapters_that_is_given_up_is_done_again(engine, server, ask, source):
    await give_base(engine, source)
    await give(engine, source, 1)
    for is_done in (False, True):
        server.stuck = asyncio.Event()
        version = server.version
        loading = asyncio.create_task(give(engine, source, 2))
        await until(lambda: server.calls[-1].endswith("/load_lora_adapter"))
        if is_done:
            # The server does it all the same, but nobody hears of it: the name is in use, the label is not.
            server.stuck.set()
            await until(lambda: len(server.adapters) > 1 or 2 in server.adapters.values())
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        assert (await engine.generate(ask())).lost
        server.stuck = None
        await engine.bring_up()
        await makes(engine, ask, 32, 2)
        assert server.version != version
        assert len(server.adapters) == 1


async def test_a_base_that_is_not_known_or_another_is_given_first(server, connect, tiny, source, ask):
    controller = RolloutController([connect(server, lora_rank=RANK)])
    await sync_weights(source, controller, 1)
    assert [path.name.split("-")[0] for path in server.loaded] == ["step_000000", "step_000001"]
    await makes(controller.engines[0], ask, 31, 1)
    await sync_weights(source, controller, 2)
    assert len(server.loaded) == 3
    await controller.update_weights(list(source.weights()), 3)
    with pytest.raises(BaseDiffersError, match="give them those first"):
        await give(controller.engines[0], source, 4)
    await makes(controller.engines[0], ask, 13, 3)
    await sync_weights(source, controller, 4)
    # What runs there must not fall back to the weights of step 0.
    assert [path.name.split("-")[0] for path in server.loaded[-2:]] == ["step_000003", "step_000004"]
    await makes(controller.engines[0], ask, 14, 4)
    await controller.close()


async def test_what_a_server_refuses_comes_merged_from_then_on(server, connect, source, ask, caplog):
    engine = connect(server, lora_rank=RANK)
    controller = RolloutController([engine])
    server.knows_lora = False
    await sync_weights(source, controller, 1)
    assert "--enable-lora" in caplog.text
    assert list(controller.engines_up) == [0]
    assert not engine.takes_adapters
    await makes(engine, ask, 11, 1)
    await sync_weights(source, controller, 2)
    assert server.lora_calls == 1
    await makes(engine, ask, 12, 2)
    await controller.close()


async def test_refused_adapters_leave_the_server_as_it_was(engine, server, ask, source):
    await give_base(engine, source)
    await give(engine, source, 1)
    server.auto = False
    running = asyncio.create_task(engine.generate(ask()))
    await server.has_jobs(1)
    server.make(1)
    server.knows_lora = False
    with pytest.raises(AdaptersRefusedError, match="load_lora_adapter was answered"):
        await give(engine, source, 2)
    await server.has_jobs(1)
    server.make(4)
    assert (await running).response_ids.tolist() == [31] * 4
    assert engine.model_step == 1


@pytest.mark.parametrize(
    ("config", "message"), [({"use_dora": True}, "use_dora"), ({"rank_pattern": {"q_proj": 8}}, "rank_pattern")]
)
async def test_what_servers_would_not_compute_exactly_never_reaches_them(engine, server, source, config, message):
    await give_base(engine, source)
    with pytest.raises(AdaptersRefusedError, match=message):
        await engine.load_adapters(source.adapters(), 1, config=source.adapter_config | config)
    assert server.lora_calls == 0
    assert engine.takes_adapters


async def test_engines_take_none_unless_their_servers_were_started_for_them(server, connect):
    assert not connect(server).takes_adapters


# Files


# peft asks transformers for attributes under names that newer versions of it deprecate.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
async def test_adapters_are_written_as_peft_reads_them_and_once(tiny, tmp_path, source):
    files = WeightFiles(tmp_path / "weights", tiny, starting_dtype="float32")
    adapters = list(source.adapters())
    one, other = await asyncio.gather(*(files.write(adapters, 1, adapters=source.adapter_config) for _ in range(2)))
    assert one == other == files.current
    assert one.base is not None
    assert one.base.folder == tiny
    ids = torch.arange(10)[None]
    with torch.no_grad():
        theirs = PeftModel.from_pretrained(load_model(tiny), one.folder)(ids).logits
        torch.testing.assert_close(theirs, source.model(ids).logits)
    # Those below the current adapters stay, however many come.
    whole = await files.write(list(source.weights(merged=False)), 2)
    for step in (3, 4, 5):
        latest = await files.write(list(source.adapters()), step, adapters=source.adapter_config)
        assert latest.base == whole
        assert latest.version.startswith(f"{whole.version}+")
    assert (whole.folder / "model.safetensors").is_file()
    assert len(list((tmp_path / "weights").glob("run-*/step_*"))) == 3
    files.close()


async def test_what_servers_begin_with_is_known_by_every_bit_and_dtype(tiny, tmp_path, source):
    for dtype, other, fits in [
        ("float32", source, True),
        ("bfloat16", source, False),
        ("bfloat16", Source(load_model(tiny, dtype="bfloat16"), rank=RANK), True),
        ("float32", Source(make_other(tiny), rank=RANK), False),
    ]:
        files = WeightFiles(tmp_path / "weights", tiny, starting_dtype=dtype)
        writing = files.write(list(other.adapters()), 1, adapters=other.adapter_config)
        if fits:
            assert (await writing).base is not None
        else:
            with pytest.raises(BaseDiffersError):
                await writing
            assert await files.latest() is None
        files.close()


def make_other(tiny: Path) -> Any:
    model = load_model(tiny)
    with torch.no_grad():
        next(model.parameters()).view(-1)[-1] += 1e-3
    return model


# From a run file


def build(tiny: Path, scratch: Path, name: str = "vllm", rank: int = RANK, **arguments) -> list[Any]:
    return build_engines(
        Component(name=name, arguments=arguments),
        EngineSurroundings(
            model_folder=tiny,
            model=ModelConfig(source=str(tiny), max_context=48),
            tokenizer=None,
            scratch=scratch,
            lora_rank=rank,
        ),
    )


async def test_own_servers_begin_with_the_base_and_take_adapters(tiny, tmp_path, source, ask):
    # The fake server in a process of its own, behind the command line of the real one.
    program = tmp_path / "python"
    program.write_text(
        f"""#!/bin/sh
echo "$VLLM_ALLOW_RUNTIME_LORA_UPDATING $*" >> {tmp_path}/commands
for argument; do [ "$last" = --port ] && port=$argument; last=$argument; done
exec {shlex.join(stand_in(["-c"]))} '
import asyncio, sys
sys.path.insert(0, "{Path(__file__).parent}")
from conftest import FakeVLLM
async def main():
    server = FakeVLLM()
    server.port = int(sys.argv[1])
    await server.start()
    await asyncio.Event().wait()
asyncio.run(main())
' $port
"""
    )
    program.chmod(0o755)
    [engine] = build(tiny, tmp_path / "scratch", servers=1, python=str(program))
    assert engine.takes_adapters
    await engine.bring_up()
    await makes(engine, ask, 10, 0)
    await give(engine, source, 1)
    await makes(engine, ask, 31, 1)
    await engine._server.stop()
    assert (await engine.generate(ask())).lost
    await engine.bring_up()
    await makes(engine, ask, 31, 1)
    # No whole weights were written.
    assert not list((tmp_path / "scratch" / "weights").rglob("model.safetensors"))
    await engine.close()
    first, second = (tmp_path / "commands").read_text().splitlines()
    for line in (first, second):
        assert line.startswith("1 -m vllm")
        assert "--enable-lora --max-loras 1 --max-lora-rank 8" in line


async def test_who_takes_adapters(tiny, tmp_path, start_fake):
    server = await start_fake()

    async def engine(**arguments) -> HTTPEngine:
        [made] = await asyncio.to_thread(build, tiny, tmp_path, **arguments)
        return made

    for arguments, takes in [
        ({"servers": 1}, True),
        ({"servers": 1, "takes_adapters": False}, False),
        ({"servers": 1, "rank": 0}, False),
        ({"urls": [server.url]}, False),
        ({"urls": [server.url], "takes_adapters": True}, True),
        ({"servers": 1, "name": "sglang"}, True),
    ]:
        made = await engine(**arguments)
        assert made.takes_adapters is takes
        await made.close()
    with pytest.raises(ConfigError, match="rank 512 at most, got 513"):
        await engine(servers=1, rank=513)


def test_command_lines_ask_for_adapters_only_where_there_will_be_some():
    given = ("/models/m", 8123, 4096, "float32")
    for rank, known in [(1, "1"), (2, "8"), (16, "16"), (33, "64"), (512, "512")]:
        command = Dialect().command(*given, rank)
        assert command[command.index("--max-lora-rank") + 1] == known
    other = SGLang().command(*given, 33)
    assert other[other.index("--max-lora-rank") + 1] == "33"
    assert "--enable-lora" in other
    for dialect in (Dialect(), SGLang()):
        assert not [option for option in dialect.command(*given) if "lora" in option]
