"""The page in a real browser: each view of finished, live, damaged and hostile runs; keys, links, sizes."""

import asyncio
import contextlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import parse_qs, urlencode

import pytest
import uvicorn
from board_run import HOSTILE, CheckedBoard, make_group, open_history, write_run
from PIL import Image

from forebay.board.export import write_report
from forebay.board.server import Board, make_app
from forebay.environments.config import FragmentRunConfig
from forebay.environments.run import launch
from forebay.runs.record.history import list_parts
from forebay.types import reset_rollout_response

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium"),
]

PICTURES = Path(__file__).parents[2] / "docs/pictures"
AXE = Path(__file__).parents[2] / "src/forebay/board/web/node_modules/axe-core/axe.min.js"
SHOWN = {
    "overview": "Reward",
    "flow": "14 taken up = 12 trained + 2 dropped + 0 live",
    "rollouts": "44 rollouts of 18 groups",
    "prompts": "mean score",
    "timeline": "training",
    "bias": "4 rollouts were dropped",
    "compare": "is better",
    "rollout": "Life of its group",
    "group": "answer 1 to 8",
    "prompt": "Train step",
}
GIVEN = {
    "compare": {"other": "planted", "step": 6, "other_step": 0},
    "rollout": {"id": "math/8/1"},
    "group": {"id": "math/8"},
}
LISTS = {"rollout": "rollouts", "group": "rollouts", "prompt": "prompts"}
LISTEN = """
window.violations = []; window.shifts = 0;
document.addEventListener("securitypolicyviolation", (event) => violations.push(event.violatedDirective));
new PerformanceObserver((list) => list.getEntries().forEach((entry) => (window.shifts += entry.value)))
  .observe({ type: "layout-shift", buffered: true });
"""


def apart(action):
    """The result of `action` in a thread of its own: the browser's driver has a loop in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(action).result()


def leave(run, groups, outcome="trained", *, train_step=1, spans=()):
    """More groups in the history of a run, and more activities."""

    async def write():
        history = open_history(run, resumed_from=1000)
        history.left(groups, outcome, train_step=train_step)
        history._spans.extend(spans)
        history.close()

    apart(lambda: asyncio.run(write()))


@contextlib.contextmanager
def served(*folders):
    board = CheckedBoard(list(folders))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(make_app(board), log_level="warning", access_log=False))
        # Open streams of events do not keep it.
        server.config.timeout_graceful_shutdown = 1
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join()
    board.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "planted")
    write_run(folder / "hostile", text=HOSTILE)
    damaged = write_run(folder / "damaged")
    (damaged / "live.json").write_text("{")
    with (damaged / "metrics.jsonl").open("a") as metrics:
        metrics.write('garbage\n{"train_step": 7, "unix')
    part = list_parts(damaged, "rollouts")[0].path
    part.write_bytes(part.read_bytes()[:100])
    (folder / "empty").mkdir()
    (folder / "empty" / "run.toml").write_text('name = "empty"\nsteps = 3\n')
    return folder


@pytest.fixture(scope="module")
def address(runs):
    with served(runs) as address:
        yield address


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """A page at an address; at the end none of them has complained."""
    contexts, wrong = [], []

    def open_page(address="about:blank", **options):
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(200_000)
        page.add_init_script(LISTEN)
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: (wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        for page in context.pages:
            wrong.extend(page.evaluate("window.violations"))
        context.close()
    assert not wrong


def see(page, view, run, **given):
    """Go to a view, and wait until it is there; its text. axe finds no fault, where `npm ci` has been run."""
    hash_ = f"#/{view}?{urlencode({'run': run, **given})}"
    page.evaluate("address => { location.hash = address; }", hash_)
    page.wait_for_selector(f".view.{view}, main > .failure")
    until(page, "run => document.title.startsWith(run) && !document.querySelector('[aria-busy]')", run)
    if AXE.exists():
        page.evaluate(f"() => {{ if (!window.axe) {{ {AXE.read_text()} }} }}")
        found = page.evaluate("axe.run(document, { resultTypes: ['violations'] }).then((it) => it.violations)")
        serious = [
            f"{view} of {run}: {one['id']}: {one['nodes'][0]}"
            for one in found
            if one["impact"] in ("serious", "critical")
        ]
        assert not serious
    return page.inner_text("main")


def has(page, text):
    until(page, "text => document.querySelector('main').innerText.includes(text)", text)


def until(page, condition, arg=None):
    # Asked with every frame, as by default, it would have the browser draw sixty of them a second.
    page.wait_for_function(condition, arg=arg, polling=40)


def given_for(page, view, run):
    """Of the views of one thing: the first of its list."""
    if run in ("planted", "hostile") and view in GIVEN:
        return GIVEN[view]
    if view not in LISTS:
        return {}
    see(page, LISTS[view], run)
    link = "main header a.item" if view != "prompt" else "main td a.item"
    if view == "group":
        page.locator(link).first.click()
        link = "main a[href^='#/group']"
    href = page.locator(link).first.get_attribute("href")
    return {name: value for name, (value,) in parse_qs(href.split("?")[1]).items() if name != "run"}


def wide(page):
    # Of the screen: `innerWidth` of a telephone grows with what overflows.
    return page.evaluate("document.documentElement.scrollWidth") - page.viewport_size["width"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_of_a_finished_run(address, open_page, scheme):
    page, other = open_page(address, color_scheme=scheme), open_page()
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
    for view, shown in SHOWN.items():
        see(page, view, "planted", **given_for(page, view, "planted"))
        has(page, shown)
        text = page.inner_text("main")
        assert "undefined" not in text
        assert "NaN" not in text
        if view in ("group", "rollout"):
            assert page.locator(".pictures img").evaluate("image => image.decode().then(() => 1)") == 1
        if scheme == "light" and view in ("overview", *GIVEN):
            # Its address shows the same to somebody else.
            other.goto("about:blank")
            other.goto(page.url)
            other.wait_for_selector(f".view.{view}")
            has(other, shown)
            assert other.title() == page.title()


def test_images_of_replies_stand_in_the_conversation(tmp_path, open_page):
    run = write_run(tmp_path / "planted", steps=1)
    files = []
    for width in (2, 3, 4):
        Image.new("RGB", (width, 1)).save(file := io.BytesIO(), "PNG")
        files.append(file.getvalue())
    group, image = make_group(77), {"type": "image", "digest": "0"}
    for state in group:
        state.message = [{"role": "user", "content": [image, {"type": "text", "text": "asked"}]}]
        state.mm_info = {"images": files[:1], "reply_images": [[1, files[1]], [1, files[2]]]}
        turn = {"role": "tool", "content": [{"type": "text", "text": "seen"}, image, image]}
        # What has no image any more is told as it is.
        turns = [{"role": "assistant", "content": "look"}, turn, {"role": "user", "content": [image]}]
        state.extra_fields["conversation"] = turns
    leave(run, [group])
    with served(tmp_path) as address:
        page = open_page(address)
        for view, given in (("rollout", {"id": "math/77/1"}), ("group", {"id": "math/77"})):
            see(page, view, "planted", **given)
            tool = page.locator(".message.tool").first
            assert tool.locator("pre").all_inner_texts() == ["seen"]
            widths = "all => Promise.all(all.map((one) => one.decode().then(() => one.naturalWidth)))"
            assert tool.locator("img").evaluate_all(widths) == [3, 4]
            assert page.locator(".message.user").first.locator("img").evaluate_all(widths) == [2]
            assert page.locator(".message.user").nth(1).locator("img").count() == 0
            assert '"digest"' in page.locator(".message.user").nth(1).inner_text()


def test_no_view_is_wider_than_a_telephone(address, open_page):
    page = open_page(address, viewport={"width": 390, "height": 800}, is_mobile=True, has_touch=True)
    for view in SHOWN:
        see(page, view, "hostile", **given_for(page, view, "hostile"))
        assert wide(page) <= 0, view


def test_labels_of_the_bias_and_the_timeline_can_be_read(address, open_page):
    page = open_page(address)
    see(page, "bias", "planted")
    right = "one => one.getBoundingClientRect().right"
    edges = page.locator(".histogram").evaluate_all(f"all => all.map({right})")
    ends = page.locator(".histogram text:last-of-type").evaluate_all(f"all => all.map({right})")
    assert edges
    assert all(end <= edge + 0.5 for end, edge in zip(ends, edges, strict=True)), (ends, edges)
    page.evaluate(
        "() => { window.labels = []; const draw = CanvasRenderingContext2D.prototype.fillText;"
        "CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {"
        " labels.push(text); draw.call(this, text, ...at); }; }"
    )
    whole = page.evaluate("fetch('api/timeline?run=planted').then((answer) => answer.json())")["whole"]
    see(page, "timeline", "planted", **{"from": whole["start_s"] + 3601, "to": whole["start_s"] + 3699})
    # It is drawn once more as it gets its width.
    page.wait_for_function("() => labels.includes('1 h 01:30')")
    assert {f"1 h 00:{second}" for second in range(10, 60, 10)} <= set(page.evaluate("labels"))


def test_a_live_step_a_warning_and_a_drop_arrive_without_a_jump(tmp_path, open_page):
    run = write_run(tmp_path / "live", steps=4, state="running")
    with served(tmp_path) as address:
        overview, flow = open_page(address), open_page(address)
        see(overview, "overview", "live")
        see(flow, "flow", "live")
        has(overview, "4 of 6")
        for page in (overview, flow):
            page.wait_for_timeout(300)
            page.evaluate("window.shifts = 0")
        with (run / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps({"train_step": 5, "unix_time_s": time.time(), "reward": 0.9}) + "\n")
        has(overview, "5 of 6")
        label = "figure[aria-label^='Reward:'][aria-label$='to 0.9']"
        overview.wait_for_selector(label)
        note = {"unix_time_s": time.time(), "kind": "warning", "text": "nothing moves", "train_step": 5}
        with (run / "notes.jsonl").open("a") as notes:
            notes.write(json.dumps(note) + "\n")
        has(overview, "nothing moves")
        live = json.loads((run / "live.json").read_text())
        live["books"]["math"] |= {"generated": 15, "dropped": {"expired": 2, "failed": 1}}
        live |= {"unix_time_s": time.time(), "stall": "The run stalls:\n" + 9 * "a judge hangs\n"}
        live["oldest"] = [
            {"stage": "judge", "name": "slow_one", "group": "g", "task": "math", "age_s": 41.0, "note": ""}
        ]
        (run / "live.tmp").write_text(json.dumps(live))
        (run / "live.tmp").replace(run / "live.json")
        has(flow, "15 taken up = 12 trained + 3 dropped + 0 live")
        has(flow, "slow_one")
        for page in (overview, flow):
            has(page, "The run stalls")
            assert page.evaluate("window.shifts") == 0
        leave(run, [make_group(77, text="a late answer")], train_step=5)
        assert "a late answer" in see(flow, "rollouts", "live", text="late")
        for page in (overview, flow):
            # Before the server ends.
            page.goto("about:blank")


def test_a_view_of_a_run_that_has_just_begun_says_what_will_come_and_fills_by_itself(tmp_path, open_page):
    begun = tmp_path / "runs/planted"
    begun.mkdir(parents=True)
    written = write_run(tmp_path / "planted", state="running")
    (written / "run.toml").rename(begun / "run.toml")
    with served(tmp_path / "runs") as address:
        views = {view: open_page(address) for view in list(SHOWN)[:7]}
        for view, page in views.items():
            text = see(page, view, "planted", **GIVEN.get(view, {}))
            assert re.search(r"by itself|by themselves|this page follows", text), text
        views["rollouts"].keyboard.press("/")
        for path in list(written.iterdir()):
            path.rename(begun / path.name)
        for view, page in views.items():
            has(page, SHOWN[view])
            assert page.locator(".awaited").count() == 0
        # Who was about to search still is.
        assert views["rollouts"].evaluate("document.activeElement.id") == "search"
        for page in views.values():
            page.goto("about:blank")


def test_what_is_left_of_a_damaged_run_is_shown(address, open_page):
    page = open_page(address)
    for run in ("damaged", "empty"):
        for view in ("flow", "rollouts", "prompts", "timeline", "bias", "compare", "overview"):
            text = see(page, view, run)
            assert text.strip(), (run, view)
            assert "undefined" not in text
            assert run == "damaged" or "earned something" not in text
    for view in ("overview", "rollouts", "timeline"):
        assert "damaged, and left out" in see(page, view, "damaged")
    assert "damaged, and left out" not in see(page, "rollouts", "planted")


def test_what_a_model_wrote_stays_text(address, open_page, tmp_path, runs):
    page = open_page(address)
    scripts = page.locator("script").count()
    for view in SHOWN:
        text = see(page, view, "hostile", **given_for(page, view, "hostile"))
        if view in ("overview", "rollouts", "group", "rollout"):
            assert "<script>alert(1)</script>" in text
        assert page.locator("script").count() == scripts
        assert page.locator("img").count() == 0
    assert page.locator("a[href^='javascript']").count() == 0
    board = Board([runs / "hostile"])
    report = write_report(board, tmp_path / "report.html")
    board.close()
    page = open_page(f"file://{report}")
    page.wait_for_selector(".view.overview")
    assert "<script>alert(1)</script>" in see(page, "rollouts", "hostile")
    assert page.locator("img").count() == 0


def test_the_keyboard_goes_everywhere(address, open_page):
    page = open_page(f"{address}#/overview?run=planted")
    page.wait_for_selector(".view.overview")
    for number, view in enumerate(list(SHOWN)[:7], 1):
        page.keyboard.press(str(number))
        page.wait_for_selector(f".view.{view}")
    page.keyboard.press("?")
    assert page.locator("dialog[open]").count() == 1
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.wait_for_function("() => document.activeElement.id === 'search'")
    page.keyboard.type("answer 1 to 8")
    has(page, "1 rollouts of 1 groups")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector(".view.rollout")
    assert "id=math%2F8%2F1" in page.url
    page.keyboard.press("u")
    page.wait_for_selector(".view.rollouts")
    assert "text=answer+1+to+8" in page.url
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_a_click_in_a_chart_opens_the_rollouts_of_that_step(address, open_page):
    page = open_page(f"{address}#/overview?run=planted")
    page.locator(".u-over").first.click(position={"x": 3, "y": 60})
    page.wait_for_selector(".view.rollouts")
    assert "train_step_max=1" in page.url
    has(page, "expected: 42")
    see(page, "rollouts", "planted", train_step_min=4, train_step_max=4)
    has(page, "Step 4 against the 3 before")


def test_a_zoom_stays_while_steps_arrive(tmp_path, open_page):
    run = write_run(tmp_path / "live", steps=6, state="running")
    with served(tmp_path) as address:
        page = open_page(address)
        see(page, "overview", "live")
        chart = page.locator(".u-over").first
        box = chart.bounding_box()
        # From between the steps 3 and 4 to the end.
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.99, box["y"] + 60, steps=4)
        page.mouse.up()
        with (run / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps({"train_step": 7, "unix_time_s": time.time(), "reward": 0.9}) + "\n")
        page.wait_for_selector("figure[aria-label^='Reward:'][aria-label$='to 0.9']")
        page.wait_for_timeout(300)
        chart.click(position={"x": 3, "y": 60})
        page.wait_for_selector(".view.rollouts")
        assert "train_step_min=4" in page.url
        # A double click shows all again.
        page.keyboard.press("u")
        page.wait_for_selector(".view.overview")
        page.wait_for_timeout(300)
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.99, box["y"] + 60, steps=4)
        page.mouse.up()
        chart.dblclick(position={"x": 60, "y": 60})
        page.wait_for_timeout(500)
        assert page.locator(".view.overview").count() == 1
        chart.click(position={"x": 3, "y": 60})
        page.wait_for_selector(".view.rollouts")
        assert "train_step_min=1&" in page.url
        page.goto("about:blank")


def test_a_chart_off_the_screen_shows_the_new_steps_after_a_double_click(tmp_path, open_page):
    run = write_run(tmp_path / "live", steps=6, state="running")
    # As many charts as are not near each other.
    others = dict.fromkeys(("train/entropy", "tokens_per_s", "gpu/busy", "train/grad_norm", "train/lr"), 1.0)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row | others) + "\n" for row in rows))
    with served(tmp_path) as address:
        page = open_page(address, viewport={"width": 500, "height": 300})
        see(page, "overview", "live")
        charts = page.locator("figure.chart")
        charts.last.scroll_into_view_if_needed()
        charts.last.locator(".u-over").wait_for()
        charts.first.scroll_into_view_if_needed()
        page.wait_for_timeout(300)
        box = charts.first.locator(".u-over").bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 60, steps=4)
        page.mouse.up()
        with (run / "metrics.jsonl").open("a") as metrics:
            row = {"train_step": 7, "unix_time_s": time.time(), "reward": 0.9, **others}
            metrics.write(json.dumps(row) + "\n")
        page.wait_for_selector("figure[aria-label^='Reward:'][aria-label$='to 0.9']")
        page.wait_for_timeout(300)
        charts.first.locator(".u-over").dblclick(position={"x": 60, "y": 60})
        page.wait_for_timeout(300)
        charts.last.scroll_into_view_if_needed()
        page.wait_for_timeout(300)
        last = charts.last.locator(".u-over")
        last.click(position={"x": last.bounding_box()["width"] - 3, "y": 60})
        page.wait_for_selector(".view.rollouts")
        assert "train_step_min=7&" in page.url
        page.goto("about:blank")


def test_of_a_long_line_a_spike_is_drawn_and_a_click_finds_its_step(tmp_path, open_page):
    folder = tmp_path / "long"
    folder.mkdir()
    (folder / "run.toml").write_text('name = "long"\nsteps = 30000\n')
    rows = ({"train_step": step, "reward": 1000 * (step == 20_001)} for step in range(1, 30_001))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with served(tmp_path) as address:
        page = open_page()
        page.add_init_script(
            "window.labels = []; const draw = CanvasRenderingContext2D.prototype.fillText;"
            "CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {"
            " labels.push(text); draw.call(this, text, ...at); };"
        )
        page.goto(address)
        page.wait_for_function("() => labels.includes('1,000')")
        box = page.locator(".u-over").first.bounding_box()
        page.locator(".u-over").first.click(position={"x": box["width"] / 2, "y": 60})
        page.wait_for_selector(".view.rollouts")
        assert abs(int(re.search(r"train_step_min=(\d+)", page.url)[1]) - 15_000) < 100
        page.goto("about:blank")


def test_warnings_stand_on_every_axis_and_of_every_run(address, open_page):
    page = open_page(address)
    for given in ({}, {"x": "tokens"}, {"with": "hostile"}):
        see(page, "overview", "planted", **given)
        box = page.locator(".u-over").first.bounding_box()
        # Step 3 of 1 to 6.
        page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 60)
        told = page.locator(".chart .mark-text").first
        told.wait_for()
        assert "step 3: look" in told.inner_text()
        assert ("hostile, step 3: look" in told.inner_text()) == ("with" in given)
    items = page.locator(".notes li").all_inner_texts()
    assert {item.split(" ")[0] for item in items} == {"planted", "hostile"}
    colors = page.locator(".notes li svg line").evaluate_all("all => all.map((line) => getComputedStyle(line).stroke)")
    assert len(set(colors)) == 2


def test_the_flow_is_of_the_chosen_task_and_names_the_judge(tmp_path, open_page):
    run = write_run(tmp_path / "planted", state="running")
    with (run / "run.toml").open("a") as file:
        parts = 'arguments = { parts = [{ name = "exact_match" }, { name = "llm", label = "style" }] }'
        # The arguments of a judge of one's own may have any names.
        own = '{ name = "mine", arguments = { parts = "all" } }'
        file.write(f'judge = {{ name = "composed", {parts} }}\n[[tasks]]\nname = "code"\njudge = {own}\n')
    live = json.loads((run / "live.json").read_text())
    live["books"]["code"] = {"generated": 5, "trained": 5, "dropped": {}, "live": 0, "retried": 0, "left": 0}
    live |= {"unix_time_s": time.time() + 60, "stages": {"generate": 7, "judge": 3}}
    live["stages_of"] = {"math": {"generate": 7, "judge": 1}, "code": {"judge": 2}}
    live["oldest"] = [
        {"stage": "judge", "name": "g1", "group": "g1", "task": "math", "age_s": 41.0, "note": ""},
        {"stage": "judge", "name": "g2", "group": "g2", "task": "code", "age_s": 5.0, "note": ""},
    ]
    (run / "live.json").write_text(json.dumps(live))
    with served(tmp_path) as address:
        page = open_page(address)
        text = see(page, "flow", "planted")
        assert "judge exact_match + style of g1, for 41 s" in text
        boxes = page.locator("svg.flow .count").all_text_contents()
        assert boxes[2] == "3", boxes
        page.locator("#task").select_option("code")
        text = page.inner_text("main")
        assert "judge mine of g2, for 5.0 s" in text
        assert "g1" not in text
        assert page.locator("svg.flow .count").all_text_contents()[2] == "2"
        # The address shows the same to somebody else.
        other = open_page(page.url)
        has(other, "g2")
        assert "g1" not in other.inner_text("main")
        for one in (page, other):
            one.goto("about:blank")


def test_rows_come_before_they_are_counted(address, open_page):
    page, held = open_page(address), []
    page.route("**/api/count?*", lambda route: held.append(route))
    assert "answer 1 to 8" in see(page, "rollouts", "planted", order="oldest", text="answer 1 to 8")
    for route in held:
        route.continue_()
    has(page, "1 rollouts of 1 groups")


def test_a_page_of_rollouts_has_its_address(address, open_page):
    page = open_page(address)
    first = see(page, "rollouts", "planted")
    page.get_by_text("next page").click()
    page.get_by_text("newer page").wait_for()
    assert "offset=40" in page.url
    other = open_page(page.url)
    other.get_by_text("newer page").wait_for()
    names = other.locator("main a.item").all_inner_texts()
    assert len(names) == 4
    assert not set(names) & set(re.findall(r"math/\d+/\d", first))


def test_the_search_is_focused_however_late_its_view_comes(address, open_page):
    page = open_page(f"{address}#/overview?run=planted")
    page.wait_for_selector(".view.overview")

    def wait(route):
        page.wait_for_timeout(700)
        route.continue_()

    page.route("**/api/rollouts?*", wait)
    page.keyboard.press("/")
    page.wait_for_function("() => document.activeElement.id === 'search'")


def test_the_life_of_a_rollout_stands_there_in_words(address, open_page):
    page = open_page(address)
    see(page, "rollout", "planted", id="math/8/1")
    said = page.locator(".life li").all_inner_texts()
    assert said[0].endswith("by version 8 of the weights")
    assert said[1] == "continued on version 9, from token 2 of 3"
    assert re.fullmatch(r"waited \d+ ms in the buffer", said[2])
    assert said[3].startswith("trained at step 4")


def test_an_answer_that_was_not_judged_earned_nothing_less(tmp_path, open_page):
    group = make_group(41, size=3)
    group[0].reward, group[1].reward = {}, {"score": 0.5}
    leave(write_run(tmp_path / "partly"), [group], train_step=7)
    with served(tmp_path) as address:
        page = open_page(address)
        # Of its two scores; 0.5 would be of all three.
        see(page, "group", "partly", id="math/41")
        page.get_by_text("the same prompt through training").click()
        has(page, "Train step 7: mean score 0.75")
        page.goto("about:blank")


def test_tokens_are_read_with_the_arrow_keys(address, open_page):
    page = open_page(address)
    see(page, "rollout", "planted", id="math/8/1")
    has(page, "The darker, the less likely")
    page.locator(".tokens").focus()
    for key, told in (("ArrowRight", "token 0 (5)"), ("ArrowRight", "token 1 (6)"), ("ArrowLeft", "token 0 (5)")):
        page.keyboard.press(key)
        has(page, told)
    assert page.locator(".token.at").count() == 1


def test_the_life_of_an_evaluated_rollout_is_of_the_last_evaluation(tmp_path, open_page):
    run = write_run(tmp_path / "planted")
    now = time.time()
    names = "math/1000/0", "math", "math/1000", ""
    leave(run, [], spans=[(now + at, now + at + at / 10, "generate", *names) for at in (10, 20)])
    with served(tmp_path) as address:
        page = open_page(address)
        see(page, "rollout", "planted", id="math/1000/0")
        assert page.locator(".life li").first.inner_text().startswith("sampled in 2.0 s by version")
        page.goto("about:blank")


def test_the_life_of_a_rollout_that_failed_before_its_first_token(tmp_path, open_page):
    run = write_run(tmp_path / "planted")
    failed = make_group(50)
    for state in failed:
        reset_rollout_response(state)
    leave(run, [failed], "dropped")
    with served(tmp_path) as address:
        page = open_page(address)
        see(page, "rollout", "planted", id="math/50/0")
        assert page.locator(".life li").first.inner_text() == "no token was sampled"
        page.goto("about:blank")


def test_what_was_removed_is_said_where_it_is_missed(tmp_path, open_page):
    run = write_run(tmp_path / "planted")
    removed = {"rollouts": 123, "spans": 45, "until_train_step": 2}
    (run / "history/removed.json").write_text(json.dumps(removed))
    with served(tmp_path) as address:
        page = open_page(address)
        told = "The oldest 123 rollouts (up to train step 2) and 45 activities were removed"
        for view in ("overview", "rollouts", "prompts", "bias"):
            assert told in see(page, view, "planted")
        # Of a link to a rollout that is gone. The browser itself says that it was not found.
        page.evaluate("window.onerror = null; location.hash = '#/group?run=planted&id=math/0'")
        page.locator("main > .failure").wait_for()
        assert told in page.inner_text("main")
        page.goto("about:blank")


def test_the_trainer_waited_for_what_went_on_meanwhile(tmp_path, open_page):
    run = write_run(tmp_path / "waits")
    with contextlib.closing(Board([tmp_path])) as board:
        whole = apart(lambda: board.answer("timeline", {"run": "waits"}))["whole"]
    begun = whole["end_s"] + 10
    spans = [
        (begun, begun + 10, "wait_batch", "batch 1", "", "", ""),
        (begun, begun + 9, "judge", "math/1", "math", "math/1", ""),
        (begun + 10, begun + 12, "train", "step 1", "", "", ""),
        # Longer, but while it trained.
        (begun + 9.5, begun + 40, "generate", "math/2/0", "math", "math/2", ""),
    ]
    leave(run, [], spans=spans)
    with served(tmp_path) as address:
        page = open_page(address)
        text = see(page, "timeline", "waits", **{"from": begun, "to": begun + 40})
        assert "groups judged 90%, rollouts generated 5% of the waiting" in text
        assert "waited mostly for groups to be judged" in text
        page.goto("about:blank")


def test_the_bias_is_of_the_chosen_task(tmp_path, open_page):
    run = write_run(tmp_path / "planted")
    with (run / "run.toml").open("a") as file:
        file.write('[[tasks]]\nname = "code"\n')
    leave(run, [make_group(300, task="code")], "dropped")
    leave(run, [make_group(301, task="code")])
    with served(tmp_path) as address:
        page = open_page(address)
        assert "6 rollouts were dropped" in see(page, "bias", "planted")
        page.locator("#task").select_option("code")
        has(page, "2 rollouts were dropped, 50%")
        other = open_page(page.url)
        has(other, "2 rollouts were dropped, 50%")
        labels = other.locator(".histogram").first.locator("title").all_text_contents()
        assert sum(int(label.rsplit(": ")[1]) for label in labels) == 4
        for one in (page, other):
            one.goto("about:blank")


def test_a_report_has_its_numbers_once_and_compares_first_with_last(tmp_path, open_page):
    run = write_run(tmp_path / "planted")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[2]["eval/score"] = rows[5]["eval/score"] = 0.5
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    leave(run, [make_group(1000, score=0.0)], "evaluated", train_step=3)
    board = Board([run])
    report = write_report(board, tmp_path / "report.html")
    board.close()
    assert report.read_text().count('"train_step":[1,2,3,4,5,6]') == 1
    page = open_page(f"file://{report}")
    page.wait_for_selector(".view.overview")
    see(page, "compare", "planted")
    has(page, "is better")
    see(page, "compare", "planted", step=0, other_step=0)
    has(page, "A report holds the last evaluation of each run against its first")


def test_several_engines_have_lanes_by_their_numbers(tmp_path, open_page):
    write_run(tmp_path / "engines", engines=(10, 2, 0))
    with served(tmp_path) as address:
        page = open_page(address)
        see(page, "timeline", "engines")
        rows = page.locator("main tbody tr").all_inner_texts()
        assert [row.split("\t")[0] for row in rows] == ["training", "engine 0", "engine 2", "engine 10"]
        # The bar below the middle one's label; it is of the first steps' rollout that was at the engine.
        box = page.locator("canvas").bounding_box()
        page.mouse.click(box["x"] + 5, box["y"] + 18 + 2 * 36 + 5)
        page.wait_for_function("() => location.hash.startsWith('#/rollout')")
        has(page, "math/2/1")
        page.goto("about:blank")


def test_a_run_in_environments_is_seen(tmp_path, open_page):
    values = {
        "name": "acting",
        "steps": 3,
        "batch_size": 2,
        "output": str(tmp_path),
        "eval_episodes": 2,
        "environment": {"id": "CartPole-v1", "num_envs": 4, "workers": 1, "mode": "threads"},
        "fragments": {"length": 16},
        "policy": {"hidden_size": 16},
    }
    config = FragmentRunConfig.model_validate(values)
    # Playwright has an event loop in this thread.
    apart(lambda: asyncio.run(launch(config)))
    with served(tmp_path) as address:
        page = open_page(address)
        for view in ("overview", "flow", "timeline"):
            text = see(page, view, "acting")
            assert "undefined" not in text
            assert "NaN" not in text
            assert page.locator("main .failure").count() == 0, text
            has(page, {"overview": "return", "flow": "fragments", "timeline": "training"}[view])
            # Its workers act, and leave no spans.
            assert "nothing was generated" not in text
        page.goto("about:blank")


def test_without_a_folder_the_runs_below_this_one_are_found(runs, open_page):
    command = [sys.executable, "-c", "from forebay.cli import main; main()", "board", "--port", "0"]
    with subprocess.Popen(command, cwd=runs, stdout=subprocess.PIPE, text=True) as board:
        try:
            address = re.search(r"http://127\.0\.0\.1:\d+/", board.stdout.readline())[0]
            page = open_page(address)
            page.wait_for_selector("main .view")
            names = page.locator("header option").all_inner_texts()
            assert {"planted", "hostile", "damaged", "empty"} <= {name.split()[0] for name in names}, names
            see(page, "overview", "planted")
            # An open stream of events would complain of the end.
            page.goto("about:blank")
        finally:
            board.kill()


def keep(page, name):
    """A picture of what is on the screen, for docs/pictures."""
    # Charts are drawn once more as they get their width.
    page.wait_for_timeout(400)
    shot = Image.open(io.BytesIO(page.screenshot()))
    save(shot, name)


def keep_all(shots, name, *, columns, scale):
    """The pictures of all views on one sheet."""
    width, height = (int(side * scale) for side in shots[0].size)
    gap, rows = 10, -(-len(shots) // columns)
    size = columns * (width + gap) + gap, rows * (height + gap) + gap
    sheet = Image.new("RGB", size, "#808890")
    for place, shot in enumerate(shots):
        at = gap + place % columns * (width + gap), gap + place // columns * (height + gap)
        sheet.paste(shot.convert("RGB").resize((width, height), Image.Resampling.LANCZOS), at)
    save(sheet, name)


def save(picture, name):
    """In 256 colors: a third of the bytes. The octree keeps those of thin lines, a median cut does not."""
    small = picture.convert("RGB").quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    small.save(PICTURES / f"{name}.png", optimize=True)


@pytest.mark.skipif("BOARD_PLANTED" not in os.environ, reason="needs the runs of benchmarks/planted.py")
def test_planted_causes_are_found_from_the_page_alone(open_page):
    """As docs/board.md says it; and the pictures that stand there."""
    with served(Path(os.environ["BOARD_PLANTED"])) as address:
        page = open_page(f"{address}#/overview?run=judge", viewport={"width": 1280, "height": 860})
        has(page, "judge Grader: ConnectionError: the grading service")
        keep(page, "board")
        # The judge fails from step 210 on: no warning yet, but it is among what moved furthest.
        see(page, "rollouts", "judge", train_step_min=210, train_step_max=210)
        has(page, "failed/judge 0 to")
        # The dip: a click in the chart of the reward, at step 111 of 240.
        see(page, "overview", "judge")
        box = page.locator(".u-over").first.bounding_box()
        page.locator(".u-over").first.click(position={"x": box["width"] * 111 / 240, "y": 60})
        has(page, "The score is lower although these prompts are not that much harder")
        page.get_by_text("the answers, worst first").click()
        has(page, "The answer is what was expected, and yet earned nothing")
        keep(page, "board_dip")
        page.locator("main a.item").first.click()
        has(page, "Life of its group")
        keep(page, "board_rollout")
        see(page, "prompts", "judge")
        has(page, "prompts never earned anything")
        see(page, "bias", "dropped")
        has(page, "longer: ")
        keep(page, "board_bias")
        # The hundredfold learning rate: named by each warning, and what differs from its twin.
        see(page, "overview", "lr")
        warnings = page.locator(".notes li").all_inner_texts()
        assert warnings
        assert all("lower train.lr (now 0.03)" in warning for warning in warnings)
        see(page, "overview", "good", **{"with": "lr"})
        has(page, "train.lr")
        keep(page, "board_overlay")
        see(page, "timeline", "dropped")
        keep(page, "board_timeline")
        phone = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
        for name, options, columns, scale in (
            ("board_light", {"viewport": {"width": 1280, "height": 860}}, 3, 0.5),
            ("board_dark", {"viewport": {"width": 1280, "height": 860}, "color_scheme": "dark"}, 3, 0.5),
            ("board_phone", phone, 5, 0.75),
        ):
            page, shots = open_page(address, **options), []
            for view in SHOWN:
                run = "judge" if view in ("overview", "prompts", "rollout", "group", "prompt") else "dropped"
                see(page, view, run, **given_for(page, view, run))
                page.wait_for_timeout(400)
                assert wide(page) <= 0, view
                shots.append(Image.open(io.BytesIO(page.screenshot())))
            keep_all(shots, name, columns=columns, scale=scale)
            page.goto("about:blank")


MILLION = {
    "overview": "5,000 of 5,000",
    "flow": "taken up",
    "rollouts": "1,000,000 rollouts of 125,000 groups",
    "prompts": "of 124,989 prompts never earned anything",
    "timeline": "The trainer trained for 50% of the time shown",
    "bias": "80,000 rollouts were dropped, 8%",
    "compare": "No held-out prompt was tried in both",
    "rollout": "Life of its group",
    "group": "Question ",
    "prompt": "Train step",
}


@pytest.mark.skipif("BOARD_MILLION" not in os.environ, reason="needs the run of benchmarks/board.py make")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_of_a_million_rollouts(open_page, scheme):
    folder = Path(os.environ["BOARD_MILLION"])
    with served(folder) as address:
        page = open_page(address, color_scheme=scheme)
        page.set_default_timeout(200_000)
        for view, shown in MILLION.items():
            text = see(page, view, folder.name, **given_for(page, view, folder.name))
            has(page, shown)
            assert "undefined" not in text
            assert "NaN" not in text
        see(page, "rollouts", folder.name, text="needle in the haystack")
        has(page, "needle in the haystack")
        see(page, "rollouts", folder.name, order="worst", task="code", train_step_min=4990)
        has(page, "score 0, ")
        page.goto("about:blank")


RUN = """
name = "seen"
steps = 4000
output = {output!r}
batch_size = 2
rollouts_per_prompt = 2
checkpoint_every = 0
board = true
model = {{ source = "tiny", tiny = {{ hidden_size = 16, num_layers = 1, num_heads = 1 }} }}
[[tasks]]
name = "sorting"
data = {{ source = "sorting", size = 40 }}
judge = {{ name = "paced:paced" }}
sample = {{ max_tokens = 4 }}
"""
# A few steps a second: else it would work as hard as it can, and the browser draw each of them.
PACED = "import asyncio\nasync def paced(state):\n    await asyncio.sleep(0.2)\n    return 1.0\n"


def answer_all(folder, run):
    """Ask a real run everything that the page asks; each answer is of its type."""
    board = CheckedBoard([folder])
    for what in ("runs", "overview", "flow", "count", "choices", "prompts", "timeline", "bias", "metrics"):
        assert board.answer(what, {"run": run})
    (row, *_) = board.answer("rollouts", {"run": run})["rows"]
    names = ("rollout_id", "group_id", "prompt_hash")
    for what, name in zip(("rollout", "group", "prompt"), names, strict=True):
        assert board.answer(what, {"run": run, name: row[name]})
    board.close()


@pytest.mark.usefixtures("warm")
def test_a_run_that_is_going_on_says_its_address_and_is_seen(tmp_path, open_page):
    run_file = tmp_path / "seen.toml"
    run_file.write_text(RUN.format(output=str(tmp_path)))
    (tmp_path / "paced.py").write_text(PACED)
    command = [sys.executable, "-c", "from forebay.cli import main; main()", "train", str(run_file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        try:
            said = []
            for line in run.stdout:
                said.append(line)
                if "http://127.0.0.1:" in line:
                    break
            found = re.search(r"http://127\.0\.0\.1:\d+/", said[-1])
            assert found, "".join(said)
            threading.Thread(target=run.stdout.read, daemon=True).start()
            page = open_page(found[0])
            has(page, "running")
            until(page, "() => /[1-9]\\d* of 4,000/.test(document.querySelector('main').innerText)")
            page.wait_for_selector("figure[aria-label^='Reward']")
            for view in SHOWN:
                text = see(page, view, "seen", **given_for(page, view, "seen"))
                assert "undefined" not in text
                assert "NaN" not in text
                assert page.locator("main .failure").count() == 0, text
            page.goto("about:blank")
            apart(lambda: answer_all(tmp_path, "seen"))
        finally:
            run.send_signal(signal.SIGKILL)
