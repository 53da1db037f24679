"""The requests that decode together: prefill, one token per row and step, and leaving. No asyncio in here.

::

    select(rows) -> those for which the cache has room, in turn
    admit(rows) -- one prefill per distinct prompt --> KV rows
    step()      -- one forward over all rows, one token each --> rows that finished, with their Completion
    abort(rows) --> their Completion so far
    all but select also return rows that memory did not suffice for, with their tokens: admit them again

Rows enter with room for some tokens more, not for all that they may make. When the cache would outgrow its
budget, the youngest are given up; when memory runs out, all are. Their tokens are kept and computed again.

A row enters with all but the last of its input tokens in the cache; that last token is what its first step
feeds. So every token is drawn by the same code, and rows with one prompt share its prefill.

Numerics: rows start at column 0, widths are multiples of 16 and no matrix product has fewer than
`MIN_ROWS` rows. With the CPU kernels of PyTorch in float32 this makes a request's logits the same to the bit
whatever runs beside it; elsewhere they agree to rounding.

To and from the device goes one array each a step: tokens, positions and random numbers; then what was drawn.

Shapes: B running rows, L columns of a prefill, P distinct prompts, V vocabulary.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import DynamicCache

from forebay.engines.base import GenerateRequest, joined_experts
from forebay.engines.local import sampling
from forebay.engines.local.cache_budget import CacheBudget
from forebay.engines.local.kv_cache import RowCache, round_up_columns
from forebay.engines.local.rows import ROW_FIELDS, TOKEN_FIELDS, Ended, Row, grown
from forebay.engines.local.step_graphs import Record, StepGraphs, graph_size
from forebay.engines.local.stopping import StopTexts
from forebay.models.devices import empty_cache, forgo_cudnn
from forebay.models.images import Images, Sight
from forebay.models.routing import Routing
from forebay.types import IntArray

logger = logging.getLogger(__name__)

AnyRow = TypeVar("AnyRow", bound=Row)
_Prompt = tuple[IntArray, Images, list[int]]
"""Token ids, the images in them, and the places of the rows that have both."""

MIN_ROWS = 4
"""Smaller matrix products take other kernels on a CPU, which round differently; spare rows fill up."""


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
        budget: CacheBudget | None = None,
        recorder: Callable[[], Record] | None = None,
    ) -> None:
        forgo_cudnn()
        self.model = model
        self.max_context_tokens = max_context_tokens
        self.budget = budget or CacheBudget()
        self._prefill_tokens = prefill_tokens
        self._eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self._stop_texts = None if tokenizer is None else StopTexts(tokenizer)
        self._device = next(model.parameters()).device
        self._min_rows = MIN_ROWS if self._device.type == "cpu" else 1
        num_layers = model.config.get_text_config().num_hidden_layers
        self._cache = RowCache(num_layers, self._device, Routing(model))
        self._sight = Sight(model)
        self._graphs = StepGraphs(self._forward, recorder)
        self._requests: list[Row] = []
        self._num_entered = 0
        self._rows = np.zeros(MIN_ROWS, ROW_FIELDS)
        self._made = np.zeros((MIN_ROWS, 0), TOKEN_FIELDS)
        self._stop_ids = np.full((MIN_ROWS, 1), _NO_STOP_ID, np.int64)
        self._sampling: sampling.Sampling | None = None

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
        self._graphs.clear()
        self._cache.release()
        # On a GPU torch keeps it for this process, and a trainer may be in another.
        empty_cache()

    def clear(self) -> None:
        """Forget all rows."""
        self._requests.clear()

    # Room

    def select(self, rows: Sequence[AnyRow]) -> tuple[list[AnyRow], list[AnyRow]]:
        """The first of these rows that have room beside each other, and those that could never run.

        In turn: a row without room lets none pass. Where none runs, the first has room.
        """
        if not self._requests:
            self.budget.measure(self._device, self._cache.num_tokens, self._cache.bytes_per_token)
        fitting: list[AnyRow] = []
        impossible: list[AnyRow] = []
        columns = self._longest()
        for row in rows:
            if self.cache_need(row) > self.budget.most_tokens:
                impossible.append(row)
                continue
            length = len(row.request.input_ids) + len(row.made)
            columns = max(columns, min(self._reach(row), length + _HEADROOM_TOKENS))
            count = self.size + len(fitting) + 1
            if count > 1 and self._num_tokens(count, columns) > self.budget.tokens:
                break
            fitting.append(row)
        return fitting, impossible

    def cache_need(self, row: Row) -> int:
        """Tokens of the cache that this row takes if it runs alone and makes all that it may.

        Not rounded up, as the cache is: it may then be a little over its bound, for one row.
        """
        return self._min_rows * self._reach(row)

    def _reach(self, row: Row) -> int:
        return min(len(row.request.input_ids) + row.request.max_tokens, self.max_context_tokens)

    def _longest(self) -> int:
        """Tokens of the longest row that runs, 0 without one."""
        return int(self._rows["position"][: self.size].max(initial=-1)) + 1

    def _num_rows(self, count: int) -> int:
        return graph_size(count) if self._graphs.used else max(count, self._min_rows)

    def _num_columns(self, count: int) -> int:
        return graph_size(count, _GRAPH_COLUMNS) if self._graphs.used else round_up_columns(count)

    def _num_tokens(self, count: int, length: int) -> int:
        """Of a cache for this many rows, the longest of which has `length` tokens."""
        return self._num_rows(count) * self._num_columns(length)

    def _make_room(self, count: int, length: int, reachable: int) -> None:
        """Let the cache hold `count` rows of `length`, which may grow to `reachable`."""
        rows, columns = self._num_rows(count), self._num_columns(length)
        held_rows, held_columns = self._cache.num_rows, self._cache.num_columns
        if rows <= held_rows and columns <= held_columns:
            return
        # By half, which keeps copying rare, but never past what the rows can still reach.
        more_rows = max(rows, held_rows if rows <= held_rows else held_rows * 3 // 2)
        more_columns = max(columns, held_columns)
        if columns > held_columns:
            more_columns = max(columns, min(held_columns * 3 // 2, self._num_columns(reachable)))
        wanted = (more_rows, more_columns), (max(rows, held_rows), max(columns, held_columns))
        fits = (size for size in wanted if size[0] * size[1] <= self.budget.tokens)
        rows, columns = next(fits, (rows, columns))
        # First: they read and write the memory that is given up here.
        self._graphs.clear()
        self._cache.resize(rows, columns)
        # From pinned memory the copy to the device goes on while the CPU does.
        self._fed_here = torch.zeros(rows, 4, dtype=torch.long, pin_memory=self._device.type == "cuda")
        self._fed = self._fed_here.to(self._device)

    def _give_up_youngest(self) -> None:
        """Until the others have room for one token more; the oldest always has."""
        self._given_up = list[Ended]()
        while self.size > 1 and self._num_tokens(self.size, self._longest()) > self.budget.tokens:
            youngest = max(range(self.size), key=lambda place: self._requests[place].turn)
            self._given_up.append((self._keep(youngest), None))
            self._close_holes([youngest])

    def _run_short(self, joining: Sequence[Row] = ()) -> list[Ended]:
        """Memory ran out: give up all rows, or fail the only one, and go on with a smaller cache."""
        rows = [*(self._keep(place) for place in range(self.size)), *joining]
        self._requests.clear()
        longest = max(len(row.token_ids) for row in rows)
        asked_for = max(self._cache.num_tokens, self._num_tokens(len(rows), longest))
        self.release()
        self.budget.fell_short(asked_for)
        advice = "set cache_tokens, prefill_tokens or max_batch in [engine.arguments] lower"
        if len(rows) == 1:
            return [(row, row.completion("error", f"out of memory with one request; {advice}")) for row in rows]
        logger.warning(
            "out of memory with a key/value cache of %d tokens: its %d requests keep their tokens and wait, "
            "and it takes %d at most for now; %s",
            *(asked_for, len(rows), self.budget.tokens, advice),
        )
        return [(row, None) for row in rows]

    # Joining

    @torch.inference_mode()
    def admit(self, rows: Sequence[Row]) -> list[Ended]:
        """Prefill these rows' tokens and let them run from the next `step` on.

        When a forward pass raises, none of them runs; when memory runs out, all are given up.
        """
        for row in rows:
            if row.turn < 0:
                self._num_entered += 1
                row.turn = self._num_entered
        with suppress(torch.OutOfMemoryError):
            self._compute(rows)
            self._enter(rows)
            return []
        # Only here, where the error no longer holds what the pass had made.
        return self._run_short(rows)

    def _compute(self, rows: Sequence[Row]) -> None:
        """The keys and values of all but the last token of each row."""
        by_prompt: dict[tuple[bytes, Images], _Prompt] = {}
        for place, row in enumerate(rows, start=self.size):
            ids, images = np.asarray(row.token_ids[:-1], np.int32), row.request.images
            by_prompt.setdefault((ids.tobytes(), images), (ids, images, []))[-1].append(place)
        longest = max(self._longest(), *(len(row.token_ids) for row in rows))
        self._make_room(self.size + len(rows), longest, reachable=longest)
        for chunk in self._chunks(sorted(by_prompt.values(), key=lambda prompt: len(prompt[0]))):
            self._prefill(chunk)

    def _chunks(self, shared: list[_Prompt]) -> list[list[_Prompt]]:
        """Split prompts in order of length into passes of like length, each within the token budget."""
        chunks: list[list[_Prompt]] = []
        shortest = -1
        for item in shared:
            padded = round_up_columns(len(item[0]))
            fits = chunks and (len(chunks[-1]) + 1) * padded <= self._prefill_tokens
            if not (fits and padded <= shortest * _PREFILL_LENGTH_RATIO):
                chunks.append([])
                shortest = padded
            chunks[-1].append(item)
        return chunks

    def _prefill(self, chunk: list[_Prompt]) -> None:
        """Compute P distinct prompts and copy each to the rows that share it."""
        places = torch.tensor([place for *_, places in chunk for place in places], device=self._device)
        length = round_up_columns(max(len(ids) for ids, *_ in chunk))
        # Prompts of one token: it is what their first step feeds, so there is nothing to compute before.
        if length == 0:
            self._cache.clear(places)
            return
        # Padding follows the prompt, where the causal mask hides it.
        ids_PL = np.zeros((len(chunk), length), np.int64)
        # The padding may reach beyond the context, where a model with learned positions has none.
        counted_L = np.arange(length).clip(max=self.max_context_tokens - 1)
        positions_4PL = np.broadcast_to(counted_L, (4, *ids_PL.shape)).copy()
        for number, (ids, images, _) in enumerate(chunk):
            ids_PL[number, : len(ids)] = ids
            positions_4PL[1:, number, : len(ids)], _ = self._sight.positions(ids, images)
        positions = positions_4PL if self._sight.has_axes else positions_4PL[0]
        prefilled = DynamicCache()
        self.model.base_model(
            input_ids=torch.from_numpy(ids_PL).to(self._device),
            position_ids=torch.from_numpy(positions).to(self._device),
            past_key_values=prefilled,
            use_cache=True,
            **self._sight.inputs([images for _, images, _ in chunk], self._device),
        )
        sources = [source for source, (*_, places) in enumerate(chunk) for _ in places]
        self._cache.store(prefilled, torch.tensor(sources, device=self._device), places)

    def _enter(self, rows: Sequence[Row]) -> None:
        first = self.size
        stop_ids = [(*self._eos_token_ids, *row.request.params.stop_token_ids) for row in rows]
        num_rows = self._cache.num_rows
        self._rows = grown(self._rows, num_rows)
        self._made = grown(self._made, num_rows, max(len(row.made) for row in rows))
        num_stop_ids = max(len(ids) for ids in stop_ids)
        self._stop_ids = grown(self._stop_ids, num_rows, num_stop_ids, fill=_NO_STOP_ID)
        for place, (row, stops) in enumerate(zip(rows, stop_ids, strict=True), start=first):
            request, token_ids = row.request, row.token_ids
            self._rows[place] = (
                token_ids[-1],
                len(token_ids) - 1,
                self._sight.positions(token_ids, request.images)[1],
                len(row.made),
                min(request.max_tokens, self.max_context_tokens - len(request.input_ids)),
                sampling.seed_state(request.seed),
                request.num_earlier,
                request.params.temperature,
                request.params.top_k,
                request.params.top_p,
            )
            self._made[place, : len(row.made)] = row.made
            self._stop_ids[place] = _NO_STOP_ID
            self._stop_ids[place, : len(stops)] = stops
        self._sampling = None
        # Last, so that another thread never sees a request before its row.
        self._requests.extend(rows)

    # Decoding

    @torch.inference_mode()
    def step(self, model_step: int) -> list[Ended]:
        """Add one token, labeled `model_step`, to every row; take out and return the rows that finished.

        Where memory does not suffice for all, some or all are given up instead.
        """
        self._give_up_youngest()
        if not self._requests:
            return self._given_up
        drawn_B2 = None
        with suppress(torch.OutOfMemoryError):
            drawn_B2 = self._draw()
        if drawn_B2 is None:
            return self._given_up + self._run_short()
        rows = self._rows[: self.size]
        ids, logprobs = drawn_B2[:, 0].astype(np.int32), drawn_B2[:, 1].astype(np.float32)
        made = int(rows["num_made"].max()) + 1
        if made > self._made.shape[1]:
            # Doubled, so that a long response is copied a few times only.
            self._made = grown(self._made, len(self._made), 2 * made)
        new = np.arange(self.size), rows["num_made"]
        self._made["id"][new], self._made["logprob"][new] = ids, logprobs
        self._made["model_step"][new] = model_step
        rows["token"] = ids
        rows["position"] += 1
        rows["num_made"] += 1
        return self._given_up + self._take_finished(rows, ids, logprobs)

    def _draw(self) -> NDArray[np.float64]:
        """Each row's next token and its log probability: [B, 2], the one thing read from the device."""
        rows, num_rows = self._rows[: self.size], self._num_rows(self.size)
        needed = self._longest()
        reachable = int((rows["position"] + rows["limit"] - rows["num_made"]).max())
        self._make_room(self.size, needed, reachable)
        if self._sampling is None:
            how = rows["temperature"].copy(), rows["top_k"].copy(), rows["top_p"].copy()
            self._sampling = sampling.Sampling(*how, device=self._device)
        fed = self._fed_here.numpy()
        fed[: self.size, 0], fed[: self.size, 1] = rows["token"], rows["position"]
        uniform = sampling.uniforms(rows["stream"], rows["num_earlier"] + rows["num_made"])
        fed[: self.size, 2], fed[: self.size, 3] = uniform.view(np.int64), rows["shift"]
        fed[self.size : num_rows] = 0
        # The host waits for this copy when it reads what was drawn, so the next step may write there.
        self._fed.copy_(self._fed_here, non_blocking=True)
        logits_RV = self._graphs(num_rows, self._num_columns(needed), self._cache.num_rows)
        uniform_B = self._fed[: self.size, 2].view(torch.float64)
        drawn_B2: NDArray[np.float64] = sampling.draw(logits_RV[: self.size], self._sampling, uniform_B).cpu().numpy()
        return drawn_B2

    def _forward(self, num_rows: int, width: int) -> torch.Tensor:
        """The logits that follow each row's last token, [R, V]; all that it reads has fixed addresses."""
        ids_R, positions_R = self._fed[:num_rows, 0], self._fed[:num_rows, 1]
        self._cache.set_step(positions_R, width)
        hidden_RC = torch.arange(width, device=self._device) > positions_R[:, None]
        # Of numbers, not booleans: those torch turns into numbers again in every layer.
        mask_RC = torch.zeros(hidden_RC.shape, dtype=self.model.dtype, device=self._device)
        mask_RC.masked_fill_(hidden_RC, torch.finfo(self.model.dtype).min)
        output = self.model(
            input_ids=ids_R[:, None],
            position_ids=(positions_R + self._fed[:num_rows, 3])[:, None],
            attention_mask=mask_RC[:, None, None, :],
            past_key_values=self._cache,
            use_cache=True,
        )
        self._cache.note_experts()
        logits: torch.Tensor = output.logits[:, -1]
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
        """Take out every row: a forward pass failed for all of them, and not for those given up before it."""
        return self._given_up + self._take_out(dict.fromkeys(range(self.size), "error"), message)

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
            row = self._keep(place)
            ended.append((row, row.completion(reason, error_msg if reason == "error" else None)))
        self._close_holes(sorted(reasons))
        return ended

    def _keep(self, place: int) -> Row:
        """The row there, with what it has made."""
        row = self._requests[place]
        row.made = self._made[place, : self._rows["num_made"][place]].copy()
        row.experts = joined_experts(row.experts, self._cache.experts(place, int(self._rows["position"][place])))
        return row

    def _close_holes(self, gone: list[int]) -> None:
        """Move the last rows into the places of those that left."""
        if not gone:
            return
        left = self.size - len(gone)
        leaving = set(gone)
        targets = [place for place in gone if place < left]
        sources = [place for place in range(left, self.size) if place not in leaving]
        self._sampling = None
        if targets:
            for array in (self._rows, self._made, self._stop_ids):
                array[targets] = array[sources]
        for source, target in zip(sources, targets, strict=True):
            self._requests[target] = self._requests[source]
            self._cache.move(source, target)
        del self._requests[left:]
        if left == 0:
            self.budget.recover()


_HEADROOM_TOKENS = 128
"""For which a row that enters needs room: with none it would soon be given up and computed again."""

_GRAPH_COLUMNS = 64
"""Widths of graphs are multiples of this."""

_PREFILL_LENGTH_RATIO = 1.25
"""Longest over shortest prompt of one prefill pass: padding costs no more than that, and prompts of all
lengths up to some thousands take a few dozen passes."""

_NO_STOP_ID = -1
