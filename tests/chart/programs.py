"""Where helm and promtool are found: on the PATH, else built once by the cluster's harness."""

import shutil
import subprocess
from pathlib import Path

from tests.cluster.harness import gobuild, tools
from tests.cluster.harness.places import default_places


def find(program: str) -> Path | None:
    """The pinned build, else the machine's own, else built now; None without Go."""
    places = default_places()
    pinned = tools.path_of(places, program)
    if pinned.exists():
        return pinned
    if own := shutil.which(program):
        return Path(own)
    return gobuild.tool(places, program) if shutil.which("go") else None


def promtools() -> list[Path]:
    """Every promtool at hand: rules must parse in Prometheus 2.42 (Debian 12's) and in 3.x."""
    found = [find("promtool"), Path(own) if (own := shutil.which("promtool")) else None]
    return list(dict.fromkeys(p for p in found if p))


def run(program: Path, *arguments: str | Path, folder: Path | None = None) -> str:
    """Output of a program that succeeds; the test fails with its words otherwise."""
    done = subprocess.run([program, *arguments], cwd=folder, capture_output=True, text=True)
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"{program.name} {arguments[0]} failed:\n{output}"
    return done.stdout
