import { ask, isOver } from "./api";
import { absent, duration, h, number, percent, show, table } from "./dom";
import { judgesOf, stageText } from "./judges";
import { address, keep } from "./place";
import type { RunSummary, Span, Timeline } from "./types";

const ROW = 14;
const TRACKS = ["train", "checkpoint", "wait_batch", "sync", "evaluate", "queued", "generate", "tool", "judge", "put"];
const NAMES: Record<string, string> = {
  train: "training", checkpoint: "checkpoints", wait_batch: "waiting for a batch", sync: "handing weights over", evaluate: "evaluation",
  queued: "rollouts queued", generate: "rollouts generated", tool: "tools and environments", judge: "groups judged", put: "groups stored",
};
/** What the trainer may wait for, in words. */
const AWAITED: Record<string, string> = { generate: "rollouts to be generated", judge: "groups to be judged", put: "groups to be stored", queued: "engines to have room" };
const MAX_LANES = 24;
const CROWD = 90;
const STEPS_S = [0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400];

interface Placed {
  span: Span;
  x: number;
  y: number;
  width: number;
}

/** What was done when: a lane for each thing at a time; wheel or buttons zoom, dragging moves. */
export async function timeline(root: HTMLElement, run: string, given: Record<string, string>, runs: RunSummary[]): Promise<() => void> {
  const canvas = document.createElement("canvas");
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  const told = h("p", { class: "told", "aria-live": "polite" });
  const totals = h("div", {});
  const controls = h("div", { class: "controls" });
  const verdict = h("p", { class: "waited" });
  show(root, controls, verdict, h("div", { class: "lanes" }, canvas), told, totals);
  const [first, judges] = await Promise.all([ask("timeline", { run, start_s: given.from, end_s: given.to }), judgesOf(run)]);
  if (first.from_s === null) {
    show(root, absent(isOver(runs, run), "Nothing that the run does has ended yet: what was generated, judged and trained when comes here by itself, some seconds after. A run with history_gb = 0 keeps none of it.", "This run kept no history of activities (history_gb = 0)."));
    return () => undefined;
  }
  let data: Timeline = first;
  let placed: Placed[] = [];
  let timer = 0;
  let turn = 0;

  const load = (from: number, to: number) => {
    data.from_s = from;
    data.to_s = to;
    draw();
    clearTimeout(timer);
    const mine = ++turn;
    timer = window.setTimeout(async () => {
      keep({ from: from.toFixed(3), to: to.toFixed(3) });
      const found = await ask("timeline", { run, start_s: from, end_s: to });
      if (mine !== turn || found.from_s === null) return;
      data = found;
      draw();
    }, 150);
  };
  const zoom = (factor: number, at = 0.5) => {
    const middle = data.from_s + at * (data.to_s - data.from_s);
    load(middle - (middle - data.from_s) * factor, middle + (data.to_s - middle) * factor);
  };
  const move = (share: number) => {
    const width = data.to_s - data.from_s;
    load(data.from_s + share * width, data.to_s + share * width);
  };
  const button = (text: string, label: string, action: () => void) => h("button", { type: "button", "aria-label": label, onclick: action }, text);
  show(
    controls,
    button("-", "- zoom out", () => zoom(2)),
    button("+", "+ zoom in", () => zoom(0.5)),
    button("\u2190", "earlier", () => move(-0.5)),
    button("\u2192", "later", () => move(0.5)),
    button("all", "all of the run", () => load(data.whole.start_s, data.whole.end_s)),
    button("end", "end: the last two minutes", () => load(Math.max(data.whole.start_s, data.whole.end_s - 120), data.whole.end_s)),
  );

  const draw = () => {
    const width = Math.max(300, (canvas.parentElement as HTMLElement).clientWidth);
    const style = getComputedStyle(document.documentElement);
    const { tracks, height } = lay(data, width);
    placed = tracks.flatMap((track) => track.spans);
    const ratio = window.devicePixelRatio || 1;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d") as CanvasRenderingContext2D;
    context.scale(ratio, ratio);
    context.font = "11px system-ui, sans-serif";
    drawAxis(context, data, width, height, style);
    tracks.forEach((track, place) => {
      context.fillStyle = style.getPropertyValue("--dim");
      context.fillText(`${NAMES[track.stage] ?? track.stage}${track.hidden ? ` (${track.hidden} more at once)` : ""}${track.counts.length ? ` (at most ${number(Math.round(track.most))} at once)` : ""}`, 4, track.y - 4);
      context.fillStyle = style.getPropertyValue(`--line-${place % 6}`);
      track.counts.forEach((count, at) => {
        const tall = (count / track.most) * (CROWD - 2);
        context.fillRect((at * width) / track.counts.length, track.y + CROWD - tall, width / track.counts.length + 0.5, tall);
      });
      for (const one of track.spans) {
        context.fillStyle = style.getPropertyValue(hasFailed(one.span) ? "--bad" : `--line-${place % 6}`);
        context.fillRect(one.x, one.y, Math.max(1, one.width), ROW - 3);
        if (given.name && one.span.name === given.name) {
          context.strokeStyle = style.getPropertyValue("--ink");
          context.lineWidth = 2;
          context.strokeRect(one.x, one.y, Math.max(3, one.width), ROW - 3);
        }
      }
    });
    canvas.setAttribute("aria-label", `${data.spans.length} activities in ${duration(data.to_s - data.from_s)}`);
    verdict.textContent = idle(data);
    show(totals, busyTable(data), Object.keys(data.crowded).length ? h("p", { class: "dim" }, "Stages with very many activities show how many were going on; zoom in for each of them.") : null);
  };
  const under = (event: MouseEvent) => {
    const box = canvas.getBoundingClientRect();
    const x = event.clientX - box.left;
    const y = event.clientY - box.top;
    return placed.find((one) => x >= one.x - 1 && x <= one.x + Math.max(2, one.width) + 1 && y >= one.y && y < one.y + ROW);
  };
  let dragged: { x: number; from: number; to: number } | null = null;
  canvas.addEventListener("pointerdown", (event) => (dragged = { x: event.clientX, from: data.from_s, to: data.to_s }));
  canvas.addEventListener("pointermove", (event) => {
    if (dragged && event.buttons) {
      const shift = ((dragged.x - event.clientX) / canvas.clientWidth) * (dragged.to - dragged.from);
      if (Math.abs(event.clientX - dragged.x) > 3) load(dragged.from + shift, dragged.to + shift);
      return;
    }
    const found = under(event);
    told.textContent = found ? `${stageText(found.span.stage, found.span.task, judges)}: ${found.span.name} ${found.span.task} ${found.span.note}: ${duration(found.span.end_s - found.span.start_s)}` : "";
  });
  canvas.addEventListener("click", (event) => {
    const found = under(event);
    const moved = dragged && Math.abs(event.clientX - dragged.x) > 3;
    dragged = null;
    if (!found || moved) return;
    if (found.span.stage === "generate" || isEngine(found.span.stage)) location.hash = address("rollout", run, { id: found.span.name });
    else if (found.span.group_id) location.hash = address("group", run, { id: found.span.group_id });
  });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const box = canvas.getBoundingClientRect();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, (event.clientX - box.left) / box.width);
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const action = { ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), "+": () => zoom(0.5), "-": () => zoom(2) }[event.key];
    if (action) action();
  });
  const observer = new ResizeObserver(draw);
  observer.observe(canvas.parentElement as HTMLElement);
  draw();
  return () => {
    turn += 1;
    observer.disconnect();
    clearTimeout(timer);
  };
}

interface Track {
  stage: string;
  y: number;
  spans: Placed[];
  hidden: number;
  /** Of a crowded stage: how many at once, over the width. */
  counts: number[];
  most: number;
}

/** The note of a judge is its failure, or that it was cancelled; that of a rollout begins with what became of it. */
function hasFailed(span: Span): boolean {
  return span.stage === "judge" ? !["", "CancelledError"].includes(span.note) : span.note.startsWith("failed");
}

/** Upright lines at round times since the run began, with their labels at the foot. */
function drawAxis(context: CanvasRenderingContext2D, data: Timeline, width: number, height: number, style: CSSStyleDeclaration): void {
  const span = data.to_s - data.from_s;
  const most = Math.max(2, width / 110);
  const step = STEPS_S.find((one) => span / one <= most) ?? 86400 * Math.ceil(span / 86400 / most);
  const begun = data.whole.start_s;
  for (let at = Math.ceil((data.from_s - begun) / step) * step; at <= data.to_s - begun; at += step) {
    const x = ((at + begun - data.from_s) / span) * width;
    context.fillStyle = style.getPropertyValue("--rule");
    context.fillRect(x, 0, 1, height - 14);
    context.fillStyle = style.getPropertyValue("--dim");
    const label = step < 1 ? `${at.toFixed(2)} s` : step < 60 && at < 600 ? `${Math.round(at)} s` : at < 3600 ? `${Math.floor(at / 60)}:${String(Math.round(at % 60)).padStart(2, "0")}` : `${Math.floor(at / 3600)} h ${String(Math.floor((at % 3600) / 60)).padStart(2, "0")}${step < 60 ? `:${String(Math.round(at % 60)).padStart(2, "0")}` : ""}`;
    context.fillText(label, Math.min(x, width - 50), height - 3);
  }
}

function lay(data: Timeline, width: number): { tracks: Track[]; height: number } {
  const scale = width / (data.to_s - data.from_s);
  const stages = [...new Set<string>(data.busy.map((row) => row.stage))].sort((a, b) => rank(a) - rank(b));
  const tracks: Track[] = [];
  let y = 18;
  for (const stage of stages) {
    const ends: number[] = [];
    const counts: number[] = data.crowded[stage] ?? [];
    const track: Track = { stage, y, spans: [], hidden: 0, counts, most: Math.max(1, ...counts) };
    for (const span of data.spans) {
      if (span.stage !== stage) continue;
      let lane = ends.findIndex((end) => end <= span.start_s);
      if (lane < 0) lane = ends.length;
      ends[lane] = span.end_s;
      if (lane >= MAX_LANES) {
        track.hidden = Math.max(track.hidden, lane - MAX_LANES + 1);
        continue;
      }
      track.spans.push({ span, x: (span.start_s - data.from_s) * scale, y: y + lane * ROW, width: (span.end_s - span.start_s) * scale });
    }
    tracks.push(track);
    y += (counts.length ? CROWD : Math.min(ends.length, MAX_LANES) * ROW) + 22;
  }
  return { tracks, height: Math.max(60, y + 8) };
}

/** A stage of its own for each of several engines: "engine 0". */
function isEngine(stage: string): boolean {
  return stage.startsWith("engine ");
}

/** Engines stand by their numbers, below the rollouts that they make. */
function rank(stage: string): number {
  if (isEngine(stage)) return TRACKS.indexOf("generate") + 1 - 1 / (2 + Number(stage.slice(7)));
  const place = TRACKS.indexOf(stage);
  return place < 0 ? TRACKS.length : place;
}

/** How long the trainer stood still, and for what. */
function idle(data: Timeline): string {
  const share = (stage: string) => (data.busy.find((row) => row.stage === stage)?.busy_s ?? 0) / (data.to_s - data.from_s);
  const worked = share("train");
  if (!worked) return "The trainer did nothing in the time shown.";
  const others = ["wait_batch", "sync", "checkpoint", "evaluate", "generate", "tool", "judge"].filter((stage) => share(stage) > 0.005);
  return `The trainer trained for ${percent(worked)} of the time shown. In it there was also: ${others.map((stage) => `${NAMES[stage]} ${percent(share(stage))}`).join(", ")}.${share("wait_batch") > 0.005 ? waitedFor(data) : ""}`;
}

/** What went on while the trainer waited for its batch: what overlaps its waiting, not what fills the window. */
export function waitedFor(data: Timeline): string {
  const waits = times(data, "wait_batch");
  const waited = length(waits);
  if (!waited) return "";
  const of = (stage: string) => length(common(waits, times(data, stage))) / waited;
  const going = Object.keys(AWAITED).map((stage): [string, number] => [stage, of(stage)]).sort((a, b) => b[1] - a[1]);
  const told = going.filter(([, part]) => part > 0.005);
  // Also of a run in environments: its history has no spans of them.
  if (!told.length && !data.busy.some((row) => row.stage in AWAITED)) return " What it waited for is not known: no rollout was generated or judged in this time, and steps in environments are not recorded one by one.";
  if (!told.length) return " While it waited for a batch, nothing was generated or judged.";
  const tools = of("tool");
  const inTools = told[0][0] === "generate" && tools > 0.5 ? ", and there for tools and environments" : "";
  return ` While it waited for a batch there was: ${told.map(([stage, part]) => `${NAMES[stage]} ${percent(part)}`).join(", ")}${tools > 0.005 ? `, ${NAMES.tool} ${percent(tools)}` : ""} of the waiting. So it waited mostly for ${AWAITED[told[0][0]]}${inTools}.`;
}

/** From, to, and in what share of that; in order, none within another. */
type Times = [number, number, number][];

/** When anything of a stage was going on, within what is shown. Of a crowded one only the share of each part is known. */
function times(data: Timeline, stage: string): Times {
  const counts = data.crowded[stage];
  if (counts) {
    const width = (data.to_s - data.from_s) / counts.length;
    return counts.flatMap((count, at): Times => (count ? [[data.from_s + at * width, data.from_s + (at + 1) * width, Math.min(1, count)]] : []));
  }
  const joined: Times = [];
  for (const span of data.spans) {
    if (span.stage !== stage) continue;
    const [from, to] = [Math.max(span.start_s, data.from_s), Math.min(span.end_s, data.to_s)];
    const last = joined[joined.length - 1];
    // Spans come in the order of their beginnings.
    if (last && from <= last[1]) last[1] = Math.max(last[1], to);
    else if (to > from) joined.push([from, to, 1]);
  }
  return joined;
}

function common(some: Times, others: Times): Times {
  const found: Times = [];
  for (let one = 0, other = 0; one < some.length && other < others.length; ) {
    const [from, to] = [Math.max(some[one][0], others[other][0]), Math.min(some[one][1], others[other][1])];
    // Within a part of the time one is as likely at one moment as at another.
    if (to > from) found.push([from, to, some[one][2] * others[other][2]]);
    if (some[one][1] < others[other][1]) one += 1;
    else other += 1;
  }
  return found;
}

function length(some: Times): number {
  return some.reduce((sum, [from, to, share]) => sum + (to - from) * share, 0);
}

/** For each stage: the share of the time in which it was going on at all. */
function busyTable(data: Timeline): HTMLElement {
  const rows = [...(data.busy)].sort((a, b) => rank(a.stage) - rank(b.stage));
  return table(
    ["what", "how often", "of the time shown", "longest"],
    rows.map((row) => [NAMES[row.stage] ?? row.stage, number(row.times), `${Math.round((100 * row.busy_s) / (data.to_s - data.from_s))}%`, duration(row.longest_s)]),
    { numbers: [1, 2, 3], label: "Share of the time by activity" },
  );
}
