"""All detectors of a run, built in one place. A new one is a file here and a line below.

See docs/how-to-add-a-detector.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kubelora_api.training_spec import Training
from kubelora_trainer.health.baseline import Baseline
from kubelora_trainer.health.detector import Detector
from kubelora_trainer.health.detectors import startup_contract
from kubelora_trainer.health.detectors.adapter_size import AdapterSize
from kubelora_trainer.health.detectors.audited_step import AuditedStep
from kubelora_trainer.health.detectors.average_copy import AverageCopy
from kubelora_trainer.health.detectors.base_model import FrozenModel
from kubelora_trainer.health.detectors.baseline_departure import BaselineDeparture
from kubelora_trainer.health.detectors.gradient_altered import GradientAltered
from kubelora_trainer.health.detectors.gradient_jump import GradientJump
from kubelora_trainer.health.detectors.latent_spread import LatentSpread
from kubelora_trainer.health.detectors.optimizer_formula import OptimizerFormula
from kubelora_trainer.health.detectors.quantities import RunFacts
from kubelora_trainer.health.detectors.repeated_draws import RepeatedDraws
from kubelora_trainer.health.detectors.skipped_steps import SkippedSteps
from kubelora_trainer.health.detectors.state_altered import StateAltered
from kubelora_trainer.health.detectors.step_limits import StepLimits
from kubelora_trainer.health.detectors.step_spike import StepSpike
from kubelora_trainer.health.startup_checks import FirstGradients
from kubelora_trainer.optim.flat_buffers import AdapterBuffers


@dataclass(frozen=True)
class Watched:
    """The facts and parts that detectors are built from.

    categories, files: of each sample, in the dataset's order; empty where images are not watched.
    training: the job's settings, which the optimizer is compared with; None: it is not compared.
    """

    facts: RunFacts
    buffers: AdapterBuffers
    categories: Sequence[str] = ()
    baseline: Baseline | None = None
    files: Sequence[str] = ()
    training: Training | None = None


def build_detectors(run: Watched) -> tuple[Detector, ...]:
    """Build every detector of a run.

    The order is that of the findings of one step, and the first critical one is what the policy
    acts on; of two broken contracts the first ends the run.
    """
    slots, compute = run.buffers.slots, run.buffers.plan.compute
    return (
        AuditedStep(),
        FrozenModel(),
        StateAltered(),
        AdapterSize(run.facts),
        GradientAltered(run.facts),
        OptimizerFormula(run.training),
        GradientJump(),
        AverageCopy(run.training),
        SkippedSteps(run.files),
        StepLimits(run.facts),
        LatentSpread(run.categories),
        RepeatedDraws(),
        BaselineDeparture(run.baseline, run.facts.total_steps),
        StepSpike(),
        startup_contract.Dtypes(),
        startup_contract.FreshAdapter(),
        startup_contract.RestoredOptimizer(),
        startup_contract.ReachedByBackward(),
        startup_contract.FiniteGradients(slots, run.files),
        startup_contract.FirstGradientsArrive(FirstGradients(slots, 0, compute)),
        startup_contract.RolledBack(),
    )
