import { ask, isOver, isReport } from "./api";
import { absent, duration, h, number, percent, show, svg, table, WITHOUT } from "./dom";
import { judgesOf } from "./judges";
import { address } from "./place";
import type { Aged, Bin, Mean, Measured, RunSummary } from "./types";

const WIDTH = 620;
const HEIGHT = 200;

type Measure = "num_tokens" | "generate_s" | "solved" | "score";

const SPREADS: [name: string, title: string, unit: string][] = [
  ["num_tokens", "By length", "tokens"],
  ["generate_s", "By time to generate and judge", "seconds"],
  ["solved", "By the score of their prompts", "mean score of all tries of the prompt (left: hard)"],
];

/** What was dropped against what was trained, and what a shorter bound of staleness would have dropped. */
export async function bias(root: HTMLElement, run: string, given: Record<string, string>, runs: RunSummary[]): Promise<() => void> {
  const task = given.task ?? "";
  const [found, judges] = await Promise.all([ask("bias", { run, task }), judgesOf(run)]);
  if (!found.means.length) {
    show(root, absent(isOver(runs, run), `No rollout was trained or dropped yet: how the two differ stands here by itself as soon as some were. ${WITHOUT}`, `No rollout was trained or dropped. ${WITHOUT}`));
    return () => undefined;
  }
  const pick = h("select", { id: "task", onchange: () => (location.hash = address("bias", run, { task: (pick as HTMLSelectElement).value })) }, h("option", { value: "" }, "all"), ...[...judges.keys()].map((name) => h("option", { value: name, selected: name === task }, name)));
  show(
    root,
    // A report has them all together.
    judges.size > 1 && !isReport ? h("div", { class: "controls" }, h("label", { for: "task" }, "task ", pick)) : null,
    h("div", {}, ...verdict(found.means)),
    h("section", {}, h("h2", {}, "By outcome"), means(found.means, run)),
    h("div", { class: "columns" }, ...SPREADS.map(([name, title, unit]) => h("section", {}, h("h2", {}, title), histogram(found.spread[name] ?? [], unit, title)))),
    h("section", {}, h("h2", {}, "What a shorter staleness bound would have dropped"), staleness(found.staleness)),
  );
  return () => undefined;
}

interface Sum {
  count: number;
  mean: number;
  /** Of the mean. */
  error: number;
}

/** Mean and standard error over the lines of a table, each with its own mean and spread. */
function sum(rows: (Measured & Partial<Mean>)[], name: Measure): Sum | null {
  const known = rows.flatMap((row) => {
    const mean = row[name];
    return mean === null ? [] : [{ mean, rollouts: row.rollouts, spread: row[`${name}_spread`] ?? 0 }];
  });
  const count = known.reduce((total, row) => total + row.rollouts, 0);
  if (!count) return null;
  const mean = known.reduce((total, row) => total + row.rollouts * row.mean, 0) / count;
  const square = known.reduce((total, row) => total + row.rollouts * (row.spread ** 2 + (row.mean - mean) ** 2), 0) / count;
  return { count, mean, error: Math.sqrt(square / count) };
}

function verdict(rows: Mean[]): HTMLElement[] {
  const of = (outcome: string) => rows.filter((row) => row.outcome === outcome);
  const total = (outcome: string) => of(outcome).reduce((count, row) => count + row.rollouts, 0);
  const dropped = total("dropped");
  if (!dropped) return [h("p", { class: "verdict" }, "Nothing was dropped: every rollout that left was trained.")];
  const reasons = new Map<string, number>();
  for (const row of of("dropped")) reasons.set(row.reason, (reasons.get(row.reason) ?? 0) + row.rollouts);
  const why = [...reasons].sort((a, b) => b[1] - a[1]).map(([reason, count]) => `${number(count)} ${reason}`).join(", ");
  const lines: [Measure, string, string][] = [["num_tokens", "longer", "shorter"], ["generate_s", "slower", "faster"], ["score", "better", "worse"], ["solved", "of easier prompts", "of harder prompts"]];
  const words = lines.flatMap(([name, more, less]) => {
    const [ours, theirs] = [sum(of("dropped"), name), sum(of("trained"), name)];
    if (!ours || !theirs) return [];
    const by = ours.mean - theirs.mean;
    // Rollouts of a group are alike, so three errors of independent ones are asked for.
    const sure = Math.abs(by) > 3 * Math.hypot(ours.error, theirs.error);
    return [h("li", {}, h("strong", {}, sure ? (by > 0 ? more : less) : `neither ${more} nor ${less}`), `: ${UNITS[name](ours.mean)} on average against ${UNITS[name](theirs.mean)} of the trained`)];
  });
  return [h("p", { class: "verdict" }, `${number(dropped)} rollouts were dropped, ${percent(dropped / (dropped + total("trained")))} of those that left (${why}). Against the trained ones they are`), h("ul", {}, ...words)];
}

const UNITS: Record<Measure, (value: number) => string> = {
  num_tokens: (value) => `${number(value)} tokens`,
  generate_s: (value) => duration(value),
  score: (value) => `score ${number(value)}`,
  solved: (value) => `prompts with a mean score of ${number(value)}`,
};

function means(rows: Mean[], run: string): HTMLElement {
  return table(
    ["task", "outcome", "why", "rollouts", "tokens", "9 of 10 below", "seconds", "score", "score of their prompts"],
    rows.map((row) => [row.task, h("a", { href: address("rollouts", run, { task: row.task, outcome: row.outcome, reason: row.reason }) }, row.outcome), row.reason, number(row.rollouts), number(row.num_tokens), number(row.num_tokens_90), number(row.generate_s), number(row.score), number(row.solved)]),
    { numbers: [3, 4, 5, 6, 7, 8], label: "Rollouts by outcome" },
  );
}

function histogram(rows: Bin[], unit: string, title: string): HTMLElement {
  if (!rows.length) return h("p", { class: "dim" }, "Nothing is known.");
  const outcomes = ["trained", "dropped"].filter((outcome) => rows.some((row) => row.outcome === outcome));
  const totals = new Map(outcomes.map((outcome) => [outcome, rows.filter((row) => row.outcome === outcome).reduce((total, row) => total + row.rollouts, 0)]));
  const share = (row: Bin) => row.rollouts / (totals.get(row.outcome) as number);
  const most = Math.max(...rows.map(share));
  const width = WIDTH / 25;
  const { low, width: step } = rows[0];
  const bars = rows.map((row) => {
    const at = outcomes.indexOf(row.outcome);
    const tall = (share(row) / most) * (HEIGHT - 10);
    const bar = svg("rect", { x: row.bin * width + 2 + (at * (width - 4)) / outcomes.length, y: HEIGHT - tall, width: (width - 5) / outcomes.length, height: tall, class: `fill-${row.outcome}` });
    bar.append(svg("title", {}, `${row.outcome}, from ${number(low + row.bin * step)} ${unit}: ${number(row.rollouts)}`));
    return bar;
  });
  // Where all are equal there is one value, and no scale.
  const labels = (step < 1e-8 ? [0] : [0, 6, 12, 18, 24]).map((bin) => svg("text", { x: bin === 24 ? WIDTH : bin * width, y: HEIGHT + 22, class: "tick", "text-anchor": bin === 24 ? "end" : "start" }, `${number(low + bin * step, 2)}${bin === 24 ? "+" : ""}`));
  return h("figure", {}, svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT + 30}`, class: "histogram", role: "img", "aria-label": `Shares of trained and dropped rollouts. ${title}` }, ...bars, ...labels) as unknown as HTMLElement, h("figcaption", { class: "dim" }, ...outcomes.map((outcome) => h("span", { class: "key" }, h("i", { class: `swatch fill-${outcome}` }), `${outcome} (${number(totals.get(outcome))})`)), ` share of each, by ${unit}`));
}

function staleness(rows: Aged[]): HTMLElement {
  const ages = [...new Set(rows.map((row) => row.staleness))].sort((a, b) => a - b);
  if (ages.length < 2 && ages[0] === 0) return h("p", { class: "dim" }, "Everything was trained on-policy, at staleness 0.");
  const bounds = [...new Set([0, ...ages.slice(0, -1)])].sort((a, b) => a - b);
  const tasks = [...new Set(rows.map((row) => row.task))];
  const lines = bounds.flatMap((bound) => tasks.map((task) => {
    const of = rows.filter((row) => row.task === task);
    const [older, kept] = [of.filter((row) => row.staleness > bound), of.filter((row) => row.staleness <= bound)];
    const count = older.reduce((total, row) => total + row.rollouts, 0);
    const pair = (name: Measure) => `${number(sum(older, name)?.mean)} / ${number(sum(kept, name)?.mean)}`;
    return [String(bound), task, number(count), percent(count / of.reduce((total, row) => total + row.rollouts, 0)), pair("num_tokens"), pair("generate_s"), pair("score"), pair("solved")];
  }));
  return h("div", {}, table(["max_staleness", "task", "rollouts", "of the trained", "tokens", "seconds", "score", "score of their prompts"], lines, { numbers: [0, 2, 3, 4, 5, 6, 7], label: "What a shorter bound would have dropped" }), h("p", { class: "dim" }, "Means of those that it would have dropped / of those that it would have kept."));
}
