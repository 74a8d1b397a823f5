// The last requests: ten rows and more, filters, and why each token was cached or not. The list holds still while the
// pointer or the focus is in it.

import { TIERS, by, cells, count, cut, el, seconds, stack, sum, table } from "./words.js";

const FIRST = 10;
const failed = (each) => each.status >= 400 || Boolean(each.finish?.includes("error"));
const cached = (each) => sum(TIERS.map((tier) => each.cached?.[tier]));
let data = null, held = null, opened = null, most = FIRST;

const KINDS = {
  all: () => true,
  failed,
  slowest: (each) => each.ttft_s !== null && each.ttft_s !== undefined,
  "no hit": (each) => each.prompt && !cached(each),
};

function chosen(requests) {
  const kind = by("kinds").elements.kind.value, words = by("find").value.trim().toLowerCase();
  const found = requests.filter((each) => KINDS[kind](each) && [each.id, each.group, each.key, each.path].some((text) => text?.toLowerCase().includes(words)));
  return kind === "slowest" ? found.sort((one, two) => two.ttft_s - one.ttft_s) : found;
}

function why(each, meanings) {
  const reasons = Object.entries(meanings).map(([reason, meaning]) => [reason, meaning, each.reasons[reason] ?? 0]).filter(([, , tokens]) => tokens);
  const strip = stack(reasons.map(([reason, , tokens]) => `${tokens} ${reason}`).join(", "), reasons.map(([reason, , tokens]) => [`r-${reason}`, tokens, `${reason}: ${count(tokens)} tokens`]), "stack strip");
  const list = reasons.map(([reason, meaning, tokens]) =>
    el("li", {}, el("i", { class: `key r-${reason}` }), `${count(tokens)} `, el("code", {}, reason), `: ${meaning}`));
  return el("tr", { class: "why" }, el("td", { colSpan: 12 }, strip, el("ul", {}, ...list)));
}

function row(each) {
  const parts = TIERS.map((tier) => [tier, each.cached?.[tier] ?? 0, `${count(each.cached?.[tier])} tokens from ${tier}`]);
  const rest = ["computed", Math.max(0, (each.prompt ?? 0) - cached(each)), "computed"];
  const hit = each.prompt ? el("div", { class: "hit" }, stack(parts.map(([tier, tokens]) => `${tokens} ${tier}`).join(", "), [...parts, rest]), `${Math.round((100 * cached(each)) / each.prompt)}%`) : "–";
  const button = each.prompt && Object.keys(each.reasons).length
    ? el("button", { type: "button", "data-why": each.number, "aria-expanded": String(each.open), "aria-label": `why, of ${each.id.slice(0, 8)}` }, "why") : "";
  const status = each.status === 200 && each.finish ? each.finish : each.status;
  const node = cells(cut(each.id, "id of the request"), each.ago, el("td", { class: failed(each) ? "error" : "" }, el("span", {}, status, each.code ? el("small", {}, ...each.code.split(/(?<=_)/).flatMap((word) => [el("wbr"), word])) : null)), each.path.replace(/^\/v1\//, ""),
    cut(each.group, "salt group"), count(each.prompt), hit, count(each.completion), seconds(each.queued_s), seconds(each.ttft_s), seconds(each.seconds), button);
  node.dataset.request = each.id;
  return node;
}

function render() {
  const now = held ?? data, found = chosen([...now.requests]), rows = [];
  for (const { ago_s: ago, ...each } of found.slice(0, most)) {
    rows.push([each.number, { ...each, open: opened === each.number, ago: ago < 10 ? "just now" : ago < 60 ? `${10 * Math.floor(ago / 10)} s ago` : `${seconds(60 * Math.floor(ago / 60))} ago` }]);
    if (opened === each.number && each.reasons) rows.push([`why ${each.number}`, { why: each, meanings: now.reasons }]);
  }
  table(by("requests"), rows, now.requests.length ? "none of them is like that" : "none yet", (each) => (each.why ? why(each.why, each.meanings) : row(each)));
  by("more").hidden = found.length <= most;
  by("more").textContent = `more (${found.length - most})`;
  const newest = held?.requests[0]?.number ?? 0, newer = held ? data.requests.filter((each) => each.number > newest).length : 0;
  by("held").textContent = held ? `held still${newer ? `, ${newer} newer` : ""}` : "";
}

export function requests(now) {
  data = now;
  render();
}

// Where else on the page a request is named: its row comes into view.
export function slowest() {
  by("kinds").elements.kind.value = "slowest";
  by("find").value = "";
  render();
  by("last").scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
}

const list = by("list");
function hold() { held ??= data; }
function release() {
  if (list.matches(":hover") || list.contains(document.activeElement)) return;
  held = null;
  if (data) render();
}
list.addEventListener("pointerenter", hold);
list.addEventListener("focusin", hold);
list.addEventListener("pointerleave", release);
list.addEventListener("focusout", () => setTimeout(release));
by("kinds").addEventListener("input", () => { most = FIRST; if (data) render(); });
by("kinds").addEventListener("submit", (event) => event.preventDefault());
by("more").addEventListener("click", () => {
  const next = by("requests").children.length;
  most = Infinity;
  render();
  by("requests").children[next]?.querySelector("button")?.focus({ preventScroll: true }); // the button is gone
});
by("requests").addEventListener("click", ({ target }) => {
  const number = target.closest("button")?.dataset.why;
  if (number === undefined) return;
  opened = opened === Number(number) ? null : Number(number);
  render();
  by("requests").querySelector(`button[data-why="${Number(number)}"]`)?.focus();
});
