"""The requests that decode together: prefill, one token per row and step, and leaving. No asyncio in here.

::

    admit(rows) -- one prefill per distinct prompt --> KV rows
    step()      -- one forward over all rows, one token each --> rows that finished, with their Completion
    abort(rows) --> their Completion so far

A row enters with all but the last of its input tokens in the cache; that last token is what its first step
feeds. So every token is drawn by the same code, and rows with one prompt share its prefill.

Numerics: rows start at column 0, widths are multiples of 16 and no matrix product has fewer than
`MIN_ROWS` rows. With the CPU kernels of PyTorch in float32 this makes a request's logits the same to the bit
whatever runs beside it; elsewhere they agree to rounding.

Shapes: B running rows, L columns of a prefill, P distinct prompts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import DynamicCache

from forebay.engines.base import Completion, GenerateRequest
from forebay.engines.local import sampling
from forebay.engines.local.kv_cache import RowCache, round_up_columns
from forebay.engines.local.stopping import StopTexts
from forebay.types import IntArray

MIN_ROWS = 4
"""Smaller matrix products take other kernels, which round differently; spare rows fill up to this."""

_PREFILL_LENGTH_RATIO = 1.25
"""Longest over shortest prompt of one prefill pass: padding costs no more than that, and prompts of all
lengths up to some thousands take a few dozen passes."""

_NO_STOP_ID = -1


class DecodeBatch:
    """Rows that decode in lockstep over one model.

    Invariant: rows 0..size-1 run and all per-row arrays agree on the order.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_context_tokens: int,
        prefill_tokens: int,
        eos_token_ids: Iterable[int] = (),
        tokenizer: Any = None,
    ) -> None:
        self.model = model
        self.max_context_tokens = max_context_tokens
        self._prefill_tokens = prefill_tokens
        self._eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self._stop_texts = None if tokenizer is None else StopTexts(tokenizer)
        self._device = next(model.parameters()).device
        self._cache = RowCache(model.config.get_text_config().num_hidden_layers)
        self._requests: list[Row] = []
        self._rows = np.zeros(MIN_ROWS, _ROW_FIELDS)
        self._made = np.zeros((MIN_ROWS, 0), _TOKEN_FIELDS)
        self._stop_ids = np.full((MIN_ROWS, 1), _NO_STOP_ID, np.int64)

    @property
    def size(self) -> int:
        """How many rows run."""
        return len(self._requests)

    def num_made(self, request_id: str) -> int:
        """Tokens of a running request, else 0; from another thread it may be a step behind."""
        for place, row in enumerate(list(self._requests)):
            if row.request.request_id == request_id:
                return int(self._rows["num_made"][place])
        return 0

    def release(self) -> None:
        """Free the cache's memory; no row may run."""
        assert not self._requests, f"{self.size} rows run"
        self._cache.release()

    def clear(self) -> None:
        """Forget all rows."""
        self._requests.clear()

    # Joining

    @torch.inference_mode()
    def admit(self, rows: Sequence[Row]) -> None:
        """Prefill these rows' inputs and let them run from the next `step` on.

        When a forward pass raises, none of them runs.
        """
        by_prompt: dict[bytes, list[int]] = {}
        for place, row in enumerate(rows, start=self.size):
            prompt = np.asarray(row.request.input_ids[:-1], np.int32)
            by_prompt.setdefault(prompt.tobytes(), []).append(place)
        longest = max(len(row.request.input_ids) for row in rows)
        num_rows = max(self.size + len(rows), MIN_ROWS)
        if num_rows > self._cache.num_rows:
            # By half at least, which keeps copying rare.
            num_rows = max(num_rows, self._cache.num_rows * 3 // 2)
        self._cache.reserve(num_rows, longest)
        shared = sorted(by_prompt.items(), key=lambda item: len(item[0]))
        for chunk in self._chunks([(np.frombuffer(ids, np.int32), places) for ids, places in shared]):
            self._prefill(chunk)
        self._enter(rows)

    def _chunks(self, shared: list[tuple[IntArray, list[int]]]) -> list[list[tuple[IntArray, list[int]]]]:
        """Split prompts in order of length into passes of like length, each within the token budget."""
        chunks: list[list[tuple[IntArray, list[int]]]] = []
        shortest = -1
        for item in shared:
            padded = round_up_columns(len(item[0]))
            fits = chunks and (len(chunks[-1]) + 1) * padded <= self._prefill_tokens
            if not (fits and padded <= shortest * _PREFILL_LENGTH_RATIO):
                chunks.append([])
                shortest = padded
            chunks[-1].append(item)
        return chunks

    def _prefill(self, chunk: list[tuple[IntArray, list[int]]]) -> None:
        """Compute P distinct prompts and copy each to the rows that share it."""
        places = torch.tensor([place for _, places in chunk for place in places], device=self._device)
        length = round_up_columns(max(len(ids) for ids, _ in chunk))
        if length == 0:
            self._cache.clear(places)
            return
        # Padding follows the prompt, where the causal mask hides it.
        ids_PL = np.zeros((len(chunk), length), np.int64)
        for target, (ids, _) in zip(ids_PL, chunk, strict=True):
            target[: len(ids)] = ids
        # The padding may reach beyond the context, where a model with learned positions has none.
        positions_L = torch.arange(length, device=self._device).clamp(max=self.max_context_tokens - 1)
        prefilled = DynamicCache()
        self.model.base_model(
            input_ids=torch.from_numpy(ids_PL).to(self._device),
            position_ids=positions_L.expand(len(chunk), -1),
            past_key_values=prefilled,
            use_cache=True,
        )
        sources = [source for source, (_, places) in enumerate(chunk) for _ in places]
        self._cache.store(prefilled, torch.tensor(sources, device=self._device), places)

    def _enter(self, rows: Sequence[Row]) -> None:
        first = self.size
        stop_ids = [(*self._eos_token_ids, *row.request.params.stop_token_ids) for row in rows]
        num_rows = self._cache.num_rows
        self._rows, self._made = _grown(self._rows, num_rows), _grown(self._made, num_rows)
        num_stop_ids = max(len(ids) for ids in stop_ids)
        self._stop_ids = _grown(self._stop_ids, num_rows, num_stop_ids, fill=_NO_STOP_ID)
        for place, (row, stops) in enumerate(zip(rows, stop_ids, strict=True), start=first):
            request = row.request
            length = len(request.input_ids)
            self._rows[place] = (
                request.input_ids[-1],
                length - 1,
                0,
                min(request.max_tokens, self.max_context_tokens - length),
                sampling.seed_state(request.seed),
                request.num_earlier,
                request.params.temperature,
                request.params.top_k,
                request.params.top_p,
            )
            self._stop_ids[place] = _NO_STOP_ID
            self._stop_ids[place, : len(stops)] = stops
        # Last, so that another thread never sees a request before its row.
        self._requests.extend(rows)

    # Decoding

    @torch.inference_mode()
    def step(self, model_step: int) -> list[Ended]:
        """Add one token, labeled `model_step`, to every row; take out and return the rows that finished."""
        logits_BV = self._forward()
        rows = self._rows[: self.size]
        how = sampling.Sampling(rows["temperature"].copy(), rows["top_k"].copy(), rows["top_p"].copy())
        drawn = sampling.uniforms(rows["stream"], rows["num_earlier"] + rows["num_made"])
        ids, logprobs = sampling.draw(logits_BV, how, drawn)
        made = int(rows["num_made"].max()) + 1
        if made > self._made.shape[1]:
            self._made = _grown(self._made, len(self._made), 2 * made)
        new = np.arange(self.size), rows["num_made"]
        self._made["id"][new], self._made["logprob"][new] = ids, logprobs
        self._made["model_step"][new] = model_step
        rows["token"] = ids
        rows["position"] += 1
        rows["num_made"] += 1
        return self._take_finished(rows, ids, logprobs)

    def _forward(self) -> torch.Tensor:
        """The logits that follow each row's last token: [B, V]."""
        num_rows = max(self.size, MIN_ROWS)
        self._rows["token"][self.size : num_rows] = 0
        self._rows["position"][self.size : num_rows] = 0
        positions = self._rows["position"][:num_rows]
        needed = int(positions.max()) + 1
        if needed > self._cache.num_columns:
            # By half, which keeps copying rare, but never past what the rows can still reach.
            running = self._rows[: self.size]
            reachable = int((running["position"] + running["limit"] - running["num_made"]).max())
            wanted = min(self._cache.num_columns * 3 // 2, reachable)
            self._cache.reserve(self._cache.num_rows, max(wanted, needed))
        width = round_up_columns(needed)
        positions_B = torch.from_numpy(positions.copy()).to(self._device)
        ids_B = torch.from_numpy(self._rows["token"][:num_rows].copy()).to(self._device)
        self._cache.set_step(positions_B, width)
        visible_BC = torch.arange(width, device=self._device) <= positions_B[:, None]
        mask_BC = torch.zeros(visible_BC.shape, dtype=self.model.dtype, device=self._device)
        mask_BC.masked_fill_(~visible_BC, torch.finfo(self.model.dtype).min)
        output = self.model(
            input_ids=ids_B[:, None],
            position_ids=positions_B[:, None],
            attention_mask=mask_BC[:, None, None, :],
            past_key_values=self._cache,
            use_cache=True,
        )
        logits: torch.Tensor = output.logits[: self.size, -1]
        return logits

    # Leaving

    @torch.inference_mode()
    def abort(self, rows: Iterable[Row]) -> list[Ended]:
        """Take out those of these rows that run, with the tokens made so far."""
        wanted = set(rows)
        places = [place for place, row in enumerate(self._requests) if row in wanted]
        return self._take_out(dict.fromkeys(places, "abort"))

    @torch.inference_mode()
    def fail(self, message: str) -> list[Ended]:
        """Take out every row: a forward pass failed for all of them."""
        return self._take_out(dict.fromkeys(range(self.size), "error"), message)

    def _take_finished(self, rows: Any, ids: IntArray, logprobs: NDArray[np.float32]) -> list[Ended]:
        stopped = (self._stop_ids[: self.size] == ids[:, None]).any(axis=1)
        for place, row in enumerate(self._requests):
            if stop := row.request.params.stop:
                assert self._stop_texts is not None, "stop texts need a tokenizer"
                tail = self._tail(place, row.request, self._stop_texts.num_tail_tokens(stop))
                stopped[place] |= self._stop_texts.completed(stop, tail)
        broken = ~np.isfinite(logprobs)
        full = rows["num_made"] >= rows["limit"]
        reasons = {
            int(place): "error" if broken[place] else "stop" if stopped[place] else "length"
            for place in np.flatnonzero(stopped | broken | full)
        }
        return self._take_out(reasons, "the model's logits are not finite: its weights may have diverged")

    def _tail(self, place: int, request: GenerateRequest, count: int) -> list[int]:
        """The last tokens of the response, with those that earlier calls of the same rollout made."""
        num_made = int(self._rows["num_made"][place])
        tail: list[int] = self._made["id"][place, max(0, num_made - count) : num_made].tolist()
        earlier = min(request.num_earlier, count - len(tail))
        return (request.input_ids[-earlier:].tolist() if earlier > 0 else []) + tail

    def _take_out(self, reasons: dict[int, str], error_msg: str | None = None) -> list[Ended]:
        ended: list[Ended] = []
        for place, reason in reasons.items():
            made = self._made[place, : self._rows["num_made"][place]]
            completion = Completion(
                response_ids=made["id"].copy(),
                logprobs=made["logprob"].copy(),
                model_steps=made["model_step"].copy(),
                finish_reason=reason,
                error_msg=error_msg if reason == "error" else None,
            )
            ended.append((self._requests[place], completion))
        if reasons:
            self._close_holes(sorted(reasons))
        return ended

    def _close_holes(self, gone: list[int]) -> None:
        """Move the last rows into the places of those that left."""
        left = self.size - len(gone)
        leaving = set(gone)
        targets = [place for place in gone if place < left]
        sources = [place for place in range(left, self.size) if place not in leaving]
        if targets:
            for array in (self._rows, self._made, self._stop_ids):
                array[targets] = array[sources]
            self._cache.move(
                torch.tensor(sources, device=self._device), torch.tensor(targets, device=self._device)
            )
        for source, target in zip(sources, targets, strict=True):
            self._requests[target] = self._requests[source]
        del self._requests[left:]


@dataclass(eq=False)
class Row:
    """One request's place in the batch; compared by identity, so a request may be asked twice."""

    request: GenerateRequest


Ended = tuple[Row, Completion]

_ROW_FIELDS = np.dtype(
    [
        ("token", np.int64),  # the next to feed
        ("position", np.int64),  # its column
        ("num_made", np.int64),
        ("limit", np.int64),  # of num_made
        ("stream", np.uint64),  # of random numbers
        ("num_earlier", np.int64),  # of them used by earlier calls
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float32),
    ]
)

_TOKEN_FIELDS = np.dtype([("id", np.int32), ("logprob", np.float32), ("model_step", np.int32)])


def _grown(array: NDArray[Any], num_rows: int, num_columns: int = 0, fill: Any = 0) -> NDArray[Any]:
    """`array` with at least these sizes, new entries `fill`."""
    shape = (max(num_rows, len(array)), *(max(num_columns, size) for size in array.shape[1:]))
    if shape == array.shape:
        return array
    grown = np.full(shape, fill, array.dtype)
    grown[tuple(slice(size) for size in array.shape)] = array
    return grown
