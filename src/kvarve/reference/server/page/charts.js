// Charts over time, drawn by uPlot (a script of its own): one time axis and one cursor for all, and marks of changes.

import { clock, el } from "./words.js";

const HEIGHT = 160, FONT = "12px system-ui, sans-serif", SMALL = "11px system-ui, sans-serif";
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const all = [];

// The next of 1, 2, 4, 6 and 8 times a power of ten: where an axis ends, so that its half is round too.
export function rounded(most) {
  if (!(most > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(most) + 1e-9);
  return power * [1, 2, 4, 6, 8, 10].find((step) => step * power >= most * (1 - 1e-9));
}

// `series`: {name, color, dash, unit}, bottom first if they are stacked; one with a unit of its own has the axis on the
// right. `least`: where axes end at least.
export function chart(node, { label, unit, series, stacked = false, least = 0 }) {
  const legend = el("p", { class: "legend" }), plot = el("div", { class: "plot" });
  node.tabIndex = 0;
  node.setAttribute("role", "group");
  node.setAttribute("aria-label", `${label}: the arrow keys move along it`);
  node.replaceChildren(legend, plot);
  const time = el("time"), says = series.map((one) => el("b"));
  legend.append(...series.flatMap((one, at) => [el("span", {}, el("i", { class: `key ${one.color} ${one.dash ? "dashed" : ""}` }), `${one.name} `, says[at])]), time);
  let raw = series.map(() => []), xs = [], marks = [], span = [0, 1];

  function tell(u) {
    const at = u.cursor.idx ?? xs.length - 1;
    says.forEach((bold, number) => { bold.textContent = xs.length ? (series[number].unit ?? unit)(raw[number][at]) : "–"; });
    time.textContent = u.cursor.idx === null || u.cursor.idx === undefined ? "now" : clock(xs[at]);
  }

  function drawMarks(u) {
    const { ctx, bbox } = u, ratio = devicePixelRatio;
    let free = bbox.left;
    ctx.save();
    ctx.font = SMALL.replace(/^\d+/, (size) => size * ratio);
    ctx.fillStyle = ctx.strokeStyle = color("mark");
    ctx.lineWidth = ratio;
    ctx.textAlign = "left";
    ctx.textBaseline = "alphabetic";
    ctx.setLineDash([4 * ratio, 3 * ratio]);
    for (const { unix_s, what } of marks) {
      if (unix_s < span[0] || unix_s > span[1]) continue;
      const x = u.valToPos(unix_s, "x", true), width = ctx.measureText(what).width;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      const left = Math.min(x - width / 2, bbox.left + bbox.width - width);
      if (left < free) continue;
      ctx.fillText(what, left, bbox.top - 4 * ratio);
      free = left + width + 8 * ratio;
    }
    ctx.restore();
  }

  const scale = { range: (u, low, high) => [0, rounded(Math.max(high ?? 0, least))] };
  const axis = { stroke: () => color("faint"), font: FONT, ticks: { show: false }, grid: { show: false } };
  const upright = { ...axis, size: 58, splits: (u, at, low, high) => [0, high / 2, high] }, right = series.find((one) => one.unit);
  const drawn = stacked ? [...series].reverse() : series;
  const lines = drawn.map((one) => ({
    scale: one.unit ? "right" : "y", stroke: () => color(one.color), width: stacked ? 0 : 2, dash: one.dash, points: { show: stacked ? false : undefined, size: 4 },
    ...(stacked ? { fill: () => color(one.color), paths: uPlot.paths.stepped({ align: -1 }) } : {}),
  }));
  const plotted = new uPlot({
    width: 300, height: HEIGHT, padding: [16, 8, 0, 0], legend: { show: false },
    scales: { x: { time: true, range: () => span }, y: scale, right: scale },
    cursor: { drag: { x: false, y: false }, y: false, sync: { key: "kvarve" }, points: { show: !stacked } },
    axes: [
      { ...axis, size: 28, space: 74, values: (u, ticks, at, space, step) => ticks.map((tick) => clock(tick, step < 60)) },
      { ...upright, grid: { show: true, stroke: () => color("line"), width: 1 }, values: (u, ticks) => ticks.map(unit) },
      ...(right ? [{ ...upright, scale: "right", side: 1, size: 40, values: (u, ticks) => ticks.map(right.unit) }] : []),
    ],
    series: [{}, ...lines],
    hooks: { draw: [drawMarks], setCursor: [tell] },
  }, [[], ...series.map(() => [])], plot);
  plotted.over.parentElement.setAttribute("aria-hidden", "true");
  new ResizeObserver(() => { if (plot.clientWidth) plotted.setSize({ width: plot.clientWidth, height: HEIGHT }); }).observe(plot);

  node.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step === undefined && event.key !== "Escape") return;
    const first = xs.findIndex((x) => x >= span[0]), at = (plotted.cursor.idx ?? xs.length) + (step ?? 0);
    const to = step === undefined ? -10 : plotted.valToPos(xs[Math.min(Math.max(at, first), xs.length - 1)], "x");
    plotted.setCursor({ left: to, top: to }, true, true);
    event.preventDefault();
  });
  all.push(plotted);

  return function show(times, values, from, to, changes) {
    [xs, raw, span, marks] = [times, values, [from, to], changes];
    let data = values;
    if (stacked) {
      const floor = times.map(() => 0);
      data = values.map((one) => one.map((value, at) => (floor[at] += value ?? 0))).reverse();
    }
    plotted.setData([times, ...data]);
    tell(plotted);
  };
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => all.forEach((each) => each.redraw(false, true)));

// A small area without axes: values from the oldest to the newest, which stands at the right end of so many slots.
export function spark(values, most, slots, name, label) {
  const make = (tag, props) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(props)) node.setAttribute(key, value);
    return node;
  };
  const x = (at) => (100 - (100 * (values.length - 1 - at)) / (slots - 1)).toFixed(2);
  const points = values.map((value, at) => `L${x(at)} ${(29 - (28 * (value ?? 0)) / (most || 1)).toFixed(2)}`).join("");
  const node = make("svg", { viewBox: "0 0 100 30", preserveAspectRatio: "none", class: `spark ${name}`, role: "img", "aria-label": label });
  node.append(make("path", { d: values.length ? `M${x(0)} 30${points}L100 30Z` : "" }), make("path", { d: "M0 29.5H100", class: "ground" }));
  return node;
}
