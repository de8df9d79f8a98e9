"""A check, from the user's options to a Report and, if everything passed, a certificate."""

import contextlib
import inspect
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from penstock import EngineConfig, InvalidRequestError, ModelLoadError, __version__
from penstock.config import BLOCK_SIZE_UNIT, BLOCK_SIZE_UNITS, TRITON, NumericsConfig
from penstock.errors import check_int, check_str, fail
from penstock.kernels.cpu.host import free_memory_bytes
from penstock.kernels.cpu.library import level_of_bits
from penstock.kernels.ops import NUMERICS_VERSION
from penstock.kernels.triton import device as gpu
from penstock.models.certificate import RANDOM_TINY, Certificate, certificate_file, find_basis
from penstock.models.config_json import load_model_config
from penstock.models.registry import find_architecture, find_model
from penstock.spec.model_config import ModelConfig
from penstock.weights.hub import resolve_model
from penstock.weights.loader import check_memory, open_stored
from penstock.weights.sources import read_parameters
from penstock_lab.check.ours import OurModel
from penstock_lab.check.parity import compare, compare_kernels, find_cause
from penstock_lab.check.proofs import NUM_TOKENS, Setting, make_prompts, prove, prove_vectors
from penstock_lab.check.report import Report
from penstock_lab.check.target import find_target
from penstock_lab.check.twin import ATTENTIONS, Twin, peft, transformers
from penstock_lab.convert.rewrite import rewrite_model

MIN_PROMPT_TOKENS = 8  # fewest tokens in the prompt
Announce = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one check.

    Attributes:
        model: a directory, a hub name, "demo", a config.json, or the name of an architecture.
        against: directory of the Transformers model to compare with; None: the same as for `model`.
        adapter: directory of a LoRA adapter, with which both are computed; theirs by PEFT.
        tiny: check a random model with the shrunk config, even if there are weights.
        verify: only compare the native kernels with the reference.
        dtype: type for the engine's guarantees and `verify`; Transformers' layers are compared in float32.
        prompt_len: number of tokens in the prompt; None: four blocks, so that prefixes are found in the cache.
    """

    model: str = "demo"
    against: str | None = None
    adapter: str | None = None
    tiny: bool = False
    verify: bool = False
    dtype: str = "auto"
    kernels: str = "auto"
    device: str = "auto"
    prompt_len: int | None = None

    def __post_init__(self) -> None:
        check_str("model", self.model)
        check_str("against", self.against, optional=True)
        check_str("adapter", self.adapter, optional=True)
        check_int("prompt_len", self.prompt_len, MIN_PROMPT_TOKENS, 2**20, optional=True)
        EngineConfig.from_options(dtype=self.dtype, kernels=self.kernels, device=self.device)
        if self.against is not None and (self.tiny or self.verify):
            raise fail("against", self.against, "left out with --tiny and --verify")
        if self.adapter is not None and (self.tiny or self.verify or self.against is not None):
            raise fail("adapter", self.adapter, "left out with --tiny, --verify and --against")


def check_model(options: Options, announce: Announce = lambda line: None) -> Report:
    """Check one model.

    Args:
        announce: called with a line of text at each step.

    Raises:
        ModelLoadError: our loader or Transformers cannot load the model, or Transformers is missing.
        InvalidRequestError: an option does not fit the model or the machine.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-check-") as scratch:
        target = find_target(options.model, Path(scratch), tiny=options.tiny)
        config = load_model_config(target.directory)
        if target.weights == RANDOM_TINY:
            torch.set_num_threads(1)  # products this small do not gain from more threads
        chosen = {name: getattr(options, name) for name in ("dtype", "kernels", "device")}
        numerics = EngineConfig.from_options(**chosen).resolve(config).numerics
        longest = config.max_position_embeddings - NUM_TOKENS - 1
        prompt_len = options.prompt_len or min(4 * BLOCK_SIZE_UNITS.get(numerics.kernels, BLOCK_SIZE_UNIT), longest)
        check_int("prompt_len", prompt_len, MIN_PROMPT_TOKENS, longest)
        prompts = make_prompts(prompt_len, config.vocab_size)
        is_coded = bool(open_stored(target.directory, config, "auto", is_complete=False).codings)
        setting = Setting(target.directory, numerics.dtype, numerics.kernels, prompts, is_coded, numerics.device)
        report = Report(
            model=options.model,
            architecture=config.architecture,
            weights=target.weights,
            kernels=_name_kernels(numerics),
            dtype=numerics.dtype,
            prompt_len=prompt_len,
        )
        if options.verify:
            return _compare_kernels(report, setting, config, announce)
        report = _compare_models(report, setting, config, options, Path(scratch), announce)
        if options.against is not None or options.adapter is not None:
            return report
        if report.passed:
            announce(f"the engine's guarantees, in {report.dtype}")
            has_head = find_architecture(config.architecture).has_lm_head
            report = replace(report, proofs=tuple(prove(setting) if has_head else prove_vectors(setting, config)))
        return report if target.config_file is None else _certify(report, target.config_file)


def _name_kernels(numerics: NumericsConfig) -> str:
    if numerics.kernels == TRITON:
        return gpu.name_of(numerics.device)
    return f"cpu.{level_of_bits()}" if numerics.kernels == "cpu" else numerics.kernels


def _compare_kernels(report: Report, setting: Setting, config: ModelConfig, announce: Announce) -> Report:
    if setting.kernels != "cpu":
        raise InvalidRequestError("verify: it compares the native kernels with the reference; --kernels must be cpu")
    announce(f"the native kernels beside the reference, in {setting.dtype}")
    prompt, remarks = _prompt(setting, config)
    rows = compare_kernels(setting.directory, setting.dtype, prompt)
    return replace(report, against="the reference kernels", rows=rows, remarks=remarks)


def _compare_models(
    report: Report, setting: Setting, config: ModelConfig, options: Options, scratch: Path, announce: Announce
) -> Report:
    """Compare both models over one prompt. Transformers gets the decoded values of a quantised checkpoint.

    Raises:
        InvalidRequestError: `against` has another architecture.
    """
    against, adapter = options.against, options.adapter
    announce("every layer beside Transformers' module, in float32")
    stored = [item.num_elements for item in read_parameters(config).values() if item.tied_to is None]
    check_memory({"float32 weights of Transformers' model": 4 * sum(stored)}, free_memory_bytes())
    theirs = setting.directory if against is None else resolve_model(against)
    beside = f"with {against}" if against is not None else ""
    if against is None and (setting.is_coded or theirs.is_file()):
        theirs, beside = scratch / "decoded", "with the decoded weights"
        rewrite_model(str(setting.directory), theirs, "transformers", 2**62, decoded="F32")
    architecture = load_model_config(theirs).architecture
    if architecture != config.architecture:
        text = f"against: it holds a {architecture}; it must hold a {config.architecture}, as the model does"
        raise InvalidRequestError(text, param="against")
    prompt, remarks = _prompt(setting, config)
    own: dict[str, Any] = {"dtype": "float32", "kernels": setting.kernels, "tokens": len(prompt)}
    own |= {"device": setting.device} if setting.kernels == TRITON else {}
    ours = OurModel.load(setting.directory, **own, adapter=adapter)
    found = compare(ours, Twin.load(theirs, adapter=adapter), prompt)
    if found.differs_in_attention:
        with contextlib.suppress(ModelLoadError):  # some models, such as Gemma 2, have no second attention
            again = compare(ours, Twin.load(theirs, ATTENTIONS[1], adapter), prompt)
            found = found if again.differs_in_attention else again
    beside += "" if adapter is None else f" with {adapter}, merged by PEFT {peft().__version__}"
    name = f"Transformers {transformers().__version__} ({found.twin.attention}) {beside}".strip()
    return replace(report, against=name, rows=found.rows, cause=find_cause(found), remarks=remarks)


def _prompt(setting: Setting, config: ModelConfig) -> tuple[list[int], tuple[str, ...]]:
    """Choose the prompt's ids; also return remarks on what they are too few to test.

    The number of ids differs from the number of heads, so that tokens and heads cannot be confused in a shape.
    """
    prompt, rope = setting.prompts[0], config.rope
    while len(prompt) in (config.num_attention_heads, config.num_key_value_heads):
        prompt = prompt[:-1]
    beyond = sorted({window for window in config.layer_windows if window is not None and window >= len(prompt)})
    remarks = [f"windows of {size} tokens hide nothing from a prompt of {len(prompt)}" for size in beyond]
    if rope is not None and rope.rope_type in ("dynamic", "longrope"):
        context = rope.original_max_position_embeddings
        if len(prompt) <= context < config.context:
            remarks.append(f"a prompt of {len(prompt)} tokens does not reach beyond the original context of {context}")
    left_out = ("not tested: rings, which no layer has on a GPU",) if setting.kernels == TRITON else ()
    return prompt, (*(f"not compared: {remark}; a longer --prompt-len tests it" for remark in remarks), *left_out)


def _certify(report: Report, config_file: Path) -> Report:
    """Write the certificate of a passed check, or remove the certificate that a failed check has disproved."""
    model = find_model(report.architecture)
    file = Path(inspect.getfile(model.model_class))
    basis = find_basis(report.architecture, file, model.table_file, config_file, NUMERICS_VERSION)
    if not report.passed:
        certificate_file(basis.id, report.weights).unlink(missing_ok=True)
        return report
    largest = {
        "layers, relative": max(row.relative_error for row in report.rows if not row.absolute),
        report.rows[-1].name: report.rows[-1].max_error,
    }
    certificate = Certificate(
        **asdict(basis),
        architecture=report.architecture,
        weights=report.weights,
        kernels=report.kernels,
        dtypes=tuple(sorted({"float32", report.dtype})),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        penstock=__version__,
        transformers=transformers().__version__,
        proofs=largest | {proof.name: proof.error for proof in report.proofs},
    )
    return replace(report, certificate=str(_write(certificate)))


def _write(certificate: Certificate) -> Path:
    """Write a certificate, replacing one of the same id atomically. Return its file."""
    file = certificate_file(certificate.id, certificate.weights)
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(f".{os.getpid()}")
    content = {"id": certificate.id, **asdict(certificate)}
    beside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    beside.replace(file)
    return file
