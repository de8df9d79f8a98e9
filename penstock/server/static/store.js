// The conversations, kept in this browser's IndexedDB and told to other tabs. Without it they last as long as the tab.

import { fromTurns } from "./conversation.js";

const NAME = "penstock", TABLE = "conversations", OLD = "penstock.conversations";
const tabs = new BroadcastChannel(NAME);
let database = null;

const done = request => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

function table(mode) { return database.transaction(TABLE, mode).objectStore(TABLE); }

// Read all conversations, newest first. Return null if this browser keeps none.
export async function openStore() {
  try {
    const opening = indexedDB.open(NAME, 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore(TABLE, { keyPath: "id" });
    database = await done(opening);
  } catch { return null; }
  await takeOver();
  const found = await done(table("readonly").getAll());
  return found.sort((one, other) => other.updated - one.updated);
}

// Take the conversations over that an earlier version of the page kept elsewhere.
async function takeOver() {
  const old = localStorage.getItem(OLD);
  if (old === null) return;
  const isWhole = one => typeof one?.id === "string" && Array.isArray(one.turns);
  let found = [];
  try { found = JSON.parse(old).filter(isWhole); } catch { found = []; }
  for (const [at, one] of found.entries()) {
    await done(table("readwrite").put({ ...fromTurns(one), updated: Date.now() - at }));
  }
  localStorage.removeItem(OLD);
}

// Keep a conversation. Throw if the store is full.
export async function keep(conversation) {
  if (database) await done(table("readwrite").put(conversation));
  tabs.postMessage(conversation.id);
}

export async function forget(id) {
  if (database) await done(table("readwrite").delete(id));
  tabs.postMessage(id);
}

// Call `changed(id, conversation)` when another tab has kept a conversation, or forgotten it (then it is undefined).
export function onChange(changed) {
  tabs.onmessage = async ({ data: id }) => changed(id, database ? await done(table("readonly").get(id)) : undefined);
}
