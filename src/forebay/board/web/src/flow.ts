import { ask, follow } from "./api";
import { duration, h, number, show, svg, table, type Child } from "./dom";
import { judgesOf, stageText, type Judges } from "./judges";
import { address, keep } from "./place";
import type { Books, Doing, Live, TaskNow } from "./types";

const WIDTH = 980;
/** With room for five reasons of a drop. */
const HEIGHT = 268;
const NARROW = 360;
/** From the top of a box to that of the next, where they stand one below the other. */
const FALL = 140;
const LINE = 16;

/** Its name, how many are in it, and how they are. */
type Box = [name: string, count: string, note: string];

/** Prompts -> in flight -> judged -> buffer -> trained, with every way out; the numbers are the balance of the books. */
export async function flow(root: HTMLElement, run: string, given: Record<string, string>): Promise<() => void> {
  const [first, judges] = await Promise.all([ask("flow", { run }), judgesOf(run)]);
  let live = first;
  let chosen = given.task ?? "";
  const picture = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "From prompts to training" });
  const parts = ["Oldest in flight", "In the buffer, by staleness", "What the trainer's side does"].map((title) => h("section", { tabindex: 0, role: "region", "aria-label": title }));
  const now = h("div", { class: "told-now", tabindex: 0, role: "region", "aria-label": "The slowest now" });
  const task = h("select", { id: "task", "aria-label": "task" });
  show(root, h("div", { class: "controls" }, h("label", { for: "task" }, "task ", task)), now, picture, h("div", { class: "columns" }, parts));
  const narrow = matchMedia("(max-width: 640px)");
  const draw = () => {
    const names = Object.keys(live.books ?? {});
    if (task.childElementCount !== names.length + 1) {
      show(task, h("option", { value: "" }, "all"), ...names.map((name) => h("option", { value: name }, name)));
      (task as HTMLSelectElement).value = chosen;
    }
    // Of a link from another run.
    if (names.length && !names.includes(chosen)) (task as HTMLSelectElement).value = chosen = "";
    const books = sum(names.filter((name) => !chosen || name === chosen).map((name) => (live.books ?? {})[name]));
    const tasks = Object.entries(live.tasks ?? {}).filter(([name]) => !chosen || name === chosen).map(([, value]) => value);
    const oldest = (live.oldest ?? []).filter((one) => !chosen || String(one.task) === chosen);
    const stages = (chosen && live.stages_of?.[chosen]) || live.stages;
    // What moves has a place of its own size; what does not takes what it needs.
    for (const part of parts) part.classList.toggle("fixed", live.state === "running");
    show(picture, drawPicture(books, tasks, { ...live, oldest, stages }, run, narrow.matches, judges));
    show(now, live.stall ? h("pre", { class: "failure" }, String(live.stall)) : oldest.length ? slowest(oldest, judges) : h("span", { class: "dim" }, idleText(live)));
    drawDetails(parts, { ...live, oldest }, books, tasks, judges);
  };
  task.addEventListener("change", () => {
    chosen = (task as HTMLSelectElement).value;
    keep({ task: chosen });
    draw();
  });
  draw();
  narrow.addEventListener("change", draw);
  const stop = follow(run, Infinity, (change) => {
    if (!change.live.books) return;
    live = change.live;
    draw();
  });
  return () => {
    narrow.removeEventListener("change", draw);
    stop();
  };
}

type Sums = Required<Pick<Books, "generated" | "trained" | "live" | "retried" | "left" | "dropped">>;

function sum(parts: Books[]): Sums {
  const total: Sums = { generated: 0, trained: 0, live: 0, retried: 0, left: 0, dropped: {} };
  for (const part of parts) {
    for (const name of ["generated", "trained", "live", "retried", "left"] as const) total[name] += part[name] ?? 0;
    for (const [reason, count] of Object.entries(part.dropped)) total.dropped[reason] = (total.dropped[reason] ?? 0) + count;
  }
  return total;
}

function added(counts: Record<string, number>[]): Map<string, number> {
  const total = new Map<string, number>();
  for (const one of counts) for (const [name, count] of Object.entries(one)) total.set(name, (total.get(name) ?? 0) + count);
  return total;
}

function drawPicture(books: Sums, tasks: TaskNow[], live: Live, run: string, isUpright: boolean, judges: Judges): Element {
  const buffer = added(tasks.map((task) => task.buffer ?? {}));
  const inBuffer = [...buffer.values()].reduce((total, count) => total + count, 0);
  const inFlight = tasks.reduce((total, task) => total + (task.in_flight ?? 0), 0);
  const dropped = Object.entries(books.dropped).sort((a, b) => b[1] - a[1]);
  const numDropped = dropped.reduce((total, [, count]) => total + count, 0);
  const known = tasks.length > 0;
  const boxes: Box[] = [
    ["taken up", number(books.generated), String(live.unit ?? "groups")],
    ["in flight", known ? number(inFlight) : "-", stages(live)],
    // Fragments are not judged.
    ...(live.unit ? [] : [atJudge(live, judges)]),
    ["in the buffer", known ? number(inBuffer) : number(books.live), [...buffer].map(([name, count]) => `${count} ${name}`).join(", ")],
    ["trained", number(books.trained), `train step ${number(live.train_step)}`],
  ];
  const moving = live.state === "running" ? "moving" : "";
  const ways = dropped.length ? dropped.map(([reason, count]) => `${number(count)} ${reason}`) : ["nothing was"];
  const parts = isUpright ? upright(boxes, moving, number(numDropped), ways) : lying(boxes, moving, number(numDropped), ways);
  const difference = books.generated - books.trained - numDropped - books.live;
  const balance = `${number(books.generated)} taken up = ${number(books.trained)} trained + ${number(numDropped)} dropped + ${number(books.live)} live`;
  const size = isUpright ? `0 0 ${NARROW} ${boxes.length * FALL - 36}` : `0 0 ${WIDTH} ${HEIGHT + LINE * Math.max(0, ways.length - 4)}`;
  const drawn = svg("svg", { viewBox: size, class: isUpright ? "flow upright" : "flow", role: "img", "aria-label": balance }, ...parts);
  return h("figure", {}, drawn as unknown as HTMLElement, h("figcaption", { class: difference ? "failure" : "" }, difference ? `The books do not balance: ${difference} ${live.unit ?? "groups"} are missing. ` : "", balance, ". ", dropped.length ? "Read dropped ones: " : null, ...dropped.flatMap(([reason]) => [h("a", { href: address("rollouts", run, { outcome: "dropped", reason }) }, reason), " "])));
}

/** Side by side, from left to right; what was dropped falls out of the buffer. */
function lying(boxes: Box[], moving: string, numDropped: string, ways: string[]): Node[] {
  const space = WIDTH / boxes.length;
  const out = (boxes.length - 2) * space + 10 + (space - 60) / 2;
  return [
    ...boxes.flatMap((box, place) => {
      const left = place * space + 10;
      const pipe = svg("line", { x1: left - 48, y1: 70, x2: left - 4, y2: 70, class: `pipe ${moving}` });
      return [...(place ? [pipe] : []), ...tank(box, left, 20, space - 60, 100)];
    }),
    svg("line", { x1: out, y1: 122, x2: out, y2: 158, class: `pipe out ${numDropped === "0" ? "unused" : moving}` }),
    svg("text", { x: out, y: 180, class: "name" }, `dropped: ${numDropped}`),
    ...ways.map((way, place) => svg("text", { x: out, y: 202 + LINE * place, class: "note" }, way)),
  ];
}

/** One below the other, for a telephone; what was dropped leaves the buffer to the right. */
function upright(boxes: Box[], moving: string, numDropped: string, ways: string[]): Node[] {
  const width = 215;
  const buffer = (boxes.length - 2) * FALL + 50;
  return [
    ...boxes.flatMap((box, place) => {
      const pipe = svg("line", { x1: width / 2, y1: place * FALL - 38, x2: width / 2, y2: place * FALL - 2, class: `pipe ${moving}` });
      return [...(place ? [pipe] : []), ...tank(box, 2, place * FALL, width, FALL - 40)];
    }),
    svg("line", { x1: width + 4, y1: buffer, x2: width + 30, y2: buffer, class: `pipe out ${numDropped === "0" ? "unused" : moving}` }),
    svg("text", { x: width + 36, y: buffer - 12, class: "name begin" }, `dropped: ${numDropped}`),
    ...ways.map((way, place) => svg("text", { x: width + 36, y: buffer + 6 + LINE * place, class: "note begin" }, way)),
  ];
}

function tank([name, count, note]: Box, left: number, top: number, width: number, height: number): Node[] {
  const middle = left + width / 2;
  return [
    svg("rect", { x: left, y: top, width, height, rx: 8, class: "tank" }),
    svg("text", { x: middle, y: top + 26, class: "name" }, name),
    svg("text", { x: middle, y: top + 60, class: "count" }, count),
    svg("text", { x: middle, y: top + 86, class: "note" }, note),
  ];
}

function stages(live: Live): string {
  const others = Object.entries(live.stages ?? {}).filter(([stage]) => live.unit || stage !== "judge");
  return others.map(([stage, count]) => `${number(count)} ${stage}`).join(", ") || "nothing";
}

/** Of the groups in flight those that are being judged, and how long the first of them has been. */
function atJudge(live: Live, judges: Judges): Box {
  const count = live.stages?.judge ?? 0;
  const first = (live.oldest ?? []).filter((one) => one.stage === "judge").sort((a, b) => b.age_s - a.age_s)[0];
  const note = first ? `${judges.get(String(first.task)) || "slowest"}: ${duration(first.age_s)}` : [...new Set(judges.values())].filter(Boolean).slice(0, 2).join(", ");
  return ["being judged", live.state === "running" ? number(count) : "-", note];
}

/** The oldest work of each stage, by name. */
function slowest(oldest: Doing[], judges: Judges): string {
  const first = new Map<string, Doing>();
  for (const one of oldest) if (!first.has(one.stage) || first.get(one.stage)!.age_s < one.age_s) first.set(one.stage, one);
  return `Slowest now: ${[...first.values()].map((one) => `${stageText(one.stage, one.task, judges)} of ${one.name || one.group}, for ${duration(one.age_s)}`).join("; ")}.`;
}

function idleText(live: Live): string {
  if (live.state === "running") return "Nothing is in flight.";
  return live.state !== "old" || Object.keys(live.books ?? {}).length ? "The run is not at work." : "The run has not said yet where it stands; it does once it has loaded its model, and this page follows.";
}

/** Each in a place of its own size, which stays: nothing jumps, and a reader who scrolled stays there. */
function drawDetails([oldest, buffer, trainer]: HTMLElement[], live: Live, books: Sums, tasks: TaskNow[], judges: Judges): void {
  const ages = added(tasks.map((task) => task.ages ?? {}));
  const fill = (section: HTMLElement, ...children: Child[]) => show(section, h("h2", {}, section.getAttribute("aria-label")), ...children);
  fill(
    oldest,
    live.oldest?.length
      ? table(["what", "name", "task", "for", "so far"], live.oldest.map((one) => [stageText(one.stage, one.task, judges), one.name, one.task ?? "", duration(one.age_s), one.note ?? ""]), { numbers: [3] })
      : h("p", { class: "dim" }, idleText(live)),
  );
  fill(
    buffer,
    h("p", { class: "dim" }, `${number(books.retried)} times a group was taken up again; ${number(books.left)} failed rollouts left their group.`),
    ages.size ? table(["train steps old", "groups"], [...ages].sort((a, b) => Number(a[0]) - Number(b[0])).map(([age, count]) => [age, number(count)]), { numbers: [0, 1] }) : h("p", { class: "dim" }, "No group is ready."),
  );
  fill(trainer, live.doing?.length ? table(["what", "name", "for"], live.doing.map((one) => [one.stage, one.name, duration(one.age_s)]), { numbers: [2] }) : h("p", { class: "dim" }, "Nothing."));
}
