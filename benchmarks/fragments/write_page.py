"""Writes benchmarks/results/fragments.md from what the fragment benchmarks recorded.

Usage: python benchmarks/fragments/write_page.py

    benchmarks/results/fragments/<name>.json, one per benchmark --> targets in one table, then every benchmark
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "replay"))
from report import findings, section, table, target_row

RESULTS = Path(__file__).parent.parent / "results" / "fragments"
PAGE = RESULTS.parent / "fragments.md"
ORDER = ("peers", "reading")


def page(records: list[dict[str, Any]]) -> Iterator[str]:
    yield "# Fragments: inserting, sampling, reading\n"
    yield (
        "What must be reached, and what was measured. Commands, versions and all numbers are below. Written "
        "by `python benchmarks/fragments/write_page.py` from `results/fragments/*.json`.\n"
    )
    columns = ["what", "target", "measured", "of the target", "verdict", "detail"]
    yield from table(columns, [target_row(one) for one in findings(records) if one.target is not None])
    for record in records:
        yield from section(record)


def main() -> None:
    paths = [RESULTS / f"{name}.json" for name in ORDER]
    records = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]
    PAGE.write_text("\n".join(page(records)) + "\n", encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
