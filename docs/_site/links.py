"""A hook of mkdocs: links from a page to files beside the docs folder, where the site has no copy of them.

With ``repo_url`` in mkdocs.yml such a link goes to the file in the repository; without it the name is text.
"""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+)([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    repository = (config["repo_url"] or "").rstrip("/")

    def link(match: re.Match[str]) -> str:
        text, path = match[1], match[3]
        return f"[{text}]({repository}/blob/main/{path})" if repository else text

    # Pages that are copied in from the root of the repository link to docs/.
    return _OUTSIDE.sub(link, markdown).replace("](docs/", "](")
