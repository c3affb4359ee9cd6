"use strict";
// The explorer of runs. Everything chosen stands in the address, so that a link keeps it.

const RESAMPLES = 1000;
// What is known of metrics; others go by their own names.
const METRICS = {
  return: "episodic return in training",
  approx_kl: "KL in the update, k3",
  clipfrac: "clip fraction",
  explained_variance: "explained variance",
  gold: "gold: true quality",
  proxy: "proxy: the reward model's score",
  kl: "KL to the SFT model",
  chosen: "log-probability of chosen responses",
  rejected: "log-probability of rejected responses",
};
const get = (id) => document.getElementById(id);

// A generator of random numbers that are the same on every visit (mulberry32).
function generator(seed) {
  return () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;

// The mean over seeds at each point, and its 95 % bootstrap interval from three seeds on.
function summary(curves) {
  const points = [...curves[0].keys()], random = generator(1);
  const middle = points.map((i) => mean(curves.map((c) => c[i])));
  if (curves.length < 3) return { middle };
  const samples = Array.from({ length: RESAMPLES }, () => curves.map(() => curves[Math.floor(random() * curves.length)]));
  const ends = points.map((i) => {
    const sorted = samples.map((own) => mean(own.map((c) => c[i]))).sort((a, b) => a - b);
    return [sorted[Math.floor(0.025 * RESAMPLES)], sorted[Math.floor(0.975 * RESAMPLES)]];
  });
  return { middle, low: ends.map((e) => e[0]), high: ends.map((e) => e[1]) };
}

// Two digits of base 91 are a value; "\\" is no digit.
const digit = (text, i) => text.charCodeAt(i) - (text.charCodeAt(i) > 92 ? 36 : 35);
const seedsOf = ({ low, unit, runs }) => Object.values(runs).map((text) =>
  Array.from({ length: text.length / 2 }, (_, i) => low + unit * (91 * digit(text, 2 * i) + digit(text, 2 * i + 1))));

// Draw lines {label, color, curve: {total, metrics}} of a metric, with their names at the right.
function drawRuns(svg, lines, metric, title) {
  const shown = lines.filter((x) => x.curve?.metrics[metric]);
  if (!shown.length) return chart(svg, { x: [0, 1], y: [0, 1], yLabel: "No run has this metric." });
  const all = shown.flatMap((x) => seedsOf(x.curve.metrics[metric])).flat().sort((a, b) => a - b);
  const total = Math.max(...shown.map((x) => x.curve.total));
  // A few points far off, as explained variance before anything is learned, would squeeze the rest.
  const [low, high] = [all[Math.floor(all.length * 0.005)], all[Math.ceil(all.length * 0.995) - 1]];
  const room = (high - low) * 0.06 || 1, wide = svg.clientWidth > 800;
  const c = chart(svg, { x: [0, total], y: [low - room, high + room], height: 380, left: 58, right: wide ? 272 : 14,
    yLabel: title, xLabel: total > 1000 ? "environment steps" : "update" });
  const means = shown.map(({ label, color, curve }) => {
    const own = curve.metrics[metric], seeds = seedsOf(own), { middle, low: from, high: to } = summary(seeds);
    const at = (i) => own.first + (i / Math.max(middle.length - 1, 1)) * (curve.total - own.first);
    const place = (values) => values.map((v, i) => [at(i), v]);
    if (from) c.band(place(from), place(to), color);
    if (seeds.length > 1) for (const seed of seeds) c.line(place(seed), "thin", color);
    c.line(place(middle), "thick", color);
    return { label, color, total: curve.total, first: own.first, middle };
  });
  let last = -Infinity; // names must not cover each other
  const ends = means.map((m) => ({ ...m, y: Math.min(Math.max(c.y(m.middle.at(-1)), 26), c.height - 46) }));
  for (const { label, color, y } of wide ? ends.sort((a, b) => a.y - b.y) : []) {
    last = Math.max(y + 4, last + 15);
    const name = label.length > 36 ? `${label.slice(0, 35)}…` : label;
    c.add("text", { class: "name", x: c.width - 264, y: last, style: `fill:var(--${color})` }, name);
  }
  svg.onpointermove = (event) => point(c, means, Math.min(Math.max(c.at(event), 0), total));
  svg.onpointerleave = () => c.cursor?.remove();
  return c;
}

// The means at a place that is pointed at, as numbers and names next to the lines.
function point(c, means, at) {
  c.cursor?.remove();
  c.cursor = c.add("g", {});
  c.add("line", { class: "base", x1: c.x(at), x2: c.x(at), y1: 22, y2: c.height - 42 }, undefined, c.cursor);
  const side = c.x(at) > c.width / 2 ? { x: c.x(at) - 8, "text-anchor": "end" } : { x: c.x(at) + 8 };
  c.add("text", { ...side, y: 34 }, short(at), c.cursor);
  means.filter((m) => at <= m.total).map(({ label, color, total, first, middle }) => {
    const place = Math.round(((at - first) / (total - first)) * (middle.length - 1)) || 0;
    const value = middle[Math.max(0, Math.min(middle.length - 1, place))];
    c.add("circle", { cx: c.x(at), cy: c.y(value), r: 4, style: `fill:var(--${color})` }, undefined, c.cursor);
    return [value, color, label];
  }).sort((a, b) => b[0] - a[0]).forEach(([value, color, label], i) => {
    c.add("text", { ...side, y: 52 + 17 * i, class: "name", style: `fill:var(--${color})` }, `${short(value)} ${label.slice(0, 30)}`, c.cursor);
  });
}

const COLORS = ["c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7"];

function state() {
  const given = new URLSearchParams(location.hash.slice(1));
  const options = [...get("suite").options].map((x) => x.value);
  const suite = options.includes(given.get("suite")) ? given.get("suite") : options[0];
  return { suite, environment: given.get("environment"), metric: given.get("metric"), lines: given.get("lines") };
}

// Fill the menus for the suite that is chosen, draw, and put the choice into the address.
async function show() {
  const chosen = state();
  get("suite").value = chosen.suite;
  const suite = await load(chosen.suite);
  const fill = (id, values, labels, wanted) => {
    get(id).replaceChildren(...values.map((x, i) => element("option", { value: x }, labels[i])));
    get(id).value = values.includes(wanted) ? wanted : values[0];
    return get(id).value;
  };
  const environment = fill("environment", suite.environments, suite.environments, chosen.environment);
  const known = suite.lines.map((line, i) => ({ ...line, i, curve: line.curves[environment] }));
  const names = [...new Set(known.flatMap((line) => Object.keys(line.curve?.metrics ?? {})))];
  const title = (x) => METRICS[x] ?? x.replaceAll("_", " ");
  const metric = fill("metric", names, names.map(title), chosen.metric);
  const bug = known.find((x) => x.control !== undefined && x.curve);
  const usual = bug ? [bug.control, bug.i] : known.length > 6 ? [0, 1, 2] : known.map((x) => x.i);
  const picked = new Set(chosen.lines === null ? usual : chosen.lines.split(",").map(Number));
  const remember = () => {
    if (location.hash && !location.hash.includes("suite=")) return; // an anchor of the text
    const lines = [...picked].sort((a, b) => a - b).join(",");
    history.replaceState(null, "", `#${new URLSearchParams({ suite: chosen.suite, environment, metric, lines })}`);
  };
  remember();
  get("about").textContent = `${suite.about[0].toUpperCase()}${suite.about.slice(1)}.`.replaceAll("`", "");

  const columns = [...new Set(known.flatMap((line) => Object.keys(line.cells[environment] ?? {})))];
  const rows = known.filter((line) => line.curve).map((line) => {
    line.box = element("input", { type: "checkbox" });
    line.box.addEventListener("change", () => {
      if (!line.box.checked) picked.delete(line.i);
      else picked.add(line.i).add(line.control ?? line.i); // a bug comes with its healthy control
      remember();
      paint();
    });
    line.swatch = element("span", { class: "swatch" });
    const missing = line.curve.metrics[metric] ? "" : element("i", {}, " (no curve of this metric)");
    const name = element("label", missing ? { class: "none" } : {}, line.box, " ", line.swatch, line.label, missing);
    return element("tr", {}, element("td", {}, name), ...columns.map((x) => element("td", {}, line.cells[environment]?.[x] ?? "–")));
  });
  const head = element("tr", {}, ...["", ...columns].map((x) => element("th", { scope: "col" }, x || "runs")));
  get("table").replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
  reach();
  const paint = () => {
    const chosen = known.filter((x) => picked.has(x.i));
    chosen.forEach((line, i) => (line.color = COLORS[i % 8])); // neighbors differ
    for (const line of known.filter((x) => x.box)) {
      line.box.checked = picked.has(line.i);
      line.swatch.style.background = line.box.checked ? `var(--${line.color})` : "none";
    }
    drawRuns(get("runs-chart"), chosen, metric, title(metric));
  };
  show.paint = paint;
  paint();
}

addEventListener("DOMContentLoaded", () => {
  if (!get("suite")) return;
  for (const id of ["suite", "environment", "metric"]) {
    get(id).addEventListener("change", () => {
      const choice = id === "suite" ? { suite: get("suite").value }
        : { ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))), [id]: get(id).value };
      location.hash = new URLSearchParams(choice);
    });
  }
  addEventListener("hashchange", show);
  show().then(() => keep(get("runs-chart"), () => show.paint()));
});
