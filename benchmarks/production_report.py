"""The results page of the production benchmarks: each writes its own section and leaves the other's alone."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).parent / "results" / "production.md"
TITLE = "# What production costs, and how soon a batch is there"


def machine() -> str:
    """Hardware, versions and load, as a line."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    cpu = found[1] if found else platform.processor() or platform.machine()
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{os.cpu_count()} cores of {cpu}, {platform.system()}, Python {platform.python_version()}, "
        f"numpy {np.__version__}; load average {load}."
    )


def write_section(heading: str, command: str, lines: list[str]) -> None:
    """Put the section `heading` in place of the one that the page has, or at its end."""
    section = "\n".join([f"## {heading}", "", f"    {command}", "", *lines, "", machine(), ""])
    page = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else f"{TITLE}\n"
    head, *sections = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    by_heading = {text.splitlines()[0]: text.strip() + "\n" for text in sections}
    by_heading[f"## {heading}"] = section
    RESULTS.write_text("\n".join([head.strip() + "\n", *by_heading.values()]), encoding="utf-8")
