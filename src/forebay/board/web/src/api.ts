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

export async function ask<What extends keyof Answers>(what: What, given: Record<string, unknown> = {}): Promise<Answers[What]> {
  const asked = new URLSearchParams();
  for (const [name, value] of Object.entries(given)) {
    if (value !== undefined && value !== null && value !== "") asked.set(name, String(value));
  }
  // A report has all columns.
  if (answers) asked.delete("names");
  asked.sort();
  const address = `${what}?${asked}`;
  if (answers) {
    if (address in answers) return answers[address] as Answers[What];
    throw new AskError("This report holds only a part of the run; open the run with forebay board to see this.");
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
