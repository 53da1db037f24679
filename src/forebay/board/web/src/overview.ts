import { ask, follow, isReport } from "./api";
import { Chart, RUN_COLORS, swatch, type Line, type Mark } from "./charts";
import { add, duration, h, number, percent, show, table } from "./dom";
import { address, here, keep } from "./place";
import { rowAt } from "./thin";
import type { Columns, Live, Note, Overview } from "./types";

interface Panel {
  title: string;
  lines: [name: string, label: string, dash?: boolean][];
  /** It is shown only where something was not zero. */
  unlessZero?: boolean;
  /** How far the first line spreads, to both sides. */
  spread?: [name: string, label: string];
}

const PANELS: Panel[] = [
  { title: "Reward", lines: [["reward", "training"], ["eval/score", "held out", true]], spread: ["train/group_score_std", "spread of the groups' means"] },
  { title: "Return of episodes", lines: [["return", "last 100 of training"], ["eval/return", "evaluation", true]] },
  { title: "Groups in which a judge failed, share", lines: [["failed/judge", "of the step"]], unlessZero: true },
  { title: "Held-out accuracy", lines: [["eval/accuracy", "accuracy"]] },
  { title: "Spread of the batch's scores", lines: [["train/score_std", "standard deviation of all"], ["train/equal_score_groups", "share of groups without a difference", true]] },
  { title: "Response length, tokens", lines: [["response_tokens", "mean"]] },
  { title: "Episode length, steps", lines: [["episode_steps", "mean"]] },
  { title: "Entropy", lines: [["train/entropy", "nats per token"], ["entropy", "nats per action"]] },
  { title: "Distance to the sampling policy", lines: [["train/policy_kl", "KL in the step"], ["train/mismatch_kl", "KL engine to trainer", true], ["kl", "KL in the step"], ["lag_kl", "KL of the lag", true]] },
  { title: "Staleness, train steps", lines: [["train/staleness_mean", "mean"], ["train/staleness_max", "most", true], ["lag", "mean of fragments"]] },
  { title: "Effective sample size", lines: [["train/ess_sequence", "by sequence"], ["train/ess_token", "by token", true]] },
  { title: "Generated tokens per second", lines: [["tokens_per_s", "tokens/s"]] },
  { title: "Environment steps per second", lines: [["env_steps_per_s", "steps/s"]] },
  { title: "Where a step's time goes, s", lines: [["time/generate_s", "generate"], ["time/wait_s", "wait"], ["time/train_s", "train"], ["time/sync_s", "sync"], ["time/pause_s", "pause"]] },
  { title: "CPU of the run's process, s per step", lines: [["cpu/generate_s", "generate"], ["cpu/train_s", "train"], ["cpu/sync_s", "sync"]] },
  { title: "GPU of the trainer, share of the time busy", lines: [["gpu/busy", "mean"]] },
  { title: "GPU memory, GB", lines: [["gpu/used_gb", "all processes"], ["gpu/reserved_gb", "torch in the run's process", true]] },
  { title: "Busy", lines: [["busy/trainer", "trainer"], ["busy/producer", "producer", true]] },
  { title: "Gradient norm", lines: [["train/grad_norm", "norm"], ["grad_norm", "norm"]] },
  { title: "Learning rate", lines: [["train/lr", "rate"]] },
];

const NEEDED = ["train_step", "unix_time_s", "samples", "step_s", "time/checkpoint_s", ...PANELS.flatMap((panel) => [...panel.lines.map(([name]) => name), ...(panel.spread?.slice(0, 1) ?? [])])];
const MAX_RUNS = RUN_COLORS;
/** Of the first, second, ... line of a run where the color says which run it is. */
const DASHES = [undefined, [5, 4], [2, 3], [10, 3, 2, 3], [12, 5]];

export async function overview(root: HTMLElement, run: string, given: Record<string, string>): Promise<() => void> {
  const others = (given.with ?? "").split("\n").filter((name) => name && name !== run).slice(0, MAX_RUNS - 1);
  const names = [run, ...others];
  const settings = { x: given.x ?? "step", smooth: Number(given.smooth ?? 0), more: given.more ?? "" };
  const columns = [...new Set([...NEEDED, ...settings.more.split(",").filter(Boolean)])];
  const loaded = await Promise.all(names.map((name) => ask("overview", { run: name, names: columns })));
  const charts = new Map<string, Chart>();

  const head = h("section", { class: "facts", "aria-label": "State of the run" });
  const notes = h("section", { class: "notes", "aria-label": "Warnings", tabindex: 0 });
  const controls = h("div", { class: "controls" });
  const grid = h("div", { class: "charts" });
  const differences = h("section", { class: "differences" });
  const nothing = h("p", { class: "empty", hidden: true }, "No train step has been reported yet. The charts come by themselves with the first.");
  show(root, head, notes, controls, nothing, grid, differences);

  const isOverlaid = loaded.length > 1;
  const xOf = (columns: Columns): number[] => {
    const steps = (columns.train_step ?? []) as number[];
    if (settings.x === "time") return (columns.unix_time_s ?? []) as number[];
    if (settings.x === "tokens") {
      let total = 0;
      return steps.map((_, row) => (total += (columns.samples?.[row] ?? 0) * (columns.response_tokens?.[row] ?? 0)));
    }
    return steps;
  };
  const linesOf = (panel: Panel, axes: number[][]): Line[] => {
    const lines: Line[] = [];
    loaded.forEach((one, place) => {
      for (const [at, [name, label, isDashed]] of panel.lines.entries()) {
        const y = one.metrics[name];
        if (!y || !y.some((value) => value !== null && value !== undefined && !(panel.unlessZero && value === 0))) continue;
        const sparse = name.startsWith("eval/");
        const shown = isOverlaid ? `${names[place]} ${label}` : label;
        const dash = DASHES[isOverlaid ? at : Number(isDashed ?? false)];
        lines.push({ label: shown, x: axes[place], y, dash, points: sparse, run: isOverlaid ? place : undefined, smooth: sparse ? 0 : settings.smooth });
      }
    });
    const [name, label] = panel.spread ?? [];
    const [middle, spread] = [lines[0]?.y, name ? loaded[0].metrics[name] : undefined];
    // Of runs that lie over each other the bands would hide the lines.
    if (isOverlaid || !label || !middle || !spread?.some((value) => value !== null)) return lines;
    const edge = (side: number): Line => ({ ...lines[0], label, isEdge: true, y: middle.map((value, row) => (value === null || (spread[row] ?? null) === null ? null : value + side * (spread[row] as number))) });
    return [...lines, edge(1), edge(-1)];
  };
  /** What happened in a run, where it stands on the axis. */
  const marksOf = (one: Overview, x: number[], place: number): Mark[] => {
    const steps = (one.metrics.train_step ?? []) as number[];
    const [run, said] = isOverlaid ? [place, `${names[place]}, `] : [undefined, ""];
    const at = (note: Note) => (settings.x === "time" ? note.unix_time_s : settings.x === "step" ? note.train_step : (x[Math.min(rowAt(steps, note.train_step), x.length - 1)] ?? 0));
    return [
      ...one.notes
        .filter((note) => note.kind !== "message" || String(note.text).startsWith("resumed"))
        .map((note): Mark => ({ x: at(note), kind: note.kind, text: `${said}step ${note.train_step}: ${note.text}`, run })),
      ...["checkpoint", "sync"].flatMap((kind) => done(one.metrics, kind).map((row): Mark => ({ x: x[row], kind, text: `${said}${kind} after step ${steps[row]}`, run }))),
    ];
  };

  const draw = () => {
    const panels = [...PANELS, ...settings.more.split(",").filter(Boolean).map((name): Panel => ({ title: name, lines: [[name, "value"]] }))];
    const wanted = new Set<string>();
    // Made once, so that the lines of one run share it.
    const axes = loaded.map((one) => xOf(one.metrics));
    const marks = loaded.flatMap((one, place) => marksOf(one, axes[place], place)).sort((a, b) => a.x - b.x);
    for (const panel of panels) {
      const lines = linesOf(panel, axes);
      if (!lines.length) continue;
      wanted.add(panel.title);
      let chart = charts.get(panel.title);
      if (!chart) {
        chart = new Chart(panel.title, () => settings.x === "time", `overview-${settings.x}`, (row) => {
          const step = loaded[0].metrics.train_step?.[row];
          if (loaded.length === 1 && step !== undefined) location.hash = address("rollouts", run, { train_step_min: step, train_step_max: step });
        });
        charts.set(panel.title, chart);
        grid.append(chart.element);
      }
      chart.set(lines, marks);
    }
    for (const [title, chart] of charts) {
      if (wanted.has(title)) continue;
      chart.close();
      chart.element.remove();
      charts.delete(title);
    }
    nothing.hidden = wanted.size > 0;
  };
  const redraw = () => {
    for (const chart of charts.values()) {
      chart.close();
      chart.element.remove();
    }
    charts.clear();
    show(grid);
    draw();
  };

  drawControls(controls, settings, loaded, run, others, async (changed) => {
    Object.assign(settings, changed);
    const missing = settings.more.split(",").filter((name) => name && !columns.includes(name));
    if (missing.length) {
      columns.push(...missing);
      await Promise.all(loaded.map(async (one, place) => Object.assign(one.metrics, await ask("metrics", { run: names[place], names: missing }))));
    }
    keep({ x: settings.x === "step" ? "" : settings.x, smooth: settings.smooth || "", more: settings.more });
    redraw();
  });
  const drawState = () => {
    drawFacts(head, loaded[0]);
    drawNotes(notes, names, loaded);
  };
  drawState();
  draw();
  if (isOverlaid) drawDifferences(differences, names, loaded);
  else drawConfig(differences, loaded[0].facts.config);

  const last = loaded[0].metrics.train_step?.at(-1) ?? -1;
  const stop = follow(run, last, (change) => {
    loaded[0].live = change.live;
    loaded[0].facts.state = change.live.state;
    for (const name of Object.keys(change.metrics)) {
      if (!loaded[0].names.includes(name)) loaded[0].names.push(name);
      if (!columns.includes(name)) delete change.metrics[name];
    }
    if (change.replace) loaded[0].metrics = change.metrics;
    else appendRows(loaded[0].metrics, change.metrics);
    loaded[0].notes.push(...change.notes);
    const steps = loaded[0].metrics.train_step ?? [];
    loaded[0].facts.train_step = steps[steps.length - 1] ?? 0;
    drawState();
    if (change.replace || Object.keys(change.metrics).length) draw();
  });
  return () => {
    stop();
    for (const chart of charts.values()) chart.close();
  };
}

/** Rows after those that are there; one of a step that is there already takes its place. */
export function appendRows(columns: Columns, more: Columns): void {
  const steps = more.train_step ?? [];
  steps.forEach((step, row) => {
    const known = columns.train_step ?? (columns.train_step = []);
    let at = known.length;
    while (at > 0 && (known[at - 1] as number) > (step as number)) at -= 1;
    const length = known.length;
    if (at > 0 && known[at - 1] === step) at -= 1;
    for (const name of new Set([...Object.keys(columns), ...Object.keys(more)])) {
      const column = columns[name] ?? (columns[name] = new Array(length).fill(null));
      column.length = at;
      column.push(more[name]?.[row] ?? null);
    }
  });
}

/** The rows of the steps after which a checkpoint was written, or weights were handed over, by the seconds that it took. */
function done(columns: Columns, kind: string): number[] {
  const seconds = columns[`time/${kind}_s`] ?? [];
  const rows = seconds.flatMap((value, row) => (value ? [row] : []));
  // Weights that are handed over after nearly every step are no news; a line of ticks would hide what is.
  if (kind === "sync") return rows.length > seconds.length / 2 ? [] : rows;
  // A checkpoint is written after a step, and its time counts to the next.
  return rows.map((row) => Math.max(0, row - 1));
}

function drawFacts(root: HTMLElement, one: Overview): void {
  const { facts, live, metrics } = one;
  const seconds = (metrics.step_s ?? []).slice(-20).filter((value): value is number => value !== null);
  const stepSeconds = seconds.reduce((sum, value) => sum + value, 0) / seconds.length;
  const left = facts.steps ? duration((facts.steps - facts.train_step) * stepSeconds) : "-";
  const item = (name: string, value: string, extra = "") => h("div", { class: "fact" }, h("dt", {}, name), h("dd", { class: extra, title: value }, value));
  const done = facts.state === "finished";
  const times = metrics.unix_time_s ?? [];
  const took = times.length > 1 ? (times[times.length - 1] as number) - (times[0] as number) : undefined;
  show(
    root,
    h(
      "dl",
      {},
      item("state", stateText(facts.state, live), `state-${facts.state}`),
      item("train step", `${number(facts.train_step)} of ${number(facts.steps)}`),
      item(done ? "ended" : "time left", done ? new Date(1000 * (facts.unix_time_s ?? 0)).toLocaleString(undefined, { dateStyle: "short", timeStyle: "short" }) : facts.state === "running" ? left : "-"),
      item("weights that generate", live.model_step === undefined ? "-" : `step ${live.model_step}`),
      ...(done
        ? [item("took, from the first step's end", took === undefined ? "-" : duration(took))]
        : [item("trainer busy", percent(live.busy?.trainer)), item("producer busy", percent(live.busy?.producer)), item("now", facts.state === "running" ? String(live.phase ?? "-") : "-")]),
    ),
    facts.problem ? h("p", { class: "failure" }, facts.problem) : null,
  );
}

export function stateText(state: string, live: Live): string {
  if (state === "running") return "running";
  if (state === "lost") return `no sign of life for ${duration(live.age_s ?? 0)}`;
  return state === "old" ? "not live" : state;
}

/** In a place of its own size, whatever comes: nothing below it may jump. Drawn again only if there is more. */
function drawNotes(root: HTMLElement, names: string[], loaded: Overview[]): void {
  const stalls = loaded.flatMap(({ live }, place) => (live.stall ? [{ place, text: String(live.stall) }] : []));
  const warnings = loaded.flatMap((one, place) => one.notes.filter((note) => note.kind !== "message").map((note) => ({ place, note })));
  warnings.sort((a, b) => b.note.unix_time_s - a.note.unix_time_s);
  const state = JSON.stringify([stalls, warnings.length]);
  if (root.dataset.state === state) return;
  root.dataset.state = state;
  const whose = (place: number) => (loaded.length > 1 ? [swatch(place), names[place], " "] : []);
  const line = ({ place, note }: { place: number; note: Note }) => {
    const steps = { train_step_min: Math.max(0, note.train_step - 5), train_step_max: note.train_step };
    return h("li", { class: note.kind }, ...whose(place), h("a", { href: address("rollouts", names[place], steps) }, `step ${note.train_step}`), " ", String(note.text));
  };
  show(
    root,
    h("h2", {}, warnings.length ? `Warnings (${warnings.length})` : stalls.length ? "The run stalls" : "No warnings"),
    ...stalls.map(({ place, text }) => h("pre", { class: "failure" }, ...whose(place), text)),
    warnings.length ? h("ul", {}, ...warnings.map(line)) : null,
  );
}

function drawControls(
  root: HTMLElement,
  settings: { x: string; smooth: number; more: string },
  loaded: Overview[],
  run: string,
  others: string[],
  changed: (settings: Record<string, unknown>) => void,
): void {
  const x = h("select", { id: "x", onchange: () => changed({ x: (x as HTMLSelectElement).value }) }, ...[["step", "train step"], ["tokens", "trained tokens"], ["time", "time"]].map(([value, text]) => h("option", { value, selected: value === settings.x }, text)));
  const slider = h("input", { id: "smooth", type: "range", min: 0, max: 0.98, step: 0.02, value: settings.smooth, onchange: () => changed({ smooth: Number((slider as HTMLInputElement).value) }) });
  const shown = new Set(PANELS.flatMap((panel) => panel.lines.map(([name]) => name)));
  const names = [...new Set(loaded.flatMap((one) => one.names))].filter((name) => !shown.has(name) && name !== "train_step" && name !== "unix_time_s").sort();
  const more = h("select", { id: "more", onchange: () => changed({ more: [settings.more, (more as HTMLSelectElement).value].filter(Boolean).join(",") }) }, h("option", { value: "" }, `one of ${names.length} more ...`), ...names.map((name) => h("option", { value: name }, name)));
  show(root, h("label", { for: "x" }, "over ", x), h("label", { for: "smooth" }, "smooth ", slider), h("label", { for: "more" }, "add ", more));
  if (loaded.length === 1 && !isReport) add(root, h("span", { class: "dim" }, "a click in a chart opens the rollouts of that step, a drag zooms, a double click shows all again"));
  if (settings.more) add(root, h("button", { type: "button", class: "quiet", onclick: () => changed({ more: "" }) }, "remove added"));
  if (others.length) add(root, h("a", { href: address("overview", run) }, "this run alone"));
}

/** The keys of a run file with dots, and their values as text. */
export function flat(value: unknown, prefix = ""): Map<string, string> {
  const found = new Map<string, string>();
  if (value !== null && typeof value === "object" && !(Array.isArray(value) && value.every((item) => typeof item !== "object"))) {
    for (const [name, item] of Object.entries(value)) {
      for (const [key, text] of flat(item, prefix ? `${prefix}.${name}` : name)) found.set(key, text);
    }
  } else found.set(prefix, JSON.stringify(value));
  return found;
}

function drawDifferences(root: HTMLElement, names: string[], loaded: Overview[]): void {
  const configs = loaded.map((one) => flat(one.facts.config));
  const keys = [...new Set(configs.flatMap((config) => [...config.keys()]))].filter((key) => new Set(configs.map((config) => config.get(key))).size > 1).sort();
  show(root, h("h2", {}, "What differs between the run files"), keys.length ? table(["key", ...names], keys.map((key) => [key, ...configs.map((config) => config.get(key) ?? "-")])) : h("p", {}, "Nothing."));
}

function drawConfig(root: HTMLElement, config: Record<string, unknown>): void {
  show(root, h("details", {}, h("summary", {}, "Run file"), table(["key", "value"], [...flat(config)].map(([key, value]) => [key, value]))));
}

export function currentRuns(): string[] {
  return (here().given.with ?? "").split("\n").filter(Boolean);
}
