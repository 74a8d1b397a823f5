// The live page: asks for /live/data once a second and shows it.

import { chart, rounded, spark } from "./charts.js";
import { requests, slowest } from "./requests.js";
import { TIERS, by, bytes, cells, clock, count, cut, el, seconds, share, short, stack, sum, table } from "./words.js";

const OLD_S = 10, EVERY_MS = 1000, PATIENCE_MS = 5000, KEY = "kvarve.key", SLOTS = 150, TENS = 30, LISTED = 5; // samples of five minutes
let key = sessionStorage.getItem(KEY), lostSince = null, timer = null, running = false;

const says = (figure, text) => { document.querySelector(`[data-figure="${figure}"]`).textContent = text; };

// --- parts of the page

function header(data) {
  const facts = data.facts, ranks = facts.ranks > 1 ? `${facts.ranks} ranks, this is rank 0` : "1 rank";
  by("model").textContent = data.model;
  document.title = `kvarve · ${data.model}`;
  const told = [["dtype", facts.dtype], ["context", facts.context && `${count(facts.context)} tokens`], ["page", `${facts.page_tokens} tokens`], ["grid", facts.grid_tokens && `${facts.grid_tokens} tokens`],
    ["storage", facts.storage.join(", then ") || "none"], ["ranks", ranks], ["identity", facts.identity], ["up for", seconds(data.up_s)], ["version", data.version]];
  by("facts").replaceChildren(...told.filter(([, value]) => value).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  if (!data.up) state("broken", "the engine has stopped");
  else if (data.draining) state("lost", `draining: ${count(data.running + data.waiting)} requests are left`);
  else state("serving", data.age_s > OLD_S ? `serving, as of ${seconds(data.age_s)} ago` : "serving");
}

function hits(data) {
  const { late, total } = data, all = late.prompt_tokens;
  const hits = sum(TIERS.map((tier) => late.cached_tokens[tier] ?? 0));
  says("hit rate", share(hits, all));
  const parts = [...TIERS.map((tier) => [tier, late.cached_tokens[tier] ?? 0]), ["computed", all - hits]];
  const told = parts.map(([name, tokens]) => [name, tokens, `${name} ${share(tokens, all)}`]);
  by("hits").replaceChildren(stack(told.map(([, , text]) => text).join(", "), told),
    el("p", { class: "legend" }, ...told.map(([name, , text]) => el("span", {}, el("i", { class: `key ${name}` }), text))));
  by("hits-note").textContent = all ? `${short(hits)} of ${short(all)} prompt tokens · ${share(total.cached_tokens, total.prompt_tokens)} since the start`
    : total.prompt_tokens ? `no prompt has ended lately · ${share(total.cached_tokens, total.prompt_tokens)} since the start` : "no prompt has ended yet";
}

function tiles(data) {
  const { late, per_s: rates, ttft_s: ttft } = data, hits = sum(TIERS.map((tier) => late.cached_tokens[tier] ?? 0));
  says("saved time", hits ? `≈ ${seconds(late.saved_s)}` : "–");
  by("saved-note").textContent = hits ? `of prefill: ${short(hits)} cached tokens at the measured ${short(data.prefill_tokens_per_s)} computed a second` : "time of prefill not computed";
  says("TTFT p50", seconds(ttft.p50));
  says("TTFT p95", seconds(ttft.p95));
  const slow = data.requests.filter((each) => each.ttft_s).sort((one, two) => two.ttft_s - one.ttft_s)[0];
  by("slowest").hidden = !slow;
  if (slow) by("slowest").textContent = `slowest of ${data.requests.length}: ${seconds(slow.ttft_s)}, ${slow.id.slice(0, 8)}`;
  says("requests/s", short(rates.requests));
  says("tokens/s", short(rates.output_tokens));
  by("rate-note").textContent = `answered · ${short(rates.prompt_tokens)} prompt tokens/s`;
  says("running", count(data.running));
  says("waiting", count(data.waiting));
  const rejected = Object.entries(data.rejected).map(([status, some]) => `${some} × ${status}`).join(", ");
  by("load-note").textContent = [data.tokenizing && `${count(data.tokenizing)} tokenizing`, data.preempted && `${count(data.preempted)} preempted`, rejected && `rejected ${rejected}`].filter(Boolean).join(" · ") || "none rejected, none preempted";
}

function computed(data) {
  const { late, reasons } = data, all = late.prompt_tokens;
  const found = Object.keys(reasons).filter((reason) => !reason.startsWith("hit_") && late.reasons[reason]).map((reason) => [reason, late.reasons[reason]]).sort((one, two) => two[1] - one[1]);
  const advice = late.advice || (all ? "All of it was cached." : "No prompt has ended in the last five minutes.");
  by("advice").replaceChildren(...advice.split(/(--[a-z-]+(?: rounded)?|capacity=|\b[a-z]+_[a-z_]+)/).map((text, at) => (at % 2 ? el("code", {}, text) : text)));
  by("computed").replaceChildren(stack(found.map(([reason, tokens]) => `${reason} ${share(tokens, all)}`).join(", ") || "nothing was computed", found.map(([reason, tokens]) => [`r-${reason}`, tokens, `${reason}: ${count(tokens)} tokens`]), "stack strip"));
  const least = found.slice(LISTED), rest = sum(least.map(([, tokens]) => tokens));
  by("whys").replaceChildren(...found.slice(0, LISTED).map(([reason, tokens]) =>
    el("li", {}, el("i", { class: `key r-${reason}` }), el("b", {}, share(tokens, all)), el("span", {}, el("code", {}, reason), ` ${reasons[reason]}`))),
    ...(rest ? [el("li", {}, el("i", { class: "key" }), el("b", {}, share(rest, all)), el("span", {}, "for other reasons: ", el("code", {}, least.map(([reason]) => reason).join(", "))))] : []));
}

function lanes(data) {
  table(by("lanes"), data.lanes.map((each) => [each.name, each]), "none", (lane) => {
    const busy = lane.bytes_per_s || lane.running || lane.waiting, most = Math.max(0, ...lane.past_bytes_per_s);
    const row = cells(lane.name.replaceAll("-", " "), el("td", { class: "graph" }, spark(lane.past_bytes_per_s, rounded(most), TENS, "lane", `of five minutes, at most ${bytes(most)} a second`)),
      `${bytes(lane.bytes_per_s)}/s`, `${count(lane.running)} + ${count(lane.waiting)}`, el("td", { class: lane.failed ? "error" : "" }, count(lane.failed)), el("td", { class: lane.stuck_s > 5 ? "error" : "" }, lane.stuck_s ? seconds(lane.stuck_s) : "–"));
    row.dataset.lane = lane.name;
    row.className = busy ? "" : "idle";
    return row;
  });
}

// A tier's row is made once, so that its bar is seen to move.
function tier(name, capacity, parts, figure, text, past, health = null) {
  let node = document.querySelector(`[data-tier="${name}"]`);
  if (node === null) {
    node = el("div", { class: "tier", "data-tier": name }, el("strong", {}, el("i", { class: `key ${name}` }), name), el("div", { class: "bar", role: "img" }), el("span", { class: "figure" }), el("div", { class: "graph" }), el("span", { class: "text" }));
    by("tiers").append(node);
  }
  const [, bar, figures, graph, words] = node.children;
  while (bar.children.length < parts.length) bar.append(el("span", { class: `${name} pool${Math.min(bar.children.length, 3)}` }));
  while (bar.children.length > parts.length) bar.lastChild.remove();
  parts.forEach((size, at) => { bar.children[at].style.flexBasis = capacity ? `${(100 * size) / capacity}%` : "0"; });
  bar.setAttribute("aria-label", `${name}: ${figure}`);
  figures.textContent = figure;
  words.replaceChildren(...(health ? [el("b", { class: health[0] ? "good" : "error" }, health[1]), " · "] : []), text);
  graph.replaceChildren(spark(past, capacity, SLOTS, name, `how full it was of late`));
}

function tiers(data) {
  const { storage, history } = data, past = (name) => (history.bytes[name] ?? []).slice(-SLOTS);
  for (const each of data.tiers) {
    const parts = each.pools.map((pool) => pool.bytes), most = each.capacity_bytes;
    tier(each.name, most, parts, `${share(sum(parts), most)} of ${bytes(most)}`,
      each.pools.map((pool) => `${pool.name} ${bytes(pool.bytes)} in ${count(pool.pages)} pages, ${count(pool.evicted)} evicted`).join(" · "), past(each.name));
  }
  if (!storage.attached) return tier("storage", 0, [], "none", storage.attached === false ? "no storage is attached: what leaves memory is gone" : "not asked yet", []);
  const held = past("storage"), most = storage.capacity_bytes ?? rounded(Math.max(1, ...held));
  const lost = [storage.lost_objects && `${count(storage.lost_objects)} objects lost`, storage.damaged_objects && `${count(storage.damaged_objects)} damaged`, storage.read_only && "only read"].filter(Boolean);
  const text = [storage.up && `${count(storage.objects)} objects`, ...lost, storage.last_error && `last error: ${storage.last_error}`].filter(Boolean).join(" · ");
  tier("storage", most, [storage.bytes ?? 0], !storage.up ? "not known" : storage.capacity_bytes === null ? bytes(storage.bytes) : `${share(storage.bytes, most)} of ${bytes(most)}`, text, held,
    [storage.up, `${storage.up ? "answers" : "does not answer"}, for ${seconds(storage.for_s)}`]);
}

const drawn = {
  prompts: chart(by("chart-prompts"), { label: "Prompt tokens a second by where they came from", unit: (value) => short(value), stacked: true,
    series: [...TIERS, "computed"].map((name) => ({ name, color: name })) }),
  ttft: chart(by("chart-ttft"), { label: "Time to first token", unit: seconds, least: 0.001,
    series: [{ name: "p50", color: "first" }, { name: "p95", color: "second", dash: [6, 3] }] }),
  rates: chart(by("chart-rates"), { label: "Answers a second", unit: (value) => short(value),
    series: [{ name: "tokens", color: "first" }, { name: "requests (right)", color: "second", dash: [6, 3], unit: (value) => short(value) }] }),
  load: chart(by("chart-load"), { label: "Requests at a time", unit: count, least: 2,
    series: [{ name: "running", color: "first" }, { name: "waiting", color: "second", dash: [6, 3] }] }),
};
const minutes = () => Number(by("window").elements.minutes.value);

function charts(data) {
  const history = data.history, times = history.unix_s, to = data.now, from = to - 60 * minutes(), marks = history.marks;
  const each_s = (values) => values.map((value, at) => value / history.seconds[at]);
  const from_tiers = TIERS.map((name) => history.cached_tokens[name]);
  const rest = history.prompt_tokens.map((tokens, at) => tokens - sum(from_tiers.map((values) => values[at])));
  drawn.prompts(times, [...from_tiers, rest].map(each_s), from, to, marks);
  const seen = marks.filter((each) => each.unix_s >= from).reverse();
  by("marks").replaceChildren(...seen.slice(0, 6).map((each) => el("li", {}, el("time", {}, clock(each.unix_s)), el("b", {}, each.what), each.text)));
  by("no-marks").hidden = seen.length > 0;
  if (!data.requests) return;
  drawn.ttft(times, [history.ttft_p50_s, history.ttft_p95_s], from, to, marks);
  drawn.rates(times, [each_s(history.output_tokens), each_s(history.requests)], from, to, marks);
  drawn.load(times, [history.running, history.waiting], from, to, marks);
}

function open(data) {
  const { count: some, requests: found } = data.open;
  by("open-count").textContent = some > found.length ? `the oldest ${found.length} of ${some}` : some ? count(some) : "";
  table(by("open"), found.map((each) => [each.number, each]), "none at this moment", (each) =>
    cells(cut(each.id, "id of the request"), each.path.replace(/^\/v1\//, ""), cut(each.group, "salt group"), count(each.prompt), count(each.completion), seconds(each.seconds), each.state));
}

function hottest(data) {
  by("hottest-age").textContent = data.hottest_ago_s > 5 ? `as of ${seconds(data.hottest_ago_s)} ago: the engine is busy` : "";
  const where = [...data.tiers.map((each) => each.name), "storage"];
  by("where").textContent = `pages on ${where.join(" · ")}`;
  table(by("hottest"), data.hottest.slice(0, 10).map((each, at) => [`${at} ${each.key}`, each]), "nothing has been resumed from yet", (each) =>
    cells(cut(each.key, "key"), cut(each.group, "salt group"), count(each.tokens), count(each.hits), `${where.map((tier) => each[tier]).join(" · ")} of ${each.pages}`, each.resumes ?? "not from memory"));
}

function ranks(data) {
  table(by("ranks"), data.ranks.map((each) => [each.rank, each]), "none", (each) =>
    cells(each.rank, el("td", { class: each.up === false ? "error" : "" }, !each.attached ? "none" : each.up ? "answers" : "does not answer"), seconds(each.for_s), bytes(each.bytes), count(each.objects), each.last_error ?? "–"));
}

// --- before the first hit: what to send, and what came of it

let beginner = null; // whether this viewer has been told how to see a hit
const quoted = (text) => `'${text.replaceAll("'", String.raw`'\''`)}'`;

function first(data) {
  const { total, facts } = data, hits = (each) => sum(TIERS.map((name) => each.cached?.[name])) > 0;
  beginner ??= total.requests < 5 && !total.cached_tokens;
  if (total.requests >= 10 && total.cached_tokens) beginner = false; // there is traffic
  by("first").hidden = !beginner;
  if (!beginner) return;
  const body = JSON.stringify({ model: data.model, max_tokens: 16, prompt: "\u0000" }), sentence = "The quick brown fox jumps over the lazy dog. ";
  const [head, tail] = body.split(String.raw`\u0000`), times = Math.ceil(facts.shortest_hit / 9) + 1;
  const lines = [`curl ${location.origin}/v1/completions -H 'Content-Type: application/json'`, key === null ? null : `-H "Authorization: Bearer $KVARVE_API_KEY"`,
    `-d ${quoted(head)}"$(printf '${sentence}%.0s' $(seq ${times}))"${quoted(tail)}`];
  const text = lines.filter(Boolean).join(" \\\n  ");
  if (by("curl").textContent !== text) by("curl").textContent = by("copy-curl").dataset.copy = text;
  const hit = data.requests.findLast((each) => each.ttft_s && hits(each));
  const cold = data.requests.slice(data.requests.indexOf(hit) + 1).find((each) => each.ttft_s && each.prompt && !hits(each));
  let says = "Send this twice. The first prompt is computed and kept; the second is a hit, and you see it here.";
  if (hit) {
    says = `That was a hit: ${count(sum(Object.values(hit.cached)))} of ${count(hit.prompt)} tokens were cached, and the first token came after ${seconds(hit.ttft_s)}${cold ? ` (computed, it took ${seconds(cold.ttft_s)})` : ""}.`;
  } else if (cold && cold.prompt < facts.shortest_hit) {
    says = `A prompt of ${count(cold.prompt)} tokens was computed. It is too short to hit: prompts of ${count(facts.shortest_hit)} tokens and more do.`;
  } else if (cold) {
    says = `A prompt of ${count(cold.prompt)} tokens was computed in ${seconds(cold.ttft_s)}, and its pages are kept. Send the same again.`;
  }
  if (by("first-says").textContent !== says) by("first-says").textContent = says;
  by("first").className = hit ? "card wide done" : "card wide";
}

function show(data) {
  by("main").hidden = false; // first: charts need their width
  header(data);
  by("trouble").hidden = !data.trouble.length;
  const troubles = JSON.stringify(data.trouble);
  if (by("trouble").dataset.told !== troubles) {
    by("trouble").dataset.told = troubles;
    by("troubles").replaceChildren(...data.trouble.map((each) => el("li", {}, ...each.split(/`(.+?)`/).map((text, at) => (at % 2 ? el("code", {}, text) : text)))));
  }
  by("main").classList.toggle("beside", !("requests" in data));
  for (const node of document.querySelectorAll("[data-needs]")) node.hidden = !(node.dataset.needs in data);
  const parts = [hits, computed, lanes, tiers, charts, hottest, ...("requests" in data ? [first, tiles, requests, open] : []), ...("ranks" in data ? [ranks] : [])];
  for (const part of parts) part(data);
}

// --- asking

function state(name, text) {
  by("state").dataset.state = name;
  if (by("state").textContent !== text) by("state").textContent = text;
  document.body.classList.toggle("lost", name === "lost" && lostSince !== null);
}

function ask(message) {
  by("wants").textContent = message;
  by("wants").className = key === null ? "" : "error";
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
const latin = (text) => String.fromCharCode(...new TextEncoder().encode(text));

async function poll() {
  running = true;
  const headers = key === null ? {} : { Authorization: `Bearer ${latin(key)}` };
  const used = key;
  try {
    const answer = await fetch(minutes() > 5 ? "/live/data?hour=true" : "/live/data", { headers, signal: AbortSignal.timeout(PATIENCE_MS), cache: "no-store" });
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
    if (error instanceof TypeError && !/fetch|network|load/i.test(error.message)) throw error; // ours
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
by("window").addEventListener("input", now);
by("slowest").addEventListener("click", slowest);
by("seen").addEventListener("click", () => { beginner = false; by("first").hidden = true; });
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
