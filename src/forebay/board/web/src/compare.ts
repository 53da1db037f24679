import { ask, isOver } from "./api";
import { absent, h, number, show, table } from "./dom";
import { address } from "./place";
import type { Evaluated, RunSummary } from "./types";

const SHOWN = 12;

/** Two runs, or two checkpoints of one, on the same held-out prompts. */
export async function compare(root: HTMLElement, run: string, given: Record<string, string>, runs: RunSummary[]): Promise<() => void> {
  const other = given.other || run;
  const steps = async (name: string) => {
    const columns = await ask("metrics", { run: name, names: "train_step,eval/score" });
    return ((columns.train_step ?? []) as number[]).filter((_, row) => columns["eval/score"]?.[row] !== null && columns["eval/score"]?.[row] !== undefined);
  };
  const [ours, theirs] = await Promise.all([steps(run), steps(other)]);
  const step = given.step ?? (other === run ? String(ours[ours.length - 1] ?? "") : "");
  const otherStep = given.other_step ?? (other === run ? String(ours[0] ?? "") : "");
  const go = (changed: Record<string, string>) => (location.hash = address("compare", run, { other, step, other_step: otherStep, ...changed }));
  const select = (id: string, label: string, values: [string, string][], chosen: string, changed: (value: string) => void) => {
    const field = h("select", { id, "aria-label": label || id.replace("_", " "), onchange: () => changed((field as HTMLSelectElement).value) }, ...values.map(([value, text]) => h("option", { value, selected: value === chosen }, text)));
    return h("label", { for: id }, `${label} `, field);
  };
  const options = (values: number[]): [string, string][] => [["", "last evaluation"], ...values.map((value): [string, string] => [String(value), `step ${value}`])];
  const body = h("div", {});
  show(
    root,
    h(
      "div",
      { class: "controls" },
      select("step", run, options(ours), step, (value) => go({ step: value })),
      " against ",
      select("other", "", runs.map((one) => [one.id, one.id]), other, (value) => go({ other: value, step: "", other_step: "" })),
      select("other_step", "", options(theirs), otherStep, (value) => go({ other_step: value })),
    ),
    body,
  );
  const found = await ask("compare", { run, other, step, other_step: otherStep });
  const there = new Map(found.there.map((row) => [row.prompt_hash, row]));
  const both = found.here.filter((row) => there.has(row.prompt_hash));
  const isScored = (row: Evaluated | undefined): row is Scored => typeof row?.score === "number";
  const pairs = both.flatMap((row): Pair[] => {
    const twin = there.get(row.prompt_hash);
    return isScored(row) && isScored(twin) ? [{ row, twin, difference: row.score - twin.score }] : [];
  });
  const isOne = other === run && pairs.length > 0 && pairs[0].row.train_step === pairs[0].twin.train_step;
  if (!pairs.length || isOne) {
    const data = isOne ? "Both are the same evaluation; choose two." : "No held-out prompt was tried in both. The history keeps evaluations since it is written; were both evaluated on the same data?";
    show(body, absent(isOver(runs, run) || ours.length > 1, "Held-out prompts were not tried twice yet. They are tried as [evaluate] of the run file says; the second time they are compared here by themselves.", data));
    return () => undefined;
  }
  const names = [`${run} step ${pairs[0].row.train_step}`, `${other} step ${pairs[0].twin.train_step}`];
  const tasks = [...new Set(pairs.map(({ row }) => row.task))];
  const alone = found.here.length + found.there.length - 2 * both.length;
  const better = pairs.filter(({ difference }) => difference > 1e-9).sort((a, b) => b.difference - a.difference);
  const worse = pairs.filter(({ difference }) => difference < -1e-9).sort((a, b) => a.difference - b.difference);
  show(
    body,
    h("p", { class: "verdict" }, verdict(pairs, names)),
    tasks.length > 1 ? h("section", {}, h("h2", {}, "By task"), ...tasks.map((task) => h("p", {}, h("strong", {}, `${task}: `), verdict(pairs.filter(({ row }) => row.task === task), names)))) : null,
    alone ? h("p", { class: "dim" }, `${number(alone)} prompts were tried in only one of them; they are left out.`) : null,
    examples(`${names[0]} is better on ${number(better.length)}`, better, run, names),
    examples(`${names[1]} is better on ${number(worse.length)}`, worse, run, names),
  );
  return () => undefined;
}

/** With a score. */
type Scored = Evaluated & { score: number };

interface Pair {
  row: Scored;
  twin: Scored;
  difference: number;
}

/** Who is better, by how much, and how sure that is. */
function verdict(pairs: Pair[], names: string[]): string {
  const differences = pairs.map(({ difference }) => difference);
  const mean = (values: number[]) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const [low, high] = interval(differences);
  const better = differences.filter((value) => value > 1e-9).length;
  const worse = differences.filter((value) => value < -1e-9).length;
  const who = low > 0 ? `${names[0]} is better` : high < 0 ? `${names[1]} is better` : "No difference that chance would not make";
  const scores = `${number(mean(pairs.map(({ row }) => row.score)))} against ${number(mean(pairs.map(({ twin }) => twin.score)))}`;
  const by = mean(differences);
  return `${who}: mean score ${scores}, so ${by >= 0 ? "+" : ""}${number(by)}, 95% interval ${number(low)} to ${number(high)} (${number(pairs.length)} prompts, paired). Better on ${number(better)}, worse on ${number(worse)}, equal on ${number(pairs.length - better - worse)}.`;
}

function examples(title: string, pairs: Pair[], run: string, names: string[]): HTMLElement | null {
  if (!pairs.length) return null;
  const rows = pairs.slice(0, SHOWN).map(({ row, twin }) => [h("a", { class: "item", href: address("prompt", run, { hash: row.prompt_hash }) }, row.prompt.slice(0, 200)), number(row.score), h("pre", { class: "text", tabindex: 0 }, row.response), number(twin.score), h("pre", { class: "text", tabindex: 0 }, twin.response)]);
  const shown = pairs.length > SHOWN ? h("p", { class: "dim" }, `The ${SHOWN} that differ most.`) : null;
  return h("section", {}, h("h2", {}, title), shown, table(["prompt", names[0], "its answer", names[1], "its answer"], rows, { numbers: [1, 3], label: title }));
}

/** The 95% interval of a mean by the bootstrap over prompts, the same at each look. */
function interval(values: number[]): [number, number] {
  let state = 12345;
  const random = () => ((state = (Math.imul(state, 1664525) + 1013904223) >>> 0) / 2 ** 32);
  const means: number[] = [];
  for (let round = 0; round < 1000; round += 1) {
    let sum = 0;
    for (let place = 0; place < values.length; place += 1) sum += values[Math.floor(random() * values.length)];
    means.push(sum / values.length);
  }
  means.sort((a, b) => a - b);
  return [means[25], means[974]];
}
