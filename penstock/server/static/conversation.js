// A conversation is a tree of messages, because a message may be edited and answered again without losing anything:
//   {id, title, created, updated, leaf, messages: [{id, parent, role, content, ...}]}
// `leaf` is the last message of the branch that is shown. A message may have `reasoning`, `files` [{name, text}], a
// `note` below it (`bad` if it says what went wrong), `isCut` if it can be continued, and `leftOut`: how many messages
// before it the model has not seen.

export const TITLE_LENGTH = 60;

// Also where crypto.randomUUID does not exist: on pages without https.
export function newId() {
  return [...crypto.getRandomValues(new Uint8Array(12))].map(byte => byte.toString(16).padStart(2, "0")).join("");
}

export function newConversation() {
  return { id: newId(), title: "", created: Date.now(), updated: Date.now(), leaf: null, messages: [] };
}

export function addMessage(conversation, parent, role, content, more = {}) {
  const message = { id: newId(), parent, role, content, ...more };
  conversation.messages.push(message);
  conversation.leaf = message.id;
  return message;
}

// Remove a message that has no answers.
export function removeMessage(conversation, message) {
  conversation.messages.splice(conversation.messages.indexOf(message), 1);
}

// The messages of the shown branch, first to last.
export function branch(conversation) {
  const byId = new Map(conversation.messages.map(message => [message.id, message]));
  const found = [];
  for (let at = byId.get(conversation.leaf); at && !found.includes(at); at = byId.get(at.parent)) found.unshift(at);
  return found;
}

// The versions of a message, itself included, oldest first.
export function siblings(conversation, message) {
  return conversation.messages.filter(other => other.parent === message.parent);
}

// Show the branch on which a message lies, down to the newest answer below it.
export function showBranch(conversation, message) {
  let at = message;
  for (;;) {
    const next = conversation.messages.findLast(other => other.parent === at.id);
    if (!next) break;
    at = next;
  }
  conversation.leaf = at.id;
}

export const titleOf = text => text.trim().replace(/\s+/g, " ").slice(0, TITLE_LENGTH);

// What the model reads: the files in front of the text, each in a fence longer than any in it.
export function contentFor({ content, files }) {
  const shown = (files ?? []).map(({ name, text }) => {
    const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map(run => run.length));
    const fence = "`".repeat(longest + 1);
    return `File ${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}\n\n`;
  });
  return shown.join("") + content;
}

// The conversation's text that matches a search, or null.
export function matching(conversation, words) {
  const texts = [conversation.title, ...conversation.messages.map(message => message.content)];
  const found = texts.find(text => words.every(word => text.toLowerCase().includes(word)));
  if (found === undefined) return null;
  const at = found.toLowerCase().indexOf(words[0] ?? "");
  return found.slice(Math.max(0, at - 20), at + 60).replace(/\s+/g, " ");
}

// --- files of conversations ---

const FORMAT = "penstock.conversations";

export const exported = conversations => JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);

// Read the conversations of an exported file. Throw an Error that says what is wrong with it.
export function imported(text) {
  let found;
  try { found = JSON.parse(text); } catch { throw new Error("it is not JSON"); }
  if (found?.format !== FORMAT || found.version !== 1) throw new Error("it was not exported from this page");
  const isWhole = Array.isArray(found.conversations) && found.conversations.every(one => Array.isArray(one?.messages));
  if (!isWhole) throw new Error("a conversation has no messages");
  return found.conversations.map(readConversation);
}

const isText = value => typeof value === "string";

function readConversation(found) {
  const made = { ...newConversation(), id: String(found.id), title: titleOf(String(found.title ?? "")) };
  for (const field of ["created", "updated"]) if (Number.isFinite(found[field])) made[field] = found[field];
  const ids = new Set();
  for (const message of found.messages) {
    const { id, parent, role, content, reasoning, note, bad, isCut, leftOut, files } = message ?? {};
    const isKnown = isText(id) && isText(content) && ["user", "assistant"].includes(role);
    if (!isKnown) throw new Error("a message is broken");
    if (parent !== null && !ids.has(parent)) throw new Error("a message answers one that is not there");
    ids.add(id);
    const more = Object.entries({ reasoning, note }).filter(([, value]) => isText(value));
    const kept = (Array.isArray(files) ? files : []).filter(file => isText(file?.name) && isText(file?.text));
    const read = { id, parent, role, content, ...Object.fromEntries(more) };
    if (kept.length) read.files = kept.map(({ name, text }) => ({ name, text }));
    for (const [name, value] of Object.entries({ bad, isCut })) if (value === true) read[name] = true;
    if (Number.isInteger(leftOut)) read.leftOut = leftOut;
    made.messages.push(read);
  }
  made.leaf = ids.has(found.leaf) ? found.leaf : made.messages.at(-1)?.id ?? null;
  return made;
}

// Conversations as an earlier version of the page kept them: {id, title, turns}.
export function fromTurns({ id, title, turns }) {
  const made = { ...newConversation(), id, title: titleOf(title ?? "") };
  for (const { role, content, reasoning, note } of turns) {
    addMessage(made, made.leaf, role, content, { ...(reasoning && { reasoning }), ...(note && { note }) });
  }
  return made;
}
