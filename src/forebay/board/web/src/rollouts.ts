import { ask, isOver } from "./api";
import { absent, copyButton, duration, failure, h, number, percent, show, table, when, WITHOUT, type Child } from "./dom";
import { judgesOf, stageText, type Judges } from "./judges";
import { lifeInWords } from "./life";
import { address, here, keep } from "./place";
import type { Answers, Columns, Count, Found, LifeEvent, Line, Member, RunSummary, Span, Tried } from "./types";

const PAGE = 40;
/** The server counts no more of those with a text. */
const MAX_COUNTED = 1000;
const STEPS_BEFORE = 10;
/** Times its usual distance from the mean of ten steps: by chance one number in two hundred comes as far. */
const MOVED = 4;
const FILTERS = ["text", "task", "outcome", "reason", "status", "finish_reason", "tool", "train_step_min", "train_step_max", "score_min", "score_max", "num_tokens_min", "num_tokens_max"];
const ORDERS = ["newest", "oldest", "best", "worst", "longest", "shortest", "stalest"];

/** Find and read: a list with filters. */
export async function rollouts(root: HTMLElement, run: string, given: Record<string, string>, runs: RunSummary[]): Promise<() => void> {
  const choices = await ask("choices", { run }).catch((): Answers["choices"] => ({}));
  const list = h("div", { class: "list", "aria-live": "polite" });
  const count = h("p", { class: "dim told" });
  const step = h("div", {});
  const form = h("form", { class: "controls", role: "search", onsubmit: (event: Event) => event.preventDefault() });
  const asked: Record<string, string> = Object.fromEntries(FILTERS.filter((name) => given[name]).map((name) => [name, given[name]]));
  let order = given.order ?? "newest";
  let offset = Number(given.offset) || 0;
  let turn = 0;

  const search = async () => {
    const mine = ++turn;
    keep({ ...Object.fromEntries(FILTERS.map((name) => [name, asked[name] ?? ""])), order: order === "newest" ? "" : order, offset: offset || "" });
    // The table above the list has its place before it is there.
    step.classList.toggle("awaits", isOfFewSteps(asked) && !asked.text);
    show(step);
    list.setAttribute("aria-busy", "true");
    try {
      const found = await ask("rollouts", { run, ...asked, order, limit: PAGE, offset: offset || "" });
      if (mine !== turn) return;
      show(list, ...(found.rows.length ? found.rows.map((row) => line(run, row)) : [empty(asked, isOver(runs, run))]));
      const more = (text: string, to: number) => h("button", { type: "button", class: "quiet", onclick: () => ((offset = to), void search()) }, text);
      show(pages, offset ? more("newer page", Math.max(0, offset - PAGE)) : null, found.more ? more("next page", offset + PAGE) : null);
    } catch (error) {
      if (mine === turn) show(list, failure(error));
    }
    list.removeAttribute("aria-busy");
    void tell(mine);
  };
  // After the rows: over a million rollouts a count takes longer than what is read first.
  const tell = async (mine: number) => {
    const total = await ask("count", { run, ...asked }).catch(() => null);
    if (mine !== turn) return;
    const some = asked.text && total && total.rollouts >= MAX_COUNTED;
    count.textContent = total ? `${number(total.rollouts)} rollouts${some ? " or more; these are" : ""} of ${number(total.groups)} groups; mean score ${number(total.score)}, ${number(total.num_tokens)} tokens` : "";
    const sides = total?.rollouts && !asked.text ? await besideStepsBefore(run, asked) : null;
    const numbers = sides ? await ask("steps", { run, first: firstBefore(asked), last: asked.train_step_max }).catch((): Columns => ({})) : {};
    if (mine !== turn) return;
    if (!sides) step.classList.remove("awaits");
    show(step, sides ? against(run, sides[0], sides[1], asked, moved(numbers, Number(asked.train_step_min))) : null);
  };
  const change = (name: string, value: string) => {
    if (value) asked[name] = value;
    else delete asked[name];
    offset = 0;
    void search();
  };
  let timer = 0;
  const text = h("input", { id: "search", type: "search", placeholder: "text of prompts and responses", value: asked.text ?? "", oninput: () => {
    clearTimeout(timer);
    timer = window.setTimeout(() => change("text", (text as HTMLInputElement).value), 250);
  } });
  const select = (name: string, label: string) => {
    const values = choices[name] ?? [];
    const field = h("select", { id: name, onchange: () => change(name, (field as HTMLSelectElement).value) }, h("option", { value: "" }, "any"), ...values.map((one) => h("option", { value: one.value, selected: one.value === asked[name] }, `${one.value} (${number(one.rollouts)})`)));
    return values.length ? h("label", { for: name }, `${label} `, field) : null;
  };
  const range = (name: string, label: string) => {
    const field = (side: string) => h("input", { type: "number", step: "any", class: "small", "aria-label": `${label}, ${side === "min" ? "at least" : "at most"}`, placeholder: side, value: asked[`${name}_${side}`] ?? "", onchange: (event: Event) => change(`${name}_${side}`, (event.target as HTMLInputElement).value) });
    return h("span", { class: "range" }, `${label} `, field("min"), " to ", field("max"));
  };
  const tool = h("input", { id: "tool", class: "small", value: asked.tool ?? "", onchange: () => change("tool", (tool as HTMLInputElement).value) });
  const sort = h("select", { id: "order", onchange: () => ((order = (sort as HTMLSelectElement).value), (offset = 0), void search()) }, ...ORDERS.map((name) => h("option", { value: name, selected: name === order }, name)));
  const pages = h("p", {});
  show(
    form,
    h("label", { for: "search" }, "search ", text),
    select("task", "task"),
    select("outcome", "outcome"),
    select("reason", "reason"),
    select("status", "status"),
    select("finish_reason", "finish"),
    range("train_step", "step"),
    range("score", "score"),
    range("num_tokens", "tokens"),
    h("label", { for: "tool" }, "tool ", tool),
    h("label", { for: "order" }, "order ", sort),
  );
  show(root, form, count, step, list, pages);
  await search();
  return () => {
    turn += 1;
    clearTimeout(timer);
  };
}

function firstBefore(asked: Record<string, string>): number {
  return Math.max(1, Number(asked.train_step_min) - STEPS_BEFORE);
}

function isOfFewSteps(asked: Record<string, string>): boolean {
  const [first, last] = [Number(asked.train_step_min), Number(asked.train_step_max)];
  return Boolean(asked.train_step_min && asked.train_step_max) && first > 1 && last - first <= STEPS_BEFORE;
}

/** The means of a few steps, and of those before; null where no few steps are asked for. */
async function besideStepsBefore(run: string, asked: Record<string, string>): Promise<Means[] | null> {
  if (!isOfFewSteps(asked)) return null;
  const first = Number(asked.train_step_min);
  const alike = { run, ...asked, outcome: asked.outcome || "trained" };
  const ranges = [{}, { train_step_min: firstBefore(asked), train_step_max: first - 1 }];
  const found = await Promise.all(ranges.map((range) => ask("count", { ...alike, ...range }))).catch((): Count[] => []);
  const known = found.filter((one): one is Means => Boolean(one.rollouts) && typeof one.score === "number");
  return known.length === ranges.length ? known : null;
}

/** Of rollouts of which some were scored; nothing else of what is counted is missing then, but `solved`. */
type Means = Count & { score: number; solved: number | null; num_tokens: number; staleness: number; truncated: number };

const MEASURES: [name: "score" | "solved" | "num_tokens" | "truncated" | "staleness", title: string, format: (value: unknown) => string][] = [
  ["score", "mean score", number],
  ["solved", "mean score of the same prompts in other steps", number],
  ["num_tokens", "tokens", number],
  ["truncated", "cut off by their budget", percent],
  ["staleness", "staleness", number],
];

interface Moved {
  name: string;
  before: number;
  now: number;
  by: number;
}

/** Sums since the start of the run, of the clock, around zero by their nature, and in the table above already. */
const UNTOLD = /^(train_step|reward|response_tokens|truncated|staleness|.*_s|.*_per_s|.*_over_p50|cpu\/.*|busy\/.*|gpu\/.*|eval\/.*|alarm\/.*|dropped\/.*|stalls|train\/(.*loss|advantage_mean|score_mean|skipped_.*|.*tokens|sequences)|produce\/(raw_reward|tokens|samples))$/;

/** The numbers that are furthest from where they were in the steps before, by how much they moved there. */
export function moved(columns: Columns, first: number): Moved[] {
  const steps = (columns.train_step ?? []) as number[];
  const found = Object.entries(columns).flatMap(([name, values]): Moved[] => {
    if (UNTOLD.test(name)) return [];
    const known = (is: (step: number) => boolean) => values.filter((value, row): value is number => value !== null && is(steps[row]));
    const [old, fresh] = [known((step) => step < first), known((step) => step >= first)];
    if (!old.length || !fresh.length) return [];
    const mean = (some: number[]) => some.reduce((sum, value) => sum + value, 0) / some.length;
    const [before, now] = [mean(old), mean(fresh)];
    const spread = Math.sqrt(mean(old.map((value) => (value - before) ** 2)));
    // Of one or two steps the spread is not known, and that of a constant is zero: a tenth of the number is little.
    const usual = Math.max(old.length > 2 ? spread : 0, 0.1 * Math.abs(before), 1e-6);
    return [{ name, before, now, by: Math.abs(now - before) / usual }];
  });
  return found.filter((one) => one.by > MOVED).sort((a, b) => b.by - a.by).slice(0, 6);
}

/** What is different in a few steps: the prompts, the answers, or how they were judged. */
function against(run: string, these: Means, before: Means, asked: Record<string, string>, others: Moved[]): HTMLElement {
  const [first, last] = [asked.train_step_min, asked.train_step_max];
  const name = first === last ? `step ${first}` : `steps ${first} to ${last}`;
  const numBefore = Math.min(STEPS_BEFORE, Number(first) - 1);
  const gap = (one: Means) => one.score - (one.solved ?? 0);
  const fell = these.score - before.score < -0.03;
  const harder = (these.solved ?? 0) - (before.solved ?? 0);
  const odd = gap(these) - gap(before);
  const overview = h("a", { href: address("overview", run) }, "the overview");
  // Prompts that were tried in these steps only do not tell.
  const why = !fell || these.solved === null || before.solved === null
    ? []
    : harder < odd
      ? ["The score is lower mostly because these prompts are harder: they score low in other steps."]
      : ["The score is lower although these prompts are not that much harder. ", ...(hasChanged(these, before) ? ["The answers are other ones, by their length: the model itself has changed. An update was too large, or it learns to end earlier or later than it should: see train.lr and the gradient norm in ", overview, ", and read "] : ["Look at ", overview, " for what else changed, and whether the judge is right: read "]), h("a", { href: address("rollouts", run, { ...asked, order: "worst" }) }, "the answers, worst first"), "."];
  return h(
    "section",
    {},
    h("h2", {}, `${name[0].toUpperCase()}${name.slice(1)} against the ${numBefore > 1 ? `${numBefore} before` : "one before"}`),
    table(["", name, "before"], MEASURES.map(([key, title, format]) => [title, format(these[key]), format(before[key])]), { numbers: [1, 2], label: "Against the steps before" }),
    why.length ? h("p", {}, ...why) : null,
    h("p", { class: others.length ? "" : "dim" }, others.length ? "Of the other numbers of the run, far from where they were: " : "No other number of the run is far from where it was.", ...others.flatMap((one, at) => [at ? "; " : "", h("a", { href: address("overview", run, { more: one.name }) }, one.name), ` ${number(one.before)} to ${number(one.now)}`])),
  );
}

/** Answers that are much longer or shorter, or run into their budget as those before did not. */
function hasChanged(these: Means, before: Means): boolean {
  return Math.abs(these.num_tokens / before.num_tokens - 1) > 0.3 || Math.abs(these.truncated - before.truncated) > 0.3;
}

function empty(asked: Record<string, string>, isOver: boolean): HTMLElement {
  if (Object.keys(asked).length) return h("p", { class: "empty" }, "No rollout fits. Loosen a condition.");
  return absent(isOver, `No rollout has left this run yet. Each comes here by itself, with its text and score, when it was trained, dropped or evaluated. ${WITHOUT}`, `No rollout has left this run. ${WITHOUT}`);
}

export function outcomeBadge(row: Tried): HTMLElement {
  const at = row.outcome === "trained" || row.outcome === "reused" ? ` at ${row.train_step}` : row.outcome === "evaluated" ? ` after ${row.train_step}` : ` (${row.reason || "?"})`;
  return h("span", { class: `badge ${row.outcome}` }, `${row.outcome}${at}`);
}

function line(run: string, row: Found): HTMLElement {
  return h(
    "article",
    { class: "card" },
    h("header", {}, h("a", { class: "item", href: address("rollout", run, { id: row.rollout_id }) }, row.rollout_id), " ", outcomeBadge(row), " ", h("span", { class: "dim" }, `score ${number(row.score)}, ${number(row.num_tokens)} tokens, ${row.staleness} stale, ${row.finish_reason || row.status}`)),
    h("p", { class: "prompt" }, row.prompt),
    h("p", { class: "response" }, row.response || (row.error ? "" : "(no text)")),
    row.error ? h("p", { class: "failure" }, row.error) : null,
    row.truth ? h("p", { class: "dim" }, `expected: ${row.truth}`) : null,
    misjudged(row),
  );
}

/** The answer is word for word the expected one and earned nothing: most often the judge is wrong. */
function misjudged(row: Tried): HTMLElement | null {
  const isSame = row.truth && row.response?.trim() === row.truth.trim() && row.score !== null && row.score <= 0;
  return isSame ? h("p", { class: "failure" }, "The answer is what was expected, and yet earned nothing: is the judge right?") : null;
}

const COLORINGS: [value: string, text: string, meaning: string][] = [
  ["logprobs", "log-probability", "The darker, the less likely the token was at the engine."],
  ["mismatch", "engine against trainer", "Green: likelier at the trainer than at the engine; red: less likely."],
  ["advantages", "advantage", "Green: the update makes the token likelier; red: less likely."],
  ["model_steps", "model version", "The darker, the newer the weights that wrote the token."],
  ["mask", "trained or not", "Blue: the model wrote the token, and it is trained; plain: it is not."],
];

/** One rollout: its tokens in color, its conversation, its life. */
export async function rollout(root: HTMLElement, run: string, given: Record<string, string>): Promise<() => void> {
  const [found, judges] = await Promise.all([ask("rollout", { run, rollout_id: given.id }), judgesOf(run)]);
  const row = found.lines[found.lines.length - 1];
  const tokens = h("div", { class: "tokens" });
  const told = h("p", { class: "dim", "aria-live": "polite" });
  const pieces: string[] = found.pieces ?? row.token_ids.map((id) => `[${id}]`);
  const draw = (coloring: string) => {
    keep({ color: coloring });
    drawTokens(tokens, told, row, pieces, coloring);
  };
  const chosen = here().given.color ?? "logprobs";
  const pick = h("select", { id: "color", onchange: () => draw((pick as HTMLSelectElement).value) }, ...COLORINGS.map(([value, text]) => h("option", { value, selected: value === chosen }, text)));
  show(
    root,
    h("p", {}, h("a", { href: address("rollouts", run) }, "rollouts"), " / ", h("a", { href: address("group", run, { id: row.group_id }) }, `group ${row.group_id}`), " / ", String(row.rollout_id)),
    h("div", { class: "line" }, outcomeBadge(row), h("span", {}, `score ${number(row.score)}`), h("span", {}, `advantage ${number(row.advantage)}`), h("span", {}, `${number(row.num_tokens)} tokens`), h("span", {}, versions(row)), h("span", {}, `staleness ${row.staleness}`), copyButton("copy as JSON", () => JSON.stringify(row, null, 1)), h("a", { href: address("prompt", run, { hash: row.prompt_hash }) }, "the same prompt through training"), inTime(run, row, found.spans)),
    row.error ? h("pre", { class: "failure" }, row.error) : null,
    misjudged(row),
    h("section", {}, h("h2", {}, "Prompt"), pictures(row), h("pre", { class: "text", tabindex: 0 }, row.prompt), row.truth ? h("p", { class: "dim" }, `expected: ${row.truth}`) : null),
    h("section", {}, h("h2", {}, "Response"), row.token_ids.length ? [found.pieces ? null : h("pre", { class: "text", tabindex: 0 }, row.response), h("label", { for: "color" }, "color by ", pick), tokens, told] : h("p", { class: "dim" }, row.outcome === "dropped" ? "The response of an expired group is not kept." : row.response || "No tokens.")),
    row.conversation ? h("section", {}, h("h2", {}, "Conversation"), ...conversation(row)) : null,
    details("Reward", row.reward),
    details("Facts", row.facts),
    h("section", {}, h("h2", {}, "Life of its group"), h("ol", { class: "life" }, ...lifeInWords(row, found.life, found.spans, judges).map((said) => h("li", {}, said))), lifeTable(found.life, found.spans, judges)),
  );
  if (row.token_ids.length) drawTokens(tokens, told, row, pieces, chosen);
  return () => undefined;
}

/** To the timeline, zoomed to what was done for the rollout. */
function inTime(run: string, row: Line, spans: Span[]): HTMLElement | null {
  if (!spans.length) return null;
  const [from, to] = [Math.min(...spans.map((span) => span.start_s)), Math.max(...spans.map((span) => span.end_s))];
  const around = Math.max(0.05, 0.1 * (to - from));
  return h("a", { href: address("timeline", run, { from: (from - around).toFixed(3), to: (to + around).toFixed(3), name: row.rollout_id }) }, "on the timeline");
}

/** A history of an older version has none. */
function urlsIn(images: string | undefined): string[] {
  return images ? images.split(" ") : [];
}

/** The images of the prompt, in their order. */
function pictures(row: Member): HTMLElement | null {
  const urls = urlsIn(row.images);
  return urls.length ? h("div", { class: "pictures" }, ...urls.map((url, at) => h("img", { src: url, alt: `image ${at + 1} of the prompt` }))) : null;
}

function versions(row: Line): string {
  if (row.first_model_step < 0) return "versions unknown";
  return row.first_model_step === row.last_model_step ? `made by weights of step ${row.first_model_step}` : `made by weights of steps ${row.first_model_step} to ${row.last_model_step}`;
}

function details(title: string, json: string): HTMLElement | null {
  return json ? h("details", {}, h("summary", {}, title), h("pre", { class: "text", tabindex: 0 }, pretty(json))) : null;
}

function pretty(json: string): string {
  try {
    return JSON.stringify(JSON.parse(json), null, 1);
  } catch {
    return json;
  }
}

/** The messages of a conversation, its images where they stand: those of the prompt first, then those of the replies. */
export function conversation(row: Member): HTMLElement[] {
  // Of any agent: what stands in it is looked at before it is shown.
  let messages: Record<string, any>[];
  try {
    messages = JSON.parse(row.conversation);
  } catch {
    return [h("pre", { class: "text", tabindex: 0 }, row.conversation)];
  }
  const left = [...urlsIn(row.images), ...urlsIn(row.reply_images)];
  const piece = (part: any): HTMLElement | null => {
    const url = part?.type === "image" || part?.type === "image_url" ? left.shift() : undefined;
    if (url) return h("div", { class: "pictures" }, h("img", { src: url, alt: "image of the conversation" }));
    const text = typeof part === "string" ? part : typeof part?.text === "string" ? part.text : part ? JSON.stringify(part, null, 1) : "";
    return text ? h("pre", { class: "text", tabindex: 0 }, text) : null;
  };
  return messages.map((message) => {
    const calls = message.tool_calls ? h("pre", { class: "call" }, JSON.stringify(message.tool_calls, null, 1)) : null;
    const pieces = (Array.isArray(message.content) ? message.content : [message.content]).map(piece);
    return h("div", { class: `message ${["user", "assistant", "tool", "system"].includes(message.role) ? message.role : "other"}` }, h("strong", {}, String(message.role ?? "?"), message.name ? ` ${message.name}` : ""), ...pieces, calls);
  });
}

function drawTokens(root: HTMLElement, told: HTMLElement, row: Line, pieces: string[], coloring: string): void {
  const engine: (number | null)[] = row.logprobs;
  const trainer: (number | null)[] = row.trainer_logprobs;
  const mismatch = engine.map((value, at) => (value === null || trainer[at] === null || trainer[at] === undefined ? null : (trainer[at] as number) - value));
  const values: (number | null)[] = coloring === "mismatch" ? mismatch : (row[coloring as "logprobs" | "advantages" | "model_steps" | "mask"] ?? []);
  const known = values.filter((value): value is number => value !== null && value !== undefined);
  // A browser takes some ten thousand arguments; responses are longer.
  const low = known.reduce((a, b) => Math.min(a, b), Infinity);
  const high = known.reduce((a, b) => Math.max(a, b), -Infinity);
  const most = Math.max(1e-6, -low, high);
  const span = Math.max(1, high - low);
  const level = (value: number | null | undefined): string => {
    if (value === null || value === undefined) return "none";
    if (coloring === "logprobs") return `heat-${Math.min(6, Math.floor(-value * 1.5))}`;
    if (coloring === "model_steps") return value < 0 ? "none" : `version-${Math.round((5 * (value - low)) / span)}`;
    if (coloring === "mask") return value ? "version-2" : "none";
    const size = Math.min(4, Math.ceil((4 * Math.abs(value)) / most));
    return size ? `${value > 0 ? "plus" : "minus"}-${size}` : "none";
  };
  const say = (at: number) => {
    told.textContent = `token ${at} (${row.token_ids[at]}): log-probability ${number(engine[at])} at the engine, ${number(trainer[at])} at the trainer; advantage ${number(row.advantages[at])}; weights of step ${row.model_steps[at]}; ${row.mask[at] ? "generated" : "from the environment"}`;
  };
  show(root, ...pieces.map((piece, at) => h("span", { class: `token ${level(values[at])}`, onmouseenter: () => say(at), onclick: () => say(at) }, piece || "\u00b7")));
  let current = -1;
  root.tabIndex = 0;
  root.onkeydown = (event) => {
    const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    if (!step) return;
    event.preventDefault();
    root.children[current]?.classList.remove("at");
    current = Math.max(0, Math.min(pieces.length - 1, current + step));
    root.children[current].classList.add("at");
    say(current);
  };
  const meaning = COLORINGS.find(([value]) => value === coloring)?.[2] ?? "";
  told.textContent = known.length ? `${meaning} Point at a token, or go along with the arrow keys, to see its numbers.` : "Nothing is known of these tokens by this measure.";
}

function lifeTable(life: LifeEvent[], spans: Span[], judges: Judges): Child {
  const start = Math.min(...life.map((event) => event.time_s), ...spans.map((span) => span.start_s));
  const rows = [
    ...life.map((event): [number, string, string] => [event.time_s, event.event, ["reason", "train_step", "num_tokens", "latency_s", "score", "error"].filter((name) => event[name] !== undefined).map((name) => `${name} ${typeof event[name] === "number" ? number(event[name]) : event[name]}`).join(", ")]),
    ...spans.map((span): [number, string, string] => [span.start_s, `${stageText(span.stage, span.task, judges)} for ${duration(span.end_s - span.start_s)}`, `${span.name} ${span.note}`]),
  ].sort((a, b) => a[0] - b[0]);
  return rows.length ? table(["time", "after", "event", "details"], rows.map(([time, event, note]) => [when(time), `+${duration(time - start)}`, event, note]), { numbers: [0, 1], label: "Life of the group" }) : h("p", { class: "dim" }, "The books have no event of it.");
}

/** A group: its members side by side. */
export async function group(root: HTMLElement, run: string, given: Record<string, string>): Promise<() => void> {
  const { members, life } = await ask("group", { run, group_id: given.id });
  if (!members.length) throw new Error(`No group ${given.id} in the history of this run.`);
  const first = members[0];
  show(
    root,
    h("p", {}, h("a", { href: address("rollouts", run) }, "rollouts"), ` / group ${given.id}`),
    h("div", { class: "line" }, copyButton("copy as JSON", () => JSON.stringify(members, null, 1)), h("a", { href: address("prompt", run, { hash: first.prompt_hash }) }, "the same prompt through training")),
    pictures(first),
    h("pre", { class: "text", tabindex: 0 }, first.prompt),
    first.truth ? h("p", { class: "dim" }, `expected: ${first.truth}`) : null,
    h("div", { class: "members" }, ...members.map((row) => h("article", { class: "card" }, h("header", {}, h("a", { class: "item", href: address("rollout", run, { id: row.rollout_id }) }, `${row.member}`), " ", outcomeBadge(row), " ", h("span", { class: "dim" }, `score ${number(row.score)}, advantage ${number(row.advantage)}, ${number(row.num_tokens)} tokens`)), row.conversation ? conversation(row) : h("pre", { class: "text", tabindex: 0 }, row.response || row.error)))),
    h("section", {}, h("h2", {}, "Life"), lifeTable(life, [], new Map())),
  );
  return () => undefined;
}

const PROMPT_ORDERS = ["hardest", "easiest", "often", "improved", "worsened", "varied"];

/** Prompts: which are never solved, which got better. */
export async function prompts(root: HTMLElement, run: string, given: Record<string, string>, runs: RunSummary[]): Promise<() => void> {
  const order = given.order ?? "hardest";
  const offset = Number(given.offset ?? 0);
  const rows = await ask("prompts", { run, order, limit: PAGE, offset: offset || "" });
  if (!rows.length && !offset) {
    show(root, absent(isOver(runs, run), `No prompt was answered and judged yet. Each comes here by itself, with the scores of its answers, the hardest first. ${WITHOUT}`, `No prompt was answered and judged. ${WITHOUT}`));
    return () => undefined;
  }
  const { never, prompts: all } = rows[0] ?? { never: 0, prompts: 0 };
  show(
    root,
    h("p", { class: "controls" }, "order: ", ...PROMPT_ORDERS.flatMap((name) => [name === order ? h("strong", {}, name) : h("a", { href: address("prompts", run, { order: name }) }, name), " "])),
    all ? h("p", { class: "verdict" }, never ? `${number(never)} of ${number(all)} prompts never earned anything: look whether they can be solved, and whether the judge is right.` : `Each of the ${number(all)} prompts earned something at least once.`) : null,
    table(
      ["prompt", "task", "tries", "mean score", "best", "first", "last", "tokens", "steps"],
      rows.map((row) => [h("a", { class: "item", href: address("prompt", run, { hash: row.prompt_hash }) }, row.prompt || "(empty)"), row.task, number(row.rollouts), number(row.score), number(row.best), number(row.first_score), number(row.last_score), number(row.num_tokens), `${row.first_step} to ${row.last_step}`]),
      { numbers: [2, 3, 4, 5, 6, 7], label: "Prompts" },
    ),
    h("p", {}, offset ? h("a", { href: address("prompts", run, { order, offset: Math.max(0, offset - PAGE) }) }, "previous page ") : null, rows.length === PAGE ? h("a", { href: address("prompts", run, { order, offset: offset + PAGE }) }, "next page") : null),
  );
  return () => undefined;
}

/** One prompt: how its answers changed. */
export async function prompt(root: HTMLElement, run: string, given: Record<string, string>): Promise<() => void> {
  const rows = await ask("prompt", { run, prompt_hash: given.hash });
  if (!rows.length) throw new Error("No rollout of this prompt is in the history.");
  const steps = [...new Set(rows.map((row) => row.train_step))];
  show(
    root,
    h("p", {}, h("a", { href: address("prompts", run) }, "prompts"), " / one prompt"),
    h("pre", { class: "text", tabindex: 0 }, rows[0].prompt),
    rows[0].truth ? h("p", { class: "dim" }, `expected: ${rows[0].truth}`) : null,
    ...steps.map((step) => {
      const of = rows.filter((row) => row.train_step === step);
      // An answer that was not judged has no score, and is not one that earned nothing.
      const scores = of.flatMap((row) => (row.score === null ? [] : [row.score]));
      const mean = scores.length ? scores.reduce((sum, score) => sum + score, 0) / scores.length : null;
      return h("section", {}, h("h2", {}, `Train step ${step}: mean score ${number(mean)}`), h("div", { class: "members" }, ...of.map((row) => h("article", { class: "card" }, h("header", {}, h("a", { class: "item", href: address("rollout", run, { id: row.rollout_id }) }, String(row.rollout_id)), " ", outcomeBadge(row), h("span", { class: "dim" }, ` score ${number(row.score)}`)), h("pre", { class: "text", tabindex: 0 }, row.response)))));
    }),
  );
  return () => undefined;
}
