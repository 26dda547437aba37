// The planner's page: what its controls say goes to the worker, what it answers is drawn.
const $ = (id) => document.getElementById(`planner-${id}`);
const COUNTS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64];
const HOST_GB = [0, 64, 128, 256, 512, 1024, 2048, 4096, 8192];
const OWN = "other";
const SERIES = ["dsv4", "with host memory", "vLLM", "SGLang"];
const SVG = "http://www.w3.org/2000/svg";
const worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
let choices = null;
let asked = null; // the question that is being answered
let next = null; // the newest one after it

worker.onmessage = ({ data }) => {
  if (data.failed) return say(`The planner could not be started: ${data.failed}`, true);
  if (data.choices) return begin(data.choices);
  asked = null;
  if (next) return send();
  show(data.answer);
};

function begin(found) {
  choices = found;
  for (const model of found.models) option($("model"), model, model);
  for (const name of Object.keys(found.gpus)) option($("gpu"), name, name);
  option($("gpu"), OWN, "of this memory");
  $("gpu").value = "H200";
  $("count").max = COUNTS.length - 1;
  $("count").value = COUNTS.indexOf(4);
  $("context").max = found.contexts.length - 1;
  $("context").value = found.contexts.indexOf(131072);
  $("host").max = HOST_GB.length - 1;
  takeMemory();
  $("form").addEventListener("input", (event) => {
    if (event.target.id === "planner-gpu") takeMemory();
    if (event.target.id === "planner-memory") $("gpu").value = OWN;
    ask();
  });
  ask();
}

function option(select, value, text) {
  const found = document.createElement("option");
  found.value = value;
  found.textContent = text;
  select.append(found);
}

function takeMemory() {
  const memory = choices.gpus[$("gpu").value];
  if (memory) $("memory").value = memory / 1e9;
}

function ask() {
  const count = COUNTS[$("count").value];
  const own = $("gpu").value === OWN;
  const layout = $("layout").value;
  const host = HOST_GB[$("host").value];
  const activations = Number($("activations").value);
  $("count-text").textContent = count;
  $("memory-text").textContent = `${$("memory").value} GB`;
  const context = choices.contexts[$("context").value];
  $("context-text").textContent = context >= 2 ** 20 ? `${context / 2 ** 20}M` : `${context / 1024}k`;
  $("host-text").textContent = host ? `${host} GB` : "none";
  $("activations-text").textContent = activations ? `${activations} GB` : "not counted";
  next = {
    model: $("model").value,
    count,
    gpu: own ? `${$("memory").value}GB` : $("gpu").value,
    tp: layout === "tp" ? count : 1,
    pp: layout === "pp" ? count : 1,
    context,
    host_memory: host ? `${host}GB` : "",
    activations: activations ? `${activations}GB` : "",
  };
  $("answer").parentElement.setAttribute("aria-busy", "true");
  if (!asked) send();
}

function send() {
  asked = next;
  next = null;
  worker.postMessage(asked);
}

function say(text, wrong) {
  $("answer").textContent = text;
  $("answer").classList.toggle("wrong", Boolean(wrong));
}

function show(found) {
  if (found.error) say(found.error, true);
  else {
    say(found.answer, !found.fits);
    $("cache").textContent = `${found.layout}: the cache is ${found.cache}.`;
    $("command").textContent = found.command;
    $("notes").replaceChildren(...found.notes.map((note) => element("li", {}, note, document)));
    drawBar(found);
    drawCurve(found);
  }
  $("answer").parentElement.setAttribute("aria-busy", "false");
}

// ---- pictures ---------------------------------------------------------------------------------

function element(name, attributes, text, html) {
  const made = html ? html.createElement(name) : document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function drawBar({ memory, memory_bytes: whole }) {
  const parts = [];
  const used = memory.reduce((sum, part) => sum + part.bytes, 0);
  const scale = 720 / Math.max(whole, used);
  let at = 0;
  let label = 0;
  memory.forEach((part, nth) => {
    if (!part.bytes) return;
    const width = part.bytes * scale;
    parts.push(element("rect", { x: at, y: 8, width, height: 40, class: `part-${nth}` }));
    parts.push(element("rect", { x: label, y: 60, width: 10, height: 10, class: `part-${nth}` }));
    parts.push(element("text", { x: label + 14, y: 69 }, `${part.what} ${part.text}`));
    at += width;
    label += 185;
  });
  parts.push(element("line", { x1: whole * scale, x2: whole * scale, y1: 2, y2: 54, class: "limit" }));
  $("bar").replaceChildren(...parts);
}

function drawCurve({ curve }) {
  const [left, right, top, bottom] = [64, 590, 12, 320];
  $("curve").parentElement.hidden = !curve.some((point) => SERIES.some((name) => [point[name]].flat()[0]));
  const most = Math.max(2, ...curve.flatMap((point) => SERIES.flatMap((name) => point[name] ?? [])));
  const last = curve.length - 1;
  const x = (nth) => left + ((right - left) * nth) / last;
  const y = (count) => bottom - ((bottom - top) * Math.log(Math.max(1, count))) / Math.log(most);
  const parts = [];
  for (let count = 1; count <= most; count *= 10) {
    parts.push(element("line", { x1: left, x2: right, y1: y(count), y2: y(count), class: "grid" }));
    parts.push(element("text", { x: left - 8, y: y(count) + 4, "text-anchor": "end" }, count.toLocaleString("en")));
  }
  curve.forEach((point, nth) => {
    if (nth % 2 && nth !== last) return;
    parts.push(element("text", { x: x(nth), y: bottom + 18, "text-anchor": "middle" }, point.label));
  });
  const chosen = Number($("context").value);
  parts.push(element("line", { x1: x(chosen), x2: x(chosen), y1: top, y2: bottom, class: "limit" }));
  const labels = [];
  SERIES.forEach((name, series) => {
    const some = curve.map((point, nth) => [nth, point[name]]).filter(([, count]) => count);
    const real = some.filter(([, count]) => (Array.isArray(count) ? count[1] : count) > 0);
    if (!real.length) return;
    const high = real.map(([nth, count]) => `${x(nth)},${y(Array.isArray(count) ? count[1] : count)}`);
    if (Array.isArray(real[0][1])) {
      const low = real.map(([nth, count]) => `${x(nth)},${y(count[0])}`).reverse();
      parts.push(element("polygon", { points: [...high, ...low].join(" "), class: `band series-${series}` }));
    }
    parts.push(element("polyline", { points: high.join(" "), class: `series-${series}` }));
    const [nth, count] = real[real.length - 1];
    labels.push({ name, series, nth, at: y(Array.isArray(count) ? count[1] : count) });
  });
  labels.sort((one, other) => one.at - other.at);
  labels.forEach((label, nth) => {
    if (nth) label.at = Math.max(label.at, labels[nth - 1].at + 15);
    parts.push(element("text", { x: x(label.nth) + 8, y: label.at + 4, class: `label series-${label.series}` }, label.name));
  });
  $("curve").replaceChildren(...parts);
}
