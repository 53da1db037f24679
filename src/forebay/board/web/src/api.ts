// Questions to the server, or to the answers that an exported report carries within itself.

export type Row = Record<string, any>;
export type Columns = Record<string, (number | null)[]>;

export interface RunSummary {
  id: string;
  state: string;
  steps: number | null;
  train_step: number;
  unix_time_s: number | null;
}

export interface Overview {
  facts: Row;
  notes: Row[];
  /** Some columns; `names` has those of all. */
  metrics: Columns;
  names: string[];
  live: Row;
}

const embedded = document.getElementById("answers");
const answers: Record<string, unknown> | null = embedded ? JSON.parse(embedded.textContent ?? "{}") : null;

export const isReport = answers !== null;

export class AskError extends Error {}

export async function ask<T = any>(what: string, given: Record<string, unknown> = {}): Promise<T> {
  const asked = new URLSearchParams();
  for (const [name, value] of Object.entries(given)) {
    if (value !== undefined && value !== null && value !== "") asked.set(name, String(value));
  }
  // A report has all columns.
  if (answers) asked.delete("names");
  asked.sort();
  const address = `${what}?${asked}`;
  if (answers) {
    if (address in answers) return answers[address] as T;
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
  return found as T;
}

/** Calls `changed` with what is new, until the returned function is called; connects again by itself. */
export function follow(run: string, since: number, changed: (change: Row) => void): () => void {
  if (answers) return () => undefined;
  const source = new EventSource(`api/events?${new URLSearchParams({ run, since: String(since) })}`);
  source.onmessage = (event) => changed(JSON.parse(event.data));
  return () => source.close();
}
