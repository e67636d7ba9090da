"""CPU time and memory of whole processes: from their start to the first step, with caches.

The trainer is the real command. Its first step is seen from outside, by the line it prints, and the
kernel's account of the process is read at that moment.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

from benchmarks.job import bench_document

COMMAND = "from kubelora_trainer.cli.main import main; main(prog_name='kubelora')"
OUR_LOOP = (
    "from kubelora_trainer.utils.third_party import import_heavy_libraries; "
    "import_heavy_libraries(); "
    "from benchmarks.our_loop import main; main()"
)


def demo_in(folder: Path) -> tuple[Path, Path]:
    """The tiny model and photographs, made by the command in a process of its own."""
    subprocess.run(
        [sys.executable, "-c", COMMAND, "demo", str(folder / "demo")],
        check=True,
        capture_output=True,
    )
    return folder / "demo" / "model", folder / "demo" / "photos"


def first_step_seconds(model: Path, photos: Path, place: Path) -> float:
    """CPU seconds of `kubelora train`, all its threads, when the first step is reported.

    place: where the output goes. The cache stands beside its folder and stays filled.
    """
    document = bench_document(
        model, photos, place, dataset={"cache": str(place.parent.parent / "cache")}, steps=1
    )
    (place.parent / "job.yaml").write_text(yaml.safe_dump(document))
    seconds = 0.0
    with subprocess.Popen(
        [sys.executable, "-u", "-c", COMMAND, "train", str(place.parent / "job.yaml")],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        told = []
        for line in process.stdout:
            told.append(line)
            if line.startswith("step=1/"):
                seconds = cpu_seconds(process.pid)
    if process.returncode or not seconds:
        raise RuntimeError("".join(told) + f"kubelora train ended with {process.returncode}")
    return seconds


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far: fields 14 and 15 of proc_pid_stat(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_of_ours(model: Path, photos: Path, steps: int) -> int:
    """Peak resident memory of the trainer's loop, alone in a process, in KiB."""
    return int(_json([sys.executable, "-c", OUR_LOOP], model, photos, steps)["peak_kib"])


def reference_process(model: Path, photos: Path, steps: int) -> tuple[int, float]:
    """The reference loop alone in a process: peak memory in KiB, CPU seconds at its first step."""
    told = _json([sys.executable, "-m", "benchmarks.reference_loop"], model, photos, steps)
    return int(told["peak_kib"]), told["first_step_cpu_s"]


def _json(command: list[str], model: Path, photos: Path, steps: int) -> dict[str, float]:
    done = subprocess.run(
        [*command, str(model), str(photos), "--steps", str(steps)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return told
