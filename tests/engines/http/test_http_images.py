"""Images at a server: each once a group, and always in the tokens that are trained on."""

from __future__ import annotations

import asyncio
import base64
import io
from typing import Any

import pytest
import torch
from PIL import Image

from forebay.engines.servers.dialects import Dialect, SGLang
from forebay.models.images import as_url, one_for_each

PLACEHOLDER = 9
PROMPT = [1, 9, 9, 9, 9, 2]


def picture(color: tuple[int, ...], mode: str = "RGB") -> bytes:
    Image.new(mode, (3, 2), color).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


RED, BLUE = picture((255, 0, 0)), picture((0, 0, 255))


@pytest.fixture
async def vllm(start_fake, fake_kinds):
    server = await start_fake(fake_kinds["FakeVLLM"])
    server.dialect = Dialect()
    server.dialect.placeholder = PLACEHOLDER
    return server


@pytest.fixture
async def engine(vllm, connect, monkeypatch):
    monkeypatch.setattr("forebay.engines.servers.link._BUSY_FIRST_S", 0.01)
    engine = connect(vllm)
    await engine.bring_up()
    vllm.bodies.clear()
    return engine


def sent(server: Any) -> list[list[bool]]:
    """For each request with images: whether it had their files."""
    return [[part["url"] is not None for part in body.get("content_parts", ())] for body in server.bodies]


async def test_an_image_is_sent_once_a_group(vllm, engine, ask):
    both = [1, 9, 9, 9, 9, 2, 9, 9, 9, 9, 3]
    requests = [ask(PROMPT, images=(RED,)) for _ in range(4)] + [ask(PROMPT, images=(BLUE,)) for _ in range(2)]
    requests += [ask(both, images=(BLUE, RED)), ask()]
    completions = await asyncio.gather(*map(engine.generate, requests))
    assert {one.finish_reason for one in completions} == {"length"}, completions
    # Not read by itself, the name alone says which image it is.
    assert sum(map(sum, sent(vllm))) == 2
    assert sorted(vllm.images.values()) == sorted(map(as_url, (RED, BLUE)))
    assert vllm.calls.count("POST /v1/completions") == 2, "the probe, and the request without images"
    assert {tuple(body["token_ids"]) for body in vllm.bodies if "token_ids" in body} == {(1, 9, 2), (1, 9, 2, 9, 3)}
    # A placeholder that the model writes ends an answer, of a prompt without images too.
    assert {tuple(body.get("sampling_params", body)["stop_token_ids"]) for body in vllm.bodies} == {(9,)}


async def test_the_others_send_an_image_that_the_first_did_not_bring_there(vllm, engine, ask):
    vllm.answers.append((400, "no"))
    requests = [ask(PROMPT, images=(RED,)) for _ in range(3)]
    completions = await asyncio.gather(*map(engine.generate, requests))
    assert sorted(one.finish_reason for one in completions) == ["error", "length", "length"]
    assert sent(vllm) == [[True], [True], [False]]


async def test_an_image_that_the_server_dropped_is_sent_again(vllm, engine, ask):
    for _ in range(2):
        await engine.generate(ask(PROMPT, images=(RED,)))
    vllm.images.clear()
    completion = await engine.generate(ask(PROMPT, images=(RED,)))
    assert completion.finish_reason == "length"
    assert sent(vllm) == [[True], [False], [False], [True]]
    # A server that keeps none gets all files in the end, and is asked once.
    for _ in range(12):
        vllm.images.clear()
        await engine.generate(ask(PROMPT, images=(RED,)))
    vllm.bodies.clear()
    for _ in range(2):
        vllm.images.clear()
        await engine.generate(ask(PROMPT, images=(RED,)))
    assert sent(vllm) == [[True], [True]]


async def test_a_group_whose_image_was_dropped_is_one_reason_to_name_fewer(vllm, engine, ask):
    await engine.generate(ask(PROMPT, images=(RED,)))
    vllm.images.clear()
    await asyncio.gather(*(engine.generate(ask(PROMPT, images=(RED,))) for _ in range(16)))
    assert vllm.images
    vllm.bodies.clear()
    await asyncio.gather(*(engine.generate(ask(PROMPT, images=(BLUE,))) for _ in range(16)))
    assert sum(map(sum, sent(vllm))) == 1


async def test_newer_weights_look_at_an_image_anew(vllm, engine, ask):
    await engine.generate(ask(PROMPT, images=(RED,)))
    await engine.load_weights([("w", torch.ones(2))], 1)
    await engine.generate(ask(PROMPT, images=(RED,)))
    assert sent(vllm) == [[True], [True]]
    assert len(vllm.images) == 2


async def check_other_tokens_are_refused(server, engine, ask):
    """Tokens other than those to train on, and none at all, fail a request."""
    server.tokens_per_image = 5
    other = await engine.generate(ask(PROMPT, images=(RED,)))
    server.tokens_per_image, server.says_prompt = 4, False
    silent = await engine.generate(ask(PROMPT, images=(RED,)))
    server.says_prompt = True
    for completion, said in ((other, "made 7 others"), (silent, "does not say its own")):
        assert (completion.finish_reason, completion.lost, len(completion.response_ids)) == ("error", False, 0)
        expected = f"has images and 6 tokens, and the server {said}: use vLLM 0.32 or SGLang 0.5.13"
        assert expected in completion.error_msg


async def test_other_tokens_than_those_to_train_on_fail_the_request(vllm, engine, ask):
    assert (await engine.generate(ask(PROMPT, images=(RED,)))).finish_reason == "length"
    # By its name alone, which is not at fault.
    await check_other_tokens_are_refused(vllm, engine, ask)
    assert len(vllm.bodies) == 3
    assert (await engine.generate(ask(PROMPT, images=(RED,)))).finish_reason == "length"


async def test_a_request_with_images_goes_on_over_new_weights(vllm, engine, ask):
    vllm.auto = False
    running = asyncio.create_task(engine.generate(ask(PROMPT, images=(RED,))))
    await vllm.has_jobs(1)
    vllm.make(2)
    await engine.load_weights([("w", torch.ones(2))], 1)
    await vllm.has_jobs(1)
    vllm.make(2)
    completion = await running
    assert completion.model_steps.tolist() == [0, 0, 1, 1]
    assert vllm.bodies[-1]["token_ids"] == [1, 9, 2, 10, 10]


@pytest.mark.parametrize("kind", ["FakeSGLang", "IncrementalSGLang"])
async def test_sglang_gets_files_and_says_its_tokens(kind, start_fake, fake_kinds, connect, ask):
    server = await start_fake(fake_kinds[kind])
    server.dialect = SGLang()
    server.dialect.placeholder = PLACEHOLDER
    engine = connect(server)
    await engine.bring_up()
    both = ask([1, 9, 9, 9, 9, 2, 9, 9, 9, 9, 3], images=(BLUE, RED))
    assert [(await engine.generate(one)).finish_reason for one in (both, ask())] == ["length"] * 2
    *_, with_images, without = server.bodies
    assert with_images["input_ids"] == [1, 9, 2, 9, 3]
    assert with_images["image_data"] == [as_url(BLUE), as_url(RED)]
    assert "image_data" not in without
    await check_other_tokens_are_refused(server, engine, ask)
    server.auto = False
    running = asyncio.create_task(engine.generate(ask(PROMPT, images=(RED,))))
    await server.has_jobs(1)
    server.make(2)
    await engine.load_weights([("w", torch.ones(2))], 1)
    await server.has_jobs(1)
    server.make(2)
    assert (await running).model_steps.tolist() == [0, 0, 1, 1]
    assert (server.bodies[-1]["input_ids"], len(server.bodies[-1]["image_data"])) == ([1, 9, 2, 10, 10], 1)


def test_images_side_by_side_are_of_one_size(ask):
    ids = ask([9, 9, 9, 9, 1, 9, 9, 2]).input_ids
    assert one_for_each(ids, (RED,) * 3, PLACEHOLDER) == [9, 9, 1, 9, 2]
    assert one_for_each(ids, (RED,) * 2, PLACEHOLDER) == [9, 1, 9, 2]
    assert one_for_each(ids[4:5], (RED,), PLACEHOLDER) == [1]


def test_others_make_the_same_pixels_of_what_they_get():
    def sent_picture(image: bytes) -> Image.Image:
        return Image.open(io.BytesIO(base64.b64decode(as_url(image).partition(",")[2])))

    assert base64.b64decode(as_url(RED).partition(",")[2]) == RED
    for mode, color in (("RGBA", (9, 99, 200, 0)), ("L", (7,)), ("P", (3,))):
        there = sent_picture(picture(color, mode))
        assert there.mode == "RGB"
        assert there.tobytes() == Image.new(mode, (3, 2), color).convert("RGB").tobytes()
