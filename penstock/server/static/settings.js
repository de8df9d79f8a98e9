// The form of settings: every parameter of the server's chat requests. Where it is empty, the model's default applies.

import { button, element, find } from "./dom.js";
import { listSettings } from "./api.js";

const STORE = "penstock.settings";
const FIRST = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed", "stop"];
const TEMPLATE_HELP = 'variables of the chat template, like {"enable_thinking": false}';
const MORE = [{ name: "chat_template_kwargs", kind: "json", default: null, help: TEMPLATE_HELP }];
const NUMBER = /^-?\d+(\.\d+)?(e-?\d+)?$/i;
let settings = [], values = readValues();   // name -> what was typed

function readValues() {
  try { return { ...JSON.parse(localStorage.getItem(STORE) ?? "{}") }; } catch { return {}; }
}

// The settings that are not empty, as [name, JSON]. Throw an Error for one that cannot be sent.
export function requestFields() {
  const given = settings.filter(({ name }) => values[name]);
  return given.map(setting => [setting.name, toJson(setting, values[setting.name].trim())]);
}

function toJson({ name, kind, low, high }, text) {
  if (kind === "flag") return text;
  if (kind === "texts" && text[0] !== "[") return JSON.stringify(text.split("\n").filter(line => line !== ""));
  if (kind === "texts" || kind === "json") {
    try { JSON.parse(text); } catch { throw new Error(`${name}: ${text} is not JSON`); }
    return text;
  }
  if (!NUMBER.test(text)) throw new Error(`${name}: ${text} is not a number`);
  const isAllowed = low === undefined || (Number(text) >= low && Number(text) <= high);
  if (!isAllowed) throw new Error(`${name}: must be from ${low} to ${high}, not ${text}`);
  return text;   // as typed
}

export const maxTokens = () => (values.max_tokens ? Number(values.max_tokens) : undefined);
export const systemMessage = () => find("system").value.trim();

function set(name, text) {
  if (text.trim()) values[name] = text; else delete values[name];
  localStorage.setItem(STORE, JSON.stringify(values));
}

// Ask the server for a model's settings, and show them.
export async function loadSettings(model) {
  settings = [...await listSettings(model), ...MORE];
  const first = FIRST.map(name => settings.find(setting => setting.name === name)).filter(Boolean);
  const rest = settings.filter(setting => !first.includes(setting));
  rest.sort((one, other) => (one.name < other.name ? -1 : 1));
  const open = rest.some(({ name }) => values[name]);
  const more = element("details", { open }, element("summary", {}, "More parameters"), ...rest.map(field));
  const reset = button("Use the model's defaults", () => {
    for (const { name } of settings) set(name, "");
    loadSettings(model);
  });
  find("settings").replaceChildren(...first.map(field), more, reset);
}

function field(setting) {
  const { name, kind } = setting, value = values[name] ?? "";
  const help = element("small", { id: "help-" + name }, helpOf(setting));
  let input;
  if (kind === "flag") {
    const choices = [["", `default: ${setting.default ? "yes" : "no"}`], ["true", "yes"], ["false", "no"]];
    const options = choices.map(([at, text]) => element("option", { value: at, selected: at === value }, text));
    input = element("select", {}, ...options);
  } else if (kind === "integer" || kind === "number") {
    const inputMode = kind === "integer" ? "numeric" : "decimal";
    input = element("input", { value, inputMode, placeholder: shownDefault(setting) });
  } else {
    input = element("textarea", { value, rows: 1, placeholder: shownDefault(setting), spellcheck: false });
  }
  input.setAttribute("aria-describedby", help.id);
  input.id = "setting-" + name;
  input.onchange = () => {
    set(name, input.value);
    check(setting, input);
  };
  check(setting, input);
  return element("div", { className: "setting" }, element("label", { htmlFor: input.id }, name), input, help);
}

function check(setting, input) {
  let problem = "";
  try { if (input.value.trim()) toJson(setting, input.value.trim()); } catch (error) { problem = error.message; }
  input.setCustomValidity(problem);
  input.setAttribute("aria-invalid", problem !== "");
  document.getElementById("help-" + setting.name)?.replaceChildren(problem || helpOf(setting));
}

const MORE_HELP = { texts: "; one per line, or a JSON list", json: "; JSON" };

function helpOf({ kind, help }) {
  return help.replace(" (repeatable)", "") + (MORE_HELP[kind] ?? "");
}

function shownDefault({ name, default: value }) {
  if (name === "max_tokens" && value === null) return "no limit";
  if (name === "seed" && value === null) return "random";
  if (value === null || value?.length === 0) return "none";
  return Array.isArray(value) ? value.map(one => JSON.stringify(one)).join(" ") : String(value);
}

export function startSettings() {
  find("system").value = values[" system"] ?? "";   // no parameter has a name like this
  find("system").onchange = () => set(" system", find("system").value);
}
