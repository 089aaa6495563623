// The page's state in the address's fragment: a link or a reload shows the same. Never the token.

const LISTS = new Set(["runs", "metrics"]);
const FIRST = { view: "curves", runs: [], metrics: [], find: "", from: null, to: null, smooth: 0, log: false, query: "", step: null };

/** What the page shows; change it through `change`. */
export const state = read();
const listeners = new Set();

function read() {
  const query = new URLSearchParams(location.hash.slice(1));
  const found = { ...FIRST };
  const whole = (name) => (/^-?\d+$/.test(query.get(name) || "") ? Number(query.get(name)) : null);
  for (const name of LISTS) found[name] = query.getAll(name).filter(Boolean).slice(0, 64);
  for (const name of ["find", "query"]) found[name] = query.get(name) || "";
  if (/^[a-z]+$/.test(query.get("view") || "")) found.view = query.get("view");
  for (const name of ["from", "to", "step"]) found[name] = whole(name);
  const smooth = Number(query.get("smooth"));
  found.smooth = smooth >= 0 && smooth < 1 ? smooth : 0;
  found.log = query.get("log") === "1";
  return found;
}

function written() {
  const query = new URLSearchParams();
  for (const [name, first] of Object.entries(FIRST)) {
    const value = state[name];
    if (LISTS.has(name)) value.forEach((each) => query.append(name, each));
    else if (value !== first && value !== null) query.set(name, value === true ? "1" : value);
  }
  return query.toString();
}

/** Changes the state and the address. Another view is an entry of the browser's history, other changes are not. */
export function change(changes) {
  const before = { ...state };
  Object.assign(state, changes);
  const names = Object.keys(changes).filter((name) => String(before[name]) !== String(state[name]));
  if (!names.length) return;
  const address = location.pathname + (written() ? `#${written()}` : "");
  if (names.includes("view")) history.pushState(null, "", address);
  else history.replaceState(null, "", address);
  listeners.forEach((listener) => listener(new Set(names)));
}

/** Calls the listener with the set of names that changed. */
export function onChange(listener) { listeners.add(listener); }

function reread() {
  const next = read();
  const names = Object.keys(FIRST).filter((name) => String(next[name]) !== String(state[name]));
  Object.assign(state, next);
  if (names.length) listeners.forEach((listener) => listener(new Set(names)));
}
addEventListener("popstate", reread);
addEventListener("hashchange", reread);
