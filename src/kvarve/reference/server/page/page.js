// The live page: asks for /live/data once a second and shows it. All that comes from the server is shown as text.

const EVERY_MS = 1000, PATIENCE_MS = 5000, KEY = "kvarve.key", TIERS = ["device", "host", "storage"];
const by = (id) => document.getElementById(id);
const shown = new Map(); // by table: what each row showed last, so that rows which did not change stay as they are
let key = sessionStorage.getItem(KEY), opened = null, lostSince = null, timer = null, running = false;

function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === "class") node.className = value;
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((each) => each !== null && each !== undefined).map((each) => (each instanceof Node ? each : String(each))));
  return node;
}

function svg(tag, props) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props)) node.setAttribute(name, value);
  return node;
}

// --- words

function count(value) {
  return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en");
}

function bytes(value) {
  if (value === null || value === undefined) return "–";
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024) return `${value < 10 && unit !== "B" ? value.toFixed(1) : Math.round(value)} ${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(1)} TiB`;
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  return value < 7200 ? `${Math.round(value / 60)} min` : `${(value / 3600).toFixed(1)} h`;
}

const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)}%` : "–");
const sum = (values) => values.reduce((total, each) => total + (each ?? 0), 0);

// --- pictures

function picture(label, ...shapes) {
  const node = svg("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img", "aria-label": label });
  node.append(svg("path", { class: "axis", d: "M0 100H100", fill: "none" }), ...shapes);
  return node;
}

// Values from the oldest to the newest; a gap where there is none. The newest stands at the right end.
function line(values, most, slots, name) {
  let path = "", pen = "M";
  values.forEach((value, at) => {
    if (value === null) { pen = "M"; return; }
    const x = 100 - (100 * (values.length - 1 - at)) / (slots - 1);
    path += `${pen}${x.toFixed(2)} ${(100 - (100 * value) / most).toFixed(2)}`;
    pen = "L";
  });
  return svg("path", { class: name, d: path });
}

function chart(node, label, most, unit, ...shapes) {
  node.className = "chart";
  node.replaceChildren(picture(label, ...shapes), el("b", {}, unit(most)), el("b", {}, unit(0)));
}

function spark(values, most, slots, name) {
  let path = "", first = null;
  values.forEach((value, at) => {
    const x = 100 - (100 * (values.length - 1 - at)) / (slots - 1);
    if (first === null) { first = x; path = `M${x} 100`; }
    path += `L${x.toFixed(2)} ${(100 - (100 * (value ?? 0)) / (most || 1)).toFixed(2)}`;
  });
  const node = picture("how full it was over the last minutes", svg("path", { class: name, d: first === null ? "" : `${path}L100 100Z` }));
  node.setAttribute("class", "spark");
  return node;
}

const SLOTS = 150, JOINED = 5; // samples that the server keeps, and those that make one bar

function hits(history) {
  const whole = Math.floor(history.unix_s.length / JOINED) * JOINED, start = history.unix_s.length - whole;
  const joined = (values) => Array.from({ length: whole / JOINED }, (_, at) => sum(values.slice(start + at * JOINED, start + (at + 1) * JOINED)));
  const prompt = joined(history.prompt_tokens), cached = TIERS.map((tier) => joined(history.cached_tokens[tier]));
  const most = Math.max(1, ...prompt), bars = SLOTS / JOINED, width = 100 / bars, shapes = [];
  prompt.forEach((tokens, at) => {
    let top = 0;
    const parts = [...cached.map((values) => values[at]), tokens - sum(cached.map((values) => values[at]))];
    parts.forEach((part, number) => {
      if (part <= 0) return;
      const height = (100 * part) / most;
      top += height;
      const x = 100 - width * (prompt.length - at);
      shapes.push(svg("rect", { class: [...TIERS, "computed"][number], x, y: 100 - top, width: width * 0.8, height }));
    });
  });
  const all = sum(history.prompt_tokens);
  const told = TIERS.map((tier) => `${tier} ${share(sum(history.cached_tokens[tier]), all)}`).join(", ");
  chart(by("hits"), `Of ${count(all)} tokens of prompts in the last minutes: ${told}`, most, count, ...shapes);
}

// --- parts of the page

function figures(data) {
  const history = data.history, prompt = sum(history.prompt_tokens);
  const rejected = Object.entries(data.rejected).map(([status, some]) => `${some} × ${status}`).join(", ");
  const told = [
    ["running", count(data.running)], ["waiting", count(data.waiting)], ["being tokenized", count(data.tokenizing)],
    ["TTFT, median", seconds(data.ttft_s.p50)], ["TTFT, 95th percentile", seconds(data.ttft_s.p95)],
    ["prompts cached", share(sum(TIERS.map((tier) => sum(history.cached_tokens[tier]))), prompt)],
    ...TIERS.map((tier) => [`from ${tier}`, share(sum(history.cached_tokens[tier]), prompt)]),
    ["preempted", count(data.preempted)], ["rejected", rejected || "none"], ["up for", seconds(data.up_s)],
  ];
  by("figures").replaceChildren(...told.map(([name, value]) => el("div", { title: name }, el("dt", {}, name), el("dd", { "data-figure": name }, value))));
}

function tier(name, capacity, parts, text, values) {
  const bar = el("div", { class: "bar", role: "img", "aria-label": `${name}: ${text}` });
  parts.forEach((size, at) => {
    const part = el("span", { class: `${name} pool${Math.min(at, 3)}` });
    part.style.flexBasis = capacity ? `${(100 * size) / capacity}%` : "0";
    bar.append(part);
  });
  return el("div", { class: "tier", "data-tier": name, "data-bytes": sum(parts) }, el("strong", {}, name), bar, spark(values, capacity, SLOTS, name),
    el("span", { class: "text" }, text));
}

function tiers(data) {
  const rows = data.tiers.map((each) => {
    const parts = each.pools.map((pool) => pool.bytes);
    const pools = each.pools.map((pool) => `${pool.name}: ${count(pool.pages)} pages, ${bytes(pool.bytes)}, ${count(pool.evicted)} evicted`);
    return tier(each.name, each.capacity_bytes, parts, `${bytes(sum(parts))} of ${bytes(each.capacity_bytes)} · ${pools.join(" · ")}`, data.history.bytes[each.name]);
  });
  const storage = data.storage;
  if (storage.attached) {
    const most = storage.capacity_bytes === null ? "" : ` of ${bytes(storage.capacity_bytes)}`;
    const trouble = storage.last_error ? ` · last trouble: ${storage.last_error}` : "";
    const reads = storage.read_only ? "only read · " : "";
    const text = `${reads}${bytes(storage.bytes)}${most} · ${count(storage.objects)} objects · ${storage.up ? "up" : "down"} for ${seconds(storage.for_s)}${trouble}`;
    const past = data.history.bytes.storage ?? [];
    rows.push(tier("storage", storage.capacity_bytes ?? Math.max(1, ...past), [storage.bytes ?? 0], text, past));
  }
  const key = JSON.stringify([data.tiers, storage, data.history.unix_s.at(-1)]);
  if (shown.get("tiers") === key) return;
  shown.set("tiers", key);
  const old = new Map([...by("tiers").children].map((node) => [node.dataset.tier, node]));
  for (const row of rows) {
    const before = old.get(row.dataset.tier);
    if (before === undefined || before.querySelectorAll(".bar span").length !== row.querySelectorAll(".bar span").length) continue;
    const bar = before.querySelector(".bar"); // the same one, so that it is seen to move
    [...bar.children].forEach((part, at) => { part.style.flexBasis = row.querySelectorAll(".bar span")[at].style.flexBasis; });
    bar.setAttribute("aria-label", row.querySelector(".bar").getAttribute("aria-label"));
    row.querySelector(".bar").replaceWith(bar);
  }
  by("tiers").replaceChildren(...rows);
}

// A table's rows, each made anew only if what it shows has changed.
function table(id, rows, nothing, make) {
  const body = by(id), before = shown.get(id) ?? new Map(), now = new Map();
  for (const [name, what] of rows) {
    const text = JSON.stringify(what), old = before.get(name);
    now.set(name, old !== undefined && old.text === text ? old : { text, node: make(what) });
  }
  shown.set(id, now);
  const nodes = [...now.values()].map((each) => each.node);
  if (!nodes.length) nodes.push(el("tr", {}, el("td", { class: "empty", colSpan: 20 }, nothing)));
  nodes.forEach((node, at) => { if (body.children[at] !== node) body.insertBefore(node, body.children[at] ?? null); });
  while (body.children.length > nodes.length) body.lastChild.remove();
}

const cells = (...values) => el("tr", {}, ...values.map((value) => (value instanceof HTMLTableCellElement ? value : el("td", {}, value))));
const code = (text) => (text ? el("code", {}, text) : "–");
const name = (id) => el("td", { class: "id", title: id }, el("code", {}, id));

function lanes(data) {
  table("lanes", data.lanes.map((each) => [each.name, each]), "none", (lane) => {
    const row = cells(lane.name, `${bytes(lane.bytes_per_s)}/s`, count(lane.waiting), count(lane.running), count(lane.failed), lane.stuck_s ? seconds(lane.stuck_s) : "–");
    row.dataset.lane = lane.name;
    return row;
  });
}

function hottest(data) {
  by("hottest-age").textContent = data.hottest_ago_s > 5 ? `as of ${seconds(data.hottest_ago_s)} ago: the engine is busy` : "";
  table("hottest", data.hottest.map((each, at) => [`${at} ${each.key}`, each]), "nothing has been resumed from yet", (each) => {
    const where = `${each.device}, ${each.host}, ${each.storage} of ${each.pages}`;
    return cells(el("td", {}, code(each.key)), el("td", {}, code(each.group)), count(each.tokens), count(each.hits), where, each.resumes ?? "not from memory");
  });
}

function open(data) {
  const { count: some, requests } = data.open;
  by("open-count").textContent = some > requests.length ? `the oldest ${requests.length} of ${some}` : "";
  table("open", requests.map((each) => [each.number, each]), "none", (each) =>
    cells(name(each.id), each.path, el("td", {}, code(each.group)), count(each.prompt), count(each.completion), seconds(each.seconds), each.state));
}

function why(each, meanings) {
  const reasons = Object.entries(meanings).map(([reason, meaning]) => [reason, meaning, each.reasons[reason] ?? 0]).filter(([, , tokens]) => tokens);
  const strip = el("div", { class: "strip", role: "img", "aria-label": reasons.map(([reason, , tokens]) => `${tokens} ${reason}`).join(", ") });
  for (const [reason, , tokens] of reasons) {
    const part = el("span", { class: `r-${reason}`, title: `${reason}: ${count(tokens)} tokens` });
    part.style.flexGrow = tokens;
    strip.append(part);
  }
  const list = reasons.map(([reason, meaning, tokens]) =>
    el("li", {}, el("i", { class: `r-${reason}` }), `${count(tokens)} `, el("code", {}, reason), `: ${meaning}`));
  return el("tr", { class: "why" }, el("td", { colSpan: 13 }, strip, el("ul", {}, ...list)));
}

function requests(data) {
  const rows = [];
  for (const { ago_s: ago, ...each } of data.requests) {
    rows.push([each.number, { ...each, open: opened === each.number, ago: ago < 60 ? `${10 * Math.floor(ago / 10)} s` : seconds(60 * Math.floor(ago / 60)) }]);
    if (opened === each.number && each.reasons) rows.push([`why ${each.number}`, { why: each, meanings: data.reasons }]);
  }
  table("requests", rows, "none yet", (each) => {
    if (each.why) return why(each.why, each.meanings);
    const status = each.status === 200 && each.finish ? each.finish : each.status;
    const failed = each.status >= 400 || each.finish?.includes("error");
    const button = each.prompt && Object.keys(each.reasons).length
      ? el("button", { type: "button", "data-why": each.number, "aria-expanded": String(each.open) }, "why") : "";
    const row = cells(name(each.id), each.path, el("td", { class: failed ? "error" : "" }, status), el("td", {}, code(each.group)), count(each.prompt),
      ...TIERS.map((tier) => count(each.cached?.[tier])), count(each.completion), seconds(each.ttft_s), seconds(each.seconds), `${each.ago} ago`, button);
    row.dataset.request = each.id;
    return row;
  });
}

let last = null;
by("requests").addEventListener("click", ({ target }) => {
  const number = target.closest("button")?.dataset.why;
  if (number === undefined) return;
  opened = opened === Number(number) ? null : Number(number);
  requests(last);
  by("requests").querySelector(`button[data-why="${Number(number)}"]`)?.focus();
});

function show(data) {
  last = data;
  const history = data.history, ttfts = [...history.ttft_p50_s, ...history.ttft_p95_s].filter((each) => each !== null);
  const slowest = Math.max(0.01, ...ttfts), busiest = Math.max(1, ...history.running, ...history.waiting);
  by("model").textContent = data.model;
  document.title = `kvarve · ${data.model}`;
  state(data.up ? "serving" : "broken", data.up ? `serving, version ${data.version}` : "the engine has stopped");
  by("trouble").hidden = !data.trouble.length;
  by("trouble").replaceChildren(...data.trouble.map((each) => el("li", {}, each)));
  figures(data);
  tiers(data);
  hits(history);
  chart(by("ttft"), `Now ${seconds(data.ttft_s.p50)}, 95th percentile ${seconds(data.ttft_s.p95)}`, slowest, seconds,
    line(history.ttft_p95_s, slowest, SLOTS, "p95"), line(history.ttft_p50_s, slowest, SLOTS, "p50"));
  chart(by("load"), `Now ${data.running} running, ${data.waiting} waiting`, busiest, count,
    line(history.waiting, busiest, SLOTS, "waiting"), line(history.running, busiest, SLOTS, "running"));
  lanes(data);
  hottest(data);
  open(data);
  requests(data);
  by("main").hidden = false;
}

// --- asking

function state(name, text) {
  by("state").dataset.state = name;
  by("state").textContent = text;
  document.body.classList.toggle("lost", name === "lost");
}

function ask(message) {
  by("wants").textContent = message;
  by("wants").className = key === null ? "" : "refused";
  key = null;
  sessionStorage.removeItem(KEY);
  by("forget").hidden = by("main").hidden = true;
  if (by("ask").hidden) {
    by("ask").hidden = false;
    by("key").focus();
  }
  state("locked", "locked");
}

// A header holds bytes: the key's are those of its UTF-8.
const header = (text) => String.fromCharCode(...new TextEncoder().encode(text));

async function poll() {
  running = true;
  const headers = key === null ? {} : { Authorization: `Bearer ${header(key)}` };
  const used = key;
  try {
    const answer = await fetch("/live/data", { headers, signal: AbortSignal.timeout(PATIENCE_MS), cache: "no-store" });
    const data = await answer.json();
    if (used !== key) return; // forgotten, or another one was given meanwhile
    if (answer.status === 401 || answer.status === 403) {
      lostSince = null;
      ask(data.error.message);
      return;
    }
    if (!answer.ok) throw new Error(data.error.message);
    by("ask").hidden = true;
    by("forget").hidden = key === null;
    lostSince = null;
    show(data);
  } catch (error) {
    lostSince ??= Date.now();
    const why = error instanceof TypeError || error.name === "TimeoutError" ? "no answer from the server" : error.message;
    state("lost", `${why} for ${seconds((Date.now() - lostSince) / 1000)}; trying again`);
  } finally {
    running = false;
    schedule();
  }
}

function schedule() {
  clearTimeout(timer);
  if (!document.hidden && (key !== null || by("ask").hidden)) timer = setTimeout(poll, EVERY_MS);
}

function now() {
  clearTimeout(timer);
  if (!running) poll();
}

document.addEventListener("visibilitychange", () => { if (!document.hidden && by("ask").hidden) now(); });
by("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  key = by("key").value;
  by("key").value = "";
  sessionStorage.setItem(KEY, key);
  now();
});
by("forget").addEventListener("click", () => {
  key = null;
  ask("The key is forgotten. This server wants a key.");
});

poll();
