// The page: what belongs together is put together here, and the keyboard.

import { changedElsewhere, escape, open, openConversation, startChat, startNew } from "./chat.js";
import { newConversation } from "./conversation.js";
import { find } from "./dom.js";
import { startEngine, watch } from "./engine.js";
import { startFiles } from "./files.js";
import { findConversation, startList } from "./list.js";
import { startLogin } from "./login.js";
import { loadSettings, startSettings } from "./settings.js";

// --- the two panels, which lie over the conversation on a small screen ---

const PANELS = { conversations: "side", settings: "panel" };

function showPanel(button, shown) {
  const panel = find(PANELS[button]);
  if (shown) for (const other of Object.keys(PANELS)) if (other !== button && isSmall()) showPanel(other, false);
  panel.classList.toggle("shown", shown);
  panel.classList.toggle("hidden", !shown);
  find("show-" + button).setAttribute("aria-expanded", shown);
}

const isSmall = () => matchMedia("(max-width: 900px)").matches;
const togglePanel = button => showPanel(button, find("show-" + button).getAttribute("aria-expanded") !== "true");

for (const button of Object.keys(PANELS)) {
  showPanel(button, !isSmall() && (button === "conversations" || matchMedia("(min-width: 1200px)").matches));
  find("show-" + button).onclick = () => togglePanel(button);
}

// --- conversations ---

function openListed(conversation) {
  open(conversation ?? newConversation());
  if (isSmall()) showPanel("conversations", false);
}

function openAddressed() {
  const wanted = findConversation(location.hash.slice(1));
  if (wanted !== openConversation()) open(wanted ?? newConversation(), { remember: false });
}

find("new").onclick = () => { startNew(); if (isSmall()) showPanel("conversations", false); };
addEventListener("popstate", openAddressed);

// --- the keyboard ---

const SHORTCUTS = {
  k: () => { showPanel("conversations", true); find("search").select(); },
  ",": () => togglePanel("settings"),
  "/": () => find("shortcuts").showModal(),
};

addEventListener("keydown", event => {
  if (document.querySelector("dialog[open]")) return;
  const key = event.key.toLowerCase(), control = event.ctrlKey || event.metaKey;
  if (control && event.shiftKey && key === "o") {
    event.preventDefault();
    startNew();
  } else if (control && !event.shiftKey && !event.altKey && SHORTCUTS[key]) {
    event.preventDefault();
    SHORTCUTS[key]();
  } else if (event.key === "Escape") {
    if (!escape() && isSmall()) for (const button of Object.keys(PANELS)) showPanel(button, false);
    find("input").focus();
  }
});
find("show-shortcuts").onclick = SHORTCUTS["/"];
find("close-shortcuts").onclick = () => find("shortcuts").close();

// --- the beginning ---

startLogin(watch);
startSettings();
startFiles();
startChat();
startEngine(loadSettings);
await startList({ open: openListed, changed: changedElsewhere });
openAddressed();
document.body.dataset.ready = "true";
