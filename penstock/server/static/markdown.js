// Markdown as nodes of the document, never as HTML: so nothing in an answer can become markup, a script or a request.
// Images are shown as links. What is not Markdown stays text, also the half of a mark that a stream has shown so far.

const BLOCK = /^(?:#{1,6} |```|~~~|>|\s*(?:[-*+]|\d{1,9}[.)]) |(?:[-*_] *){3,}$)/;

function element(name, ...children) {
  const node = document.createElement(name);
  node.append(...children);
  return node;
}

function renderMarkdown(text) {
  try { return blocks(text.replace(/\r\n?/g, "\n").split("\n")); } catch { return [text]; }   // nested too deeply
}

function blocks(lines) {
  const nodes = [];
  for (let at = 0; at < lines.length;) {
    let found = null;
    for (const read of [code, heading, rule, quote, list, table, paragraph]) if ((found = read(lines, at))) break;
    at = found[0];
    nodes.push(...found.slice(1));
  }
  return nodes;
}

// Each reader returns [index of the line after the block, its nodes ...], or null where no such block begins.

function code(lines, at) {
  const open = lines[at].match(/^ {0,3}(```+|~~~+)\s*([^\s`]*)/);
  if (!open) return null;
  let end = at + 1;
  while (end < lines.length && !lines[end].trimStart().startsWith(open[1])) end += 1;
  const source = lines.slice(at + 1, end).join("\n");
  const copy = element("button", "Copy");
  copy.className = "plain";
  copy.type = "button";
  copy.onclick = () => copyText(source, copy);
  const box = element("div", element("div", element("span", open[2]), copy), element("pre", element("code", source)));
  box.className = "code";
  return [end + 1, box];
}

function heading(lines, at) {
  const found = lines[at].match(/^(#{1,6}) +(.*?)(?: +#+)?$/);
  return found && [at + 1, element("h" + found[1].length, ...inline(found[2]))];
}

function rule(lines, at) {
  return /^(?:(?:- *){3,}|(?:\* *){3,}|(?:_ *){3,})$/.test(lines[at]) ? [at + 1, element("hr")] : null;
}

function quote(lines, at) {
  let end = at;
  while (end < lines.length && lines[end].startsWith(">")) end += 1;
  return end > at ? [end, element("blockquote", ...blocks(lines.slice(at, end).map(line => line.replace(/^> ?/, ""))))] : null;
}

function list(lines, at) {
  const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
  const first = lines[at].match(ITEM);
  if (!first) return null;
  const numbered = /\d/.test(first[2]), node = element(numbered ? "ol" : "ul");
  if (numbered) node.start = parseInt(first[2]);
  let item = null;
  for (; at < lines.length; at += 1) {
    const found = lines[at].match(ITEM);
    if (found && found[1].length <= first[1].length) {
      if (/\d/.test(found[2]) !== numbered || found[1].length < first[1].length) break;
      if (item) node.append(listItem(item));
      item = [found[3]];
    } else if (found || /^\s{2,}\S/.test(lines[at])) {
      item.push(lines[at].slice(Math.min(lines[at].search(/\S/), first[1].length + 2)));
    } else if (lines[at].trim() === "" && lines[at + 1] && (/^\s{2,}\S/.test(lines[at + 1]) || ITEM.test(lines[at + 1]))) {
      item.push("");
    } else if (lines[at].trim() === "" || BLOCK.test(lines[at])) {
      break;
    } else {
      item.push(lines[at]);
    }
  }
  node.append(listItem(item));
  return [at, node];
}

function listItem(lines) {
  while (lines.length && lines[lines.length - 1] === "") lines.pop();
  const single = lines.length === 1 && !BLOCK.test(lines[0]);
  return element("li", ...(single ? inline(lines[0]) : blocks(lines)));
}

function table(lines, at) {
  const cells = line => line.trim().replace(/^\||\|$/g, "").split("|").map(cell => cell.trim());
  if (!lines[at].includes("|") || !/^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/.test(lines[at + 1] ?? "")) return null;
  if (!lines[at + 1].includes("|")) return null;
  const row = (kind, line) => element("tr", ...cells(line).map(cell => element(kind, ...inline(cell))));
  const head = element("thead", row("th", lines[at])), body = element("tbody");
  for (at += 2; at < lines.length && lines[at].includes("|"); at += 1) body.append(row("td", lines[at]));
  const box = element("div", element("table", head, body));
  box.className = "wide";
  return [at, box];
}

function paragraph(lines, at) {
  if (lines[at].trim() === "") return [at + 1];
  let end = at + 1;
  while (end < lines.length && lines[end].trim() !== "" && !BLOCK.test(lines[end])) end += 1;
  return [end, element("p", ...inline(lines.slice(at, end).join("\n")))];
}

// [what a mark looks like, what becomes of it]; the first that begins furthest to the left wins.
const MARKS = [
  [/\\([\\`*_{}[\]()#+\-.!|~>])/, found => [found[1]]],
  [/(`+)([^`]|[^`][^]*?[^`])\1(?!`)/, found => [element("code", found[2].replace(/^ (.*) $/, "$1"))]],
  [/\*\*(?=\S)([^]*?\S)\*\*|__(?=\S)([^]*?\S)__/, found => [element("strong", ...inline(found[1] ?? found[2]))]],
  [/\*(?=[^\s*])([^*]*[^\s*])\*|\b_(?=[^\s_])([^_]*[^\s_])_\b/, found => [element("em", ...inline(found[1] ?? found[2]))]],
  [/~~(?=\S)([^]*?\S)~~/, found => [element("del", ...inline(found[1]))]],
  [/!?\[([^\]]{0,300})\]\((https?:\/\/[^\s)]+)(?:\s+"[^"]*")?\)/, found => [link(found[2], found[1] || found[2])]],
  [/https?:\/\/[^\s<>"')\]]*[^\s<>"')\].,:;!?]/, found => [link(found[0], found[0])]],
  [/\n/, () => [element("br")]],
];

function link(address, text) {
  const node = element("a", text);
  node.href = address;
  node.target = "_blank";
  node.rel = "noopener noreferrer";
  return node;
}

const MAX_INLINE = 8000;   // characters of a paragraph that are searched for marks

function inline(text) {
  const nodes = [];
  if (text.length > MAX_INLINE) return [text];
  while (text) {
    let best = null, make = null;
    for (const [pattern, made] of MARKS) {
      const found = pattern.exec(text);
      if (found && (best === null || found.index < best.index)) [best, make] = [found, made];
    }
    if (best === null) break;
    if (best.index) nodes.push(text.slice(0, best.index));
    nodes.push(...make(best));
    text = text.slice(best.index + best[0].length);
  }
  return text ? [...nodes, text] : nodes;
}
