// The view of waits: which process waits for which, with the verdict on it.

import { announce, count, empty, formatSeconds, h, paint, put, ranges, s, visible } from "./dom.js";
import { aborted, get, ofRun } from "./server.js";

const SHOWN_ONE_BY_ONE = 24;
const NODE = { width: 196, least: 140, height: 58, gap: 14, between: 96, leastBetween: 52, caption: 26 };
const PADDING = 8;
const WITHIN_MS = 1000;
const ASKED_MS = 5000;

/**
 * Nodes and edges as drawn. Beyond some dozens of processes those of one role, stage and state that wait for the same
 * roles become one node with their ranks; culprits always stay one by one.
 */
export function grouped(nodes, edges, most = SHOWN_ONE_BY_ONE) {
  const collapse = nodes.length > most;
  const waitsFor = new Map();
  const byName = new Map(nodes.map((node) => [node.name, node]));
  if (collapse) {
    for (const edge of edges) {
      const end = byName.get(edge.to);
      if (!waitsFor.has(edge.from)) waitsFor.set(edge.from, new Set());
      waitsFor.get(edge.from).add(end ? (end.culprit ? end.name : end.role) : edge.to);
    }
  }
  const groups = new Map();
  const home = new Map();
  for (const node of nodes) {
    const apart = !collapse || node.culprit;
    const key = apart ? `=${node.name}` : JSON.stringify([node.role, node.stage, node.state, [...(waitsFor.get(node.name) || [])].sort()]);
    if (!groups.has(key)) groups.set(key, { key, role: node.role, stage: node.stage, state: node.state, culprit: Boolean(node.culprit), members: [] });
    groups.get(key).members.push(node);
    home.set(node.name, key);
  }
  const links = new Map();
  for (const edge of edges) {
    const [from, to] = [home.get(edge.from), home.get(edge.to)];
    if (!from || !to || (from === to && collapse)) continue;
    const key = `${from}\n${to}`;
    const link = links.get(key) || { from, to, why: edge.why, seconds: 0, waits: 0, kinds: new Set() };
    link.seconds = Math.max(link.seconds, edge.seconds || 0);
    link.kinds.add(edge.why);
    link.waits += 1;
    links.set(key, link);
  }
  for (const group of groups.values()) {
    const ranks = group.members.map((node) => node.rank).filter((rank) => rank !== null && rank !== undefined);
    group.label = group.members.length === 1 ? group.members[0].name : ranks.length ? `${group.role} ${ranges(ranks)}` : `${group.role} (${group.members.length})`;
  }
  return { groups: [...groups.values()], links: [...links.values()] };
}

/**
 * Places the groups in layers, within a width. Who waits for nobody stands furthest right, and left of it who waits for
 * it; where that many columns do not fit, layers are lines, with who waits for nobody at the bottom. A role stands together
 * in its layer, its culprits by themselves; roles without any wait stand in lines below.
 */
export function layout(groups, links, width = 1200) {
  const { roles, layers, idle } = layersOf(groups, links);
  const pad = width < 500 ? 12 : 24;
  const inner = width - 2 * pad;
  const columns = [...layers.keys()].sort((a, b) => b - a).map((layer) => layers.get(layer));
  const fits = columns.length * NODE.least + (columns.length - 1) * NODE.leastBetween <= inner;
  const place = { captions: [], lines: !fits || !columns.length, width, height: pad };
  const perLine = Math.max(1, Math.floor((inner + NODE.gap) / (NODE.least + NODE.gap)));
  const most = Math.max(1, ...[...columns, idle].map((keys) => keys.reduce((sum, key) => sum + roles.get(key).length, 0)));
  const across = place.lines ? Math.min(perLine, most) : columns.length;
  const between = place.lines ? NODE.gap : NODE.leastBetween;
  place.node = Math.min(NODE.width, Math.floor((inner - (across - 1) * between) / across));
  if (place.lines) columns.forEach((keys, at) => { place.height += at ? NODE.gap : 0; inLines(place, keys, roles, inner, pad, columns.length - at); });
  else inColumns(place, columns, roles, inner, pad);
  if (idle.length) { place.height += columns.length ? NODE.gap : 0; inLines(place, idle, roles, inner, pad, 0); }
  place.height += pad;
  return place;
}

/** The groups by role and the roles by layer, from those that nobody waits behind; `idle`: roles without any wait. */
function layersOf(groups, links) {
  const roleOf = (group) => `${group.culprit ? "!" : ""}${group.role}`;
  const roles = new Map();
  for (const group of groups) {
    if (!roles.has(roleOf(group))) roles.set(roleOf(group), []);
    roles.get(roleOf(group)).push(group);
  }
  const byKey = new Map(groups.map((group) => [group.key, group]));
  const next = new Map([...roles.keys()].map((key) => [key, new Set()]));
  const linked = new Set();
  for (const link of links) {
    const [from, to] = [roleOf(byKey.get(link.from)), roleOf(byKey.get(link.to))];
    linked.add(from).add(to);
    if (from !== to) next.get(from).add(to);
  }
  const depth = new Map();
  const measure = (key, path) => {
    if (depth.has(key)) return depth.get(key);
    if (path.has(key)) return 0;
    path.add(key);
    const found = Math.max(-1, ...[...next.get(key)].map((to) => measure(to, path))) + 1;
    path.delete(key);
    depth.set(key, found);
    return found;
  };
  const layers = new Map();
  const sorted = [...roles.keys()].sort();
  for (const key of sorted.filter((each) => linked.has(each))) {
    const layer = measure(key, new Set());
    if (!layers.has(layer)) layers.set(layer, []);
    layers.get(layer).push(key);
  }
  return { roles, layers, idle: sorted.filter((each) => !linked.has(each)) };
}

const captionOf = (key, x, y) => ({ text: `${key.replace(/^!/, "")}${key.startsWith("!") ? ", culprit" : ""}`, x, y: y + NODE.caption - 10 });

/** Places each layer in a column; the space between columns is as wide as there is room, up to `NODE.between`. */
function inColumns(place, columns, roles, inner, pad) {
  const tall = (keys) => keys.reduce((sum, key) => sum + NODE.caption + roles.get(key).length * (NODE.height + NODE.gap), 0) - NODE.gap;
  const tallest = Math.max(...columns.map(tall));
  place.between = columns.length > 1 ? Math.min(NODE.between, (inner - columns.length * place.node) / (columns.length - 1)) : 0;
  let x = pad + (inner - columns.length * place.node - (columns.length - 1) * place.between) / 2;
  columns.forEach((keys, at) => {
    let y = place.height + (tallest - tall(keys)) / 2;
    for (const key of keys) {
      place.captions.push(captionOf(key, x, y));
      y += NODE.caption;
      for (const group of roles.get(key)) { Object.assign(group, { x, y, layer: columns.length - at }); y += NODE.height + NODE.gap; }
    }
    x += place.node + place.between;
  });
  place.height += tallest + 24; // for arrows that pass below
}

/** Places a layer in as many lines as it needs. */
function inLines(place, keys, roles, inner, pad, layer) {
  const cells = keys.flatMap((key) => roles.get(key).map((group, at) => ({ group, key: at ? null : key })));
  const across = Math.max(1, Math.floor((inner + NODE.gap) / (place.node + NODE.gap)));
  for (let first = 0; first < cells.length; first += across) {
    const line = cells.slice(first, first + across);
    let x = pad + (inner - line.length * (place.node + NODE.gap) + NODE.gap) / 2;
    for (const { group, key } of line) {
      if (key !== null) place.captions.push(captionOf(key, x, place.height));
      Object.assign(group, { x, y: place.height + NODE.caption, layer });
      x += place.node + NODE.gap;
    }
    place.height += NODE.caption + NODE.height + NODE.gap;
  }
}

export class WaitGraphView {
  constructor(app) {
    this.app = app;
    this.verdict = h("div", {});
    this.drawing = h("div", { class: "graph card" });
    this.list = h("div", { class: "card waits" });
    this.note = h("span", { class: "note", role: "status" });
    this.body = h("div", { class: "graph-body" });
    this.element = h("div", {}, this.verdict, this.body);
    this.paintAll = () => this.draw();
    new ResizeObserver(() => { if (this.shown && this.drawing.isConnected && this.drawing.clientWidth !== this.drawnFor) paint(this.paintAll); }).observe(this.body);
  }

  async show() {
    this.shown = true;
    this.run = this.app.primary()?.id;
    await this.refresh();
  }

  hide() { this.shown = false; clearInterval(this.asking); this.asking = 0; }

  async refresh() {
    this.asking ||= setInterval(() => { if (!document.hidden && (this.data?.live || this.app.primary()?.state === "running")) this.refresh(); }, ASKED_MS);
    if (!this.run) { put(this.body, empty("No run is chosen", "Choose a run on the left.")); return; }
    try { this.take(await get(ofRun(this.run, "waits"))); } catch (error) { if (!aborted(error)) this.app.failed(error); }
  }

  event(kind, data) {
    if (kind !== "waits" || !this.shown || data.run !== this.run) return;
    this.next = data;
    this.timer ||= setTimeout(() => { this.timer = 0; if (this.shown && this.next) this.take(this.next); }, WITHIN_MS);
  }

  async take(data) {
    if (!data.nodes) { await this.refresh(); return; }
    this.next = null;
    this.data = data;
    paint(this.paintAll);
  }

  draw() {
    const { nodes, edges, verdict } = this.data;
    put(this.verdict, verdictCard(verdict), verdict && (verdict.fix || verdict.evidence?.length) ? h("div", { class: "card waits why" },
      verdict.evidence?.length ? [h("h2", {}, "Evidence"), h("ul", {}, verdict.evidence.slice(0, 40).map((line) => h("li", { class: "text" }, line)))] : null,
      verdict.fix ? [h("h2", {}, "Fix"), h("p", { class: "text" }, verdict.fix)] : null) : null);
    if (!nodes.length) { put(this.body, empty("No process is shown", `${this.data.message ? `${this.data.message[0].toUpperCase()}${this.data.message.slice(1)}. ` : ""}The graph shows the processes of a run on this host while it works.`)); return; }
    const { groups, links } = grouped(nodes, edges);
    if (!this.drawing.isConnected) put(this.body, this.drawing, this.list);
    this.drawnFor = this.drawing.clientWidth;
    const place = layout(groups, links, Math.max(this.drawnFor - 2 * PADDING, 240));
    const focused = document.activeElement?.getAttribute?.("data-key");
    const svg = s("svg", { viewBox: `0 0 ${place.width} ${place.height}`, width: place.width, height: place.height, role: "group", "aria-label": `${count(groups.length, "node")}, ${count(links.length, "wait")}` },
      s("defs", {}, s("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 9, markerHeight: 9, markerUnits: "userSpaceOnUse", orient: "auto-start-reverse" }, s("path", { d: "M0 0L8 4L0 8z" }))));
    for (const { text, x, y } of place.captions) svg.append(s("text", { class: "caption", x, y }, text));
    const byKey = new Map(groups.map((group) => [group.key, group]));
    for (const link of links) svg.append(drawLink(link, byKey, place));
    groups.forEach((group, at) => svg.append(drawNode(group, links, at === 0, place.node)));
    svg.addEventListener("keydown", (event) => this.key(event, svg, groups));
    put(this.drawing, svg);
    put(this.list, this.table(links, byKey, nodes.length, groups.length));
    if (focused) svg.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  }

  key(event, svg, groups) {
    const at = [...svg.querySelectorAll(".node")].indexOf(document.activeElement);
    if (at < 0) return;
    const here = groups[at];
    const score = {
      ArrowRight: (other) => (other.x > here.x ? other.x - here.x + Math.abs(other.y - here.y) : NaN),
      ArrowLeft: (other) => (other.x < here.x ? here.x - other.x + Math.abs(other.y - here.y) : NaN),
      ArrowDown: (other) => (other.y > here.y ? other.y - here.y + 4 * Math.abs(other.x - here.x) : NaN),
      ArrowUp: (other) => (other.y < here.y ? here.y - other.y + 4 * Math.abs(other.x - here.x) : NaN),
    }[event.key];
    if (!score) return;
    event.preventDefault();
    const best = groups.filter((other) => score(other) >= 0).sort((a, b) => score(a) - score(b))[0];
    if (!best) return;
    const next = svg.querySelectorAll(".node")[groups.indexOf(best)];
    svg.querySelectorAll(".node").forEach((node) => node.setAttribute("tabindex", node === next ? "0" : "-1"));
    next.focus();
    announce(best.label);
  }

  table(links, byKey, processes, shown) {
    const rows = [...links].sort((a, b) => b.seconds - a.seconds).slice(0, 60);
    return [
      h("h2", {}, "Waits ", h("small", {}, `${count(processes, "process", "processes")}${shown < processes ? ` in ${count(shown, "node")}` : ""}`)),
      rows.length ? h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "waits"), h("th", {}, "for"), h("th", {}, "in"), h("th", { class: "right" }, "lasts"))),
        h("tbody", {}, rows.map((link) => h("tr", {}, h("td", {}, byKey.get(link.from).label), h("td", {}, byKey.get(link.to).label),
          h("td", {}, [...link.kinds].slice(0, 3).join(", ")), h("td", { class: "right" }, formatSeconds(link.seconds)))))) : h("p", { class: "muted" }, "No process waits for another one."),
    ];
  }
}

export function verdictCard(verdict, onclick) {
  if (!verdict) return null;
  const bad = /confirmed|act|high/.test(verdict.level || "");
  return h(onclick ? "button" : "div", { class: `verdict${bad ? " bad" : ""}`, type: onclick ? "button" : undefined, onclick },
    h("b", {}, verdict.level || "verdict"), h("span", {}, verdict.text), (verdict.culprits || []).slice(0, 6).map((name) => h("i", { class: "pill bad" }, name)));
}

function drawLink(link, byKey, place) {
  const [from, to] = [byKey.get(link.from), byKey.get(link.to)];
  const path = place.lines ? pathInLines(from, to, place.node) : pathInColumns(from, to, place);
  const line = s("path", { class: `link${to.culprit ? " bad" : ""}`, d: path, "marker-end": "url(#arrow)" });
  line.style.strokeWidth = `${Math.min(4, 1.25 + Math.log10(1 + link.waits))}px`;
  line.append(s("title", {}, `${from.label} waits for ${to.label}: ${[...link.kinds].join(", ")}, ${formatSeconds(link.seconds)}`));
  return line;
}

function pathInColumns(from, to, { node, between }) {
  const middle = NODE.height / 2;
  if (from.layer === to.layer) {
    const x = from.x + node;
    return `M${x} ${from.y + middle}C${x + 30} ${from.y + middle} ${x + 30} ${to.y + middle + 8} ${x + 3} ${to.y + middle + 8}`;
  }
  if (from.layer - to.layer === 1) {
    const [a, b, bend] = [from.x + node, to.x - 3, Math.min(50, 0.6 * between)];
    return `M${a} ${from.y + middle}C${a + bend} ${from.y + middle} ${b - bend} ${to.y + middle} ${b} ${to.y + middle}`;
  }
  const below = Math.max(from.y, to.y) + NODE.height + (from.layer > to.layer ? 36 : 34);
  return passingBelow(from, to, node, below);
}

function pathInLines(from, to, node) {
  const [a, b] = [from.x + node / 2, to.x + node / 2];
  if (from === to || from.y === to.y) return passingBelow(from, to, node, from.y + NODE.height + 26);
  const [start, end, bend] = to.y > from.y ? [from.y + NODE.height, to.y - 3, 24] : [from.y, to.y + NODE.height + 3, -24];
  return `M${a} ${start}C${a} ${start + bend} ${b} ${end - bend} ${b} ${end}`;
}

/** From the bottom of a node to the bottom of another one. */
function passingBelow(from, to, node, below) {
  const [a, b] = [from.x + node / 2, to.x + node / 2 + (from === to ? 16 : 0)];
  return `M${a} ${from.y + NODE.height}C${a} ${below} ${b} ${below} ${b} ${to.y + NODE.height + 3}`;
}

const short = (text, most) => { const shown = visible(text); return shown.length > most ? `${shown.slice(0, most - 1)}…` : shown; };

function drawNode(group, links, first, width) {
  const out = links.filter((link) => link.from === group.key);
  const longest = Math.max(0, ...out.map((link) => link.seconds));
  const state = [group.stage, group.state].filter(Boolean).join(", ");
  const hosts = [...new Set(group.members.map((node) => node.host).filter(Boolean))];
  const doing = group.members.length === 1 && group.members[0].doing ? ` (${group.members[0].doing})` : "";
  const text = `${group.label}${group.culprit ? ", culprit" : ""}: ${state || "no stage"}${doing}${out.length ? `, waits ${formatSeconds(longest)}` : ""}; ${hosts.slice(0, 4).join(", ")}${hosts.length > 4 ? ` and ${hosts.length - 4} more hosts` : ""}`;
  const node = s("g", { class: `node${group.culprit ? " culprit" : ""}${group.members.length > 1 ? " many" : ""}`, transform: `translate(${group.x} ${group.y})`, tabindex: first ? "0" : "-1", role: "img", "aria-label": visible(text), "data-key": group.key });
  if (group.members.length > 1) node.append(s("rect", { class: "behind", x: 5, y: 5, width, height: NODE.height, rx: 10 }));
  node.append(
    s("rect", { width, height: NODE.height, rx: 10 }),
    s("text", { class: "label", x: 14, y: 24 }, `${group.culprit ? "⚠ " : ""}${short(group.label, Math.floor((width - 28) / 7.3) - (group.culprit ? 3 : 0))}`),
    s("text", { class: "state", x: 14, y: 43 }, short(`${state || "–"}${out.length && longest ? ` · ${formatSeconds(longest)}` : ""}`, Math.floor((width - 28) / 6))),
    s("title", {}, text),
  );
  return node;
}
