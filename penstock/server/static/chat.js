// The conversation that is shown: sending, answering, editing, copying.

function el(id) { return document.getElementById(id); }
function set(id, text) { el(id).textContent = text; }

function button(text, act) {
  const node = element("button", text);
  node.type = "button";
  node.className = "plain";
  node.onclick = () => act(node);
  return node;
}

async function copyText(text, where) {
  const label = where.textContent;
  try {
    await navigator.clipboard.writeText(text);
    where.textContent = "Copied";
  } catch { where.textContent = "Not allowed here"; }   // pages without https, other than this machine's
  setTimeout(() => { where.textContent = label; }, 1200);
}

let answer = null;           // {stop: AbortController, turn} of the answer in progress
let editing = null;          // the turn of `current` whose text is in the box
const views = new WeakMap(); // of the turns that are shown: {box, under}

function showSide(shown) {
  el("side").classList.toggle("shown", shown);
  el("menu").setAttribute("aria-expanded", shown);
}

function showConversation() {
  const hint = element("p", "Send the model a message.");
  hint.className = "hint";
  el("talk").replaceChildren(...(current.turns.length ? [] : [hint]));
  for (const turn of current.turns) showTurn(turn);
  toEnd(true);
}

function showTurn(turn) {
  const box = element("div"), under = element("div");
  views.set(turn, { box, under });
  el("talk").append(box, under);
  paint(turn);
}

// Show a turn as it is now: its text, and under it what can be done with it.
function paint(turn) {
  const view = views.get(turn);
  if (!view) return;
  const open = answer !== null && answer.turn === turn;
  view.box.className = "turn " + turn.role + (open ? " open" : "");
  view.under.className = turn.role === "user" ? "under user-side" : "under";
  if (turn.role === "user") view.box.textContent = turn.content;
  else view.box.replaceChildren(...reasoning(turn, open), ...renderMarkdown(turn.content));
  const note = element("span", turn.note ?? "");
  note.className = turn.bad ? "note bad" : "note";
  const actions = [];
  if (turn.content) actions.push(button("Copy", where => copyText(turn.content, where)));
  if (turn.role === "user") actions.push(button("Edit", () => edit(turn)));
  else if (turn === current.turns.at(-1)) actions.push(button("Regenerate", () => regenerate(turn)));
  view.under.replaceChildren(note, ...(open ? [] : actions));
}

function reasoning(turn, open) {
  if (!turn.reasoning) return [];
  const details = element("details", element("summary", "Thinking"), turn.reasoning);
  details.open = open && !turn.content;
  return [details];
}

function toEnd(always) {
  const talk = el("talk");
  if (always || talk.scrollHeight - talk.scrollTop - talk.clientHeight < 120) talk.scrollTop = talk.scrollHeight;
}

// --- the request ---

function headers(more) {
  const key = el("key").value;
  return Object.assign(key ? { Authorization: "Bearer " + key } : {}, more);
}

function options() {
  const given = {};
  for (const name of ["temperature", "max_tokens", "seed"]) {
    const text = el(name).value.trim();
    if (text === "") continue;
    if (!/^-?\d+(\.\d+)?$/.test(text)) throw new Error(name + ": " + text + " is not a number");
    given[name] = text;   // sent as typed: a 64-bit seed does not fit a JavaScript number
  }
  return given;
}

function body(turns) {
  const system = el("system").value.trim();
  const messages = turns.map(({ role, content }) => ({ role, content }));
  if (system) messages.unshift({ role: "system", content: system });
  const rest = JSON.stringify({ messages, stream: true, stream_options: { include_usage: true } });
  const numbers = Object.entries(options()).map(([name, text]) => `,"${name}":${text}`).join("");
  return rest.slice(0, -1) + numbers + "}";
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts)
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield part.slice(6);
  }
}

async function problem(response) {
  if (response.status === 401) el("keyLabel").hidden = false;
  try { return (await response.json()).error.message; } catch { return "HTTP " + response.status; }
}

// Read an answer into `turn` as it comes. Throw an Error whose message says why it broke off.
async function stream(request, turn, found) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST", signal: answer.stop.signal, headers: headers({ "Content-Type": "application/json" }), body: request,
  });
  if (!response.ok) throw new Error(await problem(response));
  let waiting = false;
  for await (const line of events(response)) {
    const event = JSON.parse(line);
    if (event.error) throw new Error(event.error.message);
    if (event.usage) found.usage = event.usage;
    const choice = event.choices[0];
    if (!choice) continue;
    const { content, reasoning_content } = choice.delta;
    if (content || reasoning_content) {
      found.first ??= performance.now();
      turn.content += content ?? "";
      if (reasoning_content) turn.reasoning = (turn.reasoning ?? "") + reasoning_content;
      if (!waiting) requestAnimationFrame(() => { waiting = false; paint(turn); toEnd(false); });
      waiting = true;
    }
    if (choice.finish_reason) {
      found.reason = choice.finish_reason;
      found.seed = (line.match(/"seed":(-?\d+)/) || [])[1];
    }
  }
}

function figures(found, begin) {
  const notes = [], { usage, first } = found;
  if (usage) {
    const seconds = (performance.now() - (first ?? begin)) / 1000;
    notes.push(usage.completion_tokens + " tokens", (usage.completion_tokens / Math.max(seconds, 1e-3)).toFixed(1) + " tokens/s");
    if (usage.prompt_tokens_details.cached_tokens) notes.push(usage.prompt_tokens_details.cached_tokens + " prompt tokens cached");
  }
  if (first) notes.push("first token after " + Math.round(first - begin) + " ms");
  if (found.reason === "length") notes.push("stopped at max tokens");
  if (!found.reason) notes.push("stopped");
  if (found.seed) notes.push("seed " + found.seed);
  return notes.join(" · ");
}

// Answer the turns of a conversation. Return what went wrong before anything was answered, or null.
async function answerTurns(conversation) {
  const request = body(conversation.turns), turn = { role: "assistant", content: "" }, begin = performance.now(), found = {};
  conversation.turns.push(turn);
  answer = { stop: new AbortController(), turn };
  set("send", "Stop");
  if (conversation === current) { showTurn(turn); toEnd(true); }
  let failure = null;
  try { await stream(request, turn, found); } catch (error) {
    if (error.name !== "AbortError") failure = error.message;
  }
  answer = null;
  set("send", "Send");
  const answered = turn.content !== "" || turn.reasoning !== undefined || (failure === null && found.reason !== undefined);
  if (!answered) conversation.turns.pop();
  else if (failure === null) turn.note = figures(found, begin);
  else [turn.note, turn.bad] = [failure, true];
  if (answered) paint(turn);
  saveConversations();
  return answered ? null : failure ?? "stopped";
}

// --- what the user does ---

async function say(text) {
  body([]);   // a wrong number is said before anything changes
  const conversation = current, from = editing === null ? current.turns.length : current.turns.indexOf(editing);
  const replaced = conversation.turns.splice(from);
  conversation.turns.push({ role: "user", content: text });
  stopEditing();
  showConversation();
  touchConversation(conversation);
  const failure = await answerTurns(conversation);
  if (failure === null) return;
  conversation.turns.splice(from, 1, ...replaced);   // nothing was answered: the message goes back to where it can be sent again
  if (!conversation.turns.length) conversations.splice(conversations.indexOf(conversation), 1);
  saveConversations();
  listConversations();
  if (conversation !== current) return;
  showConversation();
  el("input").value = text + (el("input").value ? "\n" + el("input").value : "");
  if (failure !== "stopped") complain(failure);
}

async function regenerate(turn) {
  if (answer) return;
  body([]);
  const conversation = current, from = conversation.turns.indexOf(turn), replaced = conversation.turns.splice(from);
  showConversation();
  const failure = await answerTurns(conversation);
  if (failure === null) return;
  conversation.turns.push(...replaced);   // the old answer stays
  saveConversations();
  if (conversation !== current) return;
  showConversation();
  if (failure !== "stopped") complain(failure);
}

function complain(text) {
  const note = element("p", text);
  note.className = "note bad";
  note.setAttribute("role", "alert");
  el("talk").append(note);
  toEnd(true);
}

function edit(turn) {
  if (answer) return;
  editing = turn;
  el("editing").hidden = false;
  el("input").value = turn.content;
  el("input").focus();
}

function stopEditing() {
  editing = null;
  el("editing").hidden = true;
  el("input").value = "";
}

el("form").onsubmit = event => {
  event.preventDefault();
  if (answer) return answer.stop.abort();
  const text = el("input").value.trim();
  if (text) say(text).catch(error => complain(error.message));
};
el("input").onkeydown = event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); if (!answer) el("form").requestSubmit(); }
  if (event.key === "Escape" && editing !== null) stopEditing();
};
el("keep").onclick = stopEditing;
el("new").onclick = () => { newConversation(); el("input").focus(); };
el("menu").onclick = () => showSide(el("menu").getAttribute("aria-expanded") !== "true");
newConversation();
