"""Checkpoints: whole or absent, verified before use, exact to the bit."""

import hashlib
import json
import math
import os
import random
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from kubelora_trainer.checkpoint.checkpointer import resume
from kubelora_trainer.utils.errors import OutputError
from tests.trainer.fixtures.engine import Engine


def trained(path: Path) -> torch.Tensor:
    engine = Engine(path)
    engine.train()
    return engine.buffers.masters.clone()


@pytest.mark.parametrize("cut", range(1, 18))
def test_a_run_cut_at_any_micro_step_ends_with_the_same_bits(tmp_path: Path, cut: int) -> None:
    whole = Engine(tmp_path / "whole")
    whole.train()
    first = Engine(tmp_path / "cut")
    position = first.train(micro_steps=cut)
    assert position.micro_step == cut
    second = Engine(tmp_path / "cut")
    assert second.resumed is not None
    assert second.position.micro_step == cut
    second.train()
    for name in ("masters", "working"):
        assert torch.equal(getattr(whole.buffers, name), getattr(second.buffers, name)), name
    ours, theirs = whole.optimizer.tensors(), second.optimizer.tensors()
    assert torch.equal(ours["second_moment"], theirs["second_moment"])
    assert whole.exporter.report.loss == second.exporter.report.loss
    assert whole.reporter.watch == second.reporter.watch
    assert whole.reporter.norm_range == second.reporter.norm_range


def test_the_middle_of_a_window_keeps_the_accumulator(tmp_path: Path) -> None:
    first = Engine(tmp_path)
    first.train(micro_steps=4)  # one window of three, and one micro-step of the next
    assert first.saved[-1].path.name == "step-000001.1"
    assert first.buffers.gradient.count_nonzero() > 0
    second = Engine(tmp_path)
    assert torch.equal(first.buffers.gradient, second.buffers.gradient)
    assert second.position.window_samples == 1


def test_the_newest_are_kept(tmp_path: Path) -> None:
    Engine(tmp_path).train(every=1)
    kept = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-000004", "step-000005", "step-000006"]


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


def remove(file: Path) -> None:
    file.unlink()


def make_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def nest(file: Path) -> None:
    file.write_text("[" * 100_000)


def make_the_checkpoint_a_file(file: Path) -> None:
    shutil.rmtree(file.parent)
    file.parent.write_text("in the way")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("adapter.safetensors", truncate),
        ("adapter.safetensors", flip_a_bit),
        ("optimizer.safetensors", remove),
        ("checkpoint.json", truncate),
        ("checkpoint.json", remove),
        ("checkpoint.json", nest),
        ("checkpoint.json", make_a_folder),
        ("optimizer.safetensors", make_a_folder),
        ("checkpoint.json", make_the_checkpoint_a_file),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    expected = trained(tmp_path / "whole")
    Engine(tmp_path / "cut").train(micro_steps=13, every=1)
    newest = tmp_path / "cut" / "checkpoints" / "step-000004.1"
    damage(newest / name)
    again = Engine(tmp_path / "cut")
    assert again.position.step == 4
    assert again.position.micro_step == 12
    assert len(again.warnings) == 1
    assert "step-000004.1 is not usable" in again.warnings[0]
    assert name in again.warnings[0]
    again.train()
    assert torch.equal(again.buffers.masters, expected)


def sealed(manifest: dict[str, Any]) -> str:
    """A manifest as another version might write it: whole, with its digest."""
    plain = {key: value for key, value in manifest.items() if key != "sha256"}
    canonical = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return json.dumps({**plain, "sha256": hashlib.sha256(canonical.encode()).hexdigest()})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"format": 3}, "its format is 3, not 2"),
        (
            {"parts": {"adapter": {}, "optimizer": {}, "telemetry": {}, "scaler": {}}},
            r"components .*\(scaler\)",
        ),
        ({"watch": {"found": []}}, "its watchdog state has another format"),
    ],
)
def test_a_checkpoint_of_another_version_is_refused_and_not_set_aside(
    tmp_path: Path, change: dict[str, Any], why: str
) -> None:
    Engine(tmp_path).train(micro_steps=4)
    file = tmp_path / "checkpoints" / "step-000001.1" / "checkpoint.json"
    file.write_text(sealed(json.loads(file.read_text()) | change))
    with pytest.raises(OutputError, match=f"another version of kubelora .*{why}"):
        Engine(tmp_path)
    assert file.exists()


def test_the_first_format_had_no_seal(tmp_path: Path) -> None:
    Engine(tmp_path).train(micro_steps=4)
    file = tmp_path / "checkpoints" / "step-000001.1" / "checkpoint.json"
    file.write_text(json.dumps({"format": 1, "run_id": "x"}))
    with pytest.raises(OutputError, match="its format is 1, not 2"):
        Engine(tmp_path)


class Scaler:
    """A part of a checkpoint that is no tensor alone: what a loss scaler would keep."""

    def __init__(self) -> None:
        self.scale = torch.tensor(65536.0)
        self.clean_steps = 0
        self.largest = 0.0

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"scale": self.scale}

    def scalars(self) -> dict[str, Any]:
        return {"clean_steps": self.clean_steps, "largest": self.largest}

    def load(self, tensors: Mapping[str, torch.Tensor], scalars: dict[str, Any]) -> None:
        self.scale.copy_(tensors["scale"])
        self.clean_steps, self.largest = scalars["clean_steps"], scalars["largest"]


def test_a_part_of_ones_own_is_saved_and_taken_over_to_the_bit(tmp_path: Path) -> None:
    engine, scaler = Engine(tmp_path), Scaler()
    engine.saved_parts["scaler"] = scaler
    scaler.scale.fill_(0.1)
    scaler.clean_steps, scaler.largest = 7, math.inf
    engine.train(micro_steps=2)
    again = Scaler()
    resumed = resume(
        engine.folder,
        engine.buffers,
        {**engine.saved_parts, "scaler": again},
        engine.warnings.append,
    )
    assert resumed is not None
    assert torch.equal(again.scale, torch.tensor(0.1))
    assert (again.clean_steps, again.largest) == (7, math.inf)


def test_any_flipped_bit_is_noticed_in_the_manifest_too(tmp_path: Path) -> None:
    expected = trained(tmp_path / "whole")
    Engine(tmp_path / "cut").train(micro_steps=13, every=1)
    newest = tmp_path / "cut" / "checkpoints" / "step-000004.1"
    draw = random.Random(5)
    shutil.copytree(tmp_path / "cut", tmp_path / "kept")
    for number in range(40):
        shutil.rmtree(tmp_path / "cut")
        shutil.copytree(tmp_path / "kept", tmp_path / "cut")
        file = draw.choice(sorted(newest.iterdir()))
        written = file.read_bytes()
        data = bytearray(written)
        where = draw.randrange(len(data))
        data[where] ^= 1 << draw.randrange(8)
        file.write_bytes(data)
        again = Engine(tmp_path / "cut")
        if again.position.micro_step == 13:  # white space between two fields means nothing
            assert file.name == "checkpoint.json"
            assert again.warnings == []
            assert json.loads(data) == json.loads(written)
        else:
            assert again.position.micro_step == 12
            assert f"step-000004.1 is not usable: {file.name}" in again.warnings[0]
        if number % 10 == 0:
            again.train()
            assert torch.equal(again.buffers.masters, expected)
        else:
            again.exporter.close()


@pytest.mark.parametrize("left", [".step-000001.1.old", ".step-000001.1.part", ".step-000001.gone"])
def test_what_a_kill_leaves_half_done_is_tidied_up(tmp_path: Path, left: str) -> None:
    Engine(tmp_path).train(micro_steps=4)
    root = tmp_path / "checkpoints"
    if left.endswith(".old"):  # killed between the two renames that replace a checkpoint
        (root / "step-000001.1").rename(root / left)
    else:
        (root / left).mkdir()
        (root / left / "adapter.safetensors").write_text("half")
    again = Engine(tmp_path)
    assert again.position.micro_step == 4
    assert again.warnings == []
    assert [p.name for p in root.iterdir()] == ["step-000001.1"]


def test_no_usable_checkpoint_means_a_fresh_start(tmp_path: Path) -> None:
    Engine(tmp_path).train(micro_steps=4)
    truncate(tmp_path / "checkpoints" / "step-000001.1" / "adapter.safetensors")
    again = Engine(tmp_path)
    assert again.resumed is None
    assert again.position.step == 0
    assert "none of 1 checkpoints is usable; training restarts at step 0" in again.warnings[-1]


def test_a_checkpoint_that_may_not_be_read_is_refused_and_not_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be whole; root may read anything, so the system's answer is given for it."""
    Engine(tmp_path).train(micro_steps=4)
    newest = tmp_path / "checkpoints" / "step-000001.1"
    read = Path.read_bytes

    def refusing(file: Path) -> bytes:
        if file.parent == newest:
            raise PermissionError(13, "Permission denied", str(file))
        return read(file)

    monkeypatch.setattr(Path, "read_bytes", refusing)
    with pytest.raises(OutputError, match=r"checkpoint\.json can't be read: permission"):
        Engine(tmp_path)
    monkeypatch.undo()
    assert Engine(tmp_path).position.micro_step == 4


def test_an_older_attempt_writes_nothing_once_a_newer_one_began(tmp_path: Path) -> None:
    old = Engine(tmp_path, attempt=1)
    Engine(tmp_path, attempt=2).exporter.close()
    with pytest.raises(OutputError, match=r"attempt 2 of run .* has taken over this output folder"):
        old.train(every=1)
    assert not (tmp_path / "checkpoints").exists()
    with pytest.raises(OutputError, match="attempt 1 is too old"):
        Engine(tmp_path, attempt=1)


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_the_system_refuses_leaves_the_last_checkpoint_intact(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.train(micro_steps=4)
    with (
        file_size_limit(100),
        pytest.raises(OutputError, match=r"can't write to .*step-000001\.1: .*size limit"),
    ):
        engine.checkpoint(engine.position)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000001.1"]
    again = Engine(tmp_path)
    assert again.warnings == []
    assert again.position.micro_step == 4


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_a_sentence_and_the_last_checkpoint_stands(small_disk: Path) -> None:
    engine = Engine(small_disk)
    engine.train(micro_steps=4)
    filler = small_disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    with pytest.raises(OutputError, match="no space left on the device; free some"):
        engine.checkpoint(engine.position)
    with pytest.raises(OutputError, match="no space left"):
        engine.folder.write_manifest("Failed")
    assert [p.name for p in (small_disk / "checkpoints").iterdir()] == ["step-000001.1"]
    filler.unlink()
    assert Engine(small_disk).position.micro_step == 4
