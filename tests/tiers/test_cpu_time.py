"""What a command's processor time holds."""

import subprocess
import sys
from pathlib import Path

import pytest

BURN = "import time\nwhile time.process_time() < 0.5: pass\n"
DAEMON = f"""
import os
import time
from pathlib import Path
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(write, str(os.getpid()).encode())
        exec({BURN!r})
    os._exit(0)
os.wait()
daemon = Path("/proc", os.read(read, 20).decode(), "stat")
while daemon.exists() and ") Z " not in daemon.read_text():
    time.sleep(0.05)
"""


def seconds(tmp_path: Path, program: str, code: int = 0) -> float:
    """The processor time that is written down for a Python program."""
    command = [sys.executable, "-m", "tests.tiers.cpu_time", str(tmp_path / "cpu")]
    done = subprocess.run([*command, sys.executable, "-c", program], check=False)
    assert done.returncode == code
    return float((tmp_path / "cpu").read_text())


@pytest.mark.parametrize("program", [BURN, DAEMON], ids=["the command", "its daemon"])
def test_it_counts(tmp_path: Path, program: str) -> None:
    assert 0.5 <= seconds(tmp_path, program) < 1.5


def test_waiting_costs_nothing(tmp_path: Path) -> None:
    assert seconds(tmp_path, "import time; time.sleep(0.7)") < 0.5


def test_the_exit_code_is_the_commands(tmp_path: Path) -> None:
    seconds(tmp_path, "import sys; sys.exit(7)", 7)
    seconds(tmp_path, "import os; os.kill(os.getpid(), 15)", 128 + 15)
