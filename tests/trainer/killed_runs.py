"""Forks runs and kills them at random moments; each goes on from where the one before was saved.

Run as ``python -m tests.trainer.killed_runs FOLDER KILLS SEED``: a process of its own, for it
forks, and a fork wants no threads beside it. Prints one line of JSON. Imports are done before the
first fork, so that a child begins to train at once.

A child writes one line to a pipe for each thing that is then true: where it resumed, what is saved.
What it resumed is compared with the run that was never interrupted, at the same micro-step.
"""

import json
import os
import random
import select
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kubelora_trainer.checkpoint import RunPosition
from kubelora_trainer.checkpoint_part import CheckpointPart
from kubelora_trainer.train import MicroBatch
from tests.trainer.engine import Engine

STEPS, ACCUMULATION = 8, 3


@dataclass
class Tally:
    """What was seen. saved: the newest checkpoint that a child said was safe, in micro-steps."""

    kills: int = 0
    completed: int = 0
    resumed_mid_window: int = 0
    warnings: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    saved: int = 0


def state_of(engine: Engine) -> dict[str, Tensor]:
    assert engine.average is not None
    parts: dict[str, CheckpointPart]
    parts = {"adapter": engine.buffers, "optimizer": engine.optimizer, "average": engine.average}
    return {
        f"{name}.{key}": tensor.detach().clone()
        for name, part in parts.items()
        for key, tensor in part.tensors().items()
    }


def state_file(folder: Path, step: int, micro_step: int) -> Path:
    return folder / f"state-{step}-{micro_step}"


def record_whole_run(folder: Path) -> None:
    """Train without interruption; keep the state wherever one may be stopped."""
    engine = engine_at(folder / "whole")
    objective, micro_steps = engine.parts.objective, 0

    def counted(micro_step: int) -> MicroBatch:
        nonlocal micro_steps
        micro_steps += 1
        return objective(micro_step)

    def keep() -> bool:
        steps = int(engine.optimizer.tensors()["steps"])
        save_file(state_of(engine), state_file(folder, steps, micro_steps))
        return False

    object.__setattr__(engine.parts, "objective", counted)
    engine.train(stop=keep)
    keep()


def engine_at(path: Path) -> Engine:
    return Engine(
        path,
        steps=STEPS,
        gradientAccumulation=ACCUMULATION,
        learningRate=1e-2,
        schedule={"name": "cosine", "warmupSteps": 2},
        ema={"enabled": True},
    )


def child(folder: Path, pipe: int, leave_after: int | None) -> None:
    """One attempt; ``leave_after`` micro-steps it saves in the middle of a window and leaves."""

    def tell(**said: object) -> None:
        os.write(pipe, (json.dumps(said) + "\n").encode())

    engine = engine_at(folder / "run")
    at = engine.position
    expected = load_file(state_file(folder, at.step, at.micro_step))
    found = state_of(engine)
    odd = [key for key in expected if not same_bits(found[key], expected[key])]
    if odd:
        tell(fault=f"other bits at {at.step}, {at.micro_step}: {odd}")
    tell(resumed=at.micro_step, warnings=engine.warnings)
    save = engine.checkpoint

    def checkpoint(position: RunPosition) -> None:
        save(position)
        tell(saved=position.micro_step)

    engine.checkpoint = checkpoint  # type: ignore[method-assign]
    position = engine.train(micro_steps=leave_after, every=1)
    if position.step == STEPS:
        final = load_file(state_file(folder, STEPS, STEPS * ACCUMULATION))
        found = state_of(engine)
        tell(completed=all(same_bits(found[key], final[key]) for key in final))


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(
        one.reshape(-1).contiguous().view(torch.uint8),
        other.reshape(-1).contiguous().view(torch.uint8),
    )


def fork(folder: Path, leave_after: int | None) -> tuple[int, int]:
    """Begin an attempt; returns its process and the end of the pipe to read from."""
    reading, writing = os.pipe()
    process = os.fork()
    if process:
        os.close(writing)
        return process, reading
    code = 70
    try:
        os.close(reading)
        child(folder, writing, leave_after)
        code = 0
    except BaseException as error:
        os.write(writing, (json.dumps({"fault": repr(error)}) + "\n").encode())
    finally:
        os._exit(code)


def lines_until(reading: int, deadline: float) -> Iterator[str]:
    """What a child says until it ends, or until ``deadline`` (monotonic). Lines come whole."""
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([reading], [], [], left)[0]:
            continue
        block = os.read(reading, 65536)
        if not block:
            return
        yield from block.decode().splitlines()


def attempt(folder: Path, tally: Tally, patience: float, leave_after: int | None) -> None:
    """Fork, and kill after ``patience`` seconds unless the child has ended before."""
    process, reading = fork(folder, leave_after)
    said = list(lines_until(reading, time.monotonic() + patience))
    os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    said += list(lines_until(reading, time.monotonic() + 60))  # between the last look and its end
    os.close(reading)
    tally.kills += os.WIFSIGNALED(status)
    for line in said:
        note(tally, json.loads(line))


def note(tally: Tally, said: dict[str, object]) -> None:
    """Judge one line of a child."""
    match said:
        case {"fault": str(fault)}:
            tally.faults.append(fault)
        case {"resumed": int(at), "warnings": list(warnings)}:
            tally.warnings += [str(warning) for warning in warnings]
            tally.resumed_mid_window += at % ACCUMULATION != 0
            if at < tally.saved:
                tally.faults.append(f"resumed at {at}, though {tally.saved} was saved")
        case {"saved": int(at)}:
            tally.saved = max(tally.saved, at)
        case {"completed": bool(equal)}:
            tally.completed += 1
            if not equal:
                tally.faults.append("the finished run has other bits")


def main(folder: Path, kills: int, seed: int) -> None:
    """Kill ``kills`` attempts, then let one finish; a run that is done makes room for the next."""
    torch.set_num_threads(1)
    draw, tally = random.Random(seed), Tally()
    begun = time.monotonic()
    process = os.fork()
    if not process:
        record_whole_run(folder)
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0
    longest = 0.6 * (time.monotonic() - begun)  # recording takes twice the time of a child
    while tally.kills < kills:
        done = tally.completed
        leave_after = draw.choice([None, draw.randrange(1, 6)])
        attempt(folder, tally, draw.uniform(0, longest), leave_after)
        if tally.completed > done:
            tally.saved = 0
            (folder / "run").rename(folder / f"done-{tally.completed}")
    attempt(folder, tally, 300.0, None)
    print(json.dumps(tally.__dict__))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
