"""Scripted inference servers on the loopback interface, which tests step token by token and kill."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import itertools
import json
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from forebay.engines import GenerateRequest
from forebay.engines.servers.dialects import Dialect, SGLang
from forebay.engines.servers.engine import HTTPEngine
from forebay.engines.servers.sender import PROGRAM
from forebay.engines.weights.files import WeightFiles
from forebay.types import SampleParams

CONTEXT = 64
LOGPROB = -0.5
LOADS = ("/collective_rpc", "/update_weights_from_disk", "/load_lora_adapter", "/update_weights")
"""Where weights are loaded."""


@dataclass(eq=False)
class Job:
    """A request at a fake server."""

    prompt: list[int]
    max_tokens: int
    stop_ids: set[int]
    per_piece: int
    made: list[int] = field(default_factory=list)
    num_sent: int = 0
    end: str | None = None
    events: asyncio.Queue[dict[str, Any] | str | None] = field(default_factory=asyncio.Queue)
    logprob: float = LOGPROB
    adapter: str | None = None
    spans: list[tuple[str, int]] = field(default_factory=list)
    """Versions of the weights, with the number of the first token that each made."""
    by_token: bool = False
    """Whether it came to vLLM's endpoint for tokens."""
    says_prompt: bool = False
    """Whether SGLang says the prompt's token ids."""


class FakeServer:
    """A server whose tokens are ``10 + step of its weights`` and are made when the test says so.

    With adapters they are ``30 + step of the adapters``.
    """

    tokens_per_image = 4
    says_prompt = True

    def expanded(self, ids: list[int], images: list[Any]) -> list[int]:
        """Prompts have one placeholder for each image, and become those of the model's own processor."""
        if not images:
            return ids
        assert ids.count(self.dialect.placeholder) == len(images)
        return [
            each
            for token in ids
            for each in [token] * (self.tokens_per_image if token == self.dialect.placeholder else 1)
        ]

    def __init__(self) -> None:
        self.auto = True
        """Make all tokens of a request at once."""
        self.token: Callable[[Job], int] | None = None
        self.answers: list[tuple[int, str]] = []
        """Status and body of the next generations, instead of tokens."""
        self.retry_after = "0"
        self.healthy = True
        self.hangs = False
        """As a server whose model's process does: it is healthy, but makes and does nothing."""
        self.key: str | None = None
        self.num_failing_resets = 0
        self.context = CONTEXT
        self.knows_control = True
        self.capacity: tuple[int, int] | None = None
        """The requests that it runs at once and the tokens of its cache, if it tells."""
        self.load_error: str | None = None
        self.knows_lora = True
        self.lora_calls = 0
        """Adapters that it was given, also those that it refused."""
        self.failing: dict[str, str] = {}
        """By path: ``refuses`` (500), ``dies`` (connections break), ``hangs``, or ``lies`` (does nothing)."""
        self.fails_once = False
        self.stuck: asyncio.Event | None = None
        """Loading weights takes until this is set."""
        self.processed_logprobs = True
        self.bodies: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self._connections: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0
        self._reset()

    def _reset(self) -> None:
        self.step_of_weights, self.version, self.state = 0, "default", "running"
        self.asleep: set[str] = set()
        """The parts of its memory that it has given back."""
        self.received: dict[str, torch.Tensor] = {}
        """Weights that came in buckets."""
        self.is_updating = self.lacks_weights = False
        self.jobs: list[Job] = []
        self.loaded: list[Path] = []
        self.adapters: dict[str, int] = {}
        """Their steps, by name."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._reset()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """As SIGKILL does: all connections break."""
        assert self._server is not None
        self._server.close()
        for writer in self._connections:
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()
        self._server = None

    async def stop(self) -> None:
        if self._server is not None:
            await self.kill()

    async def has_jobs(self, count: int) -> None:
        while len(self.jobs) < count:
            await asyncio.sleep(0.001)

    def make(self, count: int = 1) -> None:
        """Make so many tokens of every request."""
        for job in list(self.jobs):
            for _ in range(count):
                if self.state == "running" and job.end is None:
                    self._make_one(job)

    def _make_one(self, job: Job) -> None:
        assert not self.asleep, "a sleeping server makes no tokens"
        if not job.spans or job.spans[-1][0] != self.version:
            job.spans.append((self.version, len(job.made)))
        own = 10 + self.step_of_weights if job.adapter is None else 30 + self.adapters[job.adapter]
        job.made.append(own if self.token is None else self.token(job))
        if job.made[-1] in job.stop_ids:
            self._end(job, "stop")
        elif len(job.made) == job.max_tokens:
            self._end(job, "length")
        elif len(job.made) == 1 or len(job.made) - job.num_sent >= job.per_piece:
            self._send(job)

    def _end(self, job: Job, reason: str) -> None:
        job.end = reason
        # As vLLM does: nothing is said of a request that was aborted before its first token.
        if job.made:
            self._send(job)
        job.events.put_nowait("[DONE]")
        job.events.put_nowait(None)
        self.jobs.remove(job)

    def _send(self, job: Job) -> None:
        job.events.put_nowait(self.event(job, job.num_sent))
        job.num_sent = len(job.made)

    # What the dialects differ in

    dialect: Dialect
    guarded = "/"
    """Paths for which it wants a key."""
    generate_paths: tuple[str, ...] = ()
    is_ready = True

    def job(self, body: dict[str, Any]) -> Job:
        raise NotImplementedError

    def event(self, job: Job, start: int) -> dict[str, Any]:
        raise NotImplementedError

    def control(self, path: str, query: dict[str, str], body: Any) -> Any:
        """The answer, or None for an unknown path."""
        raise NotImplementedError

    # Pausing and loading, whatever it is called

    def _pause(self, *, abort: bool) -> None:
        self.state = "paused"
        for job in list(self.jobs) if abort else ():
            self._end(job, "abort")

    def _resume(self) -> None:
        assert not self.asleep, "resumed while asleep"
        assert not self.lacks_weights, "resumed without weights"
        self.state = "running"
        if self.auto:
            self.make(CONTEXT)

    def _load(self, folder: str) -> None:
        assert self.state == "paused", "weights were loaded while requests ran"
        assert list(Path(folder).glob("model*.safetensors"))
        assert "weights" not in self.asleep, "weights were loaded into memory that is not there"
        self.loaded.append(Path(folder))
        self.lacks_weights = False
        self.step_of_weights = _step_of(folder)

    def _sleep(self, *, keep_weights: bool) -> None:
        assert self.state == "paused"
        assert not self.jobs
        self.asleep = {"weights", "kv_cache"}
        self.lacks_weights = self.lacks_weights or not keep_weights

    def _spans(self, job: Job) -> list[dict[str, Any]]:
        ends = [start for _, start in job.spans[1:]] + [len(job.made)]
        return [{"version": v, "start": s, "end": e} for (v, s), e in zip(job.spans, ends, strict=True)]

    def _load_adapters(self, name: str, folder: str) -> None:
        assert self.state == "paused", "adapters were loaded while requests ran"
        assert {file.name for file in Path(folder).iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
        self.loaded.append(Path(folder))
        self.adapters[name] = _step_of(folder)

    # HTTP

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._connections.add(writer)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while await self._answer(reader, writer):
                    pass
        finally:
            self._connections.discard(writer)
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, target, _ = head.split("\r\n", 1)[0].split(" ")
        length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
        text = await reader.readexactly(int(length[1])) if length else b""
        body, parts = json.loads(text) if text else None, urlsplit(target)
        self.calls.append(f"{method} {target}")
        has_key = self.key is None or f"uthorization: Bearer {self.key}\r\n" in head
        if not has_key and parts.path.startswith(self.guarded):
            _write(writer, 401, "who are you?")
            return True
        if parts.path in self.generate_paths:
            return await self._generate(body, reader, writer)
        if self.stuck is not None and parts.path.endswith(LOADS):
            await self.stuck.wait()
        fault = (self.failing.pop if self.fails_once else self.failing.get)(parts.path, None)
        if fault == "dies":
            for other in self._connections:
                other.transport.abort()
            return False
        if fault == "hangs":
            await reader.read(1)
            return False
        if fault:
            _write(writer, 500 if fault == "refuses" else 200, "{}")
            return True
        if self.hangs and parts.path not in ("/health", "/v1/models", self.dialect.health.path):
            await reader.read(1)
            return False
        if (error := await self.ask_workers(parts.path, body)) is not None:
            _write(writer, 500, error)
            return True
        status, answer = self._control(parts.path, dict(parse_qsl(parts.query)), body)
        _write(writer, status, json.dumps(answer))
        await writer.drain()
        return True

    async def ask_workers(self, path: str, body: Any) -> str | None:
        """Why processes beside this one failed, if there are any that have to do something."""

    def _control(self, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if path in ("/health", self.dialect.health.path) and not self.healthy:
            return 503, {}
        if path == "/health":
            return (200 if self.is_ready else 503), {}
        if path == "/v1/models":
            return 200, {"data": [{"id": "policy", "max_model_len": self.context}]}
        answer = self.control(path, query, body) if self.knows_control else None
        if answer is None:
            return 404, {"detail": "Not Found"}
        return (500 if "error" in answer else 200), answer

    async def _generate(
        self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        self.bodies.append(body)
        if self.answers:
            status, text = self.answers.pop(0)
            kind = "text/event-stream" if status == 200 else "application/json"
            _write(writer, status, text, kind=f"{kind}\r\nretry-after: {self.retry_after}")
            await writer.drain()
            return True
        job = self.job(body)
        if job.adapter is not None and job.adapter not in self.adapters:
            _write(writer, 404, f"The model {job.adapter!r} does not exist")
            return True
        self.jobs.append(job)
        # A probe is not stepped by tests.
        if (self.auto or job.max_tokens == 1) and self.state == "running" and not self.hangs:
            for _ in range(job.max_tokens):
                if job.end is None:
                    self._make_one(job)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n")
        gone = asyncio.create_task(reader.read(1))
        try:
            while True:
                got = asyncio.create_task(job.events.get())
                await asyncio.wait([got, gone], return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    got.cancel()
                    return False
                if (event := got.result()) is None:
                    writer.write(b"0\r\n\r\n")
                    # The reader's task would swallow the first byte of the next request.
                    return False
                data = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
                writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                await writer.drain()
        finally:
            gone.cancel()
            if job in self.jobs:
                self.jobs.remove(job)


def _step_of(folder: str) -> int:
    match = re.search(r"step_(\d+)", folder)
    assert match
    return int(match[1])


def _write(writer: asyncio.StreamWriter, status: int, text: str, kind: str = "application/json") -> None:
    data = text.encode()
    writer.write(f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)


def _as_text(experts: Any) -> str:
    file = io.BytesIO()
    np.save(file, experts)
    return base64.b64encode(file.getvalue()).decode()


class FakeVLLM(FakeServer):
    dialect: Dialect = Dialect()
    guarded = "/v1"
    experts: Callable[[Job], Any] | None = None
    """Those that it says it sent a request's tokens to."""
    generate_paths = (Dialect.generate_path, Dialect.tokens_path)

    def _reset(self) -> None:
        super()._reset()
        self.images: dict[str, str] = {}
        """The images that it has, by the names that it was told."""

    async def _generate(
        self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        for part in body.get("content_parts", ()):
            assert part["type"] == "image_url"
            if part["url"] is not None:
                self.images[part["uuid"]] = part["url"]
            elif part["uuid"] not in self.images:
                self.bodies.append(body)
                _write(writer, 400, "Cache miss for image at index 0 but data is not provided.")
                return True
        return await super()._generate(body, reader, writer)

    def job(self, body: dict[str, Any]) -> Job:
        by_token = "token_ids" in body
        assert by_token or not self.dialect.by_token
        if by_token:
            assert bool(body.get("cache_salt")) is self.dialect.keeps
            prompt = self.expanded(body["token_ids"], body.get("content_parts", []))
            body = {**body, **body["sampling_params"], "prompt": prompt}
        certain = body["top_p"] < 0.01 and self.processed_logprobs
        return Job(
            body["prompt"],
            body["max_tokens"],
            set(body["stop_token_ids"]),
            body["stream_interval"],
            logprob=0.0 if certain else LOGPROB,
            adapter=None if body["model"] == "policy" else body["model"],
            by_token=by_token,
        )

    def event(self, job: Job, start: int) -> dict[str, Any]:
        new = job.made[start:]
        if job.by_token:
            content = [{"token_id": token, "logprob": job.logprob} for token in new]
            choice = {"index": 0, "token_ids": new, "finish_reason": job.end, "logprobs": {"content": content}}
            if job.end and self.experts is not None:
                choice["routed_experts"] = _as_text(self.experts(job))
            said = {"prompt_token_ids": job.prompt} if self.says_prompt and not start else {}
            return {"choices": [{**choice, "weight_versions": self._spans(job) if job.end else None}], **said}
        logprobs = {"token_logprobs": [job.logprob] * len(new), "tokens": ["?"] * len(new)}
        choice = {"index": 0, "text": "?", "token_ids": new, "finish_reason": job.end, "logprobs": logprobs}
        return {"id": "cmpl-1", "choices": [choice if new else {**choice, "logprobs": None}]}

    def control(self, path: str, query: dict[str, str], body: Any) -> Any:
        if path == "/pause":
            self._pause(abort=query["mode"] == "abort")
        elif path == "/resume":
            self._resume()
        elif path == "/collective_rpc":
            if self.load_error:
                return {"error": self.load_error}
            assert body["method"] == "reload_weights"
            self._load(body["kwargs"]["weights_path"])
        elif path == "/v1/load_lora_adapter":
            self.lora_calls += 1
            if not self.knows_lora:
                return None
            assert body["load_inplace"]
            self._load_adapters(body["lora_name"], body["lora_path"])
        elif path == "/reset_prefix_cache":
            self.num_failing_resets -= 1
            return {"success": self.num_failing_resets < 0}
        elif path == "/is_paused":
            return {"is_paused": self.state == "paused"}
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        elif path == "/sleep":
            self._pause(abort=True)
            self._sleep(keep_weights=query["level"] == "1")
        elif path == "/wake_up":
            self.asleep.remove(query["tags"])
            if not self.asleep:
                self.state = "running"
            return {"status": "sleeping" if self.asleep else "awake"}
        elif path == "/init_weight_transfer_engine":
            assert body["init_info"]["packed"] is True
        elif path in ("/start_weight_update", "/update_weights", "/finish_weight_update"):
            assert self.state == "paused", "weights changed while requests ran"
            assert "weights" not in self.asleep
            if self.is_updating is (path == "/start_weight_update"):
                return {"error": f"{path} in the wrong order"}
            self.is_updating = path != "/finish_weight_update"
            if path == "/update_weights":
                self._receive(body["update_info"])
            if path == "/finish_weight_update":
                self.lacks_weights = False
                self.step_of_weights = int(next(iter(self.received.values())).flatten()[0])
        elif path == "/weight_info":
            return {"weight_version": self.version}
        elif path == "/server_info" and self.capacity:
            assert query == {"config_format": "json"}
            parts = {"max_num_seqs": self.capacity[0] // 2}, {"data_parallel_size": 2}
            cache = {"num_gpu_blocks": self.capacity[1] // 16, "block_size": 16}
            config = dict(zip(("scheduler_config", "parallel_config"), parts, strict=True))
            return {"vllm_config": {**config, "cache_config": cache}}
        else:
            return None
        return {}

    def _receive(self, info: dict[str, Any]) -> None:
        data = torch.from_file(info["path"], shared=True, size=sum(info["tensor_sizes"]), dtype=torch.uint8)
        parts = data.split(info["tensor_sizes"])
        for name, dtype, shape, part in zip(info["names"], info["dtype_names"], info["shapes"], parts, strict=True):
            self.received[name] = part.clone().view(getattr(torch, dtype)).view(shape)


class FarVLLM(FakeVLLM):
    """One with Forebay's plug-in and a model in processes of their own, which map no memory of a trainer."""

    num_workers, inside, device = 1, (), "cpu"
    """`inside`: the beginning of the command line of a worker, to start it on another host."""

    def __init__(self) -> None:
        super().__init__()
        self.workers: list[asyncio.subprocess.Process] = []
        self.has_plugin = True
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        await super().start()
        await self.start_workers()

    async def start_workers(self, *fatal: int) -> None:
        """Anew; `fatal`: a signal that the first sends itself, and the number of slices that it takes before."""
        await self.end_workers()
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
        for number in range(self.num_workers):
            own = map(str, fatal if number == 0 else ())
            line = [*self.inside, sys.executable, str(_WORKER), str(PROGRAM.parent), *own]
            self.workers.append(await asyncio.create_subprocess_exec(*line, **pipes))
        for worker in self.workers:
            assert worker.stdout is not None
            assert json.loads(await worker.stdout.readline()) == {}

    async def end_workers(self) -> None:
        for worker in self.workers:
            with contextlib.suppress(ProcessLookupError):
                worker.kill()
            await worker.wait()
        self.workers = []

    async def kill(self) -> None:
        await super().kill()
        await self.end_workers()

    async def ask_workers(self, path: str, body: Any) -> str | None:
        # One thing at a time, and no word of itself before: so is vLLM while its workers do something.
        if path in ("/health", "/v1/models"):
            return None
        async with self._turn:
            return await self._ask_workers(path, body)

    async def _ask_workers(self, path: str, body: Any) -> str | None:
        if path == "/init_weight_transfer_engine":
            return await self._tell("init", lambda _: body["init_info"])
        if path == "/update_weights":
            # What a server on another machine could make of it.
            return await self._tell("update", lambda _: {**body["update_info"], "path": "/none"})
        if path == "/finish_weight_update" and self.is_updating:
            with tempfile.TemporaryDirectory() as folder:
                error = await self._tell("dump", lambda number: f"{folder}/{number}")
                of_each = (
                    [load_file(f"{folder}/{number}") for number in range(self.num_workers)] if not error else [{}]
                )
            self.received = of_each[0]
            for other in of_each[1:]:
                assert other.keys() == self.received.keys()
                assert all(torch.equal(other[name], tensor) for name, tensor in self.received.items())
            return error
        return None

    async def _tell(self, method: str, argument: Callable[[int], Any]) -> str | None:
        answers = []
        for number, worker in enumerate(self.workers):
            assert worker.stdin is not None
            worker.stdin.write(json.dumps([method, argument(number)]).encode() + b"\n")
        for worker in self.workers:
            assert worker.stdout is not None
            if not (line := await worker.stdout.readline()):
                # It ends with them.
                for writer in self._connections:
                    writer.transport.abort()
                self._server.close()
                return "a worker has ended"
            answers.append(json.loads(line))
        return next((answer["error"] for answer in answers if "error" in answer), None)

    def control(self, path: str, query: dict[str, str], body: Any) -> Any:
        if path == "/get_world_size":
            return {"world_size": self.num_workers}
        if path == "/server_info":
            config = {"weight_transfer_config": {"backend": "forebay" if self.has_plugin else "nccl"}}
            return {"vllm_config": {**config, "device_config": {"device": self.device}}}
        return super().control(path, query, body)

    def _receive(self, info: dict[str, Any]) -> None:
        """Its workers have."""


_WORKER = Path(__file__).with_name("plugin_worker.py")


class FakeSGLang(FakeServer):
    dialect: Dialect = SGLang()
    generate_paths = ("/generate",)
    incremental = False

    @property
    def is_ready(self) -> bool:
        """Its health is one made token, as long as it is not told otherwise."""
        return self.state == "running"

    def job(self, body: dict[str, Any]) -> Job:
        params = body["sampling_params"]
        return Job(
            self.expanded(body["input_ids"], body.get("image_data", [])),
            params["max_new_tokens"],
            set(params["stop_token_ids"]),
            params["stream_interval"],
            adapter=body.get("lora_path"),
            says_prompt=body.get("return_prompt_token_ids", False) and self.says_prompt,
        )

    def event(self, job: Job, start: int) -> dict[str, Any]:
        shown = job.made[start:] if self.incremental else job.made
        return {
            "text": "?",
            **({"prompt_token_ids": job.prompt} if job.says_prompt else {}),
            "output_ids": shown,
            "meta_info": {
                "completion_tokens": len(job.made),
                "output_token_logprobs": [[job.logprob, token_id, None] for token_id in shown],
                "finish_reason": job.end and {"type": job.end},
                "weight_version": self.version,
                **({"weight_versions": self._spans(job)} if self.dialect.keeps else {}),
            },
        }

    def control(self, path: str, query: dict[str, str], body: Any) -> Any:
        if path == "/pause_generation":
            self._pause(abort=body["mode"] == "abort")
        elif path == "/continue_generation":
            self._resume()
        elif path == "/update_weights_from_disk":
            if self.load_error:
                return {"success": False, "message": self.load_error}
            self._load(body["model_path"])
            self.version = body["weight_version"]
            return {"success": True, "message": ""}
        elif path == "/load_lora_adapter":
            self.lora_calls += 1
            if not self.knows_lora or body["lora_name"] in self.adapters:
                return {"success": False, "error_message": "not enabled, or loaded already"}
            self._load_adapters(body["lora_name"], body["lora_path"])
            return {"success": True}
        elif path == "/unload_lora_adapter":
            assert self.state == "paused"
            return {"success": self.adapters.pop(body["lora_name"], None) is not None}
        elif path == "/update_weight_version":
            assert body["abort_all_requests"] is False
            self.version = body["new_version"]
            return {"success": True}
        elif path == "/get_model_info":
            return {"weight_version": self.version}
        elif path == "/get_server_info":
            if self.capacity is None:
                return {"internal_states": [{"memory_usage": {}}]}
            requests, tokens = (each // 2 for each in self.capacity)
            rank = {"effective_max_running_requests_per_dp": requests}
            states = [{**rank, "memory_usage": {"token_capacity": tokens}}] * 2
            return {"page_size": 16, "internal_states": states}
        elif path == "/release_memory_occupation":
            assert set(body["tags"]) == {"weights", "kv_cache"}
            self._sleep(keep_weights=True)
        elif path == "/resume_memory_occupation":
            self.asleep -= set(body["tags"])
        else:
            return None
        return {}


class IncrementalSGLang(FakeSGLang):
    incremental = True


@pytest.fixture(scope="session")
def fake_kinds() -> dict[str, type[FakeServer]]:
    return {kind.__name__: kind for kind in (FakeVLLM, FarVLLM, FakeSGLang, IncrementalSGLang)}


@pytest.fixture
async def start_fake() -> AsyncIterator[Callable[..., Any]]:
    """Starts fake servers, and stops them after the test."""
    started: list[FakeServer] = []

    async def start(kind: type[FakeServer] = FakeVLLM) -> FakeServer:
        server = kind()
        await server.start()
        started.append(server)
        return server

    yield start
    for server in started:
        await server.stop()


@pytest.fixture
async def connect(tmp_path: Path) -> AsyncIterator[Callable[..., HTTPEngine]]:
    """Makes engines, all with the same weight files, and closes them after the test."""
    files = WeightFiles(tmp_path / "weights", tmp_path)
    made: list[HTTPEngine] = []

    def make(server: FakeServer, bucket_device: str | None = None, **arguments: Any) -> HTTPEngine:
        files.bucket_device = bucket_device
        given = {"model": "policy", "max_context_tokens": CONTEXT, "files": files, "dialect": server.dialect}
        made.append(HTTPEngine(server.url, **{**given, **arguments}))
        return made[-1]

    yield make
    for engine in made:
        await engine.close()


@pytest.fixture
def ask() -> Callable[..., GenerateRequest]:
    """Makes requests, each with an id of its own unless one is given."""
    numbers = itertools.count()

    def make(
        ids: Any = (1, 2, 3), *, max_tokens: int = 4, earlier: int = 0, limit_s: float | None = None, **params: Any
    ) -> GenerateRequest:
        name = params.pop("request_id", f"r{next(numbers)}")
        return GenerateRequest(
            request_id=name,
            input_ids=np.asarray(ids, np.int32),
            images=params.pop("images", ()),
            params=SampleParams(max_tokens=max_tokens + earlier, **params),
            max_tokens=max_tokens,
            seed=7,
            time_limit_s=limit_s,
        )

    return make
