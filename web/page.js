// The page: fields and a dial above, an answer below. Its state is in the address, so a link shows the same again.
// Not here: any figure, any picture or sentence (ask.py makes them in the worker).
const at = (id) => document.getElementById(id);
const FIELDS = ["model", "gpus", "cluster", "runtime", "seq_len", "global_batch_size"];
const AXES = ["tp", "pp", "cp", "ep", "dp_shard", "dp_replicate", "micro_batch_size"];

let worker, number = 0, waiting = new Map(), shown = null, busy = false;

function start() {
  worker = new Worker("worker.js", { type: "module" });
  worker.onmessage = ({ data }) => {
    if ("loading" in data) at("loading").value = data.loading;
    else if ("failed" in data) say(`The planner did not start: ${data.failed}`);
    else if ("ready" in data) at("loading").hidden = true;
    else if ("done" in data) say(`Looking at layouts: ${data.done.toLocaleString()} of ${data.total.toLocaleString()}`);
    else { waiting.get(data.number)?.(data.found); waiting.delete(data.number); }
  };
}

function ask(asked) {
  return new Promise((done) => { waiting.set(++number, done); worker.postMessage({ number, asked }); });
}

const say = (text) => { at("said").textContent = text; };

async function put(asked, pushed = true) {
  if (busy) return;
  busy = true;
  document.body.classList.add("busy");
  const found = await ask(asked);
  busy = false;
  document.body.classList.remove("busy");
  if (found.refused) { say(found.refused); mark(found.field); return; }
  mark("");
  show(found);
  if (pushed) history.pushState(null, "", address(found.given));
}

function address(given) {
  return "#" + new URLSearchParams(Object.entries(given).map(([key, value]) => [key, Array.isArray(value) ? value.join(",") : String(value)]));
}

function mark(field) {
  for (const one of FIELDS) at(one).classList.toggle("wrong", one === field);
}

function typed() {
  const given = {};
  for (const one of FIELDS) if (at(one).value.trim()) given[one] = at(one).value.trim();
  return given;
}

function element(tag, text, kind) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function show(found) {
  const before = shown;
  shown = found;
  say(found.change);
  at("headline").textContent = found.headline;
  at("verdict").textContent = found.verdict;
  at("facts").replaceChildren(...found.facts.flatMap((fact, place) => {
    const was = before && before.facts[place].text !== fact.text ? ` (${before.facts[place].text})` : "";
    const value = element("dd", fact.text);
    value.dataset.key = fact.key;
    value.dataset.value = fact.value;
    value.append(element("small", was));
    const both = element("div");
    both.append(element("dt", fact.name), value);
    return [both];
  }));
  at("shares").textContent = Object.entries(found.shares).filter(([, share]) => share >= 0.005)
    .map(([word, share]) => `${word} ${(share * 100).toFixed(0)} %`).join(", ");
  for (const axis of AXES) at(`size-${axis}`).textContent = axis === "micro_batch_size" ? `${found.micro_batch_size} x ${found.grad_accum}` : found.mesh[axis];
  at("batch").textContent = found.global_batch_size;
  for (const view of ["memory", "map", "time"]) picture(at(view), found[view]);
  at("why").replaceChildren(...[...found.reasons, ...found.notes].map((one) => element("li", one)));
  at("command").textContent = found.command;
  for (const one of FIELDS) if (one in found.given) at(one).value = found.given[one];
}

function picture(place, text) {
  if (!text) { place.replaceChildren(); return; }
  const parsed = new DOMParser().parseFromString(text, "image/svg+xml").documentElement;
  place.replaceChildren(document.importNode(parsed, true));
}

function fromAddress() {
  const given = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  return Object.keys(given).length ? given : null;
}

function dial() {
  at("dial").append(...AXES.map((axis) => {
    const one = element("span", undefined, "axis");
    one.append(element("b", axis.replaceAll("_", " ")));
    for (const [sign, up] of [["−", false], ["+", true]]) {
      const button = element("button", sign);
      button.id = `${up ? "up" : "down"}-${axis}`;
      button.title = `${up ? "more" : "less"} ${axis}`;
      button.onclick = () => put({ do: "turn", name: axis, up, held: at("held").checked });
      if (up) { const size = element("output", "1"); size.id = `size-${axis}`; one.append(size); }
      one.append(button);
    }
    return one;
  }));
}

function listen() {
  at("question").onsubmit = (event) => { event.preventDefault(); put({ do: "ask", given: typed() }); };
  at("best").onclick = () => put({ do: "best", given: typed() });
  at("stop").onclick = () => {
    if (!busy) return;
    worker.terminate();
    waiting.clear();
    busy = false;
    start();
    put({ do: "ask", given: shown.given }, false);  // a new worker knows no layout to turn
  };
  at("config").onchange = async ({ target: { files } }) => {
    if (files.length) put({ do: "config", text: await files[0].text(), given: typed() });
  };
  at("tour").onclick = () => tour(0);
  at("next").onclick = () => tour(stop + 1);
  at("previous").onclick = () => tour(stop - 1);
  at("copy").onclick = () => navigator.clipboard.writeText(at("command").textContent);
  onpopstate = () => { const given = fromAddress(); if (given) put({ do: "ask", given }, false); };
}

let stop = 0;

async function tour(place) {
  await put({ do: "tour", stop: place });
  if (shown.stop !== place) return;
  stop = place;
  at("stop-title").textContent = shown.title;
  at("stop-does").textContent = shown.does;
  at("lesson").hidden = false;
  at("previous").disabled = place === 0;
  at("next").disabled = shown.title.startsWith(`${place + 1} of ${place + 1}:`);
}

async function main() {
  dial();
  if (!fromAddress()) show(await (await fetch("first.json")).json());
  start();
  listen();
  const lists = await ask({ do: "choices" });
  for (const [name, values] of Object.entries(lists)) {
    at(`list-${name}`)?.replaceChildren(...values.map((value) => Object.assign(element("option"), { value })));
  }
  await put({ do: "ask", given: fromAddress() ?? shown.given }, false);
  document.body.classList.add("ready");
}

main();
