// The engine, watched once a second.

let model = null, lastCount = null, lastTime = 0;
const rates = [];

function draw(status) {
  const now = performance.now(), count = status.generated_tokens_total;
  const rate = lastCount === null || count < lastCount ? 0 : (count - lastCount) / ((now - lastTime) / 1000);
  [lastCount, lastTime] = [count, now];
  rates.push(rate);
  if (rates.length > 60) rates.shift();
  const top = Math.max(...rates, 1);
  el("line").setAttribute("points", rates.map((r, i) => (i + 60 - rates.length) + "," + (19.5 - 19 * r / top).toFixed(2)).join(" "));
  set("rate", rate.toFixed(1)); set("running", status.running); set("waiting", status.waiting);
  set("generated", count); set("prompted", status.prompt_tokens_total); set("cached", status.cached_tokens_total);
  set("preempted", status.preemptions_total); set("restarts", status.engine.restarts); set("pid", status.engine.pid ?? "–");
  const blocks = status.kv_blocks, used = blocks.total - blocks.free, percent = n => 100 * n / Math.max(blocks.total, 1) + "%";
  el("used").style.width = percent(used); el("reusable").style.width = percent(blocks.cached);
  set("blocks", used + " of " + blocks.total); set("blocksCached", blocks.cached);
  state(status.engine.state, status.engine.state === "ready" ? "good" : status.engine.state === "failed" ? "bad" : "busy");
}

function state(text, kind) { set("state", text); el("state").className = kind; }

async function watch() {
  try {
    const response = await fetch("/status", { headers: headers() });
    if (response.status === 401) el("keyLabel").hidden = false;
    if (!response.ok) return state(response.status === 401 ? "API key needed" : await problem(response), "bad");
    draw(await response.json());
    if (model === null && el("state").textContent === "ready") {
      const card = (await (await fetch("/v1/models", { headers: headers() })).json()).data[0];
      model = card.id;
      set("model", model + ", context of " + card.max_model_len + " tokens");
    }
  } catch { state("server not reachable", "bad"); }
}

el("key").value = sessionStorage.getItem("key") || "";
el("keyLabel").hidden = !el("key").value;
el("key").onchange = () => { sessionStorage.setItem("key", el("key").value); watch(); };
watch();
setInterval(watch, 1000);
