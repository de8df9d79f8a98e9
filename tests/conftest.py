"""Shared by all tests: the list of checklist rows that the passing tests cover, printed at the end of a run."""

import pytest
import torch

torch.set_num_threads(1)  # tiny products gain nothing from more, and lose a lot beside another busy process


def pytest_configure(config: pytest.Config) -> None:
    config.stash[COVERED] = {}


COVERED: pytest.StashKey[dict[str, bool]] = pytest.StashKey()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if report.when != "call":
        return
    for marker in item.iter_markers("covers"):
        for row in marker.args:
            found = item.config.stash[COVERED]
            found[row] = found.get(row, True) and report.passed


def pytest_terminal_summary(terminalreporter, config):
    found = config.stash[COVERED]
    if found:
        rows = sorted(found, key=lambda row: (row[0], int(row[1:])))
        terminalreporter.write_line("checklist rows proved: " + " ".join(row for row in rows if found[row]))
