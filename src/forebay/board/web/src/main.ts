import "uplot/dist/uPlot.min.css";
import "./style.css";
import { ask, isReport } from "./api";
import { bias } from "./bias";
import { compare } from "./compare";
import { failure, h, number, show } from "./dom";
import { flow } from "./flow";
import { currentRuns, overview } from "./overview";
import { address, here } from "./place";
import { group, prompt, prompts, rollout, rollouts } from "./rollouts";
import { timeline } from "./timeline";
import type { RunSummary } from "./types";

type View = (root: HTMLElement, run: string, given: Record<string, string>, runs: RunSummary[]) => Promise<() => void>;

const VIEWS: Record<string, View> = { overview, flow, rollouts, prompts, timeline, bias, compare, rollout, group, prompt };
const TABS = ["overview", "flow", "rollouts", "prompts", "timeline", "bias", "compare"];
const PARENTS: Record<string, string> = { rollout: "rollouts", group: "rollouts", prompt: "prompts" };
const LOOK_AGAIN_MS = 3000;
const KEYS: [string, string][] = [
  ["/", "search rollouts"],
  ["j, k", "next and previous item of a list"],
  ["Enter", "open it"],
  ["1 to 7", "the views, in their order"],
  ["u", "back"],
  ["t", "light or dark"],
  ["?", "this help"],
];

let leave: () => void = () => undefined;
let turn = 0;
/** The reader asked for the search, and its view is on its way. */
let isSearchAwaited = false;
/** The run that the address names. */
let looked: RunSummary | undefined;

const header = h("header", { class: "top" });
const main = h("main", { id: "main", tabindex: -1 });
const banner = h("p", { class: "banner", hidden: true });
const help = h("dialog", { "aria-label": "Keys" }) as HTMLDialogElement;
show(
  help,
  h("h2", {}, "Keys"),
  h("dl", { class: "keys" }, ...KEYS.flatMap(([key, text]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)])),
  h("form", { method: "dialog" }, h("button", {}, "close")),
);
show(document.getElementById("app") as HTMLElement, h("a", { class: "skip", href: "#main", onclick: (event: Event) => (event.preventDefault(), main.focus()) }, "to the content"), header, main, help);

/** What of the run cannot be seen, above every view: a reader must not search for it in vain. */
function drawBanner(run: RunSummary | undefined, problem: string): void {
  const removed = run?.removed;
  const gone = removed ? `The oldest ${number(removed.rollouts)} rollouts (up to train step ${removed.until_train_step})${removed.spans ? ` and ${number(removed.spans)} activities` : ""} were removed: history_gb is the limit.` : "";
  banner.textContent = [gone, problem].filter(Boolean).join(" ");
  banner.hidden = !banner.textContent;
}

/** Shows what the address says; `isAgain`: only if there is more than before, and without a jump. */
async function draw(isAgain = false): Promise<void> {
  const mine = ++turn;
  if (!isAgain) {
    leave();
    leave = () => undefined;
    main.setAttribute("aria-busy", "true");
  }
  try {
    await drawView(mine, isAgain);
  } catch (error) {
    // A view that waits goes on waiting.
    if (mine !== turn || isAgain) return;
    drawBanner(looked, "");
    show(main, banner, failure(error));
  }
  if (mine !== turn) return;
  main.removeAttribute("aria-busy");
  if (isSearchAwaited) document.getElementById("search")?.focus();
  isSearchAwaited = false;
}

async function drawView(mine: number, isAgain: boolean): Promise<void> {
  const runs = await ask("runs");
  if (mine !== turn) return;
  const place = here();
  const run = place.run || runs[0]?.id || "";
  const view = VIEWS[place.view] ? place.view : "overview";
  looked = runs.find((one) => one.id === run);
  if (!isAgain) drawHeader(runs, run, view);
  if (!run) return show(main, h("p", { class: "empty awaited" }, "There is no run here yet. Start one with forebay train, or name a folder: forebay board runs/"));
  document.title = `${run} - ${view} - Forebay`;
  const root = h("div", { class: `view ${view}` });
  const done = await VIEWS[view](root, run, place.given, runs);
  // Damage is found by reading, so it is asked for after the view's own questions. The overview says it itself.
  const { facts } = view === "overview" || isReport ? { facts: null } : await ask("overview", { run, names: ["train_step"] }).catch(() => ({ facts: null }));
  if (mine !== turn || (isAgain && root.querySelector(".awaited"))) return done();
  leave();
  leave = done;
  const focused = document.activeElement?.id;
  if (isAgain) drawHeader(runs, run, view);
  drawBanner(looked, facts?.problem ?? "");
  // Only now: the old view stays until the new one is there, so that nothing jumps.
  show(main, banner, root);
  window.dispatchEvent(new Event("resize"));
  if (isAgain && focused) document.getElementById(focused)?.focus();
}

function drawHeader(runs: RunSummary[], run: string, view: string): void {
  const chosen = new Set([run, ...currentRuns()]);
  const pick = h("select", { id: "run", "aria-label": "run", onchange: () => (location.hash = address(PARENTS[view] ?? view, (pick as HTMLSelectElement).value)) }, ...runs.map((one) => h("option", { value: one.id, selected: one.id === run }, `${one.id} (${one.state === "old" ? "" : `${one.state}, `}${one.train_step} of ${one.steps ?? "?"})`)));
  const overlay = h("select", { "aria-label": "lay another run over it", onchange: () => {
    chosen.add((overlay as HTMLSelectElement).value);
    chosen.delete(run);
    location.hash = address("overview", run, { with: [...chosen].join("\n") });
  } }, h("option", { value: "" }, "lay over ..."), ...runs.filter((one) => !chosen.has(one.id)).map((one) => h("option", { value: one.id }, one.id)));
  show(
    header,
    h("h1", { class: "name" }, "forebay"),
    pick,
    view === "overview" && runs.length > 1 && !isReport ? overlay : null,
    h("nav", { "aria-label": "views" }, ...TABS.map((name) => h("a", { href: address(name, run), "aria-current": (PARENTS[view] ?? view) === name ? "page" : undefined }, name))),
    h("button", { type: "button", class: "quiet", "aria-label": "light or dark", onclick: changeTheme }, "\u25d0"),
    h("button", { type: "button", class: "quiet", "aria-label": "keys", onclick: () => help.showModal() }, "?"),
  );
}

/** A view of a run that has just begun fills by itself. What somebody types is not taken away. */
function lookAgain(): void {
  const field = document.activeElement as HTMLInputElement | null;
  // Not while another view is on its way: what is shown is no longer what the address says.
  if (main.querySelector(".awaited") && !main.hasAttribute("aria-busy") && !field?.value) void draw(true);
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");

/** That of this reader, else of the browser. */
function setTheme(): void {
  let theme: string | null = null;
  try {
    theme = localStorage.getItem("theme");
  } catch {
    // A browser that keeps nothing.
  }
  document.documentElement.dataset.theme = theme ?? (prefersDark.matches ? "dark" : "light");
}

function changeTheme(): void {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("theme", theme);
  } catch {
    // The theme is that of this visit.
  }
  void draw();
}

function moveTo(step: number): void {
  const items = [...main.querySelectorAll<HTMLElement>("a.item")];
  const at = items.indexOf(document.activeElement as HTMLElement);
  const next = items[Math.max(0, Math.min(items.length - 1, at < 0 ? 0 : at + step))];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
}

document.addEventListener("keydown", (event) => {
  const target = event.target as HTMLElement;
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  if (["INPUT", "SELECT", "TEXTAREA"].includes(target.tagName)) {
    if (event.key === "Escape") target.blur();
    return;
  }
  const { run } = here();
  const actions: Record<string, () => void> = {
    "/": () => {
      const field = document.getElementById("search");
      if (field) return field.focus();
      isSearchAwaited = true;
      location.hash = address("rollouts", run);
    },
    j: () => moveTo(1),
    k: () => moveTo(-1),
    u: () => history.back(),
    t: changeTheme,
    "?": () => help.showModal(),
  };
  TABS.forEach((name, place) => (actions[String(place + 1)] = () => (location.hash = address(name, run))));
  if (actions[event.key]) {
    event.preventDefault();
    actions[event.key]();
  }
});

setTheme();
prefersDark.addEventListener("change", () => {
  setTheme();
  void draw();
});
window.addEventListener("hashchange", () => void draw());
if (!isReport) window.setInterval(lookAgain, LOOK_AGAIN_MS);
void draw();
