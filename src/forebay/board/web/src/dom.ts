// Elements, always made from text: nothing that a model wrote is ever read as markup.

export type Child = Node | string | number | null | undefined | false;
type Attributes = Record<string, unknown>;

export function h(tag: string, attributes: Attributes = {}, ...children: (Child | Child[])[]): HTMLElement {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value as EventListener);
    else if (name === "style") Object.assign(element.style, value);
    else if (name === "value") (element as HTMLInputElement).value = String(value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  add(element, ...children);
  return element;
}

export function add(element: Element, ...children: (Child | Child[])[]): void {
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
}

export function show(element: Element, ...children: (Child | Child[])[]): void {
  element.replaceChildren();
  add(element, ...children);
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag: string, attributes: Record<string, string | number>, ...children: (Node | string)[]): SVGElement {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

export function number(value: unknown, digits = 3): string {
  if (typeof value !== "number" || !Number.isFinite(value)) return "-";
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size >= 1000) return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
  return size && size < 0.001 ? value.toExponential(1) : String(Number(value.toPrecision(digits)));
}

export function percent(value: unknown): string {
  return typeof value === "number" ? `${Math.round(100 * value)}%` : "-";
}

export function duration(seconds: number): string {
  if (!Number.isFinite(seconds)) return "-";
  if (seconds < 0.1) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function when(unixSeconds: number | null | undefined): string {
  return unixSeconds ? new Date(unixSeconds * 1000).toLocaleString() : "-";
}

export function table(head: string[], rows: (Child | Child[])[][], options: { numbers?: number[]; label?: string } = {}): HTMLElement {
  const numbers = new Set(options.numbers ?? []);
  const cell = (tag: string, content: Child | Child[], place: number) =>
    h(tag, { class: numbers.has(place) ? "number" : undefined, scope: tag === "th" ? "col" : undefined }, content);
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": options.label ?? head.join(", ") },
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, ...head.map((text, place) => cell("th", text, place)))),
      h("tbody", {}, ...rows.map((row) => h("tr", {}, ...row.map((content, place) => cell("td", content, place))))),
    ),
  );
}

/** Of which runs there are no rollouts. */
export const WITHOUT = "Runs in environments, and those with history_gb = 0, keep no rollouts.";

/** In place of what is not there: `soon` while the run may bring it, and the page looks again by itself (main.ts). */
export function absent(isOver: boolean, soon: string, never: string): HTMLElement {
  return h("p", { class: isOver ? "empty" : "empty awaited" }, isOver ? never : soon);
}

export function failure(error: unknown): HTMLElement {
  return h("p", { class: "failure", role: "alert" }, error instanceof Error ? error.message : String(error));
}

/** A button that copies `text`. */
export function copyButton(label: string, text: () => string): HTMLElement {
  const button = h("button", { class: "quiet", type: "button" }, label);
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text());
    button.textContent = "copied";
    setTimeout(() => (button.textContent = label), 1200);
  });
  return button;
}
