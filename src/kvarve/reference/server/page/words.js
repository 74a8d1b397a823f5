// Nodes and numbers as text. All that comes from the server becomes text, never markup.

export const TIERS = ["device", "host", "storage"];
export const by = (id) => document.getElementById(id);
export const sum = (values) => values.reduce((total, each) => total + (each ?? 0), 0);
export const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)}%` : "–");

export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === "class") node.className = value;
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((each) => each !== null && each !== undefined).map((each) => (each instanceof Node ? each : String(each))));
  return node;
}

export function count(value) {
  return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en");
}

// Three digits, such as 1.27, 23.4 and 12.4k.
export function short(value) {
  if (value === null || value === undefined) return "–";
  for (const unit of ["", "k", "M", "G"]) {
    if (value < 999.5) return `${value >= 100 || Number.isInteger(value) ? Math.round(value) : Number(value.toPrecision(3))}${unit}`;
    value /= 1000;
  }
  return `${Math.round(value)}T`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 999.5) return `${value < 9.95 && unit !== "B" && value ? value.toFixed(1) : Math.round(value)} ${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(1)} TiB`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  if (value < 0.01) return `${Number((value * 1000).toPrecision(2))} ms`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 120) return `${value < 10 ? Number(value.toFixed(1)) : Math.round(value)} s`;
  return value < 7200 ? `${Math.round(value / 60)} min` : `${(value / 3600).toFixed(1)} h`;
}

// The reader's own time of a server's moment.
export function clock(unix_s, withSeconds = true) {
  const date = new Date(1000 * unix_s), two = (number) => String(number).padStart(2, "0");
  return `${two(date.getHours())}:${two(date.getMinutes())}${withSeconds ? `:${two(date.getSeconds())}` : ""}`;
}

// A key or an id, of which eight characters tell, and a button that copies all of it.
export function cut(text, what, length = 8) {
  if (!text) return "–";
  const shown = el("code", { title: text }, text.length > length ? text.slice(0, length) : text);
  return el("span", { class: "cut" }, shown, el("button", { type: "button", class: "copy", "data-copy": text, "aria-label": `copy the ${what} ${text.slice(0, length)}`, title: "copy" }));
}

// navigator.clipboard is there on HTTPS and on localhost alone.
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = el("textarea", { value: text, class: "unseen" });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

document.addEventListener("click", async ({ target }) => {
  const button = target.closest("button[data-copy]");
  if (button === null) return;
  await copy(button.dataset.copy).then(() => { button.dataset.done = "copied"; }, () => { button.dataset.done = "failed"; });
  setTimeout(() => { delete button.dataset.done; }, 1200);
});

// A bar of parts: [name of its class, how much, what it says].
export function stack(label, parts, className = "stack") {
  const node = el("div", { class: className, role: "img", "aria-label": label });
  for (const [name, size, says] of parts) {
    if (!size) continue;
    const part = el("span", { class: name, title: says });
    part.style.flexGrow = size;
    node.append(part);
  }
  return node;
}

// A table's rows, each made anew only if what it shows has changed, so that none moves below the pointer in vain.
const shown = new Map();
export function table(body, rows, nothing, make) {
  const before = shown.get(body) ?? new Map(), now = new Map();
  for (const [name, what] of rows) {
    const text = JSON.stringify(what), old = before.get(name);
    now.set(name, old !== undefined && old.text === text ? old : { text, node: make(what) });
  }
  shown.set(body, now);
  const labels = [...body.closest("table").querySelectorAll("thead th")].map((each) => each.textContent);
  const nodes = [...now.values()].map((each) => each.node);
  if (!nodes.length) nodes.push(el("tr", {}, el("td", { class: "empty", colSpan: labels.length }, nothing)));
  for (const node of nodes) if (node.children.length > 1) [...node.children].forEach((cell, at) => { cell.dataset.label = labels[at]; });
  nodes.forEach((node, at) => { if (body.children[at] !== node) body.insertBefore(node, body.children[at] ?? null); });
  while (body.children.length > nodes.length) body.lastChild.remove();
}

export const cells = (...values) => el("tr", {}, ...values.map((value) => (value instanceof HTMLTableCellElement ? value : el("td", {}, value))));
