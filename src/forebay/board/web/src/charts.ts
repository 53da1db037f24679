import uPlot from "uplot";
import { h, number, svg } from "./dom";
import { drawnRows, type Values } from "./thin";

export interface Line {
  label: string;
  x: number[];
  y: (number | null)[];
  /** Lengths of strokes and gaps; none for a whole line. */
  dash?: number[];
  points?: boolean;
  run?: number;
  /** The weight of what was before (`smooth`). */
  smooth?: number;
  /** The upper or lower edge of a band around the first line, drawn as its color between the two; they come last. */
  isEdge?: boolean;
}

export interface Mark {
  x: number;
  kind: string;
  text: string;
  /** Where several runs lie over each other: which one's. */
  run?: number;
}

export const RUN_COLORS = 6;
const HEIGHT = 190;
const DOUBLE_CLICK_MS = 300;

function color(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export function lineColor(place: number): string {
  return color(`line-${place % RUN_COLORS}`);
}

/** An exponential mean that does not lean on the first value; 0: the values themselves. */
export function smooth(values: (number | null)[], weight: number): (number | null)[] {
  if (weight <= 0) return values;
  let mean = 0;
  let sum = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    mean = weight * mean + (1 - weight) * value;
    sum = weight * sum + (1 - weight);
    return mean / sum;
  });
}

/** Charts with something new. A frame draws as many as it has time for, and of those with long lines one: all are too much. */
const waiting = new Set<Chart>();
const FRAME_MS = 6;

function drawWaiting(): void {
  const end = performance.now() + FRAME_MS;
  try {
    for (const chart of waiting) {
      waiting.delete(chart);
      if (chart.refresh() || performance.now() > end) break;
    }
  } finally {
    // A chart that cannot be drawn does not keep the others from it.
    if (waiting.size) requestAnimationFrame(drawWaiting);
  }
}

/** One chart: lines over one x axis, marks as upright strokes; the legend is beside the title. */
export class Chart {
  readonly element: HTMLElement;
  private plot: uPlot | null = null;
  private readonly canvas = h("div", { class: "plot" });
  private readonly legend = h("span", { class: "legend" });
  private readonly told = h("div", { class: "mark-text", hidden: true });
  private lines: Line[] = [];
  private marks: Mark[] = [];
  private readonly observer: ResizeObserver;

  constructor(private readonly title: string, private readonly xTime: () => boolean, group: string, private readonly chosen: (row: number) => void) {
    this.element = h("figure", { class: "chart" }, h("figcaption", {}, h("strong", {}, title), " ", this.legend), this.canvas, this.told);
    this.group = group;
    this.observer = new ResizeObserver(() => {
      const width = this.canvas.clientWidth;
      if (!this.plot || !width || Math.abs(width - this.plot.width) <= 1) return;
      this.plot.setSize({ width, height: HEIGHT });
      this.isStale = true;
      this.refreshSoon();
    });
    this.observer.observe(this.canvas);
    // Of twenty charts six are on the screen: the others are drawn when they come near it.
    this.near = new IntersectionObserver((entries) => {
      this.isNear = entries[entries.length - 1].isIntersecting;
      this.refreshSoon();
    }, { rootMargin: "300px" });
    this.near.observe(this.canvas);
  }

  private readonly near: IntersectionObserver;
  private isNear = false;
  private isStale = false;
  private clicked = 0;
  /** What the reader looks at, if it is not all; it stays where it is while the run goes on. */
  private zoom: { min: number; max: number } | null = null;
  /** From where to where it is drawn: off the screen that is less than there is by now, and the columns grow in place. */
  private all = { min: 0, max: 0 };
  private shown: Shown = { data: [[]], rows: null, isThin: false };

  private readonly group: string;

  set(lines: Line[], marks: Mark[]): void {
    const alike =
      lines.length === this.lines.length &&
      lines.every((line, place) => line.label === this.lines[place].label && line.run === this.lines[place].run);
    this.lines = lines;
    this.marks = marks;
    if (!alike) {
      this.plot?.destroy();
      this.plot = null;
      this.drawLegend();
    }
    this.isStale = true;
    this.refreshSoon();
    this.element.setAttribute("aria-label", this.described());
    this.element.setAttribute("role", "img");
  }

  private refreshSoon(): void {
    if (!this.isNear || !this.isStale) return;
    if (!waiting.size) requestAnimationFrame(drawWaiting);
    waiting.add(this);
  }

  /** Draws what is new; true if its lines are long. */
  refresh(): boolean {
    if (!this.isNear || !this.isStale) return false;
    this.isStale = false;
    const { zoom, plot } = this;
    this.all = ends(this.lines);
    this.shown = prepared(this.lines, zoom ?? this.all, this.canvas.clientWidth || 400);
    if (!plot) this.draw(this.shown.data);
    plot?.batch(() => {
      plot.setData(this.shown.data, zoom === null);
      if (zoom) plot.setScale("x", zoom);
    });
    return this.shown.isThin;
  }

  /** The reader zoomed in or out: what is drawn thinly is drawn anew for what is seen now. */
  private hasZoomed(plot: uPlot): void {
    const { min = 0, max = 0 } = plot.scales.x;
    const zoom = min > this.all.min || max < this.all.max ? { min, max } : null;
    if (zoom?.min === this.zoom?.min && zoom?.max === this.zoom?.max) return;
    this.zoom = zoom;
    if (!this.shown.isThin) return;
    this.isStale = true;
    this.refreshSoon();
  }

  close(): void {
    waiting.delete(this);
    clearTimeout(this.clicked);
    this.observer.disconnect();
    this.near.disconnect();
    this.plot?.destroy();
  }

  private described(): string {
    const told = this.lines.filter((line) => !line.isEdge).map(({ label, y }) => {
      let [first, last] = [0, y.length - 1];
      while (first <= last && (y[first] ?? null) === null) first += 1;
      while (last > first && (y[last] ?? null) === null) last -= 1;
      return first <= last ? `${label} from ${number(y[first])} to ${number(y[last])}` : `${label}: nothing yet`;
    });
    return `${this.title}: ${told.join("; ")}`;
  }

  private drawLegend(): void {
    this.legend.replaceChildren(
      ...this.lines
        .filter((line) => !line.isEdge)
        .map((line, place) => h("span", { class: "key" }, swatch((line.run ?? place) % RUN_COLORS, line.dash), line.label, " ", h("b", { "data-line": place }))),
      ...this.lines.filter((line) => line.isEdge).slice(0, 1).map((line) => h("span", { class: "key" }, h("i", { class: "swatch band" }), line.label)),
    );
  }

  private draw(data: uPlot.AlignedData): void {
    const text = color("dim");
    const grid = { stroke: color("rule"), width: 1 };
    const values = this.legend.querySelectorAll("b");
    const options: uPlot.Options = {
      width: this.canvas.clientWidth || 400,
      height: HEIGHT,
      legend: { show: false },
      cursor: { sync: { key: this.group }, points: { size: 6 } },
      scales: { x: { time: this.xTime() }, y: { range: (_, low, high) => around(low, high) } },
      axes: [
        { stroke: text, grid, ticks: grid, size: 28 },
        { stroke: text, grid, ticks: grid, size: 60, values: (_, ticks) => ticks.map((tick) => number(tick)) },
      ],
      series: [
        {},
        ...this.lines.map((line, place) => ({
          label: line.label,
          stroke: line.isEdge ? "transparent" : lineColor(line.run ?? place),
          width: line.isEdge ? 0 : 1.6,
          dash: line.dash,
          spanGaps: true,
          points: { show: !line.isEdge && (line.points ?? line.y.length < 2), size: 5 },
        })),
      ],
      bands: this.lines[this.lines.length - 1]?.isEdge ? [{ series: [this.lines.length - 1, this.lines.length], fill: `${lineColor(0)}30` }] : [],
      hooks: {
        draw: [(plot) => this.drawMarks(plot)],
        setScale: [(plot, scale) => scale === "x" && this.hasZoomed(plot)],
        setCursor: [
          (plot) => {
            const at = plot.cursor.idx;
            const left = plot.cursor.left ?? -99;
            const [low, high] = [plot.posToVal(left - 5, "x"), plot.posToVal(left + 5, "x")];
            const near = left < 0 ? [] : this.marks.filter((mark) => mark.kind !== "sync" && mark.x > low && mark.x < high);
            this.told.textContent = near.map((mark) => mark.text).join(" | ");
            this.told.hidden = !near.length;
            values.forEach((value, place) => {
              const found = at === null || at === undefined ? null : plot.data[place + 1][at];
              value.textContent = found === null || found === undefined ? "" : number(found);
            });
          },
        ],
      },
    };
    this.plot = new uPlot(options, data, this.canvas);
    this.plot.over.addEventListener("click", () => {
      const at = this.plot?.cursor.idx;
      clearTimeout(this.clicked);
      if (at === null || at === undefined) return;
      // As it is drawn now: a later step may draw other rows.
      const row = this.shown.rows?.[at] ?? at;
      // A second click would make it a double one: that zooms out.
      this.clicked = window.setTimeout(() => this.chosen(row), DOUBLE_CLICK_MS);
    });
    this.plot.over.addEventListener("dblclick", () => clearTimeout(this.clicked));
  }

  private drawMarks(plot: uPlot): void {
    const { ctx, bbox } = plot;
    const { min = 0, max = 0 } = plot.scales.x;
    const [bad, other] = [color("bad"), color("mark")];
    const drawn = new Set<string>();
    ctx.save();
    // Many checkpoints would cross out the lines: until one zooms in they are ticks at the foot.
    const ticks = new Set(["sync"]);
    if (this.marks.filter((mark) => mark.kind === "checkpoint" && mark.x >= min && mark.x <= max).length > 30) ticks.add("checkpoint");
    for (const mark of this.marks) {
      if (mark.x < min || mark.x > max) continue;
      const x = Math.round(plot.valToPos(mark.x, "x", true)) + 0.5;
      const place = `${x} ${mark.kind} ${mark.run}`;
      if (drawn.has(place)) continue;
      drawn.add(place);
      const isBad = mark.kind === "warning" || mark.kind === "error";
      ctx.strokeStyle = mark.run !== undefined ? lineColor(mark.run) : isBad ? bad : other;
      ctx.setLineDash(isBad ? [] : [2, 4]);
      ctx.beginPath();
      // Weights may be handed over at every step: those are short strokes at the bottom.
      ctx.moveTo(x, ticks.has(mark.kind) ? bbox.top + bbox.height - 5 * devicePixelRatio : bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }
}

/** A piece of the line, as the chart draws it. */
export function swatch(color: number, dash: number[] = []): Node {
  const line = svg("line", { x1: 0, y1: 3, x2: 24, y2: 3, class: `line-${color}`, "stroke-dasharray": dash.join(" ") });
  return svg("svg", { width: 24, height: 6, "aria-hidden": "true" }, line);
}

/** The y axis around what is drawn; noise of rounding is not blown up, and of a constant its size is seen. */
function around(low: number | null, high: number | null): uPlot.Range.MinMax {
  if (low === null || high === null) return [0, 1];
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (high - low >= Math.max(1e-6, 1e-9 * size)) return uPlot.rangeNum(low, high, 0.1, true) as uPlot.Range.MinMax;
  if (size < 1e-6) return [0, 1];
  return low > 0 ? [0, 1.25 * high] : [1.25 * low, 0];
}

/** The first and the last x of all lines. */
function ends(lines: Line[]): { min: number; max: number } {
  const known = lines.filter((line) => line.x.length);
  return { min: Math.min(...known.map((line) => line.x[0])), max: Math.max(...known.map((line) => line.x[line.x.length - 1])) };
}

interface Shown {
  data: uPlot.AlignedData;
  /** Of each place in `data` its row, where that is not the place itself and all lines are of one run. */
  rows: number[] | null;
  isThin: boolean;
}

/** What is drawn of the lines between two values of x, over the union of the x values. */
function prepared(lines: Line[], range: { min: number; max: number }, width: number): Shown {
  const runs = new Map<number[], Line[]>();
  for (const line of lines) runs.set(line.x, [...(runs.get(line.x) ?? []), line]);
  const tables = [...runs].map(([x, of]) => {
    const values = of.map((line): Values => (line.smooth ? smooth(line.y, line.smooth) : line.y));
    const rows = drawnRows(x, values, range.min, range.max, width);
    const pick = <Value>(all: Value[]) => (rows ? rows.map((row) => all[row]) : all);
    return { rows, data: [pick(x), ...values.map(pick)] as uPlot.AlignedData };
  });
  const isThin = tables.some(({ rows }) => rows !== null);
  if (!tables.length) return { data: [[]], rows: null, isThin };
  if (tables.length === 1) return { ...tables[0], isThin };
  return { data: uPlot.join(tables.map(({ data }) => data)), rows: null, isThin };
}
