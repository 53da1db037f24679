import uPlot from "uplot";
import { h, number, svg } from "./dom";

export interface Line {
  label: string;
  x: number[];
  y: (number | null)[];
  /** Lengths of strokes and gaps; none for a whole line. */
  dash?: number[];
  points?: boolean;
  run?: number;
}

export interface Mark {
  x: number;
  kind: string;
  text: string;
}

export const RUN_COLORS = 6;
const HEIGHT = 190;

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
      if (this.plot && width && Math.abs(width - this.plot.width) > 1) this.plot.setSize({ width, height: HEIGHT });
    });
    this.observer.observe(this.canvas);
    // Of twenty charts six are on the screen: the others are drawn when they come near it.
    this.near = new IntersectionObserver((entries) => {
      this.isNear = entries[entries.length - 1].isIntersecting;
      this.refresh();
    }, { rootMargin: "300px" });
    this.near.observe(this.canvas);
  }

  private readonly near: IntersectionObserver;
  private isNear = false;
  private isStale = false;

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
    this.refresh();
    this.element.setAttribute("aria-label", this.described());
    this.element.setAttribute("role", "img");
  }

  private refresh(): void {
    if (!this.isNear || !this.isStale) return;
    this.isStale = false;
    const data = joined(this.lines);
    if (this.plot) this.plot.setData(data);
    else this.draw(data);
  }

  close(): void {
    this.observer.disconnect();
    this.near.disconnect();
    this.plot?.destroy();
  }

  private described(): string {
    const ends = this.lines.map((line) => {
      const known = line.y.filter((value): value is number => value !== null && value !== undefined);
      return known.length ? `${line.label} from ${number(known[0])} to ${number(known[known.length - 1])}` : `${line.label}: nothing yet`;
    });
    return `${this.title}: ${ends.join("; ")}`;
  }

  private drawLegend(): void {
    this.legend.replaceChildren(
      ...this.lines.map((line, place) =>
        h("span", { class: "key" }, swatch((line.run ?? place) % RUN_COLORS, line.dash), line.label, " ", h("b", { "data-line": place })),
      ),
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
          stroke: lineColor(line.run ?? place),
          width: 1.6,
          dash: line.dash,
          spanGaps: true,
          points: { show: line.points ?? line.y.length < 2, size: 5 },
        })),
      ],
      hooks: {
        draw: [(plot) => this.drawMarks(plot)],
        setCursor: [
          (plot) => {
            const at = plot.cursor.idx;
            const near = this.marks.filter((mark) => mark.kind !== "sync" && Math.abs(plot.valToPos(mark.x, "x") - (plot.cursor.left ?? -99)) < 5);
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
      if (at !== null && at !== undefined) this.chosen(at);
    });
  }

  private drawMarks(plot: uPlot): void {
    const { ctx, bbox } = plot;
    ctx.save();
    for (const mark of this.marks) {
      const x = Math.round(plot.valToPos(mark.x, "x", true)) + 0.5;
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      const bad = mark.kind === "warning" || mark.kind === "error";
      ctx.strokeStyle = color(bad ? "bad" : "mark");
      ctx.setLineDash(bad ? [] : [2, 4]);
      ctx.beginPath();
      // Weights may be handed over at every step: those are short strokes at the bottom.
      ctx.moveTo(x, mark.kind === "sync" ? bbox.top + bbox.height - 5 * devicePixelRatio : bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }
}

/** A piece of the line, as the chart draws it. */
function swatch(color: number, dash: number[] = []): Node {
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

/** All lines over the union of their x values. */
function joined(lines: Line[]): uPlot.AlignedData {
  if (!lines.length) return [[]];
  const same = lines.every((line) => line.x === lines[0].x);
  if (same) return [lines[0].x, ...lines.map((line) => line.y)] as uPlot.AlignedData;
  return uPlot.join(lines.map((line) => [line.x, line.y] as uPlot.AlignedData));
}
