"""Replay: from a bundle to a report. The bundle is checked, its engine rebuilt, and its steps computed again."""

import os
from collections.abc import Callable
from dataclasses import replace

from penstock import EngineConfig, InvalidRequestError
from penstock.assembly import BuiltEngine, build_engine
from penstock.client.records import Begun, Bundle, EngineDescription, Planned
from penstock.config import MAX_CONTEXT
from penstock.interface.plugins import check_registered
from penstock_lab.bench.record_audit import Audit
from penstock_lab.bench.record_history import EngineStart, engine_errors, history
from penstock_lab.prove.recompute import ReplayReport, compute, num_scratch


def replay(bundle: Bundle, *, model: str | None = None, imports: tuple[str, ...] = (),
           announce: Callable[[str], None] = lambda line: None) -> ReplayReport:  # fmt: skip
    """Check a bundle and, if it includes its text, compute it again on an engine built for it.

    Args:
        model: where the model is now; None: where it was.
        imports: the user's files; those that the record names are not run.
        announce: called with a line before anything that may take long, or end this process.

    Raises:
        InvalidRequestError, ModelLoadError: the bundle is malformed, or does not fit the model.
    """
    report = ReplayReport(bundle.reason)
    engine, num_blocks = check_bundle(bundle, report)
    if not bundle.has_text:
        report.remarks.append("the text was left out: the schedule was checked, and nothing could be computed")
        return report
    announce("loading the model")
    built = build_for(engine, num_blocks, model=model, imports=imports)
    try:
        check_processors(bundle)
        report.remarks += compare_fingerprints(engine.system_fingerprint, built.info.system_fingerprint)
        compute(bundle, built.engine.executor, report, num_blocks, announce, built.engine.adapters)
    finally:
        built.engine.shutdown()
    return report


def check_bundle(bundle: Bundle, report: ReplayReport) -> tuple[EngineDescription, list[int]]:
    """Check every step without computing it. Return the engine, and per cache group the number of blocks used."""
    audit, engine = Audit(has_text=bundle.has_text), None
    for event in history(bundle.records):
        if isinstance(event, EngineStart):
            audit.start(event)
            engine = engine or event.engine
        else:
            audit.step(event)
            report.steps += 1
    if engine is None:
        raise InvalidRequestError("bundle: it has no engine", param="bundle")
    report.findings += audit.findings
    report.remarks += [f"the engine process ended with: {error}" for error in engine_errors(bundle.records)]
    return engine, audit.num_blocks


def build_for(
    engine: EngineDescription, num_blocks: list[int], *, model: str | None = None, imports: tuple[str, ...] = ()
) -> BuiltEngine:
    """Build an engine that computes the recorded steps, with the blocks that they use and more for restoring."""
    options = dict(engine.options)
    wanted = options.pop("imports", ())
    options.pop("kv_cache_memory_bytes", None)
    if wanted and not imports:
        files = ", ".join(str(file) for file in wanted) if isinstance(wanted, list | tuple) else str(wanted)
        raise InvalidRequestError(f"import: the engine had files of the user's own; give them again: {files}")
    options["model"] = model or local_model(options.get("model"))
    options["max_num_seqs"] = min(engine.max_num_seqs + 1, 2**16)  # one more row, for restoring
    options["max_num_batched_tokens"] = min(max(engine.max_num_batched_tokens, engine.max_num_seqs + 1), MAX_CONTEXT)
    groups = [
        replace(group, num_blocks=max(1, used + num_scratch(group, engine)))
        for group, used in zip(engine.groups, num_blocks, strict=True)
    ]
    return build_engine(EngineConfig.from_options(**options, imports=imports), groups=groups)


def local_model(name: object) -> str:
    """Name the recorded model if it is on this machine. A record must not cause a download."""
    if isinstance(name, str) and (name == "demo" or os.path.isdir(os.path.expanduser(name))):
        return name
    raise InvalidRequestError(f"model: {name!r} is not a directory here; say where it is with --model", param="model")


def compare_fingerprints(there: str, here: str) -> list[str]:
    """List what is different about this engine, and what that means; empty if the fingerprints are equal."""
    if there == here:
        return []
    names = ("", "the version of the arithmetic", "the kernels", "the dtype")
    theirs, ours = there.split("-"), here.split("-")
    changed = [
        f"{name} ({old} there, {new} here)" for name, old, new in zip(names, theirs, ours, strict=False) if old != new
    ]
    if theirs[-1] != ours[-1] and not changed:
        changed = ["the model's files, or its quantization"]
    return [f"another engine made the record: {' and '.join(changed)} differ; so may the bits, without a fault"]


def check_processors(bundle: Bundle) -> None:
    """Raise InvalidRequestError if a request names a logits processor that no imported file has registered."""
    for record in bundle.records:
        new = record.new if isinstance(record, Planned) else record.requests if isinstance(record, Begun) else []
        for request in new:
            check_registered(request.params.logits_processors or ())
