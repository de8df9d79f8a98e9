// What the page's tests run under node. A document of nodes that keep their children, and a server that answers one request
// after the other with [status, body], or not at all. `steps` drive the page; what they return is printed.

const [page, answers, steps] = JSON.parse(require("fs").readFileSync(0, "utf8"));
class Node {
  constructor(name) {
    Object.assign(this, { name, value: "", className: "", style: {}, children: [], attributes: {} });
  }
  append(...added) {
    for (const child of added) if (child instanceof Node) child.parent = this;
    this.children.push(...added);
  }
  replaceChildren(...added) { this.children = []; this.append(...added); }
  remove() { this.parent.children.splice(this.parent.children.indexOf(this), 1); }
  get textContent() { return this.children.map(child => child.textContent ?? child).join(""); }
  set textContent(text) { this.children = text === "" ? [] : [String(text)]; }
  setAttribute(name, value) { this.attributes[name] = value; }
  getAttribute(name) { return this.attributes[name] ?? null; }
  focus() {}
  get classList() { return { toggle() {} }; }
  get shown() {
    const inner = this.children.map(child => child.shown ?? child).join("");
    return `<${this.name}${this.href ? " " + this.href : ""}${this.start > 1 ? " " + this.start : ""}>${inner}</>`;
  }
}
const made = {}, store = {}, sent = [];
globalThis.document = { getElementById: id => made[id] ??= new Node(id), createElement: name => new Node(name) };
const storage = { getItem: name => store[name] ?? null, setItem(name, text) { store[name] = text; } };
Object.assign(globalThis, { sessionStorage: storage, localStorage: storage, addEventListener() {}, setInterval() {} });
Object.assign(globalThis, { requestAnimationFrame: act => setImmediate(act), confirm: () => true });
globalThis.fetch = async (path, options) => {
  if (path !== "/v1/chat/completions") return new Promise(() => {});
  sent.push(JSON.parse(options.body).messages);
  const answer = answers.shift();
  if (!answer) throw new TypeError("Failed to fetch");
  return new Response(answer[1], { status: answer[0] });
};
require("vm").runInThisContext(page + "\n;Object.assign(globalThis, { renderMarkdown, conversations, edit, regenerate });");
const box = () => made.input, talk = () => made.talk.children.map(child => [child.className, child.textContent]);
const press = (child, text) => child.children.find(one => one.textContent === text).onclick();
const rest = () => new Promise(done => {
  const wait = () => made.send.textContent === "Stop" ? setImmediate(wait) : setImmediate(done);
  wait();
});
const say = async text => { box().value = text; made.form.onsubmit({ preventDefault() {} }); await rest(); };
(async () => console.log(JSON.stringify(await eval(`(async () => { ${steps} })()`))))();
