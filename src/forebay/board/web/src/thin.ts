// Of long lines only what a screen can show: the lowest and the highest of each pixel, so that spikes stay.

export type Values = (number | null)[];

/** The first row whose x is at least `value`. */
export function rowAt(x: ArrayLike<number>, value: number): number {
  let low = 0;
  let high = x.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/**
 * The rows that are drawn between two values of x, in order, with the first and the last of all; null: all rows.
 *
 * Of each of `parts` of the range it takes two rows of every line. `x` rises.
 */
export function drawnRows(x: ArrayLike<number>, lines: Values[], from: number, to: number, parts: number): number[] | null {
  const last = x.length - 1;
  if (x.length <= 2 * parts * lines.length) return null;
  // One beyond each side: the line goes on to the edge.
  const begin = Math.max(0, rowAt(x, from) - 1);
  const end = Math.min(last, rowAt(x, to) + 1);
  const rows = begin > 0 ? [0] : [];
  const width = (to - from) / parts;
  let row = begin;
  for (let part = 1; row <= end; part += 1) {
    const border = part < parts ? rowAt(x, from + part * width) : end + 1;
    const stop = Math.min(Math.max(border, row + 1), end + 1);
    const found = new Set<number>();
    for (const values of lines) {
      let low = -1;
      let high = -1;
      for (let at = row; at < stop; at += 1) {
        const value = values[at];
        if (value === null || value === undefined) continue;
        if (low < 0 || value < (values[low] as number)) low = at;
        if (high < 0 || value > (values[high] as number)) high = at;
      }
      if (low >= 0) found.add(low).add(high);
    }
    rows.push(...[...found].sort((a, b) => a - b));
    row = stop;
  }
  if (!rows.length || rows[0] > 0) rows.unshift(0);
  if (rows[rows.length - 1] < last) rows.push(last);
  return rows;
}
