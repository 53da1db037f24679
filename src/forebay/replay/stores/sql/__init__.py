"""A replay store in a database: a SQLite file, or PostgreSQL by URL."""

from __future__ import annotations

import re


def hide_password(url: str) -> str:
    """`url` as it may be shown."""
    scheme, found, rest = url.partition("://")
    if not found:
        return url
    rest = re.sub(r"(?<=[?&]password=)[^&]*", "***", rest)
    # At the last @: a password may have one in it.
    user, at, host = rest.rpartition("@")
    return f"{scheme}://{user.partition(':')[0]}@{host}" if at else f"{scheme}://{rest}"
