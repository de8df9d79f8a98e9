// Helpers for the document.

export const find = id => document.getElementById(id);

// Make an element. A property that elements do not have becomes an attribute, such as aria-label.
export function element(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in node) node[key] = value; else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

export function button(text, act, properties = {}) {
  const onclick = event => act(event.currentTarget);
  return element("button", { type: "button", className: "plain", onclick, ...properties }, text);
}

export async function copyText(text, where) {
  const label = where.textContent;
  try {
    await navigator.clipboard.writeText(text);
    where.textContent = "Copied";
  } catch { where.textContent = "Not allowed here"; }   // on pages without https, unless they are this machine's
  setTimeout(() => { where.textContent = label; }, 1200);
}

// Show a message for a while, and have it read out.
export function notify(text) {
  const note = element("p", {}, text);
  find("notes").append(note);
  setTimeout(() => note.remove(), 6000);
}

// Have something read out that is visible anyway.
export function announce(text) { find("announced").textContent = text; }
