"""Attacks on the real server while an honest stream runs: nobody else may notice them.

The tables, and the monitor, are the package's own: `penstock prove --only hostile-requests` runs all of them, each
under a monitor of its own, and then generated ones. Here a theme shares one, the crowds are smaller, and of calls that
are alike there are some.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from penstock_lab.prove.attacks import THEMES
from penstock_lab.prove.attacks.attack import FLAGS, KEY, Behaviour, Calls, Target
from penstock_lab.prove.canary import Monitor
from penstock_lab.prove.proof import Subject
from penstock_lab.prove.servers import Server, serve

MAX_CALLS = 40  # of an attack: only the 300 different schemas are more


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(Subject("demo", {"threads": 1, "dtype": "float32"}), *FLAGS) as started:
        yield started


@pytest.fixture(scope="module")
def monitor(server: Server) -> Monitor:
    return Monitor(server, KEY, health_s=60)  # a busy machine must not fail it


@pytest.mark.parametrize("theme", THEMES)
def test_nobody_else_notices(theme: str, server: Server, monitor: Monitor) -> None:
    """Guards against a request that kills, blocks, fills or confuses the server: see what the tables name."""
    target = Target(server.url)
    with monitor.watching(theme):
        for attack in THEMES[theme]:
            if isinstance(attack, Calls):
                attack = replace(attack, calls=attack.calls[:MAX_CALLS])
            attack.run(target)
    complaints, monitor.complaints[:] = target.complaints + monitor.complaints, []
    assert complaints == []


def test_the_oracle_notices_what_stays(server: Server, monitor: Monitor) -> None:
    """Guards against a monitor that never complains: a 200 where a 400 is right, and a stream that is still open."""
    target = Target(server.url)
    target.judge("a request", 200, b"{}", (400,))
    target.judge("an error", 400, b'{"error": "no"}', (400,))
    target.judge("a leak", 200, f"the key is {KEY}".encode(), (200,))
    assert len(target.complaints) == 3
    before = monitor._level()
    body = {"prompt": "a", "n": 32, "max_tokens": 900, "ignore_eos": True, "stream": True}  # longer than a look
    with target.client() as http, http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()  # kept: httpx closes the connection of an iterator that nobody holds
        next(lines)
        assert monitor._level().problem(before) is not None
    with monitor.watching("the stream that was left"):  # and complains no more once it is gone
        pass
    assert monitor.complaints == []


def test_tables_have_no_attack_twice() -> None:
    """Guards against a theme that a later one replaces, and an attack without a request."""
    names = [attack.name for theme in THEMES.values() for attack in theme]
    assert len(names) == len(set(names))
    for theme in THEMES.values():
        for attack in theme:
            assert isinstance(attack, Behaviour) or (getattr(attack, "calls", None) or getattr(attack, "pieces", None))
