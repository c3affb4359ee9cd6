"use strict";
// Shared by all pages: light and dark, data from disk, and a small chart in SVG.

const held = {}, waiting = {};

// Files in data/ call this. Scripts, unlike requests, may be loaded from disk.
function data(name, content) {
  held[name] = content;
  waiting[name]?.(content);
}

function load(name) {
  if (held[name]) return Promise.resolve(held[name]);
  return new Promise((resolve) => {
    waiting[name] = resolve;
    document.head.append(Object.assign(document.createElement("script"), { src: `data/${name}.js` }));
  });
}

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// Round steps of an axis: 1, 2 or 5 times a power of ten.
function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((x) => x * power >= rough * 0.999);
  const found = [];
  for (let x = Math.ceil(low / step - 1e-9); x * step <= high + step * 1e-9; x++) found.push(x * step);
  return found;
}

function short(x) {
  const size = Math.abs(x);
  if (size >= 1e6) return `${+(x / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(x / 1e3).toPrecision(3)}k`;
  return String(+x.toPrecision(3)).replace("-", "−");
}

// An empty chart as wide as its place, with axes over the ranges x and y; what is drawn into it
// beyond them is cut off. Returns scales and functions that draw.
function chart(svg, { x: [x0, x1], y: [y0, y1], height = 280, xLabel = "", yLabel = "", left = 52,
  right = 14, xTicks, xFormat = short, yFormat = short, top = 26 }) {
  const width = Math.max(svg.clientWidth, 260), bottom = xLabel ? 42 : 24;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.style.height = `${height}px`;
  const x = (value) => left + ((value - x0) / (x1 - x0)) * (width - left - right);
  const y = (value) => height - bottom - ((value - y0) / (y1 - y0)) * (height - top - bottom);
  const add = (name, attributes, text, parent = svg) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    parent.append(node);
    return node;
  };
  const id = `${svg.id}-inside`, clip = add("clipPath", { id });
  add("rect", { x: left, y: top - 4, width: width - left - right, height: height - top - bottom + 8 }, "", clip);
  for (const value of ticks(y0, y1, Math.max(3, height / 60))) {
    add("line", { class: value ? "grid" : "base", x1: left, x2: width - right, y1: y(value), y2: y(value) });
    add("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, yFormat(value));
  }
  for (const value of xTicks ?? ticks(x0, x1, Math.max(2, width / 110))) {
    add("text", { x: x(value), y: height - bottom + 18, "text-anchor": "middle" }, xFormat(value));
  }
  add("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, xLabel);
  add("text", { x: 2, y: 13 }, yLabel);
  const inside = add("g", { "clip-path": `url(#${id})` });
  const path = (points) => "M" + points.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join("L");
  return {
    x, y, width, height, add,
    shape: (name, attributes, text) => add(name, attributes, text, inside),
    line: (points, kind, color) =>
      add("path", { class: kind, d: path(points), style: `stroke:var(--${color})` }, undefined, inside),
    band: (low, high, color) => add("path",
      { class: "band", d: `${path([...low, ...high.reverse()])}Z`, style: `fill:var(--${color})` }, undefined, inside),
    dot: (a, b, color, r = 4, more = {}) =>
      add("circle", { cx: x(a), cy: y(b), r, style: `fill:var(--${color})`, ...more }, undefined, inside),
    // The value of x below a pointer.
    at: (event) => x0 + ((event.clientX - svg.getBoundingClientRect().left - left) / (width - left - right)) * (x1 - x0),
  };
}

// Draw now, and again when the place gets another width.
function keep(svg, render) {
  let width = 0;
  new ResizeObserver(() => {
    if (svg.clientWidth !== width) render();
    width = svg.clientWidth;
  }).observe(svg);
  return render;
}

// Call back with the place of the pointer while it is pressed.
function drag(svg, moved) {
  svg.addEventListener("pointerdown", (event) => {
    svg.setPointerCapture(event.pointerId);
    moved(event);
  });
  svg.addEventListener("pointermove", (event) => event.buttons && moved(event));
}

// What has to be scrolled sideways can be reached with the keyboard, and a table says so.
function reach() {
  for (const part of document.querySelectorAll("pre:not(.code), math, .scroll")) {
    const wide = part.scrollWidth > part.clientWidth;
    part.classList.toggle("wide", wide);
    if (wide) part.tabIndex = 0;
    else part.removeAttribute("tabindex");
  }
}

// Light or dark: as chosen here, else as the system. Where storage is blocked, a choice holds for the page.
function scheme(chosen) {
  try {
    if (chosen) localStorage.setItem("scheme", chosen);
    chosen ??= localStorage.getItem("scheme");
  } catch {}
  chosen ??= matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  document.documentElement.dataset.scheme = chosen;
}

// A note and its lines of code are marked together: pointed at, focused, or named in the address.
function light(anchors) {
  for (const node of document.querySelectorAll(".lit")) node.classList.remove("lit");
  for (const anchor of anchors) {
    document.getElementById(anchor)?.classList.add("lit");
    for (const line of document.querySelectorAll(`[data-of~="${anchor}"]`)) line.classList.add("lit");
  }
}

function lightUnder(event) {
  const line = event.target.closest?.("[data-of]"), note = event.target.closest?.(".note");
  light(line ? line.dataset.of.split(" ") : [note ? note.id : location.hash.slice(1)].filter(Boolean));
}

// Each note stands next to its line, or higher up if others need the room. Notes that do not fit next to the code go
// below it: one takes the width of the code; several go, one by one, to the shortest of three columns.
function place() {
  const groups = [...document.querySelectorAll(".group")], sum = (numbers) => numbers.reduce((x, y) => x + y, 0);
  const height = (x) => Math.ceil(x.getBoundingClientRect().height), top = (x) => x.getBoundingClientRect().top;
  for (const note of document.querySelectorAll(".note")) note.style.gridArea = "";
  for (const group of groups) group.classList.add("placed"); // so that a note's height is its own
  const sizes = groups.map((group) => {
    const code = [...group.querySelectorAll(".code")], notes = [...group.querySelectorAll(".note")];
    const lines = notes.map((x) => group.querySelector(`[data-of~="${x.id}"]`) ?? code[0]);
    const starts = lines.map((x) => Math.round(top(x) - top(code[0])));
    return { group, notes, starts, code: sum(code.map(height)), heights: notes.map(height) };
  });
  for (const { group, notes, starts, code, heights } of sizes) {
    group.style.setProperty("--rows", code);
    const ends = [code + 10, code + 10, 0], beside = notes.filter((_, i) => !i || sum(heights.slice(0, i + 1)) < code + 40).length;
    notes.forEach((note, i) => {
      const wide = i === beside && i === notes.length - 1, highest = code - sum(heights.slice(i, beside));
      const column = i < beside ? 2 : wide ? 0 : ends.indexOf(Math.min(...ends));
      const start = i < beside ? Math.max(ends[2], Math.min(starts[i], highest)) : ends[column];
      const area = (rows) => `${start + 1} / ${column + 1} / span ${rows} / span ${wide ? 2 : 1}`;
      note.style.gridArea = area(heights[i]);
      if (wide) note.style.gridArea = area(height(note)); // lower than in a column
      note.style.setProperty("--up", `${start - starts[i]}px`); // a link to the note shows its line, too
      ends[column] = start + heights[i];
    });
  }
}

scheme();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => scheme());
addEventListener("resize", reach);
addEventListener("resize", place);
addEventListener("load", reach);
addEventListener("toggle", reach, true); // a table in <details> has no width before it is opened
addEventListener("DOMContentLoaded", () => {
  document.getElementById("theme").addEventListener("click", () => {
    scheme(document.documentElement.dataset.scheme === "dark" ? "light" : "dark");
  });
  const scripts = document.querySelector(".scripts"), narrow = matchMedia("(max-width: 760px)");
  const move = () => { // on a phone there is one menu
    if (scripts && narrow.matches) document.getElementById("menu").append(scripts);
    else if (scripts) document.getElementById("content").prepend(scripts);
  };
  narrow.addEventListener("change", move);
  move();
  place();
  const open = () => document.getElementById(location.hash.slice(1))?.closest("details")?.setAttribute("open", "");
  addEventListener("hashchange", open);
  open();
  if (!document.querySelector("[data-of]")) return;
  for (const kind of ["pointerover", "focusin", "hashchange"]) addEventListener(kind, lightUnder);
  lightUnder({ target: document.body });
});
