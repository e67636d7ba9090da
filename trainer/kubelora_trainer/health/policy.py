"""What ``spec.health.policy`` makes of a critical finding: train on, wait, fail, or go back.

Pure: a finding goes in, an exception comes out that says what is due. A run that its user resumes
after a suspension has accepted what was found; a run that went back once fails the next time.
"""

from kubelora_api.spec import Health
from kubelora_api.status import Finding
from kubelora_trainer.storage.run_record import Rollback
from kubelora_trainer.utils.errors import PolicyError, SuspendedByPolicyError


class RollbackRequiredError(Exception):
    """Training has to go back to before ``finding``."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding)
        self.finding = finding


def verdict_on(finding: Finding, policy: Health, earlier: Rollback | None) -> Exception | None:
    """What is due for a critical finding; None to train on."""
    told = sentence(finding)
    match policy.policy:
        case "Warn":
            return None
        case "Fail":
            return PolicyError(f"{told} (health.policy is Fail)")
        case "Suspend":
            return SuspendedByPolicyError(
                f"{told} (health.policy is Suspend; a checkpoint is saved)"
            )
        case "Rollback" if earlier is None:
            return RollbackRequiredError(finding)
        case "Rollback":
            return PolicyError(
                f"{told} (health.policy is Rollback, and the run already went back to step "
                f"{earlier.back_to} because of {earlier.finding.name})"
            )


def sentence(finding: Finding) -> str:
    """What was found, where, and what to do, without a full stop."""
    where = f" in {finding.group}" if finding.group else ""
    since = f" since step {finding.since_step}" if finding.since_step is not None else ""
    return f"{finding.name}{where}{since}: {finding.message.rstrip('.')}"
