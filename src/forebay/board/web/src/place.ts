// Where the reader is: everything is in the address, so that every view can be sent to a colleague.

export interface Place {
  view: string;
  run: string;
  given: Record<string, string>;
}

/** `#/VIEW?run=NAME&...` */
export function here(): Place {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const given = Object.fromEntries(new URLSearchParams(query ?? ""));
  const run = given.run ?? "";
  delete given.run;
  return { view: path || "overview", run, given };
}

export function address(view: string, run: string, given: Record<string, unknown> = {}): string {
  const asked = new URLSearchParams();
  if (run) asked.set("run", run);
  for (const [name, value] of Object.entries(given)) {
    if (value !== undefined && value !== null && value !== "") asked.set(name, String(value));
  }
  return `#/${view}?${asked}`;
}

/** Changes what is given in the address, without a new entry in the history of the browser. */
export function keep(given: Record<string, unknown>): void {
  const place = here();
  history.replaceState(null, "", address(place.view, place.run, { ...place.given, ...given }));
}
