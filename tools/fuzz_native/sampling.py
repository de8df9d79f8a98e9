"""The target for sampling."""

import ctypes

import numpy as np

from penstock.kernels.cpu.library import PenstockSampling
from penstock.kernels.sampling import NO_TOKEN
from penstock.kernels.tensors import FLOAT32, INT64, Array
from tools.fuzz_native.target import Fuzz

PAIRS = ("masked", "bias", "repetition", "counts")  # fields that hold pairs (row, id)


def sample(fuzz: Fuzz) -> None:
    rows, vocab = fuzz.rows(), fuzz.size(1)
    logits, fields = fuzz.normal(rows, vocab).values, _fields(fuzz, rows, vocab)
    if rows and fuzz.chance(0.2):
        logits[fuzz.random.randrange(rows)] = -np.inf
    if logits.size and fuzz.chance(0.2):
        logits.reshape(-1)[fuzz.random.randrange(logits.size)] = fuzz.random.choice((-np.inf, 3e38, -3e38, 1e-40))

    def compute(chosen: Array) -> Array:
        out, given = fuzz.out((len(chosen),), INT64), fuzz.array(logits[chosen])
        structure = PenstockSampling(**_addresses(fuzz, fields, chosen))
        fuzz.call("sample", given, len(chosen), vocab, ctypes.addressof(structure), out)
        return out.values

    found = fuzz.same_alone(compute, rows)
    assert ((found >= NO_TOKEN) & (found < vocab)).all(), f"sample: {found} of {vocab}"
    masked = {tuple(pair) for pair in fields.get("masked_pairs", np.empty((0, 2))).tolist()}
    for row in range(rows):
        open_ids = [at for at in range(vocab) if logits[row, at] > -np.inf and (row, at) not in masked]
        assert (found[row] == NO_TOKEN) == (not open_ids), f"sample: {found[row]} of {len(open_ids)} ids"
        assert not open_ids or found[row] in open_ids, f"sample: {found[row]} was masked"
        only_masked = not {"bias_pairs", "repetition_pairs", "counts_pairs"} & set(fields)
        if open_ids and only_masked and fields["temperature"][row] == 0:
            assert found[row] == max(open_ids, key=lambda at: (logits[row, at], -at)), "sample: not the highest"


def _fields(fuzz: Fuzz, rows: int, vocab: int) -> dict[str, Array]:
    """Return some parameters of each row, and distinct pairs (row, id)."""
    numbers = fuzz.numbers
    fields: dict[str, Array] = {"temperature": numbers.choice([0, 0.1, 1, 2], rows).astype(FLOAT32)}
    noise = numbers.integers(0, 2**62, (rows, 3), dtype=INT64)
    fields["noise_key"] = noise & np.array([-1, 2**31 - 1, 2**31 - 1])
    some = {
        "top_k": numbers.choice([1, 2, vocab], rows).clip(1, vocab).astype(INT64),
        "top_p": numbers.choice([1e-6, 0.5, 0.99, 1], rows).astype(FLOAT32),
        "min_p": numbers.choice([0, 0.1, 1], rows).astype(FLOAT32),
        "repetition": numbers.choice([0.5, 1, 2], rows).astype(FLOAT32),
        "frequency": numbers.choice([-2, 0, 2], rows).astype(FLOAT32),
        "presence": numbers.choice([-2, 0, 2], rows).astype(FLOAT32),
    }
    pairs_of = {"repetition": "repetition", "frequency": "counts", "presence": "counts"}
    chosen = {name for name in (*PAIRS, "top_k", "top_p", "min_p") if fuzz.chance(0.4)}
    for name, values in some.items():
        if pairs_of.get(name, name) in chosen:
            fields[name] = values
    for name in chosen & set(PAIRS):
        count = min(fuzz.size(0, 129), rows * vocab)
        at = numbers.choice(rows * vocab, count, replace=False) if count else np.empty(0, INT64)
        fields[f"{name}_pairs"] = np.stack([at // vocab, at % vocab], axis=1).astype(INT64)
        if name in ("bias", "counts"):
            fields[f"{name}_values"] = numbers.integers(1, 5, count).astype(FLOAT32)
    return fields


def _addresses(fuzz: Fuzz, fields: dict[str, Array], chosen: Array) -> dict[str, int]:
    """Return the fields of PenstockSampling for some rows, in guarded memory."""
    native: dict[str, int] = {}
    for name, values in fields.items():
        if "_" not in name or name in ("top_k", "top_p", "min_p", "noise_key"):
            native[name] = fuzz.array(values[chosen]).address
    for name in PAIRS:
        if f"{name}_pairs" not in fields:
            continue
        pairs = fields[f"{name}_pairs"]
        mine = np.isin(pairs[:, 0], chosen)
        renamed = np.stack([np.searchsorted(chosen, pairs[mine, 0]), pairs[mine, 1]], axis=1).astype(INT64)
        field = {"masked": "masked", "counts": "count_pairs"}.get(name, f"{name}_pairs")
        native[field], native[f"num_{name}"] = fuzz.array(renamed).address, len(renamed)
        if f"{name}_values" in fields:
            values = "count_values" if name == "counts" else "bias_values"
            native[values] = fuzz.array(fields[f"{name}_values"][mine]).address
    return native


TARGETS = {"sample": sample}
