// Text files beside a message: dropped, pasted or chosen. Their text goes into the message; nothing is uploaded before.

import { button, element, find, notify } from "./dom.js";

const MAX_BYTES = 2 ** 21;
let files = [];   // [{name, text}]

export const attached = () => files;

export function setAttached(some) {
  files = [...some];
  find("files").replaceChildren(...files.map(file => element("li", {}, `${file.name} (${file.text.length} characters) `,
    button("×", () => setAttached(files.filter(other => other !== file)), { "aria-label": `Remove ${file.name}` }))));
}

export async function attach(some) {
  for (const file of some) {
    try { setAttached([...files, { name: file.name, text: await readText(file) }]); } catch (error) {
      notify(`${file.name} was not added: ${error.message}`);
    }
  }
  find("input").focus();
}

async function readText(file) {
  if (file.size > MAX_BYTES) throw new Error(`it is larger than ${MAX_BYTES / 2 ** 20} MiB`);
  const bytes = await file.arrayBuffer();
  let text;
  try { text = new TextDecoder("utf-8", { fatal: true }).decode(bytes); } catch { text = "\0"; }
  if (text.includes("\0")) throw new Error("it is not a text in UTF-8");
  if (!text.trim()) throw new Error("it is empty");
  return text;
}

export function startFiles() {
  find("attach").onclick = () => find("attach-file").click();
  find("attach-file").onchange = ({ target }) => { attach([...target.files]); target.value = ""; };
  const hasFiles = event => [...event.dataTransfer?.types ?? []].includes("Files");
  addEventListener("dragover", event => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    document.body.classList.add("dragging");
  });
  addEventListener("dragleave", event => { if (!event.relatedTarget) document.body.classList.remove("dragging"); });
  addEventListener("drop", event => {
    document.body.classList.remove("dragging");
    if (!hasFiles(event)) return;
    event.preventDefault();
    attach([...event.dataTransfer.files]);
  });
  find("input").addEventListener("paste", event => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    attach([...event.clipboardData.files]);
  });
}
