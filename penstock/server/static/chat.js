// The open conversation: sending, answering, editing, answering again.

import { figures, isFull, readAnswer } from "./answer.js";
import { messagesToLeaveOut } from "./context.js";
import { addMessage, branch, contentFor, newConversation, removeMessage, showBranch, titleOf } from "./conversation.js";
import { announce, find, notify } from "./dom.js";
import { model } from "./engine.js";
import { attached, setAttached } from "./files.js";
import { dropConversation, markOpen, touchConversation } from "./list.js";
import { maxTokens, requestFields, systemMessage } from "./settings.js";
import { complain, paintMessage, scrollToEnd, showTalk } from "./talk.js";

const KEEP_EVERY_MS = 2000;   // of an answer that is being written, so that a reload does not lose it
const DRAFT = "penstock.draft", ONE_ANSWER = "An answer is being written: stop it first.";
let current = newConversation();
let answering = null;   // {conversation, message, stop} of the answer in progress
let editing = null;     // the message of `current` whose text is in the box

const actions = { edit, answer, regenerate, proceed, show: showVersion };
const box = () => find("input");

// --- what is shown ---

export const openConversation = () => current;

export function open(conversation, { remember = true } = {}) {
  current = conversation;
  stopEditing({ keepText: true });
  const address = conversation.messages.length ? "#" + conversation.id : location.pathname + location.search;
  if (remember) history.pushState(null, "", address);
  show();
}

export function startNew() {
  open(newConversation());
  box().focus();
}

function show() {
  showTalk(current, actions, answering?.conversation === current ? answering.message.id : undefined);
  markOpen(current.id);
}

function paint(message) {
  const isOpen = answering?.message === message;
  if (answering === null || isOpen) paintMessage(current, message, actions, isOpen ? message.id : undefined);
}

function showVersion(message) {
  showBranch(current, message);
  touchConversation(current, { isNewer: false });
  show();
}

// --- answering ---

// Answer a message: with a new one, or by continuing `answer`. Return what went wrong if nothing was answered, or null.
async function answerTo(conversation, asked, answer) {
  const continues = answer !== undefined;
  const message = answer ?? addMessage(conversation, asked.id, "assistant", "", { isCut: true });
  answering = { conversation, message, stop: new AbortController() };
  find("send").textContent = "Stop";
  announce("The model is answering.");
  if (conversation === current) show();
  let found = {}, failure = null;
  const before = message.content;
  try {
    found = await request(conversation, message, continues);
    if (found.reason === undefined) failure = "The connection ended before the answer did.";
  } catch (error) {
    if (error.name !== "AbortError") failure = error.message;
  }
  answering = null;
  find("send").textContent = "Send";
  const isAnswered = message.content !== before || message.reasoning !== undefined || found.reason !== undefined;
  if (isAnswered) finish(message, found, failure);
  else if (!continues) removeMessage(conversation, message);
  if (isAnswered) touchConversation(conversation);
  if (conversation === current && isAnswered) show();
  return isAnswered ? null : failure ?? "stopped";
}

function finish(message, found, failure) {
  message.note = failure ?? figures(found, model.context);
  message.bad = failure !== null;
  message.isCut = found.reason !== "stop" && !isFull(found.usage, model.context);   // can be continued
  announce(failure ?? "The answer is complete.");
}

async function request(conversation, message, continues) {
  const path = branch({ ...conversation, leaf: continues ? message.id : message.parent });
  const system = systemMessage() ? [{ role: "system", content: systemMessage() }] : [];
  const messages = path.map(one => ({ role: one.role, content: contentFor(one) }));
  const fields = [...requestFields()];
  if (continues) fields.push(["continue_final_message", "true"], ["add_generation_prompt", "false"]);
  let isScheduled = false, lastKept = 0;
  const changed = () => {
    if (Date.now() - lastKept > KEEP_EVERY_MS) {
      lastKept = Date.now();
      touchConversation(conversation);
    }
    if (!isScheduled) requestAnimationFrame(() => { isScheduled = false; paint(message); scrollToEnd(false); });
    isScheduled = true;
  };
  const { signal } = answering.stop;
  for (let mustShorten = false; ; mustShorten = true) {
    const limits = { model, maxTokens: maxTokens(), mustShorten };
    const leftOut = model.context ? await messagesToLeaveOut(system, messages, limits, signal) : 0;
    if (leftOut) message.leftOut = leftOut; else delete message.leftOut;
    if (leftOut && conversation === current) show();
    try {
      return await readAnswer([...system, ...messages.slice(leftOut)], model.name, fields, message, changed, signal);
    } catch (error) {
      if (error.code !== "context_length_exceeded" || mustShorten || messages.length < 2 || !model.context) throw error;
    }
  }
}

// --- what the user does ---

async function say(text, files) {
  requestFields();   // a wrong setting is said before anything changes
  const conversation = current, before = current.leaf, edited = editing;
  const parent = edited ? edited.parent : before;
  const asked = addMessage(conversation, parent, "user", text, files.length ? { files } : {});
  conversation.title ||= titleOf(text || files[0].name);
  stopEditing();
  touchConversation(conversation);
  history.replaceState(null, "", "#" + conversation.id);
  const failure = await answerTo(conversation, asked);
  if (failure === null) return;
  removeMessage(conversation, asked);   // nothing was answered: the message goes back to where it can be sent again
  conversation.leaf = before;
  if (conversation.messages.length) touchConversation(conversation); else dropConversation(conversation);
  if (conversation !== current) return;
  show();
  if (edited && !editing) edit(edited);
  setText(text + (box().value && !edited ? "\n" + box().value : ""));
  setAttached(edited ? files : [...files, ...attached()]);
  if (failure !== "stopped") complain(failure);
}

async function again(asked, answer) {
  if (answering) return notify(ONE_ANSWER);
  const conversation = current, before = conversation.leaf;
  try { requestFields(); } catch (error) { return complain(error.message); }
  const failure = await answerTo(conversation, asked, answer);
  if (failure === null) return;
  conversation.leaf = before;   // the old answer stays
  if (conversation !== current) return;
  show();
  if (failure !== "stopped") complain(failure);
}

const askedBy = message => current.messages.find(other => other.id === message.parent);

function answer(message) { return again(message); }
function regenerate(message) { return again(askedBy(message)); }
function proceed(message) { return again(askedBy(message), message); }

function edit(message) {
  if (answering) return notify(ONE_ANSWER);
  editing = message;
  find("editing").hidden = false;
  setText(message.content);
  setAttached(message.files ?? []);
  box().focus();
}

function stopEditing({ keepText = false } = {}) {
  if (editing === null && keepText) return;
  editing = null;
  find("editing").hidden = true;
  setText("");
  setAttached([]);
}

function setText(text) {
  box().value = text;
  sessionStorage.setItem(DRAFT, text);
}

export function stop() { answering?.stop.abort(); }

// Esc: end what is going on. Return whether there was anything.
export function escape() {
  const something = editing !== null || answering !== null;
  if (editing !== null) stopEditing(); else stop();
  return something;
}

function send() {
  const text = box().value.trim();
  if (text || attached().length) say(text, attached()).catch(error => complain(error.message));
}

// Another tab has changed a conversation.
export function changedElsewhere(id, conversation) {
  if (id !== current.id || answering?.conversation === current) return;
  current = conversation ?? newConversation();
  stopEditing({ keepText: true });
  show();
}

export function startChat() {
  box().value = sessionStorage.getItem(DRAFT) ?? "";
  find("form").onsubmit = event => {
    event.preventDefault();
    if (answering) stop(); else send();
  };
  box().oninput = () => sessionStorage.setItem(DRAFT, box().value);
  box().onkeydown = event => {
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      if (!answering) send();
    } else if (event.key === "ArrowUp" && !box().value) {
      const last = branch(current).findLast(message => message.role === "user");
      if (last) { event.preventDefault(); edit(last); }
    }
  };
  find("keep").onclick = () => stopEditing();
}
