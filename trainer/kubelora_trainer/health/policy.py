"""``spec.health.policy``: whether a critical finding suspends, fails or rolls back a run.

Pure: it takes a finding and returns the exception to raise. Resuming a run after a suspension
accepts the finding; a run that was rolled back once fails the next time.
"""

from kubelora_api.spec import Health
from kubelora_api.status import Finding
from kubelora_trainer.storage.run_record import Rollback
from kubelora_trainer.utils.errors import PolicyError, SuspendedByPolicyError


class RollbackRequiredError(Exception):
    """A rollback to before ``finding`` is required."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding)
        self.finding = finding


def verdict_on(finding: Finding, policy: Health, earlier: Rollback | None) -> Exception | None:
    """Return the exception that a critical finding demands; None to continue.

    Args:
        finding: The critical finding.
        policy: The job's settings.
        earlier: The run's earlier rollback, if any.
    """
    found = sentence(finding)
    match policy.policy:
        case "Warn":
            return None
        case "Fail":
            return PolicyError(f"{found} (health.policy is Fail)")
        case "Suspend":
            return SuspendedByPolicyError(
                f"{found} (health.policy is Suspend; a checkpoint is saved)"
            )
        case "Rollback" if earlier is None:
            return RollbackRequiredError(finding)
        case "Rollback":
            return PolicyError(
                f"{found} (health.policy is Rollback, and the run already went back to step "
                f"{earlier.back_to} because of {earlier.finding.name})"
            )


def sentence(finding: Finding) -> str:
    """Describe what was found, where, and what to do, without a full stop."""
    where = f" in {finding.group}" if finding.group else ""
    since = f" since step {finding.since_step}" if finding.since_step is not None else ""
    return f"{finding.name}{where}{since}: {finding.message.rstrip('.')}"
