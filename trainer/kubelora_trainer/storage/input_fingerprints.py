"""Check that a resumed run still has the data and base model it began with.

Settings are compared when the output is claimed, but the content behind a path can change. A
resumed run would then not be reproducible.
"""

from kubelora_trainer.storage.run_record import RunRecord
from kubelora_trainer.utils.errors import OutputError


def check_same_inputs(began: RunRecord, now: RunRecord, data: str, model: str) -> None:
    """Check that data and model are those the run began with.

    Args:
        began: Fingerprints at the start of the run; only what both records have is compared.
        now: Current fingerprints.
        data: Location of the data, for the message.
        model: Location of the model, for the message.

    Raises:
        OutputError: Data or model have changed.
    """
    changed = changed_inputs(began, now, data, model)
    if changed:
        raise OutputError(
            f"{' and '.join(changed)} changed since this run began, so it can't resume from its "
            "checkpoint: restore the original, or create a new job with another "
            "spec.output.uri"
        )


def changed_inputs(began: RunRecord, now: RunRecord, data: str, model: str) -> list[str]:
    """Describe which of data and model have changed; arguments as of `check_same_inputs`."""
    changed = []
    if _differ(began.dataset_sha256, now.dataset_sha256):
        before, after = began.dataset_images, now.dataset_images
        what = (
            "the same number of images, but different bytes, captions, categories or order"
            if before == after
            else f"{before} usable images then, {after} now"
        )
        changed.append(f"the data in {data} ({what})")
    if _differ(began.model_sha256, now.model_sha256):
        changed.append(f"the base model in {model}")
    return changed


def _differ(before: str | None, now: str | None) -> bool:
    return before is not None and now is not None and before != now
