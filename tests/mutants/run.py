"""Check that the tests notice faults: plant each fault of `mutants.toml`, and run its tests.

    python tests/mutants/run.py [NAME ...] [--output after.csv] [--against killed.csv]

Each mutant is planted in a copy of the working tree. The result is one of:

- killed: a test fails, and fails again when it or its file is run alone, but not without the
  mutant;
- survived: all tests pass, so nobody would notice this fault;
- timeout: the tests did not end in time;
- error: anything else, such as tests that cannot be run, or that fail without the mutant.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
FIELDS = ("name", "result", "seconds", "test")
TIMEOUT = 2700  # seconds; far more than the tests of any package take
PASSED, FAILED = 0, 1  # exit codes of pytest; with any other, tests could not be run


def copy_tree(root: Path, copy: Path) -> None:
    """Copy the files that git tracks, and new ones that it does not ignore."""
    command = ["git", "-C", str(root), "ls-files", "-z", "-co", "--exclude-standard"]
    for name in filter(None, subprocess.check_output(command).decode().split("\0")):
        if (root / name).is_file():  # git also lists files that were deleted since
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name)


def plant(mutant: dict, copy: Path) -> None:
    """Change the source in a copy. Raise a ValueError if the mutant does not apply to it."""
    path = copy / "src/tailavg" / mutant["file"]
    source = path.read_text(encoding="utf-8") if path.exists() else ""
    if source.count(mutant["before"]) != 1:
        raise ValueError(f"mutant {mutant['name']} no longer applies to {mutant['file']}")
    path.write_text(source.replace(mutant["before"], mutant["after"]), encoding="utf-8")


def run_tests(copy: Path, tests: list[str]) -> tuple[int | None, str]:
    """Run tests up to the first failure. Return pytest's exit code (None: timeout) and output."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(copy / "src")}  # precedes what is installed
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # and all processes that tests started
            process.wait()
    return process.returncode, output


def try_mutant(mutant: dict, root: Path) -> dict:
    """Return the result of one mutant, and the first test that fails."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        mutated, unchanged = Path(folder, "mutated"), Path(folder, "unchanged")
        copy_tree(root, mutated)
        copy_tree(root, unchanged)
        try:
            plant(mutant, mutated)
            code, output = run_tests(mutated, mutant["tests"])
        except ValueError as error:
            code, output = -1, str(error)
        result, test = {PASSED: "survived", None: "timeout"}.get(code, "error"), ""
        found = re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", output, re.MULTILINE)
        if code == FAILED and found:
            result, test = "killed", found[1]
            for tests in ([test], [test.partition("::")[0]]):  # some depend on those before them
                codes = [run_tests(tree, tests)[0] for tree in (mutated, unchanged)]
                if codes == [FAILED, PASSED]:
                    break
            else:
                result, test = "error", f"alone, with the mutant and without it: {codes}, {test}"
        elif result == "error":
            test = output.strip().rpartition("\n")[2]  # what pytest says at last
    seconds = round(time.monotonic() - start)
    return dict(zip(FIELDS, (mutant["name"], result, seconds, test), strict=True))


def read_results(path: Path | None) -> dict[str, dict]:
    """Return the rows of a file of results, by name; nothing if there is no file."""
    if path is None or not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {row["name"]: row for row in csv.DictReader(file)}


def main() -> int:
    """Try mutants. Return 1 if one that was killed before survives now, or cannot be tried."""
    parser = argparse.ArgumentParser(description="Plant faults, and see whether tests notice.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to try; by default all")
    parser.add_argument("--root", type=Path, default=HERE.parents[1], help="the tree to test")
    parser.add_argument("--jobs", type=int, default=1, help="mutants to try at the same time")
    parser.add_argument("--output", type=Path, help="results; with NAMEs, other rows are kept")
    parser.add_argument("--against", type=Path, help="earlier results to compare with")
    options = parser.parse_args()
    listed = tomllib.loads((HERE / "mutants.toml").read_text(encoding="utf-8"))["mutant"]
    mutants = {mutant["name"]: mutant for mutant in listed}
    if unknown := [name for name in options.names if name not in mutants]:
        parser.error(f"no such mutants: {', '.join(unknown)}")
    chosen = [mutants[name] for name in options.names or mutants]
    before = read_results(options.against)
    rows = read_results(options.output) if options.names else {}
    lost = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(lambda mutant: try_mutant(mutant, options.root.resolve()), chosen):
            rows[row["name"]] = row
            print("{name:44} {result:9} {seconds:5} s  {test}".format(**row), flush=True)  # noqa: T201
            killed_before = before.get(row["name"], {}).get("result") == "killed"
            if killed_before and row["result"] in ("survived", "error"):
                lost.append(row["name"])
            if options.output:  # after each mutant, so that nothing is lost
                with options.output.open("w", newline="", encoding="utf-8") as file:
                    writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
                    writer.writeheader()
                    writer.writerows(rows[name] for name in mutants if name in rows)
    results = [rows[mutant["name"]]["result"] for mutant in chosen]
    counts = ", ".join(f"{results.count(kind)} {kind}" for kind in sorted(set(results)))
    print(f"{len(results)} mutants: {counts}")  # noqa: T201
    if lost:
        print(f"killed before, and not now: {', '.join(lost)}")  # noqa: T201
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
