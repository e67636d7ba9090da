"""When micro-steps are audited, what counts as another result, and that audits leave no trace."""

from pathlib import Path
from typing import cast

import pytest
import torch

from kubelora_trainer.training.loop import Parts
from kubelora_trainer.training.recomputation import Recomputation, RecomputedObjective
from kubelora_trainer.training.step_audit import StepAudit
from tests.numerics.bench import Configuration, Document, observe_run
from tests.numerics.scene import Scene
from tests.trainer.fixtures.engine import Engine


def audit_of(engine: Engine, accumulation: int = 8) -> StepAudit:
    own = cast(RecomputedObjective, engine.parts.objective)
    return StepAudit(Recomputation(own, engine.buffers, engine.telemetry), [], accumulation)


def test_early_steps_of_an_attempt_are_audited_and_then_one_in_a_hundred(tmp_path: Path) -> None:
    fresh, resumed = audit_of(Engine(tmp_path / "a")), audit_of(Engine(tmp_path / "b"))
    assert [s for s in range(1, 301) if fresh.due(s)] == [2, 4, 8, 16, 32, 64, 100, 200, 300]
    assert [s for s in range(151, 301) if resumed.due(s)][:4] == [152, 154, 158, 166]


def test_kernels_that_never_agree_blame_no_device_within_their_own_spread(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(engine.buffers.numel, generator=generator)

    def noisy(size: float) -> torch.Tensor:
        return exact * (1 + size * torch.randn(exact.shape, generator=generator))

    audit = audit_of(engine)
    assert audit.hardware_distance(noisy(0.01), noisy(0.01), lambda: noisy(0.01))[0] == 0.0
    assert audit.hardware_distance(noisy(0.2), noisy(0.2), lambda: noisy(0.2))[0] == 0.0
    broken = noisy(0.01)
    broken[0] += 1e4
    off, factor = audit.hardware_distance(broken, noisy(0.01), lambda: noisy(0.01))
    assert off > 1
    assert factor == engine.buffers.slots[0].factor.name


def test_a_single_bit_counts_once_kernels_are_known_to_be_deterministic(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    exact = torch.linspace(0.1, 1, engine.buffers.numel)
    broken = exact.clone()
    broken.view(torch.int32)[3] ^= 1
    unknown, known = audit_of(engine), audit_of(engine)
    assert unknown.hardware_distance(broken, exact, lambda: exact)[0] == 0.0
    assert known.hardware_distance(exact, exact, lambda: exact)[0] == 0.0
    assert known.hardware_distance(broken, exact, lambda: exact)[0] > 0.0


def test_nan_in_both_passes_is_the_same_result(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    broken = torch.full((engine.buffers.numel,), torch.nan)
    audit = audit_of(engine)
    assert audit.hardware_distance(broken, broken.clone(), lambda: broken)[0] == 0.0


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene.create(tmp_path_factory.mktemp("scene"))


@pytest.mark.parametrize(
    "spec",
    [
        {"training": {"steps": 5}},
        {"training": {"steps": 5}, "precision": {"compute": "fp16"}},
        {"training": {"steps": 5}, "adapter": {"rank": 4, "dropout": 0.2, "dora": True}},
    ],
    ids=["plain", "fp16", "dropout and DoRA"],
)
def test_a_run_with_audits_ends_with_the_same_bits(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: Document
) -> None:
    def masters(name: str) -> torch.Tensor:
        kept: list[Parts] = []

        def keep(parts: Parts) -> Parts:
            kept.append(parts)
            return parts

        seen = observe_run(scene, Configuration(spec), 1, tmp_path / name, keep)
        assert not seen.findings
        return kept[0].buffers.masters

    audited = masters("audited")
    monkeypatch.setattr(StepAudit, "due", lambda self, step: False)
    assert torch.equal(audited, masters("plain"))
