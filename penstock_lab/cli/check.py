"""`penstock check`: compares a model with Transformers' class, layer by layer, and tests the engine's guarantees."""

import argparse
import json
import sys
from dataclasses import fields
from typing import TYPE_CHECKING

from penstock import InvalidRequestError
from penstock.cli.options import add_imports, add_model
from penstock.cli.terminal import handle_signals, note
from penstock.config import DTYPES, KERNELS
from penstock.interface.plugins import import_files

if TYPE_CHECKING:
    from rich.table import Table

    from penstock_lab.check.report import Report

DESCRIPTION = "Compare a model with Transformers, layer by layer, and test the engine's guarantees on it."
EXAMPLES = """examples:
  penstock check                                  the bundled demo model, with its own weights
  penstock check /models/llama --tiny             its config, shrunk, with random weights: seconds
  penstock check LlamaForCausalLM                 an architecture
  penstock check /models/a --against /models/b    which layer of b is the first that differs from a
  penstock check /models/llama --adapter /adapters/sql   with a LoRA adapter, beside PEFT
  penstock check /models/llama --files            only its files: structure, checksums, config, tokenizer
  penstock check /models/llama --verify           the native kernels beside the reference; needs no Transformers

Exit code 0: everything agrees. 1: something differs; the first differing layer is named. 2: bad input.
A passed check leaves a certificate, which /v1/models shows as long as table, code, numerics and config are unchanged.
"""
PIPED_WIDTH = 140  # characters per line of tables that go to a file or another program
MEASURES = "largest: absolute error; RMS: relative to theirs, and bounded (of log-probabilities the largest is bounded)"


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_imports(parser)
    parser.add_argument("--against", metavar="DIR", help="compare with Transformers' model of another directory")
    help_text = "compute both with a LoRA adapter, theirs by PEFT, which must be installed"
    parser.add_argument("--adapter", metavar="DIR", help=help_text)
    parser.add_argument(
        "--tiny", action="store_true", help="use small sizes and random weights even if there are weights"
    )
    help_text = "only check the files: structure, checksums, config, tokenizer; needs no Transformers"
    parser.add_argument("--files", action="store_true", help=help_text)
    parser.add_argument("--verify", action="store_true", help="only compare the native kernels with the reference")
    help_text = "type in which the guarantees are tested"
    parser.add_argument("--dtype", default="auto", metavar="{" + ",".join(DTYPES) + "}", help=help_text)
    help_text = "backend that is checked"
    parser.add_argument("--kernels", default="auto", metavar="{" + ",".join(KERNELS) + "}", help=help_text)
    parser.add_argument("--device", default="auto", metavar="{auto,cpu,cuda[:N]}", help="where it is checked")
    help_text = "tokens of the prompt (default: 64, on a GPU 512)"
    parser.add_argument("--prompt-len", type=int, default=None, metavar="N", help=help_text)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def run(args: argparse.Namespace) -> int:
    import_files(getattr(args, "import", ()))
    if args.files:
        return _run_files(args)
    from penstock_lab.check.run import Options, check_model

    options = Options(**{item.name: getattr(args, item.name) for item in fields(Options)})
    handle_signals(terminate=True)
    report = check_model(options, lambda line: note(f"penstock: {line}"))
    if args.json:
        print(json.dumps(report.as_dict()))
    else:
        _print_report(report)
    return 0 if report.passed else 1


def _run_files(args: argparse.Namespace) -> int:
    if args.against or args.adapter or args.tiny or args.verify:
        message = "files: --against, --adapter, --tiny and --verify compute, --files only reads; give one of them"
        raise InvalidRequestError(message)
    from penstock_lab.check.files import check_files

    handle_signals(terminate=True)
    report = check_files(args.model)
    if args.json:
        print(json.dumps(report.as_dict()))
        return 0 if report.passed else 1
    for finding in report.findings:
        print(f"{'ok' if finding.passed else 'BROKEN':<8}{finding.name:<29}{finding.what}")
    return 0 if report.passed else 1


def _print_report(report: "Report") -> None:
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)
    console.print(f"{report.model}: {report.architecture}, {report.weights} weights, beside {report.against}")
    console.print(MEASURES)
    table = _table("layer", "largest", "RMS", "allowed", "")
    for row in report.rows:
        figures = (f"{value:.1e}" for value in (row.max_error, row.relative_error, row.allowed))
        table.add_row(row.name, *figures, "ok" if row.passed else "[bold red]differs[/]")
    console.print(table)
    if report.proofs:
        table = _table("guarantee", "error", "allowed", "measured as", "")
        for proof in report.proofs:
            error, allowed = (f"{value:.1e}" if value else "0" for value in (proof.error, proof.allowed))
            verdict = f"[bold red]{proof.verdict}[/]" if proof.verdict != "ok" else "ok"
            table.add_row(proof.name, error, allowed, proof.meaning, verdict)
        console.print(table)
    for remark in report.remarks:
        console.print(remark)
    console.print(verdict_line(report))


def _table(*columns: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=index > 0)
    return table


def verdict_line(report: "Report") -> str:
    """Say in one sentence how the check ended."""
    first = report.first_difference
    if first is not None:
        return f"first difference: {first.name}" + ("" if report.cause is None else f"\n  {report.cause}")
    broken = [proof.name for proof in report.proofs if not proof.passed]
    if broken:
        return f"every layer agrees; broken: {', '.join(broken)}"
    certificate = f"; certificate: {report.certificate}" if report.certificate else ""
    costly = [proof.name for proof in report.proofs if proof.verdict == "costly"]
    advice = f"; better without {' and '.join(costly)}, which cost this model more than usual" if costly else ""
    return f"passed: {report.kernels}, {report.dtype}{advice}{certificate}"
