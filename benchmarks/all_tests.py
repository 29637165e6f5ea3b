"""Run the tests, file by file: how many pass on this device, and which do not."""

import os
import re
import subprocess
import sys

from benchmarks.report import Sheet
from benchmarks.workers import Result

FAILURES = 20  # lines of failed tests that are kept of each file
COUNTS = "passed", "failed", "error", "skipped"
NONE_SELECTED = 5  # what pytest returns if all tests of a file are deselected


def run(path: str) -> Result:
    """Run the tests of a file or folder."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line", path]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # some tests start processes of their own
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    counts = {what: int(n) for n, what in re.findall(rf"(\d+) ({'|'.join(COUNTS)})", lines[-1] if lines else "")}
    if not counts and done.returncode != NONE_SELECTED:
        raise RuntimeError(f"pytest did not run: {(done.stderr or done.stdout)[-1000:]}")
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"tests": path, "counts": counts, "failures": failures[:FAILURES]}


def sheet(rows: list[Result]) -> Sheet:
    """How many tests passed, and the names of those that did not."""
    counts = lambda row: {name: str(row["counts"].get(name, 0)) for name in COUNTS}
    cells = [{"tests": row["tests"].rpartition("/")[2]} | counts(row) for row in rows]
    return Sheet("tests", cells, "\n".join(line for row in rows for line in row["failures"]))
