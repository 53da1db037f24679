"""Writes benchmarks/results/replay.md from what the replay benchmarks recorded.

Usage: python benchmarks/replay/report.py

    benchmarks/results/replay/<name>.json, one per benchmark --> targets in one table, then every benchmark
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from measuring import RESULTS, Finding, show

PAGE = RESULTS.parent / "replay.md"
ORDER = ("scan_design", "scaling", "memory", "snapshot", "put_take", "ray_hosted", "peers")


def load() -> list[dict[str, Any]]:
    """The records there are, in the order of the page."""
    paths = [RESULTS / f"{name}.json" for name in ORDER]
    found = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]
    if not found:
        raise SystemExit(f"there is nothing in {RESULTS}; run the benchmarks without --quick first")
    return found


def page(records: list[dict[str, Any]]) -> Iterator[str]:
    yield "# The replay buffer: speed and size\n"
    yield (
        "What must be reached, and what was measured. Medians of one run each; commands, versions and all "
        "numbers are below. Written by `python benchmarks/replay/report.py` from `results/replay/*.json`.\n"
    )
    yield from table(
        ["what", "target", "measured", "of the target", "verdict", "detail"],
        [target_row(finding) for finding in findings(records) if finding.target is not None],
    )
    others = [finding for finding in findings(records) if finding.target is None]
    if others:
        yield "\nBeside the targets:\n"
        yield from table(
            ["what", "measured", "detail"],
            [[finding.what, f"{show(finding.measured)}{finding.unit}", finding.detail] for finding in others],
        )
    for record in records:
        yield from section(record)


def findings(records: list[dict[str, Any]]) -> list[Finding]:
    return [Finding(**finding) for record in records for finding in record["findings"]]


def target_row(finding: Finding) -> list[str]:
    assert finding.target is not None
    sense = "<=" if finding.at_most else ">="
    share = finding.measured / finding.target
    return [
        finding.what,
        f"{sense} {finding.target:,.10g}{finding.unit}",
        f"{show(finding.measured)}{finding.unit}",
        f"{show(share)}x",
        "met" if finding.is_met else "**missed**",
        finding.detail,
    ]


def section(record: dict[str, Any]) -> Iterator[str]:
    machine = record["hardware"]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    yield f"\n## {record['title']}\n"
    yield f"    {record['command']}\n"
    yield (
        f"* {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}; "
        f"load average {record['load_before']:.1f} before and {record['load_after']:.1f} after; "
        f"{record['minutes']:.1f} minutes on {record['date']}."
    )
    yield f"* {versions}."
    yield from (f"* {sentence}" for sentence in record["setting"])
    for content in record["tables"]:
        yield f"\n{content['title']}:\n"
        yield from table(content["columns"], content["rows"])


def table(columns: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"


def main() -> None:
    PAGE.write_text("\n".join(page(load())) + "\n", encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
