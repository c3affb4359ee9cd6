"use strict";
// The explorer of runs. Everything chosen stands in the address, so that a link keeps it.

const RESAMPLES = 1000;
// What is known of metrics; others go by their own names.
const METRICS = {
  return: "episodic return in training",
  approx_kl: "KL in the update, k3",
  kl_after: "KL after the update",
  clipfrac: "clip fraction",
  explained_variance: "explained variance",
  log_std: "log standard deviation of actions",
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

// Draw lines {label, color, curve: {total, metrics}} of a metric; returns what a reader points at.
function drawRuns(svg, lines, metric, title) {
  const shown = lines.filter((x) => x.curve?.metrics[metric]);
  if (!shown.length) return chart(svg, { x: [0, 1], y: [0, 1], yLabel: "No run has this metric." });
  // Values are whole numbers of a unit.
  const seedsOf = ({ unit, runs }) => Object.values(runs).map((run) => run.map((v) => v * unit));
  const all = shown.flatMap((x) => seedsOf(x.curve.metrics[metric])).flat().sort((a, b) => a - b);
  const total = Math.max(...shown.map((x) => x.curve.total));
  // A few points far off, as explained variance before anything is learned, would squeeze the rest.
  const [low, high] = [all[Math.floor(all.length * 0.005)], all[Math.ceil(all.length * 0.995) - 1]];
  const room = (high - low) * 0.06 || 1;
  const c = chart(svg, { x: [0, total], y: [low - room, high + room], height: 420, left: 58, yLabel: title,
    xLabel: total > 1000 ? "environment steps" : "update" });
  const means = [];
  for (const { color, curve } of shown) {
    const seeds = seedsOf(curve.metrics[metric]), { middle, low: from, high: to } = summary(seeds);
    const place = (values) => values.map((v, i) => [((i + 1) / values.length) * curve.total, v]);
    if (from) c.band(place(from), place(to), color);
    if (seeds.length > 1) for (const seed of seeds) c.line(place(seed), "thin", color);
    c.line(place(middle), "thick", color);
    means.push({ color, total: curve.total, middle });
  }
  svg.onpointermove = (event) => point(c, means, Math.min(Math.max(c.at(event), 0), total));
  svg.onpointerleave = () => c.cursor?.remove();
  return c;
}

// The means at a place that is pointed at, as numbers beside the lines.
function point(c, means, at) {
  c.cursor?.remove();
  c.cursor = c.add("g", {});
  c.add("line", { class: "base", x1: c.x(at), x2: c.x(at), y1: 22, y2: c.height - 42 }, undefined, c.cursor);
  const side = c.x(at) > c.width - 110 ? { x: c.x(at) - 8, "text-anchor": "end" } : { x: c.x(at) + 8 };
  c.add("text", { ...side, y: 34 }, short(at), c.cursor);
  means.filter((m) => at <= m.total).map(({ color, total, middle }) => {
    const value = middle[Math.max(0, Math.min(middle.length, Math.round((at / total) * middle.length)) - 1)];
    c.add("circle", { cx: c.x(at), cy: c.y(value), r: 4, style: `fill:var(--${color})` }, undefined, c.cursor);
    return [value, color];
  }).sort((a, b) => b[0] - a[0]).forEach(([value, color], i) => {
    c.add("text", { ...side, y: 52 + 17 * i, style: `fill:var(--${color});font-weight:600` }, short(value), c.cursor);
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
  const known = suite.lines.map((line, i) => ({ ...line, i, curve: line.curves[environment], color: COLORS[i % 8] }));
  const names = [...new Set(known.flatMap((line) => Object.keys(line.curve?.metrics ?? {})))];
  const title = (x) => METRICS[x] ?? x.replaceAll("_", " ");
  const metric = fill("metric", names, names.map(title), chosen.metric);
  const usual = known.length > 6 ? [0, 1, 2] : known.map((x) => x.i);
  const picked = new Set(chosen.lines === null ? usual : chosen.lines.split(",").map(Number));
  const remember = () => {
    if (location.hash && !location.hash.includes("suite=")) return; // an anchor of the text
    const lines = [...picked].sort((a, b) => a - b).join(",");
    history.replaceState(null, "", `#${new URLSearchParams({ suite: chosen.suite, environment, metric, lines })}`);
  };
  remember();
  get("about").textContent = `${suite.about[0].toUpperCase()}${suite.about.slice(1)}.`;

  const columns = [...new Set(known.flatMap((line) => Object.keys(line.cells[environment] ?? {})))];
  const rows = known.filter((line) => line.curve).map((line) => {
    const box = element("input", { type: "checkbox" });
    box.checked = picked.has(line.i);
    box.addEventListener("change", () => {
      if (box.checked) picked.add(line.i);
      else picked.delete(line.i);
      remember();
      paint();
    });
    const swatch = element("span", { class: "swatch", style: `background:var(--${line.color})` });
    const name = element("label", {}, box, " ", swatch, line.label);
    return element("tr", {}, element("td", {}, name), ...columns.map((x) => element("td", {}, line.cells[environment]?.[x] ?? "–")));
  });
  const head = element("tr", {}, ...["", ...columns].map((x) => element("th", { scope: "col" }, x || "runs")));
  get("table").replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
  const paint = () => drawRuns(get("runs-chart"), known.filter((x) => picked.has(x.i)), metric, title(metric));
  show.paint = paint;
  paint();
}

addEventListener("DOMContentLoaded", () => {
  if (!get("suite")) return;
  for (const id of ["suite", "environment", "metric"]) {
    get(id).addEventListener("change", () => {
      const choice = id === "suite" ? { suite: get("suite").value }
        : { ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))), [id]: get(id).value };
      if (id === "environment") delete choice.metric;
      location.hash = new URLSearchParams(choice);
    });
  }
  addEventListener("hashchange", show);
  show().then(() => keep(get("runs-chart"), () => show.paint()));
});
