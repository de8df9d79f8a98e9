// The form that asks for the API key, where the server has one.

import { events, hasKey, listModels, setKey } from "./api.js";
import { find } from "./dom.js";

// Call `entered` when the server has accepted a key.
export function startLogin(entered) {
  const dialog = find("login");
  events.addEventListener("key-needed", () => {
    find("logout").hidden = true;
    if (!dialog.open) dialog.showModal();
  });
  find("login-form").onsubmit = async event => {
    event.preventDefault();
    setKey(find("key").value.trim(), find("remember").checked);
    find("login-problem").textContent = "";
    try { await listModels(); } catch (error) {
      if (error.status === 401) return wrong();
      if (!error.status) return say("The server cannot be reached.");   // others are the engine's: the key is right
    }
    find("key").value = "";
    find("logout").hidden = false;
    dialog.close();
    entered();
  };
  dialog.oncancel = event => event.preventDefault();   // nothing can be done without the key
  find("logout").hidden = !hasKey();
  find("logout").onclick = () => {
    setKey("", false);
    location.reload();
  };
}

function wrong() {
  setKey("", false);
  say("The server does not know this key.");
}

function say(problem) {
  find("login-problem").textContent = problem;
  find("key").select();
}
