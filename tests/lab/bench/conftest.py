"""Fixtures of the benchmarks' tests."""

import pytest

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
