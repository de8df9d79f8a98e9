// The conversations, kept in this browser: {id, title, turns: [{role, content, reasoning?, note?, bad?}]}, newest first.

const STORE = "penstock.conversations", MAX_CONVERSATIONS = 50, TITLE_LENGTH = 60;
const conversations = loadConversations();
let current = null;

function loadConversations() {
  try {
    const found = JSON.parse(localStorage.getItem(STORE) ?? "[]");
    return Array.isArray(found) ? found.filter(one => one && typeof one.id === "string" && Array.isArray(one.turns)) : [];
  } catch { return []; }
}

function saveConversations() {
  conversations.splice(MAX_CONVERSATIONS);
  for (;;) {
    try { return localStorage.setItem(STORE, JSON.stringify(conversations)); } catch {
      if (conversations.length < 2) return el("kept").textContent = "This browser keeps no conversations.";
      conversations.pop();   // the store is full: the oldest goes
    }
  }
}

// Called when a message is sent: a conversation is listed from its first message on, and moves to the top.
function touchConversation(conversation) {
  const at = conversations.indexOf(conversation);
  if (at >= 0) conversations.splice(at, 1);
  conversation.title = conversation.turns[0].content.trim().replace(/\s+/g, " ").slice(0, TITLE_LENGTH);
  conversations.unshift(conversation);
  saveConversations();
  listConversations();
}

function deleteConversation(conversation) {
  if (!confirm("Delete “" + conversation.title + "”?")) return;
  conversations.splice(conversations.indexOf(conversation), 1);
  saveConversations();
  if (conversation === current) newConversation(); else listConversations();
}

function newConversation() { openConversation({ id: Date.now() + "-" + Math.random(), title: "", turns: [] }); }

function openConversation(conversation) {
  current = conversation;
  stopEditing();
  showConversation();
  listConversations();
  showSide(false);
}

function listConversations() {
  el("conversations").replaceChildren(...conversations.map(conversation => {
    const item = element("li", button(conversation.title || "…", () => openConversation(conversation)),
      button("Delete", () => deleteConversation(conversation)));
    if (conversation === current) item.className = "current";
    return item;
  }));
}

// Another tab saved: show its conversations too, and keep the open one.
addEventListener("storage", event => {
  if (event.key !== STORE) return;
  const found = loadConversations().map(one => (one.id === current.id ? current : one));
  conversations.splice(0, conversations.length, ...found);
  listConversations();
});
