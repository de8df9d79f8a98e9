// The messages of the open conversation as they are shown, and what can be done with each.

import { siblings, branch } from "./conversation.js";
import { button, copyText, element, find } from "./dom.js";
import { showMarkdown } from "./markdown.js";

const LEFT_OUT = "the model sees what is below";
const views = new Map();   // id of a message that is shown -> {box, text, under}

// Show a conversation. `actions` are functions of a message: edit, answer, regenerate, proceed, show; `open` is the id
// of the message that is being written.
export function showTalk(conversation, actions, open) {
  views.clear();
  const messages = branch(conversation);
  const hint = element("p", { className: "hint" }, "Send the model a message, or drop text files here.");
  find("talk").replaceChildren(...(messages.length ? [] : [hint]));
  const leftOut = messages.findLast(message => message.role === "assistant")?.leftOut;
  for (const [at, message] of messages.entries()) {
    if (leftOut && at === leftOut) find("talk").append(element("p", { className: "divider" }, LEFT_OUT));
    const box = element("article", { "aria-label": message.role === "user" ? "You" : "Model" }), under = element("div");
    const text = element("div", { className: "text" });
    views.set(message.id, { box, text, under });
    find("talk").append(box, under);
    paintMessage(conversation, message, actions, open);
  }
  scrollToEnd(true);
}

// Show a message as it is now.
export function paintMessage(conversation, message, actions, open) {
  const view = views.get(message.id);
  if (!view) return;
  const isOpen = message.id === open;
  view.box.className = "turn " + message.role + (isOpen ? " open" : "");
  if (message.role === "user") {
    view.text.textContent = message.content;
    view.box.replaceChildren(...(message.files ?? []).map(shownFile), view.text);
  } else {
    showReasoning(view, message, isOpen);
    showMarkdown(view.text, message.content);
  }
  view.under.className = "under " + message.role;
  const note = element("span", { className: message.bad ? "note bad" : "note" }, message.note ?? "");
  const possible = open ? [] : possibilities(conversation, message, actions);
  view.under.replaceChildren(note, element("span", { className: "actions" }, ...possible));
}

function shownFile({ name, text }) {
  return element("details", { className: "file" }, element("summary", {}, name), element("pre", { tabIndex: 0 }, text));
}

function showReasoning(view, message, isOpen) {
  if (!view.box.contains(view.text)) view.box.replaceChildren(view.text);
  if (!message.reasoning) return;
  if (!view.thinking) {
    view.thinking = element("div");
    const summary = element("summary", {}, "Thinking");
    view.details = element("details", { className: "thinking", open: isOpen }, summary, view.thinking);
    view.text.before(view.details);
  }
  if (message.content) view.details.open = view.details.open && view.toggled === true;
  view.details.querySelector("summary").onclick = () => { view.toggled = true; };
  view.thinking.textContent = message.reasoning;
}

function possibilities(conversation, message, actions) {
  const found = [];
  const others = siblings(conversation, message), at = others.indexOf(message);
  if (others.length > 1) {
    const step = (by, text, label) =>
      button(text, () => actions.show(others[at + by]), { disabled: !others[at + by], "aria-label": label });
    found.push(element("span", { className: "versions" }, step(-1, "‹", "Previous version"),
      ` ${at + 1} of ${others.length} `, step(1, "›", "Next version")));
  }
  if (message.content) found.push(button("Copy", where => copyText(message.content, where)));
  const isLast = message.id === conversation.leaf;
  if (message.role === "user") found.push(button("Edit", () => actions.edit(message)));
  else found.push(button("Regenerate", () => actions.regenerate(message)));
  const isUnanswered = message.role === "user" && isLast;   // after a reload
  if (isUnanswered) found.push(button("Answer", () => actions.answer(message)));
  if (message.isCut && isLast) found.push(button("Continue", () => actions.proceed(message)));
  return found;
}

// Show why a message was not answered.
export function complain(text) {
  find("talk").append(element("p", { className: "note bad", role: "alert" }, text));
  scrollToEnd(true);
}

// Follow the text as it grows, unless its reader has scrolled up.
export function scrollToEnd(always) {
  const talk = find("talk");
  if (always || talk.scrollHeight - talk.scrollTop - talk.clientHeight < 120) talk.scrollTop = talk.scrollHeight;
}
