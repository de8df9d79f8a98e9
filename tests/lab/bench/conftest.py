"""Fixtures of the benchmarks' tests."""

import pytest

from penstock import EngineConfig
from penstock.assembly import PlannedEngine, plan_engine
from penstock_lab.bench.machine import MachineLimits
from penstock_lab.bench.samples import Rates

STEADY = {"read": 40.0, "f32": 400.0, "bf16": 800.0, "int8": 1600.0}


@pytest.fixture
def steady_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes that always find the same limits, so that shares can be computed from the other figures."""

    def probe(self: MachineLimits, *kinds: str) -> Rates:
        rates = {name: STEADY[name] for name in ("read", *kinds)}
        for name, rate in rates.items():
            self.seen[name].append(rate)
        return rates

    monkeypatch.setattr(MachineLimits, "probe", probe)


@pytest.fixture(scope="module")
def planned() -> PlannedEngine:
    config = EngineConfig.from_options(
        model="demo", max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256, kv_cache_memory_bytes=2**21
    )
    return plan_engine(config)
