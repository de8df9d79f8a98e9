"""What answers look like in Markdown, and what the web page has to show: (what it is, Markdown, shown).

`shown` is the page's document in short: <tag>children</>, a link with its address, a code block as <code language>,
with the text of its spans only, and a formula as <math>, <display> or <wrong> with its TeX.
"""

CASES: list[tuple[str, str, str]] = [
    ("marks", "a **b** *c* `d*e*` ~~f~~", "<p>a <strong>b</> <em>c</> <code>d*e*</> <s>f</></>"),
    ("strong and emphasised", "***x*** and **a *b* c**", "<p><em><strong>x</></> and <strong>a <em>b</> c</></>"),
    ("no marks", "2 * 3 * 4 and snake_case_name and **open", "<p>2 * 3 * 4 and snake_case_name and **open</>"),
    ("escaped marks", "\\*a\\* \\_b\\_ 1\\. \\`c\\`", "<p>*a* _b_ 1. `c`</>"),
    ("lines", "a\nb", "<p>a<br>\nb</>"),
    ("headings", "# A\n\n## B\n\ntext", "<h1>A</><h2>B</><p>text</>"),
    ("a rule", "a\n\n---\n\nb", "<p>a</><hr><p>b</>"),
    ("a quotation", "> q\n> r\n>\n> - s", "<blockquote><p>q<br>\nr</><ul><li>s</></></>"),
    ("a list in a list", "- a\n- b\n  1. c\n  2. d\n\nx", "<ul><li>a</><li>b\n<ol><li>c</><li>d</></></></><p>x</>"),
    ("a list that starts at 3", "3. a\n4. b", "<ol 3><li>a</><li>b</></>"),
    ("a loose list", "- a\n\n- b", "<ul><li><p>a</></><li><p>b</></></>"),
    ("tasks", "- [ ] a\n- [x] b", "<ul><li>☐ a</><li>☑ b</></>"),
    ("code", "```py\nx < 1\n\n# y\n```\nz", "<code py>x < 1\n\n# y\n</><p>z</>"),
    ("code without a language", "~~~\na *b*\n~~~", "<code>a *b*\n</>"),
    ("code that is half there", "```\nhalf", "<code>half</>"),
    ("code with fences in it", "````md\n```py\nx\n```\n````", "<code md>```py\nx\n```\n</>"),
    (
        "code in a numbered list",
        "1. Install it:\n\n   ```bash\n   pip install x\n   ```\n\n2. Run it:\n\n   ```bash\n   x --help\n   ```",
        "<ol><li><p>Install it:</><code bash>pip install x\n</></><li><p>Run it:</><code bash>x --help\n</></></>",
    ),
    (
        "code in a numbered list, without empty lines",
        "1. Install it:\n   ```bash\n   pip install x\n   ```\n2. Run it.",
        "<ol><li>Install it:<code bash>pip install x\n</></><li>Run it.</></>",
    ),
    (
        "code four spaces deep in a bullet",
        "- a\n\n    ```\n    b\n      c\n    ```\n- d",
        "<ul><li><p>a</><code>b\n  c\n</></><li><p>d</></></>",
    ),
    ("code between the items of a list", "1. a\n\n```\nb\n```\n\n2. c", "<ol><li>a</></><code>b\n</><ol 2><li>c</></>"),
    ("code by its depth", "a\n\n    b\n    c", "<p>a</><code>b\nc\n</>"),
    (
        "a table",
        "|a|b|\n|:-:|-|\n|1|*2*|",
        "<table><thead><tr><th center>a</><th>b</></></><tbody><tr><td center>1</><td><em>2</></></></></>",
    ),
    (
        "escaped pipes in a table",
        "|a|b|\n|-|-|\n|x \\| y|`p\\|q`|",
        "<table><thead><tr><th>a</><th>b</></></><tbody><tr><td>x | y</><td><code>p|q</></></></></>",
    ),
    (
        "a line break in a table",
        "|a|\n|-|\n|1<br>2|",
        "<table><thead><tr><th>a</></></><tbody><tr><td>1<br>2</></></></>",
    ),
    (
        "a link",
        "[y](https://a.b/c 't') and <https://d.e/f>",
        "<p><a https://a.b/c>y</> and <a https://d.e/f>https://d.e/f</></>",
    ),
    ("a link with parentheses", "[y](https://a.b/c_(d))!", "<p><a https://a.b/c_(d)>y</>!</>"),
    (
        "a bare link",
        "see https://d.e/f_(g), or README.md.",
        "<p>see <a https://d.e/f_(g)>https://d.e/f_(g)</>, or README.md.</>",
    ),
    ("a link by reference", "[y][1]\n\n[1]: https://a.b/", "<p><a https://a.b/>y</></>"),
    (
        "a link that runs",
        "[x](javascript:alert(1)) [y](data:text/html,z)",
        "<p>[x](javascript:alert(1)) [y](data:text/html,z)</>",
    ),
    ("an image", "![i](https://a.b/c.png)", "<p><a https://a.b/c.png>i</></>"),
    ("markup", "<script>alert(1)</script> <b onclick=x>", "<p><script>alert(1)</script> <b onclick=x></>"),
    (
        "markup as a block",
        "<div style=x>\n<img src=x onerror=y>\n</div>",
        "<p><div style=x><br>\n<img src=x onerror=y><br>\n</div></>",
    ),
    (
        "tags that are known",
        "H<sub>2</sub>O, x<sup>2</sup>, <kbd>Esc</kbd>",
        "<p>H<sub>2</>O, x<sup>2</>, <kbd>Esc</></>",
    ),
    ("entities", "a &lt; b &amp;&amp; c &copy;", "<p>a < b && c ©</>"),
    ("a formula", "It is $x^2$, or \\(y_1\\).", "<p>It is <math>x^2</>, or <math>y_1</>.</>"),
    (
        "displayed formulas",
        "$$\na = b\n$$\n\n\\[ c \\]\n\nd $$e$$",
        "<display>a = b</><display>c</><p>d <display>e</></>",
    ),
    ("a formula in a list", "1. a\n\n   $$\n   b\n   $$", "<ol><li><p>a</><display>b</></></>"),
    ("prices", "It costs $5, not $6 or $7.50.", "<p>It costs $5, not $6 or $7.50.</>"),
    ("dollars in code", "`$x$` and `\\(y\\)`", "<p><code>$x$</> and <code>\\(y\\)</></>"),
    ("a formula that is wrong", "$\\frac{1$", "<p><wrong>\\frac{1</></>"),
]

# Makes the short form of a node.
SHORT = r"""
const short = node => {
    if (node.nodeType === Node.TEXT_NODE) return node.data === "\n" ? "" : node.data;  // between blocks
    const inner = () => [...node.childNodes].map(short).join("");
    const name = node.localName;
    if (node.matches(".code")) {
        const language = node.querySelector("span").textContent;
        return `<code${language && " " + language}>${node.querySelector("pre").textContent}</>`;
    }
    if (node.matches(".wide")) return inner();
    if (node.matches(".formula")) {
        const source = (node.querySelector("annotation") ?? node).textContent;
        return `<${[...node.classList].at(-1).replace("formula", "math")}>${source}</>`;
    }
    if (name === "br" || name === "hr") return `<${name}>`;
    const more = node.getAttribute("href") ?? (node.className || (node.start > 1 ? node.start : ""));
    return `<${name}${more && " " + more}>${inner()}</>`;
};
"""
