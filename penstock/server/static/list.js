// The list of conversations: search, names, export and import.

import { download } from "./api.js";
import { exported, imported, matching, newId, titleOf } from "./conversation.js";
import { button, element, find, notify } from "./dom.js";
import { forget, keep, onChange, openStore } from "./store.js";

let conversations = [], openId = null, open = () => {};
const deleted = new WeakSet();   // an answer to one of them may still be on its way

// Read the conversations. `act` has `open(conversation)`, and `changed(id, conversation)` for what another tab does.
export async function startList(act) {
  open = act.open;
  const found = await openStore();
  conversations = found ?? [];
  if (found === null) find("kept").textContent = "This browser keeps no conversations: they last as long as this page.";
  onChange((id, conversation) => {
    conversations = conversations.filter(one => one.id !== id);
    if (conversation) conversations.push(conversation);
    act.changed(id, conversation);
    list();
  });
  find("search").oninput = list;
  find("export-all").onclick = () => save(conversations, "penstock-conversations");
  find("import").onclick = () => find("import-file").click();
  find("import-file").onchange = ({ target }) => { importFiles([...target.files]); target.value = ""; };
  list();
}

export const findConversation = id => conversations.find(one => one.id === id);

export function markOpen(id) {
  openId = id;
  list();
}

// A conversation has changed: keep it, and list it. With isNewer it moves to the top.
export function touchConversation(conversation, { isNewer = true } = {}) {
  if (deleted.has(conversation)) return;
  if (isNewer) conversation.updated = Date.now();
  if (!conversations.includes(conversation)) {
    conversations = [...conversations.filter(one => one.id !== conversation.id), conversation];
  }
  keep(conversation).catch(error => notify(`This browser could not keep the conversation: ${error.message}`));
  list();
}

export function dropConversation(conversation) {
  conversations = conversations.filter(one => one !== conversation);
  forget(conversation.id);
  list();
}

function list() {
  const words = find("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  conversations.sort((one, other) => other.updated - one.updated);
  const shown = conversations.map(one => [one, matching(one, words)]).filter(([, text]) => text !== null);
  find("conversations").replaceChildren(...shown.map(([one, text]) => entry(one, words.length ? text : "")));
  find("found").textContent = words.length ? `${shown.length} of ${conversations.length} conversations` : "";
}

function entry(conversation, text) {
  const isOpen = conversation.id === openId;
  const name = button(conversation.title || "…", () => open(conversation), { className: "plain name" });
  if (isOpen) name.setAttribute("aria-current", "true");
  if (text) name.append(element("small", {}, text));
  const item = element("li", { className: isOpen ? "current" : "" }, name);
  if (isOpen) {
    item.append(element("div", { className: "actions" },
      button("Rename", () => rename(conversation)),
      button("Export", () => save([conversation], fileName(conversation.title))),
      button("Delete", () => remove(conversation))));
  }
  return item;
}

function rename(conversation) {
  const title = prompt("Name of the conversation", conversation.title);
  if (title === null || !titleOf(title)) return;
  conversation.title = titleOf(title);
  touchConversation(conversation, { isNewer: false });
}

function remove(conversation) {
  if (!confirm(`Delete “${conversation.title}”?`)) return;
  deleted.add(conversation);
  dropConversation(conversation);
  open(null);
}

const fileName = title => title.replace(/[^\p{L}\p{N}]+/gu, "-") || "conversation";

function save(some, name) {
  if (some.length) download(name + ".json", exported(some)); else notify("There is no conversation yet.");
}

async function importFiles(files) {
  for (const file of files) {
    try {
      const found = imported(await file.text());
      for (const conversation of found) add(conversation);
      notify(`${file.name}: ${found.length} conversations`);
    } catch (error) { notify(`${file.name} was not imported: ${error.message}`); }
  }
  list();
}

// One that is here already, and differs, stays as it is beside the imported one.
function add(conversation) {
  const here = findConversation(conversation.id);
  if (here && exported(imported(exported([here]))[0].messages) === exported(conversation.messages)) return;
  touchConversation(here ? { ...conversation, id: newId() } : conversation, { isNewer: false });
}
