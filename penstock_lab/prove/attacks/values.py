"""Values that no request should have: sampling, sizes, prompts, JSON. Most have broken some inference server."""

import json
from typing import Any

from penstock_lab.prove.attacks.attack import BODIES, CHAT, COMPLETION, JSON, Attack, Call, Calls, each, refused

NAN, INF = float("nan"), float("inf")  # json.dumps writes them as NaN and Infinity, which is not JSON
NUMBERS: tuple[Any, ...] = (NAN, INF, -INF, "NaN", "1", True, [], {})
COMPLETION_PATHS = ("/v1/completions", "/v1/chat/completions")
CHAT_PATH, TOKENIZE, DETOKENIZE, PIN = "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/cache/pin"
RESPONSES = "/v1/responses"
RENDERING = (*COMPLETION_PATHS, TOKENIZE, RESPONSES, PIN)
DEPTHS = (200, 300, 500, 700, 900)
OK_OR_REFUSED = (200, 400)


TEMPLATES: tuple[tuple[str, Any], ...] = (
    ("chat_template", "{% for i in range(10**9) %}{% for j in range(10**9) %}x{% endfor %}{% endfor %}"),
    ("chat_template", "{{ 'a' * 999999999 }}"),
    ("chat_template", "{{ '%999999999d' % 1 }}"),
    ("chat_template", "{{ ''.__class__.__mro__ }}"),
    ("chat_template_kwargs", {"chat_template": "{{ 'a'.center(10**9) }}", "tokenize": True}),
    ("chat_template_kwargs", {"tone": [{"messages": "x"}]}),
    ("chat_template_kwargs", {"messages": "a" * 1_000_000}),
    ("chat_template_kwargs", {"not_in_the_template": True}),
)
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"guided_regex": "(a+)+b", "guided_choice": ["a"]},
    {"guided_regex": "a{1000000}"},
    {"guided_json": {"type": "strin"}},
    {"guided_grammar": "(" * 30_000},
    {"structured_outputs": {"regex": "a{1000000}"}},
    {"structured_outputs": {"json": {"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(200)]}}},
    {"structured_outputs": {"regex": "(" * 5000 + "a" + ")" * 5000}},
    {"structured_outputs": {"json": {"$ref": "http://169.254.169.254/"}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"pattern": "[unclosed"}}}},
    {"logits_processors": ["os.system"]},
    {"logits_processors": {"../../etc/passwd": {}}},
)


def raw(name: str, *bodies: bytes, path: str = "/v1/completions", expect: tuple[int, ...] = (400,)) -> Calls:
    """Make an attack of bodies that are sent unchanged."""
    return Calls(name, [Call(body, expect, path) for body in bodies])


def on_both(name: str, *fields: dict[str, Any], expect: tuple[int, ...] = (400,)) -> Calls:
    """Make an attack on completions and on chat."""
    return Calls(name, [Call({**BODIES[path], **item}, expect, path) for path in COMPLETION_PATHS for item in fields])


def nested(depth: int) -> dict[str, Any]:
    """Nest an object `depth` deep."""
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


CUSTOM: tuple[dict[str, Any], ...] = (
    {}, {"name": "a b"}, {"name": "a", "format": {"type": "grammar"}},
    *({"name": "a", "format": {"type": "grammar", "grammar": {"syntax": kind, "definition": text}}} for kind, text in (
        ("regex", "("), ("regex", "(?!a)"), ("lark", "start: start"), ("lark", "x"), ("ebnf", "a"),
    )),
)  # fmt: skip
BAD_INPUTS: tuple[Any, ...] = ("", [], [""], [[]], [[10**9]], [1, "a"], {}, None)
BAD_EMBEDDINGS: list[dict[str, Any]] = [
    *({"input": value} for value in BAD_INPUTS),
    *({"input": "a", "dimensions": value} for value in (10**9, 0, 5, "a")),
    *({"input": "a", "truncate_prompt_tokens": value} for value in (0, -2, 10**12)),
    {"input": "a", "encoding_format": "x"},
]
SAMPLING: tuple[Attack, ...] = (
    on_both(
        "a beam search beyond its limits",
        {"use_beam_search": 1}, {"length_penalty": 2}, {"early_stopping": True},
        *({"use_beam_search": True, **item} for item in (
            {"n": 65}, *each("length_penalty", [1e308, -6, "1"]), *each("early_stopping", ["always", 1, 0.5]),
            {"top_p": 0.5}, {"temperature": 0.5}, {"logit_bias": {"5": 1}}, {"stop": "a"}, {"min_tokens": 1},
        )),
    ),
    on_both("n without bounds (CVE-2026-34756)", *each("n", [10**9, 2**31, 2**63, 257, 0, -1, 1.5])),
    refused("best_of (CVE-2024-8939)", {"best_of": 10**6}, {"best_of": 2, "stream": True}, {"best_of": 1, "n": 2}),
    refused(
        "too many prompts in a call (CVE-2026-73559)",
        {"prompt": ["a"] * 200_000},
        {"prompt": [[1]] * 200_000},
        {"prompt": ["a"] * 200, "n": 2},
    ),
    refused("empty prompts (CVE-2024-8768)", *each("prompt", ["", [], [[]], [""], ["a", ""], [[1], []]])),
    refused("no messages", {"messages": []}, {"messages": None}, {"messages": {}}, path=CHAT_PATH),
    on_both(
        "max_tokens out of range (vLLM #6707)", *each("max_tokens", [-2, 0, 2**31, 2**63, -(2**63), 10**300, 1e300])
    ),
    on_both("max_tokens of another type", *each("max_tokens", ["5", True, [5], {}, 1.5, NAN])),
    on_both("temperature (GHSA-7h4p-rffg-7823)", *each("temperature", [*NUMBERS, 1e308, -1, -1e-45, 10**40])),
    on_both("temperature near zero (vLLM #1623)", *each("temperature", [1e-45, 1e-4, -0.0]), expect=OK_OR_REFUSED),
    on_both("tiny nucleus", {"temperature": 1e-4, "top_p": 1e-4, "seed": 1}, expect=(200,)),
    on_both("top_p (TensorRT-LLM #17158)", *each("top_p", [*NUMBERS, 0, -0.0, 1.0000001, -1])),
    on_both("min_p", *each("min_p", [*NUMBERS, -1e-9, 1.0000001])),
    on_both("repetition_penalty (SGLang #24874)", *each("repetition_penalty", [*NUMBERS, 0, -1, 1e-30, 1e30])),
    on_both("frequency_penalty", *each("frequency_penalty", [*NUMBERS, 1e308, -3])),
    on_both("presence_penalty", *each("presence_penalty", [*NUMBERS, 1e308, 3])),
    on_both("top_k (Rapid-MLX #778)", *each("top_k", [-2, 1.5, "a", True, NAN])),
    on_both("top_k beyond the vocabulary", *each("top_k", [0, -1, 2**20, 2**31, 2**40, 2**63]), expect=OK_OR_REFUSED),
    on_both(
        "logit_bias (vLLM #16529)",
        *each("logit_bias", [{"2147483647": 1}, {"-1": 1}, {"AI": 1}, {str(2**63): 1}, {"1": NAN}, {"1": 1e30}]),
        *each("logit_bias", [{"1": -INF}, {"1": "x"}, {"1": None}, [1], 1, {str(i): 1 for i in range(5000)}]),
    ),
    on_both(
        "stop_token_ids (vLLM #54195)",
        *each("stop_token_ids", [[2**31 - 1], [-1], [2**63], [1.5], ["a"], list(range(1000)), [[1]], "1"]),
    ),
    refused("logprobs (CVE-2026-116173)", *each("logprobs", [10**9, -2, 1.5, True, NAN])),
    refused("a whole vocabulary of them", *({"n": 128, "max_tokens": 100, "logprobs": n} for n in (-1, 10**6))),
    refused("top_logprobs", *({"logprobs": True, "top_logprobs": n} for n in (10**9, -2, 1.5, "1")), path=CHAT_PATH),
    refused("prompt_logprobs", *each("prompt_logprobs", [10**9, -2, 1.5, "a"])),
    refused("logprob_token_ids", {"logprob_token_ids": list(range(200))}, {"logprob_token_ids": [-1]},
            {"logprob_token_ids": [1]}),
    on_both("allowed_token_ids", *each("allowed_token_ids", [[], [-1], [2**31], [1.5], "1", [1] * 200_000, [10**6]])),
    on_both(
        "repetition_detection",
        *each("repetition_detection", [1, [], {"x": 1}]),
        *(
            {"repetition_detection": {"max_pattern_size": size, "min_count": count}}
            for size, count in ((10**9, 2), (5, 1), (5, 2.5), ([5], 2))
        ),
    ),
    on_both("thinking_token_budget", *each("thinking_token_budget", [-2, 2**40, 1.5, "a", True])),
    on_both("min_tokens", {"min_tokens": 3}, *each("min_tokens", [-1, 2**63, 1.5, "a"])),
    on_both("seed (vLLM bounds it too)", *each("seed", [2**64, -(2**64), 1.5, "x", NAN, True])),
    on_both("seed at its ends", *each("seed", [-(2**63), 2**63 - 1, 0, -1]), expect=OK_OR_REFUSED),
    on_both(
        "stop strings",
        *each("stop", [["x"] * 10_000, "y" * 2**20, "", [""], ["a", ""], [1], 1, {}, ["a" * 257]]),
        *each("bad_words", [["x"] * 10_000, "y" * 2**20, [1], {}]),
    ),
    on_both("a stop string that is its own beginning", *each("stop", ["a" * 256, ["a" * i for i in range(1, 17)]]),
            expect=(200,)),
    on_both("a salt that is none (CVE-2025-46570)", *each("cache_salt", ["", 1, ["a"], "x" * 10**6, {}, True])),
    on_both("options of a stream that is none", {"stream_options": {"include_usage": True}}, {"stream_options": 1}),
    on_both("unknown fields", {"x": 1}, {" - at `$": 1}, {"": 1}, {"temperature ": 1}, {"__proto__": {}},
            {"x" * 100_000: 1}),
    on_both("a field name that a parser might walk", {" - at " * 20_000: 1}),
    on_both("what this server cannot do", {"prompt_embeds": "AAAA"}),
    on_both("a prompt cut to nothing", *each("truncate_prompt_tokens", [0, -2, 2**40, "a"]), {"truncation_side": "up"}),
)  # fmt: skip

PROMPTS: tuple[Attack, ...] = (
    refused("a prompt of many contexts (vLLM #1026)", {"prompt": "word " * 200_000}, {"prompt": [1] * 100_000}),
    Calls(
        "a million characters of one kind",
        [
            Call(lambda kind=kind: {**COMPLETION, "prompt": kind * (10**6 // len(kind))}, (400, 413))
            for kind in ("a", " ", "\U0001f469\u200d", "e\u0301\u0302", "\u4e2d", "\n", "\u0000")
        ],
    ),
    Calls(
        "a hundred megabytes of prompt",
        [Call(lambda: b'{"prompt": "%s"}' % (b"a" * 100_000_000), (413,))],
    ),
    refused(
        "token ids (vLLM #1026)",
        *each("prompt", [[-1], [2**31], [2**40], [2**63], [1.5], [[1.5]], [[[1]]], [True], [None], [1, "a"], ["a", 1]]),
        {"prompt": [1.5] * 1_000_000},
    ),
    refused(
        "pins of nothing, of too much, and with names that are paths",
        *each("prompt", [None, 1, [], ["a", "b"], "a", [1], [-1] * 32, [2**63] * 32, "word " * 200_000]),
        *each("name", ["", "../x", "a" * 100, 1, "\n", "\u00e9"]),
        *each("cache_salt", ["", 1, "x" * 10**6]),
        path=PIN,
    ),
    refused("token ids to text", *each("tokens", [[-1], [2**31], [2**63], [1.5], ["a"], None, "a"]), path=DETOKENIZE),
    refused("text to tokens", *each("prompt", [None, 1, [], ["a"], "a" * 10**6]), path=TOKENIZE),
    raw(
        "text that is not Unicode",
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\udc00\\ud800"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "\xc0\xaf"}',
        b'{"prompt": "\xf8\x88\x80\x80\x80"}',
        b'\xef\xbb\xbf{"prompt": "a"}',
        b'{"prompt": "a"}\x00',
        '{"prompt": "a"}'.encode("utf-16"),
        b'{"prompt": "\x00"}',
    ),
    on_both("text that is Unicode, though odd", {"user": "\u0000\u202e\ufeff"}, expect=(200,)),
    refused(
        "roles and contents",
        *each(
            "messages",
            [
                [{"role": "wizard", "content": "a"}],
                [{"role": "user", "content": 1}],
                [{"role": "user"}],
                [{"role": "user", "content": [{"type": "text"}]}],
                [{"role": "user", "content": [{}]}],
                [{"role": "user", "content": "a"}] * 5000,
                [[]],
                [None],
                ["a"],
            ],
        ),
        path=CHAT_PATH,
        expect=(400,),
    ),
    refused(
        "addresses to fetch (CVE-2025-6242)",
        *(
            {"messages": [{"role": "user", "content": [{"type": kind, kind: {"url": url}}]}]}
            for kind in ("image_url", "video_url", "input_audio", "file")
            for url in ("http://169.254.169.254/latest/meta-data", "file:///etc/passwd", "http://127.0.0.1:1/")
        ),
        path=CHAT_PATH,
    ),
    Calls(
        "a template of the request's own (CVE-2026-115911, CVE-2026-115918)",
        [Call({**BODIES[path], name: value}, (400,), path) for path in RENDERING for name, value in TEMPLATES],
    ),
    refused(
        "values for the template that are too deep to read (a 500 here once)",
        *each("tools", [[{"type": "function", "function": {"name": "f", "parameters": nested(d)}}] for d in DEPTHS]),
        *each("documents", [[nested(depth)] for depth in DEPTHS]),
        *each("chat_template_kwargs", [nested(depth) for depth in DEPTHS]),
        path=CHAT_PATH,
    ),
    on_both("grammars and processors that cannot be followed (CVE-2025-48944, CVE-2026-25048)", *GRAMMARS),
    Calls(
        "many schemas, all of them different (CVE-2025-29770)",
        [
            Call({**COMPLETION, "structured_outputs": {"json": {"const": i}}}, (200,))
            for i in range(300)  # more schemas than the server keeps
        ],
    ),
    Calls(
        "names of models and adapters (CVE-2024-37032)",
        [
            Call({**COMPLETION, "model": name}, (404,))
            for name in ("../../etc/passwd", "/etc/passwd", "\u0000", "\\\\?\\C:", "dem\u043e", "x" * 4096, "", " ")
        ]
        + [
            Call({"lora_name": "x", "lora_path": path}, (400,), "/v1/load_lora_adapter")
            for path in ("/etc", "/proc/self", "..", "a/../..", "a", "", "\u0000", "x" * 10**5, "/dev/zero", "~root")
        ]
        + [
            Call({"lora_name": name}, (404,), "/v1/unload_lora_adapter")
            for name in ("x", "demo", "", "x" * 10**6, "\u0000", "x@0")
        ]
        + [Call(None, (404,), "/v1/models/..%2f..%2fetc%2fpasswd", "GET")],
    ),
    Calls(
        "embeddings of many texts, and of none (vLLM #30656)",
        [Call(lambda: {"input": ["x"] * 100_000}, (400,), "/v1/embeddings")]
        + [Call(lambda: {"input": ["x"] * 2048}, (200,), "/v1/embeddings")]
        + [Call(body, (400,), "/v1/embeddings") for body in BAD_EMBEDDINGS]
        + [Call({"query": "a", "documents": ["x"] * 100_000}, (400,), "/rerank")],
    ),
    refused("many prompts with costly stops", {"prompt": ["x"] * 200, "stop": [chr(65 + i) * 256 for i in range(16)]},
            expect=(200,)),
    refused("many biased prompts", {"prompt": ["x"] * 200, "logit_bias": {str(i): 1 for i in range(300)}},
            expect=(200,)),
)  # fmt: skip

DEPTH = 100_000
JSON_BODIES: tuple[Attack, ...] = (
    raw(
        "nesting",
        b"[" * DEPTH,
        b'{"a":' * DEPTH,
        b'{"prompt": %s' % (b"[" * DEPTH),
        b'{"prompt": "a", "metadata": %s1%s}' % (b"[" * DEPTH, b"]" * DEPTH),
        b'{"prompt": "a", "logit_bias": %s' % (b'{"a":' * DEPTH),
        b'{"messages": %s' % (b'[{"content":' * DEPTH),
        b'{"prompt": "a", "metadata": %s}' % (b'{"a":' * 900 + b"1" + b"}" * 900) + b"]",
    ),
    raw(
        "numbers",
        b'{"prompt": "a", "max_tokens": %s}' % (b"9" * 5000),
        b'{"prompt": "a", "temperature": 1e%s}' % (b"9" * 5000),
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "temperature": -NaN}',
        b'{"prompt": "a", "n": 0x10}',
        b'{"prompt": "a", "n": 01}',
        b'{"prompt": "a", "n": +1}',
        b'{"prompt": "a", "n": .5}',
    ),
    raw(
        "what only looks like JSON",
        b"",
        b" ",
        b"null",
        b"[]",
        b'"a"',
        b"1",
        b"{",
        b"}",
        b'{"prompt"}',
        b"{'prompt': 'a'}",
        b'{"prompt": "a",}',
        b'{"prompt": "a"}{"prompt": "b"}',
        b'{"prompt": "a" /* */}',
        b'{"prompt": "\n"}',
        b'{"prompt": "\\x41"}',
    ),
    raw("a key twice", b'{"prompt": "a", "prompt": "b", "max_tokens": 1, "max_tokens": 2}', expect=OK_OR_REFUSED),
    raw("an error message with NaN in it (Rapid-MLX #740)", b'{"prompt": NaN}', b'{"prompt": "a", "top_p": NaN}'),
    on_both("a huge label", {"metadata": {"k": ["x" * 100] * 60_000}}, {"user": "x" * 7_000_000}, expect=(200,)),
    Calls(
        "bodies that are compressed (GO-2025-3548)",
        [
            Call(json.dumps(COMPLETION).encode(), (415,), headers={**JSON, "Content-Encoding": encoding})
            for encoding in ("gzip", "zstd", "br", "deflate", "gzip, identity", "x" * 1000)
        ],
    ),
    Calls(
        "bodies of another type (CVE-2025-54121, Ollama GHSA-5jx5-hqx5-2vrj)",
        [
            # Ollama's routes read a body of any type
            Call(
                b"--x\r\n" * 100_000, (400 if path.startswith("/api/") else 415,), path, headers={"Content-Type": kind}
            )
            for path in BODIES
            for kind in ("multipart/form-data; boundary=x", "text/plain", "application/x-www-form-urlencoded", "*/*")
        ],
    ),
    refused("custom tools", *each("tools", [[{"type": "custom", "custom": tool}] for tool in CUSTOM]), path=CHAT_PATH),
    Calls("a wrong field in a chat", [Call({**CHAT, "prompt": "a"}, (400,), CHAT_PATH)]),
)
