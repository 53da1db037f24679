// The judges of a run by name, as its run file has them.

import { ask } from "./api";

interface Judge {
  name?: string;
  arguments?: { parts?: { name?: string; label?: string | null }[] };
}

/** Of each task, or empty. A run's do not change, so they are asked for once. */
export type Judges = Map<string, string>;

const known = new Map<string, Promise<Judges>>();

export function judgesOf(run: string): Promise<Judges> {
  const found = known.get(run) ?? ask("overview", { run, names: "train_step" })
    .then(({ facts }) => named(facts.config.tasks))
    // Asked again by the next view.
    .catch((): Judges => (known.delete(run), new Map()));
  known.set(run, found);
  return found;
}

function named(tasks: unknown): Judges {
  const tables = Array.isArray(tasks) ? (tasks as { name?: string; judge?: string | Judge | null }[]) : [];
  return new Map(tables.flatMap((task): [string, string][] => (task.name ? [[task.name, typeof task.judge === "string" ? task.judge : text(task.judge ?? {})]] : [])));
}

/** That of `composed` by its parts. */
function text(judge: Judge): string {
  const given = judge.arguments?.parts;
  const parts = Array.isArray(given) ? given : [];
  return parts.length ? parts.map((part) => part.label ?? part.name ?? "?").join(" + ") : (judge.name ?? "");
}

/** "judge exact_match", and of other stages, or where it is not known, the stage alone. */
export function stageText(stage: string, task: unknown, judges: Judges): string {
  const judge = stage === "judge" ? judges.get(String(task)) : undefined;
  return judge ? `judge ${judge}` : stage;
}
