import { ask, type Row, type RunSummary } from "./api";
import { h, number, show, table } from "./dom";
import { address } from "./place";

const SHOWN = 30;

/** Two runs, or two checkpoints of one, on the same held-out prompts. */
export async function compare(root: HTMLElement, run: string, given: Record<string, string>, runs: RunSummary[]): Promise<() => void> {
  const other = given.other || run;
  const steps = async (name: string) => {
    const columns = await ask("metrics", { run: name });
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
  const found = await ask("compare", { run, other, run_id: run, step, other_step: otherStep });
  const pairs: Row[] = found.prompts.filter((row: Row) => row.score !== null && row.other_score !== null);
  if (!pairs.length) {
    show(body, h("p", { class: "empty" }, "No held-out prompt was tried in both. The history keeps evaluations since it is written; were both evaluated on the same data?"));
    return () => undefined;
  }
  const differences = pairs.map((row) => row.score - row.other_score);
  const mean = differences.reduce((sum, value) => sum + value, 0) / pairs.length;
  const [low, high] = interval(differences);
  const better = differences.filter((value) => value > 1e-9).length;
  const worse = differences.filter((value) => value < -1e-9).length;
  const verdict = low > 0 ? `${run} (step ${found.step}) is better` : high < 0 ? `${other} (step ${found.other_step}) is better` : "No difference that chance would not make";
  const sorted = [...pairs].sort((a, b) => Math.abs(b.score - b.other_score) - Math.abs(a.score - a.other_score)).slice(0, SHOWN);
  show(
    body,
    h("p", { class: "verdict" }, `${verdict}: the mean score differs by ${mean >= 0 ? "+" : ""}${number(mean)}, 95% interval ${number(low)} to ${number(high)} (${pairs.length} prompts, paired). Better on ${better}, worse on ${worse}, equal on ${pairs.length - better - worse}.`),
    found.only_here + found.only_there ? h("p", { class: "dim" }, `${found.only_here} prompts were tried only here, ${found.only_there} only there; they are left out.`) : null,
    table(
      ["prompt", `${run} step ${found.step}`, "its answer", `${other} step ${found.other_step}`, "its answer"],
      sorted.map((row) => [h("a", { href: address("prompt", run, { hash: row.prompt_hash }) }, row.prompt.slice(0, 200)), number(row.score), h("pre", { class: "text" }, row.response), number(row.other_score), h("pre", { class: "text" }, row.other_response)]),
      { numbers: [1, 3], label: "Prompts that differ most" },
    ),
  );
  return () => undefined;
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
