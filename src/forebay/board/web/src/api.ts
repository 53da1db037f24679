// Questions to the server, or to the answers that an exported report carries within itself.

import type { Answers, Change, RunSummary } from "./types";

const embedded = document.getElementById("answers");
const answers: Record<string, unknown> | null = embedded ? JSON.parse(embedded.textContent ?? "{}") : null;

export const isReport = answers !== null;

/** Nothing more will come of this run. */
export function isOver(runs: RunSummary[], run: string): boolean {
  return isReport || ["finished", "stopped", "failed"].includes(runs.find((one) => one.id === run)?.state ?? "");
}

export class AskError extends Error {}

/** What a report does not hold, by question. */
const UNTOLD: Partial<Record<keyof Answers, string>> = {
  compare: "A report holds the last evaluation of each run against its first, and no other: answers of all would be most of its size. Open the run with forebay board to compare others.",
};

export async function ask<What extends keyof Answers>(what: What, given: Record<string, unknown> = {}): Promise<Answers[What]> {
  const asked = new URLSearchParams();
  for (const [name, value] of Object.entries(given)) {
    if (value !== undefined && value !== null && value !== "") asked.set(name, String(value));
  }
  // A report has all columns, and has them once.
  if (answers) {
    asked.delete("names");
    if (what === "metrics") return (answers[`overview?${asked}`] as Answers["overview"]).metrics as Answers[What];
  }
  asked.sort();
  const address = `${what}?${asked}`;
  if (answers) {
    if (address in answers) return answers[address] as Answers[What];
    throw new AskError(UNTOLD[what] ?? "This report holds only a part of the run; open the run with forebay board to see this.");
  }
  let response: Response;
  try {
    response = await fetch(`api/${address}`);
  } catch {
    throw new AskError("The board's server does not answer. Is forebay board still running?");
  }
  const found = await response.json().catch(() => ({ error: response.statusText }));
  if (!response.ok) throw new AskError(String(found.error));
  return found as Answers[What];
}

/** Calls `changed` with what is new, until the returned function is called; connects again by itself. */
export function follow(run: string, since: number, changed: (change: Change) => void): () => void {
  if (answers) return () => undefined;
  const source = new EventSource(`api/events?${new URLSearchParams({ run, since: String(since) })}`);
  source.onmessage = (event) => changed(JSON.parse(event.data));
  return () => source.close();
}
