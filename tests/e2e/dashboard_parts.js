// Checks of the page's modules, run in the page by test_dashboard_page.py. Its value is the list of what was wrong.
(async () => {
  const names = ["wait_graph", "word_diff", "line_chart", "curves", "dom"];
  const modules = await Promise.all(names.map((name) => import(`./${name}.js`)));
  const { grouped, layout, difference, matcher, Curve, visible, formatNumber, ranges, ticks } = Object.assign({}, ...modules);
  const wrong = [];
  const same = (what, got, wanted) => {
    if (JSON.stringify(got) !== JSON.stringify(wanted)) wrong.push(`${what}: ${JSON.stringify(got)} instead of ${JSON.stringify(wanted)}`);
  };

  const nodes = Array.from({ length: 1024 }, (_, rank) => ({
    name: `policy-${rank}`, role: "policy", rank, host: "a", stage: "train", state: "alive", culprit: [5, 700].includes(rank),
  }));
  const edges = nodes.filter((node) => !node.culprit).map((node) => ({ from: node.name, to: "policy-5", why: "all_reduce", seconds: node.rank }));
  const { groups, links } = grouped(nodes, edges);
  const place = layout(groups, links);
  same("groups of ranks, each culprit by itself", groups.map((group) => group.label), ["policy 0–4, 6–699, 701–1023", "policy-5", "policy-700"]);
  same("one wait for all", links.map((link) => [link.waits, link.seconds]), [[1022, 1023]]);
  same("all are placed inside", groups.every((group) => group.x >= 0 && group.y >= 0 && group.x < place.width && group.y < place.height), true);
  same("the culprits stand right of who waits", groups[1].x > groups[0].x, true);

  const few = [0, 1].map((at) => ({ name: `r${at}`, role: `role${at}`, rank: 0 }));
  const cycle = grouped(few, [{ from: "r0", to: "r1", why: "", seconds: null }, { from: "r1", to: "r0", why: "", seconds: 1 }]);
  same("a deadlock has a layout, too", layout(cycle.groups, cycle.links).height > 0, true);

  const chain = Array.from({ length: 9 }, (_, at) => ({ name: `r${at}`, role: `role${Math.min(at, 6)}`, rank: at, culprit: at === 6 }));
  const waits = chain.slice(1, 7).map((node, at) => ({ from: `r${at}`, to: node.name, why: "", seconds: 1 }));
  for (const [nodes, edges] of [[chain, waits], [chain, waits.slice(0, 3)], [chain, []], [few, []]]) {
    for (const width of [240, 340, 700, 926, 1400]) {
      const drawn = grouped(nodes, edges);
      const { node, height } = layout(drawn.groups, drawn.links, width);
      const apart = (a, b) => a === b || a.x + node <= b.x || b.x + node <= a.x || a.y + 58 <= b.y || b.y + 58 <= a.y;
      const inside = ({ x, y }) => x >= 0 && x + node <= width && y >= 0 && y + 58 <= height;
      same(`${edges.length} waits of ${nodes.length} fit in ${width}`, drawn.groups.every(inside), true);
      same(`${edges.length} waits of ${nodes.length}: no node covers another in ${width}`, drawn.groups.every((a) => drawn.groups.every((b) => apart(a, b))), true);
    }
  }
  const narrow = grouped(chain, waits);
  layout(narrow.groups, narrow.links, 340);
  same("in a narrow place who is waited for stands below", narrow.groups[1].y > narrow.groups[0].y, true);

  same("words that differ", difference("the answer is 391.", "the answer is 392, I think."),
    [["same", "the answer is "], ["gone", "391"], ["new", "392, I think"], ["same", "."]]);
  same("equal texts", difference("a b", "a b"), [["same", "a b"]]);
  same("an empty text", difference("", "b"), [["new", "b"]]);
  same("texts too long for words", difference("a ".repeat(50000), "b ".repeat(50000)).map(([kind]) => kind), ["gone", "new"]);

  const found = (query) => ["reward/mean", "reward/std", "policy/kl"].filter(matcher(query));
  same("a word and one left out", found("reward -std"), ["reward/mean"]);
  same("a pattern", found("/^policy/"), ["policy/kl"]);
  same("a broken pattern is plain text", found("/(/"), []);
  same("letters of either case", found("KL"), ["policy/kl"]);

  const curve = new Curve("x", 0, { steps: [1, 2, 3], values: [1, "nan", 1], low: [1, "nan", 1], high: [1, "inf", 1] });
  same("smoothing leaves gaps", curve.smooth(0.9).map((value) => (Number.isNaN(value) ? "nan" : Math.round(value * 1e9) / 1e9)), [1, "nan", 1]);
  same("steps that are known are not added", [curve.add(3, 5), curve.add(4, 5), curve.steps.length], [false, true, 4]);
  same("the nearest step", [0, 2.4, 9].map((step) => curve.nearest(step)), [0, 1, 3]);
  same("ticks", ticks(0, 1, 4), [0, 0.25, 0.5, 0.75, 1]);
  same("directions are spelled out", visible("a\u202eb\u0000\ufeff"), "a[U+202E]b[U+0000][U+FEFF]");
  same("numbers", [0, 1e-9, 123456.7, NaN, -Infinity, 0.25].map(formatNumber), ["0", "1.00e-9", "1.23e5", "nan", "-inf", "0.25"]);
  same("ranges", ranges([3, 1, 2, 7]), "1–3, 7");
  return wrong;
})()
