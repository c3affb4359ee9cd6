"use strict";
// Three pictures to play with. The first two compute what the scripts compute, a test compares them.

// The clipped objective of one sample and its derivative by the ratio, as `policy_loss`.
function clipped(ratio, advantage, epsilon) {
  const limited = Math.min(Math.max(ratio, 1 - epsilon), 1 + epsilon);
  const plain = ratio * advantage, other = limited * advantage;
  return { plain, other, value: Math.min(plain, other), gradient: other < plain ? 0 : advantage };
}

// Advantages, and the deltas that they sum up, as `gae`.
function gae(rewards, values, nextValues, done, gamma, lambda) {
  const deltas = rewards.map((r, t) => r + gamma * nextValues[t] - values[t]);
  const advantages = [];
  for (let t = rewards.length - 1; t >= 0; t--) {
    advantages[t] = deltas[t] + gamma * lambda * (1 - done[t]) * (advantages[t + 1] ?? 0);
  }
  return { deltas, advantages };
}

const by = (id) => document.getElementById(id);
const fixed = (x, digits = 2) => x.toFixed(digits).replace("-", "−");
const number = (id) => Number(by(id).value);
const choice = (name) => document.querySelector(`input[name="${name}"]:checked`).value;
// Redraw on any input of a figure; the number beside each slider is its value.
function follow(figure, render) {
  by(`play-${figure}`).addEventListener("input", render);
  return keep(by(`${figure}-chart`), render);
}

// --- The clipped objective ---

function drawClip() {
  const ratio = number("clip-ratio"), epsilon = number("clip-epsilon"), sign = Number(choice("clip-sign"));
  const now = clipped(ratio, sign, epsilon), grid = [...Array(101).keys()].map((i) => i / 50);
  by("clip-ratio-text").textContent = fixed(ratio);
  by("clip-epsilon-text").textContent = fixed(epsilon);
  const c = chart(by("clip-chart"), { x: [0, 2], y: sign > 0 ? [0, 2] : [-2, 0], height: 320,
    xLabel: "ratio ρ = π(a|s) / π_old(a|s)", yLabel: "objective of this sample" });
  const [low, high] = [c.x(1 - epsilon), c.x(1 + epsilon)];
  c.shape("rect", { class: "shade", x: low, width: high - low, y: 0, height: c.height });
  c.line(grid.map((r) => [r, r * sign]), "dash", "c7");
  c.line(grid.map((r) => [r, clipped(r, sign, epsilon).other]), "dash", "c1");
  c.line(grid.map((r) => [r, clipped(r, sign, epsilon).value]), "thick", "c0");
  if (now.gradient) {
    const end = ratio + 0.2 * sign;
    c.line([[ratio, now.value], [end, end * sign]], "thick", "c2");
    c.dot(end, end * sign, "c2", 5);
  }
  c.dot(ratio, now.value, "c0", 8, { class: "knob" });
  c.add("text", { class: "strong", x: (low + high) / 2, y: 15, "text-anchor": "middle" }, "1 ± ε");
  const good = sign > 0, inside = Math.abs(ratio - 1) <= epsilon + 1e-9;
  let text = "Within the range both terms are the same: the objective is that of the plain policy gradient.";
  if (!inside && !now.gradient) {
    text = `The ratio has moved far enough in the direction that is rewarded: the gradient is 0, and this sample asks for nothing more.`;
  } else if (!inside) {
    text = `Here the minimum matters. A ${good ? "good" : "bad"} action has become ${good ? "less" : "more"} likely, against its advantage; ` +
      `the clipped term alone (orange) is flat, so the way back would be closed. The minimum takes the plain term, and the gradient stays.`;
  }
  by("clip-say").textContent = `ρÂ = ${fixed(now.plain)}, clip(ρ)Â = ${fixed(now.other)}; the smaller counts: ` +
    `${fixed(now.value)}. Gradient ${fixed(now.gradient, 0)}. ${text}`;
  drawClip.at = c.at;
}

// --- Generalized advantage estimation ---

const EPISODE = { rewards: [0, 0, 1, 0, -1, 2, 0, 0], values: [1.6, 1.5, 1.9, 0.8, 1.2, 1.9, 0.6, 1.0], last: 1.1, final: 1.5 };
const END = 5; // where the episode may end

function drawGae() {
  const gamma = number("gae-gamma"), lambda = number("gae-lambda"), ending = choice("gae-end"), from = number("gae-step");
  for (const [id, value] of [["gamma", fixed(gamma)], ["lambda", fixed(lambda)], ["step", from]]) {
    by(`gae-${id}-text`).textContent = value;
  }
  const { rewards, values, last, final } = EPISODE, steps = rewards.length;
  const nextValues = [...values.slice(1), last], zeros = rewards.map(() => 0);
  if (ending !== "none") nextValues[END] = ending === "limit" ? final : 0;
  const done = zeros.map((_, t) => Number(ending !== "none" && t === END));
  const { deltas, advantages } = gae(rewards, values, nextValues, done, gamma, lambda);
  const stop = done[END] && from <= END ? END : steps - 1;
  const weights = zeros.map((_, t) => (t < from || t > stop ? 0 : (gamma * lambda) ** (t - from)));
  const rows = [["rewards (bars), values (dots)", rewards, "c7", [-1.1, 2.2]], ["δ: how much better than predicted", deltas, "c1", [-1.1, 1.1]],
    [`weight of each δ in the advantage of step ${from}`, weights, "c2", [0, 1.1]], ["advantages Â", advantages, "c0", [-1.3, 2.2]]];
  rows.forEach(([label, bars, color, y], i) => {
    const most = Math.max(...bars.map(Math.abs)), grow = Math.max(1, most / y[1]);
    const c = chart(by(i ? `gae-chart-${i}` : "gae-chart"), { x: [-0.6, steps - 0.4], y: y.map((v) => v * grow), height: 140,
      yLabel: label, left: 40, xTicks: [...zeros.keys()], xFormat: (t) => (i === 3 ? `t = ${t}` : t) });
    const wide = (c.x(1) - c.x(0)) * 0.55;
    bars.forEach((value, t) => {
      const [a, b] = [c.y(Math.max(value, 0)), c.y(Math.min(value, 0))];
      const faint = i === 3 && t !== from ? 0.45 : 1;
      c.shape("rect", { x: c.x(t) - wide / 2, width: wide, y: a, height: Math.max(b - a, 0.5), style: `fill:var(--${color});opacity:${faint}` });
    });
    if (i === 0) {
      c.line(values.map((v, t) => [t, v]), "thin", "c0");
      values.forEach((v, t) => c.dot(t, v, "c0"));
      if (ending === "limit") c.dot(END + 0.5, final, "c3", 5);
    }
    if (ending !== "none") c.shape("line", { class: "base", x1: c.x(END + 0.5), x2: c.x(END + 0.5), y1: 0, y2: 140, "stroke-dasharray": "3 3" });
    if (i === 0) drawGae.at = c.at;
  });
  const terms = weights.map((w, t) => (w > 0.005 ? `${fixed(w)} · ${deltas[t] < 0 ? `(${fixed(deltas[t])})` : fixed(deltas[t])}` : "")).filter(Boolean);
  const end = {
    none: "The rollout stops after the last step; the value of the next observation stands for everything that follows.",
    terminated: `At step ${END} the episode fails: nothing follows, so its δ has no value of a next observation, and the sum stops there.`,
    limit: `At step ${END} a time limit cuts the episode off. The sum stops there too, but δ contains the value of the final observation (${fixed(final)}, violet), because the episode could have gone on.`,
  };
  by("gae-say").textContent = `Â of step ${from} = ${fixed(advantages[from])} = ${terms.join(" + ")}. ${from > END && ending !== "none" ? "This step belongs to the next episode." : end[ending]}`;
}

// --- The frontier of RLHF ---

function drawFrontier() {
  const { models } = held.play, order = [...models].sort((a, b) => a.kl - b.kl);
  const model = order[number("rlhf-beta")], root = (m) => Math.sqrt(Math.max(m.kl, 0));
  by("rlhf-beta-text").textContent = model.beta === null ? "SFT model" : `β = ${model.beta}`;
  // Policies far off come into the picture when they are chosen.
  const far = Math.max(root(order.at(-2)), root(model)) * 1.08, all = order.filter((m) => root(m) < far).flatMap((m) => [m.gold, m.proxy]);
  const c = chart(by("rlhf-chart"), { x: [0, far], y: [Math.min(...all) - 0.8, Math.max(...all) + 0.6], height: 340,
    xLabel: "square root of the KL to the SFT model", yLabel: "standard deviations of the SFT model's reviews" });
  for (const [name, color] of [["proxy", "c1"], ["gold", "c0"]]) {
    c.line(order.map((m) => [root(m), m[name]]), "thick", color);
    order.forEach((m) => c.dot(root(m), m[name], color, m === model ? 8 : 4));
  }
  c.shape("line", { class: "base", x1: c.x(root(model)), x2: c.x(root(model)), y1: c.y(model.gold), y2: c.y(model.proxy) });
  const distance = (m, event) => Math.abs(root(m) - c.at(event));
  drawFrontier.nearest = (event) => order.reduce((best, m, i) => (distance(m, event) < distance(order[best], event) ? i : best), 0);
  by("rlhf-say").textContent = `${model.beta === null ? "Before PPO" : `PPO with β = ${model.beta}`}: the reward model says ${fixed(model.proxy)}, ` +
    `the truth is ${fixed(model.gold)}, at a KL of ${fixed(model.kl, 1)} nats; ${fixed(100 * model.unique, 0)} % of the reviews are different.`;
  by("rlhf-reviews").replaceChildren(...model.reviews.map((r) => element("li", {}, element("b", {}, r.prompt), ` ${r.text} `,
    element("span", { class: "kicker" }, `gold ${fixed(r.gold)}, proxy ${fixed(r.proxy)}`))));
}

addEventListener("DOMContentLoaded", async () => {
  follow("clip", drawClip);
  drag(by("clip-chart"), (event) => {
    by("clip-ratio").value = drawClip.at(event);
    drawClip();
  });
  follow("gae", drawGae);
  for (const id of ["gae-chart", "gae-chart-1", "gae-chart-2", "gae-chart-3"]) {
    drag(by(id), (event) => {
      by("gae-step").value = Math.round(drawGae.at(event));
      drawGae();
    });
  }
  if (!by("play-rlhf")) return; // the first page has only the other two
  await load("play");
  follow("rlhf", drawFrontier);
  drag(by("rlhf-chart"), (event) => {
    by("rlhf-beta").value = drawFrontier.nearest(event);
    drawFrontier();
  });
});
