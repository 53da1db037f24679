"""The board's charts at 100,000 steps: what a frame and a live step cost the page, in Chromium.

    python benchmarks/board_frames.py [STEPS]

A frame of 60 a second has 16.7 ms. CPU time of the page's thread stands beside the frames that were counted,
because other work on the machine moves only the latter. The pointer is moved over a chart (its line and
numbers follow in all charts), the page is scrolled from end to end, a chart is zoomed, and steps arrive, one
a second; with them stands what the page does in as many seconds without a step.
"""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

from board import Served

COLUMNS = (
    "reward",
    "response_tokens",
    "train/entropy",
    "train/policy_kl",
    "train/mismatch_kl",
    "train/staleness_mean",
    "train/staleness_max",
    "train/ess_sequence",
    "train/score_std",
    "tokens_per_s",
    "time/generate_s",
    "time/train_s",
    "busy/trainer",
    "busy/producer",
    "train/grad_norm",
    "train/lr",
)
COUNT = """
window.frames_s = [];
(function tick(before) {
  requestAnimationFrame((now) => { frames_s.push((now - before) / 1000); tick(now); });
})(performance.now());
"""


def row(step: int) -> str:
    values = {name: math.sin(step / 3000 + place) + random.random() for place, name in enumerate(COLUMNS)}
    return json.dumps({"train_step": step, "unix_time_s": time.time(), "samples": 8, **values}) + "\n"


class Measured:
    """One page, and what its main thread does."""

    def __init__(self, browser, page) -> None:
        self.browser, self.page = browser, page
        self.client = page.context.new_cdp_session(page)
        self.client.send("Performance.enable", {"timeDomain": "threadTicks"})

    def worked_s(self) -> float:
        found = self.client.send("Performance.getMetrics")["metrics"]
        return next(one["value"] for one in found if one["name"] == "TaskDuration")

    def during(self, what: str, action) -> None:
        """Print the frames of the page while `action` goes on, and what each cost."""
        self.page.evaluate("frames_s.length = 0")
        self.browser.start_tracing(page=self.page, categories=["toplevel", "devtools.timeline"])
        worked, begun = self.worked_s(), time.perf_counter()
        times = action()
        wall, worked = time.perf_counter() - begun, self.worked_s() - worked
        frames = sorted(self.page.evaluate("frames_s"))
        longest_ms = longest(json.loads(self.browser.stop_tracing())["traceEvents"])
        print(
            f"{what}: {len(frames) / wall:.0f} frames/s, the longest {1000 * frames[-1]:.0f} ms; "
            f"{1000 * worked / times:.1f} ms of the page's thread each, "
            f"at most {longest_ms:.0f} ms in one task",
            flush=True,
        )


def longest(events) -> float:
    """CPU milliseconds of the longest task of a page's thread."""
    threads = {
        (one["pid"], one["tid"])
        for one in events
        if one["name"] == "thread_name" and one["args"]["name"] == "CrRendererMain"
    }
    tasks = (one for one in events if one["ph"] == "X" and (one["pid"], one["tid"]) in threads)
    return max((one.get("tdur", 0) / 1000 for one in tasks if "RunTask" in one["name"]), default=0.0)


def main(num_steps: int = 100_000) -> None:
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        (folder / "run.toml").write_text(f'name = "long"\nsteps = {2 * num_steps}\n')
        with (folder / "metrics.jsonl").open("w") as rows:
            rows.writelines(row(step) for step in range(1, num_steps + 1))
        served = Served(folder)
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 860})
        page.add_init_script(COUNT)
        page.goto(served.address)
        page.wait_for_selector("figure.chart canvas", timeout=120_000)
        page.wait_for_timeout(2000)
        measured, box = Measured(browser, page), page.locator(".u-over").first.bounding_box()

        def point() -> int:
            for place in range(240):
                page.mouse.move(box["x"] + 5 + (box["width"] - 10) * place / 240, box["y"] + 60)
            return 240

        def scroll() -> int:
            for direction in (1, -1):
                for _ in range(60):
                    page.mouse.wheel(0, direction * 60)
                    page.wait_for_timeout(16)
            return 120

        def zoom() -> int:
            for _ in range(5):
                page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 60)
                page.mouse.down()
                page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 60, steps=3)
                page.mouse.up()
                page.wait_for_timeout(300)
                page.locator(".u-over").first.dblclick(position={"x": 60, "y": 60})
                page.wait_for_timeout(300)
            return 10

        def live() -> int:
            with (folder / "metrics.jsonl").open("a") as rows:
                for step in range(num_steps + 1, num_steps + 11):
                    rows.write(row(step))
                    rows.flush()
                    page.wait_for_timeout(1000)
            return 10

        def rest() -> int:
            page.wait_for_timeout(10_000)
            return 10

        measured.during("the pointer moves", point)
        measured.during("nothing arrives, a second", rest)
        measured.during("a step a second arrives", live)
        measured.during("scrolled", scroll)
        page.mouse.wheel(0, -10_000)
        page.wait_for_timeout(500)
        measured.during("zoomed in and out", zoom)
        page.goto("about:blank")
        browser.close()
        served.process.kill()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
