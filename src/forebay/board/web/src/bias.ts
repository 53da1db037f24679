import { ask, type Row } from "./api";
import { h, number, percent, show, svg, table } from "./dom";
import { address } from "./place";

const WIDTH = 640;
const HEIGHT = 180;

/** What was dropped against what was trained, and what a shorter bound of staleness would have dropped. */
export async function bias(root: HTMLElement, run: string): Promise<() => void> {
  const found = await ask<Record<string, Row[]>>("bias", { run });
  if (!found.means.length) {
    show(root, h("p", { class: "empty" }, "No rollout has left this run yet."));
    return () => undefined;
  }
  show(
    root,
    h("p", {}, ...verdict(found.means)),
    h("section", {}, h("h2", {}, "By outcome"), means(found.means, run)),
    h("section", {}, h("h2", {}, "Length of trained and dropped rollouts"), histogram(found.lengths)),
    h("section", {}, h("h2", {}, "A shorter bound would have dropped"), staleness(found.staleness)),
  );
  return () => undefined;
}

function verdict(rows: Row[]): string[] {
  const total = (outcome: string) => rows.filter((row) => row.outcome === outcome).reduce((sum, row) => sum + row.rollouts, 0);
  const dropped = total("dropped");
  if (!dropped) return ["Nothing was dropped: every rollout that left was trained."];
  const mean = (outcome: string, name: string) => {
    const known = rows.filter((row) => row.outcome === outcome && row[name] !== null);
    const count = known.reduce((sum, row) => sum + row.rollouts, 0);
    return count ? known.reduce((sum, row) => sum + row.rollouts * row[name], 0) / count : null;
  };
  const lines = [`${number(dropped)} rollouts were dropped, ${percent(dropped / (dropped + total("trained")))} of those that left. `];
  const lengths = [mean("dropped", "num_tokens"), mean("trained", "num_tokens")];
  if (lengths[0] && lengths[1]) lines.push(`They have ${number(lengths[0])} tokens on average; the trained ones ${number(lengths[1])} (${number(lengths[0] / lengths[1], 2)} times). `);
  const scores = [mean("dropped", "score"), mean("trained", "score")];
  if (scores[0] !== null && scores[1] !== null) lines.push(`Their mean score is ${number(scores[0])} against ${number(scores[1])}.`);
  return lines;
}

function means(rows: Row[], run: string): HTMLElement {
  return table(
    ["task", "outcome", "why", "rollouts", "tokens", "9 of 10 below", "score", "seconds to generate"],
    rows.map((row) => [row.task, h("a", { href: address("rollouts", run, { task: row.task, outcome: row.outcome, reason: row.reason }) }, row.outcome), row.reason, number(row.rollouts), number(row.num_tokens), number(row.num_tokens_90), number(row.score), number(row.generate_s)]),
    { numbers: [3, 4, 5, 6, 7], label: "Rollouts by outcome" },
  );
}

function histogram(rows: Row[]): HTMLElement {
  const outcomes = ["trained", "dropped"].filter((outcome) => rows.some((row) => row.outcome === outcome));
  const totals = new Map(outcomes.map((outcome) => [outcome, rows.filter((row) => row.outcome === outcome).reduce((sum, row) => sum + row.rollouts, 0)]));
  const share = (row: Row) => row.rollouts / (totals.get(row.outcome) as number);
  const most = Math.max(...rows.map(share));
  const width = WIDTH / 25;
  const bars = rows.map((row) => {
    const at = outcomes.indexOf(row.outcome);
    const tall = (share(row) / most) * (HEIGHT - 10);
    const bar = svg("rect", { x: row.bin * width + 2 + (at * (width - 4)) / outcomes.length, y: HEIGHT - tall, width: (width - 5) / outcomes.length, height: tall, class: `fill-${row.outcome}` });
    bar.append(svg("title", {}, `${row.outcome}, ${number(row.bin * row.width)} tokens and more: ${number(row.rollouts)}`));
    return bar;
  });
  const step = rows[0]?.width ?? 1;
  const labels = [0, 6, 12, 18, 24].map((bin) => svg("text", { x: bin * width, y: HEIGHT + 16, class: "tick" }, `${number(Math.round(bin * step))}${bin === 24 ? "+" : ""}`));
  return h("figure", {}, svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT + 22}`, class: "histogram", role: "img", "aria-label": "Shares of trained and dropped rollouts by length" }, ...bars, ...labels) as unknown as HTMLElement, h("figcaption", {}, ...outcomes.map((outcome) => h("span", { class: "key" }, h("i", { class: `swatch fill-${outcome}` }), `${outcome} (${number(totals.get(outcome))})`)), " share of each, by tokens"));
}

function staleness(rows: Row[]): HTMLElement {
  const total = rows.reduce((sum, row) => sum + row.rollouts, 0);
  const tasks = [...new Set(rows.map((row) => row.task))];
  const ages = [...new Set(rows.map((row) => row.staleness))].sort((a, b) => a - b);
  if (ages.length < 2 && ages[0] === 0) return h("p", { class: "dim" }, "Everything was trained on-policy, at staleness 0.");
  return table(
    ["max_staleness", "would have dropped", "of the trained", ...tasks.map((task) => `${task}: tokens of those`)],
    ages.slice(0, -1).concat(ages[0] > 0 ? [0] : []).sort((a, b) => a - b).map((bound) => {
      const older = rows.filter((row) => row.staleness > bound);
      const count = older.reduce((sum, row) => sum + row.rollouts, 0);
      return [String(bound), number(count), percent(count / total), ...tasks.map((task) => {
        const of = older.filter((row) => row.task === task);
        const many = of.reduce((sum, row) => sum + row.rollouts, 0);
        return many ? number(of.reduce((sum, row) => sum + row.rollouts * row.num_tokens, 0) / many) : "-";
      })];
    }),
    { numbers: [0, 1, 2, 3, 4, 5], label: "What a shorter bound would have dropped" },
  );
}
