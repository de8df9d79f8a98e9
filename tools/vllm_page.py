"""Write docs/from_vllm.md: every flag, request field and metric of vLLM, and what it is here.

    python tools/vllm_page.py          compare the page with what it should be
    python tools/vllm_page.py --write  write it

vLLM's names are in tools/vllm_names.toml. What they are here is not written down for this page: it is read from the
parser of `penstock serve`, from the advice that the command line gives (penstock/option_hints.toml), from the request
bodies, from the table of refused fields, and from the table of `--metrics-names vllm`. A flag or field that none of
them knows is an error.
"""

import re
import sys
import tomllib
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from penstock.cli.main import build_parser  # noqa: E402
from penstock.cli.options import flag_of  # noqa: E402
from penstock.config import read_hints  # noqa: E402
from penstock.server.client_fields import UNSUPPORTED  # noqa: E402
from penstock.server.metrics import VLLM_NAMES  # noqa: E402
from penstock.server.openai_requests import ChatRequest, CompletionRequest  # noqa: E402
from tools import written_page  # noqa: E402

NAMES = ROOT / "tools" / "vllm_names.toml"
PAGE = ROOT / "docs" / "from_vllm.md"
BODIES = {"/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest}
SAME = "the same"
HEAD = """\
# From vLLM

Names and meanings are vLLM's wherever Penstock has the feature: `LLM`, `SamplingParams`, the flags of `serve`, the
fields of requests. Nothing is ignored in silence: an option or a field that is absent is an error that says what to do
instead, which is also what the tables below say. `tools/vllm_page.py` writes this page from Penstock's own tables of
options and fields; vLLM's names are those of version 0.11 and, as far as they are known, of later ones.

| in vLLM | here |
|---|---|
| `vllm serve MODEL` | `penstock serve MODEL`; it listens on 127.0.0.1 unless `--host` says otherwise |
| `vllm chat --url URL`, `vllm complete` | `penstock chat --url URL`, `penstock generate` |
| `vllm bench serve` | `penstock bench serve`, with the same names of results |
| `vllm bench latency`, `vllm bench throughput` | `penstock bench offline` |
| `vllm run-batch -i FILE -o FILE` | `penstock run-batch -i FILE -o FILE` |
| `vllm collect-env` | `penstock --version`, `penstock bench machine` |
| `LLM(model=...)`, `AsyncLLM` | the same; [Python](python.md) has the methods |
| `VLLM_CPU_KVCACHE_SPACE` | `--kv-cache-memory-bytes`, or `--memory` for the whole engine |
| `VLLM_CPU_OMP_THREADS_BIND` | `--threads`, `--cpu-affinity` |
| `VLLM_API_KEY` | `PENSTOCK_API_KEY` |
| `VLLM_ALLOW_RUNTIME_LORA_UPDATING` | `--allowed-lora-path DIR`, below which administrators may load adapters |
| `POST /v1/load_lora_adapter`, `.../unload_lora_adapter` | the [same](serving.md#lora-adapters); no `lora_int_id` |
| `base_model_name` in `--lora-modules` | leave it out: the parent is the served model |

What is different on purpose: the address is 127.0.0.1 and CORS is off by default; the queue is bounded, and beyond it
requests get 429; SIGTERM lets open requests finish; a request's tokens do not depend on the batch, and
`system_fingerprint` names all that can change them.

"""


def flag_rows(names: dict[str, str], known: set[str], hints: dict[str, str]) -> dict[str, list[tuple[str, str]]]:
    """List for each group (flag, what it is here).

    Raises:
        ValueError: nothing says what a flag is here.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for group, text in names.items():
        for name in text.split():
            field = name.replace("-", "_")
            if f"--{name}" not in known and field not in hints:
                raise ValueError(f"--{name}: give advice in penstock/option_hints.toml")
            here = SAME if f"--{name}" in known else _advice(hints[field])
            found.setdefault(group, []).append((f"--{name}", here))
    return found


def field_rows(names: str, known: set[str]) -> list[tuple[str, str]]:
    """List (field, what it is here) of one request body. Raise ValueError if nothing says what a field is here."""
    found = []
    for name in names.split():
        if name not in known and name not in UNSUPPORTED:
            raise ValueError(f"{name}: neither a field nor in the table of unsupported ones")
        refusal = None if name in known else UNSUPPORTED[name]
        if refusal is None:
            here = SAME
        elif refusal.forbidden:
            here = "refused: a request may not change what the server runs"
        else:
            here = f"absent: {refusal.instead}" if refusal.instead else "not built yet"
        found.append((name, here))
    return found


def _advice(text: str) -> str:
    """Write advice with the flags that it names, and say whether the flag is absent."""
    has_name = "{" in text or "--" in text
    named = re.sub(r"\{(\w+)\}", lambda match: flag_of(match[1]), text)
    named = re.sub(r"(?<![`\w])(--[a-z][\w-]*)", r"`\1`", named).removesuffix("; leave it out")
    named = re.sub(r"^it is (`.+`) here", r"\1", named)
    return named if has_name else f"absent: {named}"


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    """Write a section: the names that are the same in one line, then a table of the others."""
    same = ", ".join(f"`{name}`" for name, here in rows if here == SAME)
    grouped: dict[str, list[str]] = {}
    for name, here in rows:
        if here != SAME:
            grouped.setdefault(here, []).append(f"`{name}`")
    lines = [f"### {title}", "", f"The same: {same or 'none'}.", ""]
    if grouped:
        lines += ["| in vLLM | here |", "|---|---|"]
        lines += [f"| {', '.join(found)} | {here} |" for here, found in grouped.items()]
        lines.append("")
    return "\n".join(lines)


def page() -> str:
    """Write the whole page. Raise ValueError if nothing says what a name of vLLM is here."""
    names = tomllib.loads(NAMES.read_text(encoding="utf-8"))
    action = next(item for item in build_parser(["serve"])._actions if item.dest == "command")
    assert action.choices is not None
    flags = flag_rows(names["flags"], set(action.choices["serve"]._option_string_actions), read_hints())  # type: ignore
    parts = [HEAD, FLAGS]
    parts += [_table(title, rows) + "\n" for title, rows in flags.items()]
    parts.append(FIELDS)
    for route, text in names["fields"].items():
        known = {item.encode_name for item in msgspec.structs.fields(BODIES[route])}
        parts.append(_table(f"`{route}`", field_rows(text, known)) + "\n")
    parts += [METRICS, *map(metric_rows, names["metrics"].values())]
    return "".join(parts)


FLAGS = """\
## Flags of `vllm serve`

The values of a flag may differ: `penstock serve --help` lists them.

"""
FIELDS = """\
## Fields of requests

A field that is absent may be null, or have the value that changes nothing.

"""
METRICS = """\
## Metrics

With `--metrics-names vllm`, the metrics that vLLM has too get its names and labels; the buckets of histograms are
Penstock's. [Metrics](metrics.md) describes each.

| in vLLM | here |
|---|---|
"""


def metric_rows(names: str) -> str:
    """Write the rows of the table of metrics. Raise ValueError if one that Penstock has is not in the list."""
    ours = {theirs.removeprefix("vllm:"): name for name, theirs in VLLM_NAMES.items()}
    if unlisted := ours.keys() - set(names.split()):
        raise ValueError(f"{sorted(unlisted)}: not in {NAMES.name}")
    rows = [f"| `vllm:{name}` | `{ours[name]}` |\n" for name in names.split() if name in ours]
    absent = ", ".join(f"`vllm:{name}`" for name in names.split() if name not in ours)
    return "".join(rows) + f"| {absent} | absent |\n"


if __name__ == "__main__":
    sys.exit(written_page.main(__doc__, PAGE, page))
