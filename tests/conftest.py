"""Shared by all tests: the list of checklist rows that the passing tests cover, printed at the end of a run."""

import asyncio
import gc
import inspect
import re

import pytest
import torch
from hypothesis import settings

settings.load_profile("ci")  # the same examples each time, no matter how long one takes on a busy machine
torch.set_num_threads(1)  # tiny products gain nothing from more, and lose a lot beside another busy process
gc.disable()  # while thousands of tests are collected, of which nothing is garbage


COVERS = "covers"


@pytest.fixture(scope="session", autouse=True)
def empty_home(tmp_path_factory):
    """Give the tests of a worker a home of their own, which is empty: what Penstock keeps in a user's (certificates, a
    machine's speed, the history of a chat) comes from no earlier run and stays for no later one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
            patch.delenv(name, raising=False)
        yield


def pytest_addoption(parser):
    parser.addoption("--may-skip", metavar="REGEX", help="fail if a test is skipped for a reason that does not match")
    parser.addoption(
        "--mutations", metavar="N", type=int, default=10, help="damaged files of each format (default: 10)"
    )


def pytest_itemcollected(item):
    """Mark the tests that need a browser: they are a stage of their own."""
    if "chromium" in getattr(item, "fixturenames", ()):
        item.add_marker("browser")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test that is a coroutine function in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """Leave the modules and the collected tests out of every later collection of garbage, which took 0.3 s each."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    """Write a test's rows into its report, which also crosses from a worker process to the one that sums up.

    Meanwhile no garbage is collected. A report of a failure parses sources; on Python 3.11 that ends with `SystemError:
    AST constructor recursion depth mismatch`, and pytest with an internal error, if the collector runs in the middle
    and ends an object whose finaliser parses, too, for instance because it logs a traceback.
    """
    gc.disable()
    try:
        report = yield
    finally:
        gc.enable()
    if call.when == "call":
        rows = [row for marker in item.iter_markers(COVERS) for row in marker.args]
        report.user_properties += [(COVERS, row) for row in rows]
    return report


def not_allowed(config):
    """Return the reasons of skips that --may-skip does not match: on a machine for all tests they are errors."""
    pattern, reporter = config.getoption("--may-skip"), config.pluginmanager.get_plugin("terminalreporter")
    if pattern is None or reporter is None:
        return []
    reasons = {str(report.longrepr[2]).removeprefix("Skipped: ") for report in reporter.stats.get("skipped", [])}
    return sorted(reason for reason in reasons if not re.search(pattern, reason))


def pytest_sessionfinish(session):
    if not_allowed(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    """A row is proved where no test of it has failed."""
    for reason in not_allowed(terminalreporter.config):
        terminalreporter.write_line(f"ERROR --may-skip: tests were skipped here: {reason}")
    found: dict[str, bool] = {}
    for kind in ("passed", "failed"):
        for report in terminalreporter.stats.get(kind, []):
            for row in [value for name, value in report.user_properties if name == COVERS]:
                found[row] = found.get(row, True) and kind == "passed"
    if found:
        rows = sorted(found, key=lambda row: (row[0], int(row[1:])))
        terminalreporter.write_line("checklist rows proved: " + " ".join(row for row in rows if found[row]))
