"""Killed with SIGKILL at any moment, a run goes on from the newest checkpoint, to the bit."""

import json
import subprocess
import sys
from pathlib import Path

KILLS = 50


def test_a_run_killed_fifty_times_loses_no_bit_and_no_checkpoint(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.trainer.fixtures.killed_runs",
            str(tmp_path),
            str(KILLS),
            "7",
        ],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    tally = json.loads(done.stdout.splitlines()[-1])
    assert tally["faults"] == []
    assert tally["warnings"] == []  # a checkpoint is whole or not there
    assert tally["kills"] >= KILLS
    assert tally["completed"] >= 1
    assert tally["resumed_mid_window"] >= 1
