"""A plugin of pytest: how long each file takes, and how much memory each process.

The fifteen slowest files are printed after a run, and `--durations-csv PATH` writes the seconds of
every test. A file that takes more than 40 s says why in a line of its docstring: "Slow: …".
"""

from __future__ import annotations

import ast
import csv
import re
import resource
from collections import Counter
from pathlib import Path

import pytest

LONG, SHOWN = 40, 15

_seconds: Counter[str] = Counter()
_peaks: list[str] = []


def pytest_addoption(parser):
    parser.addoption("--durations-csv", type=Path, help="write the seconds of every test here")


def pytest_runtest_logreport(report):
    _seconds[report.nodeid] += report.duration


def pytest_sessionfinish(session):
    """Tell the peak memory of this process and of its largest child, in GB."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    own, child = (resource.getrusage(kind).ru_maxrss / 1e6 for kind in kinds)
    told = f"{own:.2f} GB, its largest child {child:.2f} GB"
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["peak"] = told
    else:
        _peaks.append(f"main: {told}")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    peak = getattr(node, "workeroutput", {}).get("peak", "unknown")
    _peaks.append(f"{node.gateway.id}: {peak}")


def pytest_terminal_summary(terminalreporter, config):
    if hasattr(config, "workeroutput"):
        return
    files: Counter[str] = Counter()
    for test, seconds in _seconds.items():
        files[test.split("::")[0]] += seconds
    terminalreporter.section("slowest files, in seconds")
    for file, seconds in files.most_common(SHOWN):
        reason = f"  {_reason(config.rootpath / file)}" if seconds > LONG else ""
        terminalreporter.write_line(f"{seconds:7.1f} {file}{reason}")
    terminalreporter.write_line(f"{sum(files.values()):7.1f} in all")
    for peak in _peaks:
        terminalreporter.write_line(f"peak memory of {peak}")
    if path := config.getoption("--durations-csv"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["test", "seconds"])
            rows.writerows((test, f"{seconds:.3f}") for test, seconds in _seconds.most_common())


def _reason(path: Path) -> str:
    """Why a file takes long, by its docstring."""
    said = ast.get_docstring(ast.parse(path.read_text())) if path.suffix == ".py" else ""
    found = re.search(r"^Slow: .*", said or "", re.MULTILINE)
    return found[0] if found else "(says not why: add a line “Slow: …” to its docstring)"
