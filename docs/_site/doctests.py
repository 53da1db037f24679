"""An extension of griffe: examples in docstrings become blocks of code on the pages of the API.

A package's public names are those that it imports as themselves (``from .. import X as X``).
"""

from __future__ import annotations

from typing import Any

import griffe


class Doctests(griffe.Extension):
    """Fences each paragraph that begins with ``>>>``; Markdown would read it as a quotation.

    The ``::`` before a literal block goes: in Markdown its indent is enough.
    """

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            paragraphs = obj.docstring.value.split("\n\n")
            obj.docstring.value = "\n\n".join(_fenced(text) for text in paragraphs if text.strip() != "::")

    def on_alias_instance(self, *, node: Any, alias: griffe.Alias, **_: Any) -> None:
        """Mark as public what a package imports under its own name."""
        if any(name.asname == alias.name == name.name for name in getattr(node, "names", ())):
            alias.public = True


def _fenced(paragraph: str) -> str:
    lines = paragraph.split("\n")
    first = next((number for number, line in enumerate(lines) if line.lstrip().startswith(">>>")), None)
    if first is None:
        return paragraph.removesuffix(":") if paragraph.endswith("::") else paragraph
    indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
    return "\n".join([*lines[:first], "", f"{indent}```pycon", *lines[first:], f"{indent}```"])
