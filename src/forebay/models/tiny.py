"""A small decoder made from nothing: a standard Llama with characters for tokens.

::

    TinyConfig, seed --> tokenizer (one token per character) + LlamaForCausalLM --> folder

Its chat template is plain text: the contents one after another behind a start token, and an end token after
what the assistant says. So a prompt ``12+30=`` is answered by ``42`` and the end token.
"""

import string
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.models.config import TinyConfig

if TYPE_CHECKING:
    from transformers import LlamaConfig

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)

_MLP_RATIO = 3
"""Width of the feed-forward part over the hidden size; Llama's three matrices make 8/3 the usual ratio."""


DEFAULT_ALPHABET = string.printable[:95] + "\n"
"""ASCII text, where the config leaves the alphabet open and the data was not looked at."""
DEFAULT_CONTEXT = 512
"""Tokens, where the config leaves the context open: plenty for tasks that so small a model can learn."""


def write_tiny(folder: Path, config: TinyConfig, *, max_context: int, seed: int) -> None:
    """Write the model and its tokenizer into `folder`; the same arguments give the same weights."""
    import torch
    from transformers import LlamaForCausalLM

    # The caller's random numbers go on as if no model had been made.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(tiny_config(config, max_context=max_context))
    model.save_pretrained(folder)
    tokenizer = character_tokenizer(config.alphabet or DEFAULT_ALPHABET)
    tokenizer.model_max_length = max_context
    tokenizer.save_pretrained(folder)


def tiny_config(config: TinyConfig, *, max_context: int) -> "LlamaConfig":
    """transformers' config of the model."""
    from transformers import LlamaConfig

    tokenizer = character_tokenizer(config.alphabet or DEFAULT_ALPHABET)
    # Half as many key and value heads as query heads, as current decoders have: a smaller cache.
    num_key_value_heads = config.num_heads // 2 if config.num_heads % 2 == 0 else config.num_heads
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=_MLP_RATIO * config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=num_key_value_heads,
        max_position_embeddings=max_context,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        # As small models do; without it the few tokens of a short warm-up leave the distribution flat.
        tie_word_embeddings=True,
    )


def character_tokenizer(alphabet: str) -> Any:
    """A tokenizer with one token per character of `alphabet` and pad, start and end tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: token_id for token_id, token in enumerate([PAD, BOS, EOS, *alphabet])}
    # No unknown token: a character outside the alphabet must not become a silent hole in a prompt.
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, padding_side="left"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
