// Markdown as nodes. markdown-it writes HTML in which nothing of the text is markup, DOMPurify lets only the elements
// below through, and KaTeX builds the formulas from their text. Images are shown as links, so that nothing is loaded.

import markdownIt from "./vendor/markdown-it/markdown-it.esm.min.mjs";
import highlighter from "./vendor/highlight/highlight.min.js";
import "./vendor/dompurify/purify.min.js";
import { button, copyText, element } from "./dom.js";

const { DOMPurify } = globalThis;
const ALLOWED = {
  ALLOWED_TAGS: ("p br hr h1 h2 h3 h4 h5 h6 ul ol li blockquote pre code span div a em strong s " +
    "table thead tbody tr th td sub sup kbd mark").split(" "),
  ALLOWED_ATTR: ["href", "class", "start", "title"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const MAX_HIGHLIGHTED = 50000;   // characters of a code block; longer ones stay plain
const MAX_FORMULA = 5000;

const md = markdownIt({ html: false, linkify: true, breaks: true, highlight: highlighted });
md.linkify.set({ fuzzyLink: false, fuzzyEmail: false });   // README.md is a file, not a site
md.validateLink = address => /^(https?:\/\/|mailto:)/i.test(address);
md.inline.ruler.before("escape", "formula", formulaInText);
md.inline.ruler.before("html_inline", "known_tag", knownTag);
md.block.ruler.before("fence", "formula_block", formulaBlock, { alt: ["paragraph", "blockquote", "list"] });
md.core.ruler.after("inline", "tasks", markTasks);
md.renderer.rules.formula = (tokens, at) => formulaHtml("span", tokens[at]);
md.renderer.rules.formula_block = (tokens, at) => formulaHtml("div", tokens[at]);
md.renderer.rules.image = (tokens, at) => imageLink(tokens[at]);
for (const kind of ["th_open", "td_open"]) md.renderer.rules[kind] = alignedCell;

// Show a text in a box. Blocks that are shown already stay as they are, so that a text that grows can be selected.
const shownBlocks = new WeakMap();   // box -> [{html, nodes}]

export function showMarkdown(box, text) {
  const before = shownBlocks.get(box) ?? [];
  const blocks = toHtmlBlocks(text).map(html => ({ html, nodes: null }));
  let same = 0;
  while (same < before.length && same < blocks.length && before[same].html === blocks[same].html) {
    blocks[same].nodes = before[same].nodes;
    same += 1;
  }
  for (const block of before.slice(same)) for (const node of block.nodes) node.remove();
  for (const block of blocks.slice(same)) {
    block.nodes = [...toNodes(block.html).childNodes];
    box.append(...block.nodes);
  }
  shownBlocks.set(box, blocks);
}

// The HTML of each block at the top level. A text that the library cannot read is shown as it is.
export function toHtmlBlocks(text) {
  const env = {}, blocks = [];
  let tokens;
  try { tokens = md.parse(text, env); } catch { return ["<p>" + md.utils.escapeHtml(text) + "</p>"]; }
  let depth = 0, first = 0;
  for (const [at, token] of tokens.entries()) {
    depth += token.nesting;
    if (depth > 0) continue;
    blocks.push(md.renderer.render(tokens.slice(first, at + 1), md.options, env));
    first = at + 1;
  }
  return blocks;
}

function toNodes(html) {
  const nodes = DOMPurify.sanitize(html, ALLOWED);
  for (const link of nodes.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  for (const table of nodes.querySelectorAll("table")) {
    const frame = element("div", { className: "wide", tabIndex: 0, role: "group", "aria-label": "Table" });
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const pre of nodes.querySelectorAll("pre")) pre.replaceWith(codeBox(pre));
  const formulas = [...nodes.querySelectorAll(".formula")];
  if (formulas.length) showFormulas(formulas);
  return nodes;
}

// --- code ---

const seen = new Map();   // code blocks that were highlighted last: a growing answer has the same ones each time

function highlighted(source, language) {
  if (!highlighter.getLanguage(language) || source.length > MAX_HIGHLIGHTED) return "";   // then markdown-it escapes it
  const known = language + "\n" + source;
  if (!seen.has(known)) {
    if (seen.size >= 100) seen.delete(seen.keys().next().value);
    seen.set(known, highlighter.highlight(source, { language, ignoreIllegals: true }).value);
  }
  return seen.get(known);
}

function codeBox(pre) {
  const language = /language-(\S+)/.exec(pre.firstElementChild?.className ?? "")?.[1] ?? "";
  const copy = button("Copy", where => copyText(pre.textContent, where), { "aria-label": "Copy this code" });
  const box = element("div", { className: "code" }, element("div", {}, element("span", {}, language), copy));
  box.append(pre.cloneNode(true));
  box.lastChild.tabIndex = 0;   // can be scrolled with the keyboard
  return box;
}

// --- formulas: $x$, $$x$$, \(x\) and \[x\] ---

const MARKS = [["\\[", "\\]", true], ["\\(", "\\)", false], ["$$", "$$", true], ["$", "$", false]];

function formulaInText(state, silent) {
  const code = state.src.charCodeAt(state.pos);
  if (code !== 0x24 && code !== 0x5c) return false;
  for (const [open, close, display] of MARKS) {
    if (!state.src.startsWith(open, state.pos)) continue;
    const start = state.pos + open.length, end = endOfFormula(state, start, close);
    if (end < 0) continue;
    const source = state.src.slice(start, end);
    if (source.trim() === "" || source.length > MAX_FORMULA) continue;
    // "$5 and $6" are prices: a formula between single dollars has no space inside them, and no digit follows it
    if (open === "$" && (/^\s|\s$/.test(source) || /\d/.test(state.src[end + 1] ?? ""))) continue;
    if (!silent) Object.assign(state.push("formula", "", 0), { content: source, meta: display });
    state.pos = end + close.length;
    return true;
  }
  return false;
}

// Find the mark that closes a formula; -1 without one. What was searched in vain is not searched again.
function endOfFormula(state, start, close) {
  state.unclosed ??= {};
  if (state.unclosed[close] <= start) return -1;
  for (let end = state.src.indexOf(close, start); end >= 0; end = state.src.indexOf(close, end + 1)) {
    if (close[0] === "\\" || state.src[end - 1] !== "\\") return end;
  }
  state.unclosed[close] = start;
  return -1;
}

function formulaBlock(state, startLine, endLine, silent) {
  const line = number => state.src.slice(state.bMarks[number] + state.tShift[number], state.eMarks[number]);
  if (state.sCount[startLine] - state.blkIndent >= 4) return false;
  const first = line(startLine), mark = MARKS.find(([open, , display]) => display && first.startsWith(open));
  if (!mark) return false;
  const [open, close] = mark, lines = [first.slice(open.length)];
  let last = startLine;
  while (!lines.at(-1).includes(close)) {
    last += 1;
    if (last >= endLine || state.sCount[last] < state.blkIndent || lines.length > 200) return false;
    lines.push(line(last));
  }
  const text = lines.join("\n"), end = text.lastIndexOf(close);
  if (text.slice(end + close.length).trim() !== "" || text.indexOf(close) !== end) return false;   // text follows it
  if (text.slice(0, end).trim() === "") return false;
  if (silent) return true;
  Object.assign(state.push("formula_block", "", 0), { content: text.slice(0, end), meta: true, block: true });
  state.line = last + 1;
  return true;
}

const formulaHtml = (tag, token) =>
  `<${tag} class="formula${token.meta ? " display" : ""}">${md.utils.escapeHtml(token.content.trim())}</${tag}>`;

let katex = null;   // loaded with the first formula

async function showFormulas(nodes) {
  katex ??= import("./vendor/katex/katex.min.js").then(() => globalThis.katex);
  const { render } = await katex;
  for (const node of nodes) {
    const displayMode = node.classList.contains("display");
    const source = node.textContent;
    try { render(source, node, { displayMode, strict: false, maxSize: 20, maxExpand: 500 }); } catch {
      node.classList.add("wrong");
      node.textContent = source;
    }
    // the policy of the page forbids style attributes, but not what they say
    for (const styled of node.querySelectorAll("[style]")) styled.style.cssText = styled.getAttribute("style");
  }
}

// --- the rest ---

const TAG = /^<\/?(?:br|sub|sup|kbd|mark)\s*\/?>/i;   // in answers of many models, and harmless

function knownTag(state, silent) {
  if (state.src.charCodeAt(state.pos) !== 0x3c) return false;
  const found = TAG.exec(state.src.slice(state.pos, state.pos + 12));
  if (!found) return false;
  if (!silent) state.push("html_inline", "", 0).content = found[0];
  state.pos += found[0].length;
  return true;
}

function markTasks(state) {
  for (const [at, token] of state.tokens.entries()) {
    const text = token.type === "inline" && state.tokens[at - 2]?.type === "list_item_open" ? token.children[0] : null;
    const found = text?.type === "text" ? /^\[([ xX])\] /.exec(text.content) : null;
    if (found) text.content = (found[1] === " " ? "☐ " : "☑ ") + text.content.slice(4);
  }
}

function imageLink(token) {
  const address = md.utils.escapeHtml(token.attrGet("src")), text = md.utils.escapeHtml(token.content);
  return address ? `<a href="${address}">${text || address}</a>` : text;
}

function alignedCell(tokens, at) {
  const alignment = /text-align:(\w+)/.exec(tokens[at].attrGet("style") ?? "")?.[1];   // as a class: see the policy
  return alignment ? `<${tokens[at].tag} class="${alignment}">` : `<${tokens[at].tag}>`;
}
