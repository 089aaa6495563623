// Differences of two texts, word by word.

const MOST_CELLS = 6_000_000;

const words = (text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) || [];
const lines = (text) => text.match(/[^\n]*\n|[^\n]+/g) || [];

/**
 * Parts in order: [kind, text] with kind "same", "gone" (only in a) or "new" (only in b). Texts that are too long for a
 * comparison of words are compared by lines, and beyond that as wholes after their common start and end.
 */
export function difference(a, b) {
  for (const split of [words, lines]) {
    const found = compare(split(a), split(b));
    if (found) return found;
  }
  return trimmed([...a], [...b], (one, two) => [["gone", one.join("")], ["new", two.join("")]]);
}

function compare(one, two) {
  return trimmed(one, two, (a, b) => (a.length * b.length > MOST_CELLS ? null : aligned(a, b)));
}

/** Compares what lies between the common start and the common end with `inner`; null where it gives up. */
function trimmed(one, two, inner) {
  let start = 0;
  while (start < one.length && start < two.length && one[start] === two[start]) start += 1;
  let end = 0;
  while (end < one.length - start && end < two.length - start && one[one.length - 1 - end] === two[two.length - 1 - end]) end += 1;
  const between = inner(one.slice(start, one.length - end), two.slice(start, two.length - end));
  if (!between) return null;
  const parts = [["same", one.slice(0, start).join("")], ...between, ["same", end ? one.slice(-end).join("") : ""]];
  return parts.filter(([, text]) => text);
}

/** The longest common subsequence of two lists, as parts. */
function aligned(a, b) {
  const width = b.length + 1;
  const table = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      const at = i * width + j;
      table[at] = a[i] === b[j] ? table[at + width + 1] + 1 : Math.max(table[at + width], table[at + 1]);
    }
  }
  const parts = [];
  const add = (kind, text) => { if (parts.length && parts[parts.length - 1][0] === kind) parts[parts.length - 1][1] += text; else parts.push([kind, text]); };
  let [i, j] = [0, 0];
  while (i < a.length && j < b.length) {
    if (a[i] === b[j]) { add("same", a[i]); i += 1; j += 1; }
    else if (table[(i + 1) * width + j] >= table[i * width + j + 1]) { add("gone", a[i]); i += 1; }
    else { add("new", b[j]); j += 1; }
  }
  if (i < a.length) add("gone", a.slice(i).join(""));
  if (j < b.length) add("new", b.slice(j).join(""));
  return parts;
}
