// The models, and the engine, watched once a second while the page is visible.

import { listModels, readStatus } from "./api.js";
import { element, find } from "./dom.js";

const CHOSEN = "penstock.model", POINTS = 60;
export const model = { name: null, context: null };
const rates = [];
let lastCount = null, lastTime = 0, whenKnown = () => {};

const write = (id, text) => { find(id).textContent = text; };

function state(text, kind) {
  write("state", text);
  find("state").className = kind;
}

// Call `known` when the server has said which models it has.
export function startEngine(known) {
  whenKnown = known;
  find("model").onchange = () => {
    choose(find("model").value);
    localStorage.setItem(CHOSEN, model.name);
  };
  watch();
  setInterval(() => { if (!document.hidden && !find("login").open) watch(); }, 1000);
}

export async function watch() {
  try {
    draw(await readStatus());
    if (model.name === null && find("state").className === "good") await readModels();
  } catch (error) {
    state(error.status === 401 ? "API key needed" : error.status ? error.message : "server not reachable", "bad");
  }
}

let cards = [];

async function readModels() {
  cards = await listModels();
  find("model").replaceChildren(...cards.map(({ id }) => element("option", { value: id }, id)));
  await whenKnown();
  const wanted = localStorage.getItem(CHOSEN);
  choose(cards.some(({ id }) => id === wanted) ? wanted : cards[0].id);
  find("model").disabled = cards.length < 2;
}

function choose(name) {
  find("model").value = name;
  model.name = name;
  model.context = cards.find(({ id }) => id === name).max_model_len;
  write("context", `context of ${model.context} tokens`);
}

function draw(status) {
  const now = performance.now(), count = status.generated_tokens_total;
  const isNext = lastCount !== null && count >= lastCount && now - lastTime < 5000;   // not after a pause or a restart
  if (isNext) rates.push((count - lastCount) / ((now - lastTime) / 1000));
  [lastCount, lastTime] = [count, now];
  if (rates.length > POINTS) rates.shift();
  const top = Math.max(...rates, 1), first = POINTS - rates.length;
  const point = (rate, at) => `${first + at},${(19.5 - 19 * rate / top).toFixed(2)}`;
  find("line").setAttribute("points", rates.map(point).join(" "));
  write("rate", (rates.at(-1) ?? 0).toFixed(1));
  write("running", status.running);
  write("waiting", status.waiting);
  write("generated", count);
  write("prompted", status.prompt_tokens_total);
  write("cached", status.cached_tokens_total);
  write("preempted", status.preemptions_total);
  write("restarts", status.engine.restarts);
  write("pid", status.engine.pid ?? "–");
  const blocks = status.kv_blocks, used = blocks.total - blocks.free;
  const share = count => 100 * count / Math.max(blocks.total, 1) + "%";
  find("used").style.width = share(used);
  find("reusable").style.width = share(blocks.cached);
  write("blocks", used + " of " + blocks.total);
  write("blocks-cached", blocks.cached);
  const kinds = { ready: "good", failed: "bad" };
  state(status.engine.state, kinds[status.engine.state] ?? "busy");
}
