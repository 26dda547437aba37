// A chat, and beside it what the cache holds. Text reaches the page by textContent alone.

const $ = (id) => document.getElementById(id);
const LIT_MS = 2500; // how long a reused block stays lit
const MOST_DRAWN = 2048; // blocks; more are counted, not drawn
const MOST_TURNS = 12;
let conversation = []; // replaced, not emptied: an answer that still comes belongs to the old one
let session = newSession();
let introduction = [], key = "", model = "", state = null, running = null, litUntil = new Map(), known = new Set();

function newSession() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
function make(kind, text = "", className = "") {
  const made = document.createElement(kind);
  if (text) made.textContent = text;
  if (className) made.className = className;
  return made;
}
const count = (n) => n.toLocaleString("en");
const bytes = (n) => {
  for (const unit of ["bytes", "KiB", "MiB", "GiB"]) {
    if (n < 1024 || unit === "GiB") return `${unit === "bytes" ? n : n.toFixed(1)} ${unit}`;
    n /= 1024;
  }
};

async function ask(path, options = {}) {
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const answer = await fetch(path, { ...options, headers });
  if (answer.status === 401) $("unlock").hidden = false;
  if (!answer.ok) {
    let why = `${answer.status}`;
    try { const body = await answer.json(); why = body.error?.message ?? why; } catch { /* no JSON */ }
    throw new Error(why);
  }
  return answer;
}

// Server-sent events of a fetch, which can carry a key, where EventSource cannot.
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const pieces = (rest + value).split("\n\n");
      rest = pieces.pop();
      for (const piece of pieces) {
        const found = { kind: "message", data: "" };
        for (const line of piece.split("\n")) {
          if (line.startsWith("event: ")) found.kind = line.slice(7);
          else if (line.startsWith("data: ")) found.data += line.slice(6);
        }
        if (found.data) yield found;
      }
    }
  } finally { await reader.cancel().catch(() => {}); }
}

// ---- chat

function message(role, text) {
  const item = make("li", "", role);
  const body = make("span", text);
  item.append(body);
  $("messages").append(item);
  item.scrollIntoView({ block: "nearest" });
  return { item, body };
}

async function send(text) {
  const turns = conversation;
  turns.push({ role: "user", content: text });
  message("user", text);
  const { item, body } = message("assistant", "");
  running = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  item.setAttribute("aria-busy", "true");
  let usage = null, said = "";
  try {
    const answer = await ask("/v1/chat/completions", {
      method: "POST", signal: running.signal, headers: { "Content-Type": "application/json" },
      body: JSON.stringify({
        model, session_id: session, messages: [...($("introduction").checked ? introduction : []), ...turns], stream: true, temperature: 0,
        stream_options: { include_usage: true },
      }),
    });
    for await (const { data } of events(answer)) {
      if (data === "[DONE]") break;
      const piece = JSON.parse(data);
      if (piece.error) throw new Error(piece.error.message);
      said += piece.choices?.[0]?.delta?.content ?? "";
      body.textContent = said;
      usage = piece.usage ?? usage;
    }
  } catch (error) {
    if (error.name !== "AbortError") { item.className = "error"; body.textContent = `${said} ${error.message}`; }
  }
  if (said) turns.push({ role: "assistant", content: said });
  else turns.pop(); // what was not answered is not asked again with the next message
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    item.append(make("small", `${count(cached)} of ${count(usage.prompt_tokens)} prompt tokens from the cache, ${count(usage.completion_tokens)} tokens answered`));
  }
  item.removeAttribute("aria-busy");
  $("spoken").textContent = item.textContent;
  $("send").disabled = false;
  $("stop").disabled = true;
  running = null;
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value.trim();
  if (!text || running || $("send").disabled) return;
  $("prompt").value = "";
  send(text);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("ask").requestSubmit(); }
});
$("stop").addEventListener("click", () => running?.abort());
$("anew").addEventListener("click", () => {
  running?.abort();
  conversation = [];
  session = newSession();
  $("messages").replaceChildren();
  $("prompt").focus();
});
$("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value;
  $("unlock").hidden = true;
  name();
});

// ---- cache

function draw() {
  const { blocks, slots, requests } = state, now = performance.now();
  const perBlock = state.model.block_tokens;
  const counters = [
    ["tokens per second", state.tokens_per_s.toFixed(1)],
    ["blocks free", `${count(blocks.free)} of ${count(blocks.total)}`],
    ["blocks live", count(blocks.live)],
    ["blocks cached", count(blocks.cached)],
    ["blocks in flight", count(blocks.in_flight)],
    ["slots free", `${count(slots.free)} of ${count(slots.total)}`],
    ["requests waiting", count(state.waiting)],
    ["a block", `${perBlock} tokens, ${bytes(state.model.block_bytes)}`],
  ];
  if (blocks.in_host_memory !== undefined) counters.push(["blocks in host memory", count(blocks.in_host_memory)]);
  if (state.prefix) counters.push(["tokens reused", `${count(state.prefix.tokens_skipped)} of ${count(state.prefix.tokens_asked)}`]);
  $("counters").replaceChildren(...counters.map(([name, value]) => {
    const pair = make("div");
    pair.append(make("dt", name), make("dd", value));
    return pair;
  }));

  const users = new Map();
  for (const request of requests) {
    for (const block of request.blocks) users.set(block, (users.get(block) ?? 0) + 1);
    if (!known.has(request.number) && request.cached_tokens) {
      for (const block of request.blocks.slice(0, Math.ceil(request.cached_tokens / perBlock))) litUntil.set(block, now + LIT_MS);
    }
    known.add(request.number);
  }
  const cached = new Set(state.tree.nodes.map((node) => node.block_id));
  const away = new Set(state.entries?.in_host_memory ?? []);
  const look = (block) => {
    if ((litUntil.get(block) ?? 0) > now) return "lit";
    if ((users.get(block) ?? 0) > 1) return "shared";
    if (users.has(block)) return "live";
    return cached.has(block) ? "cached" : "free";
  };
  const lookWithPlace = (block) => look(block) + (away.has(block) ? " away" : "");
  const field = $("blocks");
  const drawn = Math.min(blocks.total, MOST_DRAWN);
  while (field.childElementCount < drawn) field.append(make("i", "", "block free"));
  for (let block = 0; block < drawn; block++) {
    const name = `block ${lookWithPlace(block)}`, cell = field.children[block];
    if (cell.className !== name) { cell.className = name; cell.title = `block ${block}: ${look(block)}${away.has(block) ? ", entries in host memory" : ""}`; }
  }
  field.setAttribute("aria-label", `${blocks.total} blocks: ${blocks.free} free, ${blocks.live} live, ${blocks.cached} cached, ${[...users.values()].filter((n) => n > 1).length} of several requests${state.entries ? `, ${away.size} with entries in host memory` : ""}`);
  $("away-legend").hidden = !state.entries;

  $("requests").replaceChildren(...(requests.length ? requests.map(drawRequest) : [make("p", "Nobody asks at the moment.")]));
  $("turns").tBodies[0].replaceChildren(...state.turns.slice(-MOST_TURNS).reverse().map((turn) => {
    const row = make("tr");
    const where = [[turn.host_tokens, "host memory"], [turn.storage_tokens, "storage"]].filter(([n]) => n).map(([n, name]) => `${count(n)} ${name}`).join(", ");
    row.append(...[turn.number, turn.session, count(turn.prompt_tokens), count(turn.hit_tokens) + (where ? ` (${where})` : ""), count(turn.missed_tokens) + (turn.missed_because ? ` (${turn.missed_because.replaceAll("_", " ")})` : ""), count(turn.generated_tokens)].map((value) => make("td", `${value}`)));
    return row;
  }));
  $("tree").replaceChildren(drawTree(lookWithPlace));
  const places = state.tiers.map((tier) =>
    make("p", `${tier.name}: ${bytes(tier.held_bytes)}${tier.capacity_bytes ? ` of ${bytes(tier.capacity_bytes)}` : ""}; hits: ${count(tier.hits)}, misses: ${count(tier.misses)}`));
  if (!places.length) places.push(make("p", "No tier: what is evicted is computed again."));
  if (state.entries) places.unshift(make("p", `Host memory for entries: ${bytes(state.entries.host_bytes)}; the device has room for those of ${count(state.entries.rows_total)} blocks. Of entries that were selected elsewhere ${count(state.entries.hits)} had been fetched before, and ${count(state.entries.misses)} were fetched (${bytes(state.entries.bytes_fetched)}).`));
  $("tiers").replaceChildren(...places);
}

function drawRequest(request) {
  const made = make("div", "", "request");
  const width = Math.max(request.length, request.prompt_tokens, 1);
  made.append(make("p", `Request ${request.number}, session ${request.session}: ${count(request.length)} tokens in the cache, ${count(request.cached_tokens)} of ${count(request.prompt_tokens)} prompt tokens reused`));
  const strip = make("div", "", "strip");
  const part = (className, begin, end) => {
    const piece = make("i", "", className);
    piece.style.left = `${(100 * begin) / width}%`;
    piece.style.width = `${(100 * (end - begin)) / width}%`;
    strip.append(piece);
  };
  part("hit", 0, request.cached_tokens);
  part("rest", request.cached_tokens, request.length);
  part("window", ...request.window);
  strip.setAttribute("role", "img");
  strip.setAttribute("aria-label", `window of positions ${request.window.join(" to ")}`);
  const groups = request.groups.map((group) => `ratio ${group.ratio}: ${count(group.entries)} entries, ${group.unfinished_tokens} token${group.unfinished_tokens === 1 ? "" : "s"} of an unfinished group`);
  made.append(strip, make("p", `window ${request.window.join(" to ")}; ${groups.join("; ")}`));
  return made;
}

function drawTree(look) {
  const nodes = new Map(state.tree.nodes.map((node) => [node.id, node])), children = new Map();
  for (const node of nodes.values()) {
    const parent = nodes.has(node.parent) ? node.parent : null;
    children.set(parent, [...(children.get(parent) ?? []), node]);
  }
  const branch = (parent) => {
    const list = make("ul");
    for (let node of children.get(parent) ?? []) {
      const item = make("li"), run = make("div", "", "run");
      let last = node, length = 0;
      for (; node; node = (children.get(last.id) ?? []).length === 1 ? children.get(last.id)[0] : null) {
        const box = make("i", "", `block ${look(node.block_id)}${node.snapshot ? " snapshot" : ""}`);
        box.title = `block ${node.block_id}${node.pinned ? ", pinned" : ""}`;
        run.append(box);
        last = node;
        length += 1;
      }
      item.append(run, make("span", `${length} block${length > 1 ? "s" : ""}`));
      if (children.has(last.id)) item.append(branch(last.id));
      list.append(item);
    }
    return list;
  };
  return branch(null);
}

let isDrawn = false;
function drawSoon() {
  if (isDrawn) return;
  isDrawn = true;
  requestAnimationFrame(() => { isDrawn = false; draw(); });
}

async function watch() {
  for (;;) {
    try {
      const answer = await ask("/cache/events");
      for await (const { kind, data } of events(answer)) {
        const found = JSON.parse(data);
        if (kind === "state") { state = found; known = new Set(); }
        else if (state) state = { ...state, ...found, turns: [...state.turns, ...found.turns.filter((turn) => turn.number > (state.turns.at(-1)?.number ?? 0) || !state.turns.some((old) => old.number === turn.number))].slice(-64), tree: found.tree ?? state.tree };
        $("connection").textContent = "live";
        if (state) { drawSoon(); setTimeout(drawSoon, LIT_MS + 50); }
      }
      $("connection").textContent = "the server ended the connection";
    } catch (error) { $("connection").textContent = `not connected: ${error.message}`; }
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

async function name() {
  try {
    const found = await (await ask("/v1/models")).json();
    model = found.data[0].id;
    $("model").textContent = model;
    introduction = await (await ask("/static/introduction.json")).json();
    $("introduced").hidden = !introduction.length;
    $("send").disabled = running !== null;
  } catch (error) { $("model").textContent = error.message; }
}
name();
watch();
