// The models, and the engine, watched once a second while the page is visible.

import { listModels, readStatus } from "./api.js";
import { element, find } from "./dom.js";

const CHOSEN = "penstock.model", POINTS = 60;
export const model = { name: null, context: null };
const rates = [];
let isKnown = false, lastCount = null, lastTime = 0, whenChosen;

const write = (id, text) => { find(id).textContent = text; };

function state(text, kind) {
  write("state", text);
  find("state").className = kind;
}

// Call `chosen` with the name of a model when the user, or the page at its beginning, has chosen it.
export function startEngine(chosen) {
  whenChosen = chosen;
  find("model").onchange = () => {
    Object.assign(model, { name: find("model").value, context: null });
    localStorage.setItem(CHOSEN, model.name);
    history.replaceState(null, "", `?${new URLSearchParams({ model: model.name })}${location.hash}`);
    [isKnown, lastCount, rates.length] = [false, null, 0];
    watch();
  };
  watch();
  setInterval(() => { if (!document.hidden && !find("login").open) watch(); }, 1000);
}

export async function watch() {
  const asked = model.name;
  try {
    const status = await readStatus(asked), isReady = status.engine.state === "ready";
    if (asked !== model.name) return;
    draw(status);
    isKnown &&= model.context !== null || !isReady;   // one of several that has just been loaded for the first time
    if (!isKnown && (isReady || status.models)) await readModels();
  } catch (error) {
    isKnown = false;   // after a restart, there may be others
    if (error.code === "model_not_found") model.name = null;
    state(error.status === 401 ? "API key needed" : error.status ? error.message : "server not reachable", "bad");
  }
}

async function readModels() {
  const cards = await listModels(), shown = ({ id, parent }) => (parent ? `${id} (adapter of ${parent})` : id);
  find("model").replaceChildren(...cards.map(card => element("option", { value: card.id }, shown(card))));
  const wanted = [model.name, new URLSearchParams(location.search).get("model"), localStorage.getItem(CHOSEN)];
  const card = wanted.map(name => cards.find(({ id }) => id === name)).find(Boolean) ?? cards[0];
  Object.assign(model, { name: card.id, context: card.max_model_len });
  find("model").value = model.name;
  find("model").disabled = cards.length < 2;
  write("context", model.context === null ? "" : `context of ${model.context} tokens`);
  isKnown = true;
  await whenChosen(model.name);
}

function draw(status) {
  const now = performance.now(), count = status.generated_tokens_total;
  const isNext = lastCount !== null && count >= lastCount && now > lastTime && now - lastTime < 5000;   // not after a pause or a restart
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
  const kinds = { ready: "good", sleeping: "good", failed: "bad" };
  state(status.engine.state, kinds[status.engine.state] ?? "busy");
}
