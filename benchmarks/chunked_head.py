"""Log probabilities and their gradients: all logits at once, in slices, and by chunks of hidden states.

    python benchmarks/chunked_head.py --vocabulary 32000 --hidden 256 --tokens 2048 4096 8192

Prints CPU seconds and peak memory beyond the model of one forward and backward pass, each in a process of its
own. ``slices`` is what version 0.1 did: its backward pass grows with the square of the tokens.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time

import torch
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from forebay.train import Packer, TrainBatch
from forebay.train.collate import collate
from forebay.train.model import forward

WAYS = ("whole", "slices", "chunks")


def in_slices(model, micro, rows: int) -> torch.Tensor:
    """The logprobs from slices of logits that all exist."""

    def select(module, states):
        return (states[0].flatten(0, 1).index_select(0, micro.positions)[None],)

    with forward.output_head(model).register_forward_pre_hook(select):
        logits_NV = model(input_ids=micro.input_ids, use_cache=False).logits.squeeze(0)
    parts = [slice(start, start + rows) for start in range(0, len(logits_NV), rows)]
    return torch.cat(
        [
            checkpoint(
                forward._token_outputs,
                logits_NV[part],
                micro.targets[part, None],
                None,
                "measure",
                None,
                [],
                use_reentrant=False,
            )[:, 0]
            for part in parts
        ]
    )


def measure(way: str, tokens: int, vocabulary: int, hidden: int, chunk: int, queue) -> None:
    """CPU seconds and MiB of one pass, put into `queue`."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=hidden, intermediate_size=hidden, num_hidden_layers=1,
            num_attention_heads=2, max_position_embeddings=1024,
        )
    )  # fmt: skip
    examples = [([1, 2], torch.randint(3, vocabulary, (255,)).tolist()) for _ in range(tokens // 255)]
    batch = Packer(10**9).pack_pad_dispatch(TrainBatch.from_examples(examples))
    micro = collate(batch, batch.packs[0][0][0], pad_token_id=0, device=torch.device("cpu"))
    forward.CHUNK_ELEMENTS = 10**12 if way == "whole" else chunk
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    if way == "slices":
        logprobs = in_slices(model, micro, max(1, chunk // vocabulary))
    else:
        logprobs = forward.response_logprobs(model, micro, entropy="measure").logprobs
    logprobs.sum().backward()
    seconds = time.process_time() - started
    queue.put((seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=forward.CHUNK_ELEMENTS, help="logits that exist at once")
    given = parser.parse_args()
    print("| tokens | " + " | ".join(f"{way}: CPU s, MiB" for way in WAYS) + " |")
    print("|---|" + "---|" * len(WAYS))
    context = multiprocessing.get_context("spawn")
    for tokens in given.tokens:
        cells = []
        for way in WAYS:
            queue = context.Queue()
            arguments = (way, tokens, given.vocabulary, given.hidden, given.chunk, queue)
            process = context.Process(target=measure, args=arguments)
            process.start()
            cells.append("{:.1f}, {:.0f}".format(*queue.get()))
            process.join()
        print(f"| {tokens} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
