// The server's routes. Paths are relative, so that the page also works below another path, behind a proxy.

import { element } from "./dom.js";

const KEY = "penstock.key";
let key = sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "";
export const events = new EventTarget();   // "key-needed": a route has answered that the key is missing or wrong

export class ServerError extends Error {
  constructor(status, error) {
    super(error?.message ?? "HTTP " + status);
    this.status = status;
    this.code = error?.code;
  }
}

export const hasKey = () => key !== "";

export function setKey(text, remember) {
  key = text;
  for (const storage of [sessionStorage, localStorage]) storage.removeItem(KEY);
  if (text) (remember ? localStorage : sessionStorage).setItem(KEY, text);
}

async function request(path, { body, signal } = {}) {
  const headers = key ? { Authorization: "Bearer " + key } : {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(path, { method: body === undefined ? "GET" : "POST", headers, body, signal });
  if (response.ok) return response;
  if (response.status === 401) events.dispatchEvent(new Event("key-needed"));
  let error;
  try { ({ error } = await response.json()); } catch { error = undefined; }   // a proxy's page, perhaps
  throw new ServerError(response.status, error);
}

const json = async (path, options) => (await request(path, options)).json();

export const listModels = async () => (await json("v1/models")).data;
const of = (path, model) => (model ? `${path}?${new URLSearchParams({ model })}` : path);   // without one: the first
export const readStatus = model => json(of("status", model));
export const listSettings = async model => (await json(of("page/settings", model))).data;
export const countTokens = async (messages, model, signal) =>
  (await json("tokenize", { body: JSON.stringify({ model, messages, add_generation_prompt: true }), signal })).count;

// The chunks of a chat completion, each with the text that it was read from. `body` is JSON.
export async function* streamChat(body, signal) {
  const response = await request("v1/chat/completions", { body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ") || part === "data: [DONE]") continue;
      const chunk = JSON.parse(part.slice(6));
      if (chunk.error) throw new ServerError(response.status, chunk.error);
      yield [chunk, part];
    }
  }
}

export function download(name, text) {
  const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  element("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}
