"""Whether a run that goes on still has the data and the base model that it began with.

Settings are compared when the output is claimed; what they name can change behind the same path. A
resumed run would then be none that anyone could repeat.
"""

from kubelora_trainer.storage.run_record import RunRecord
from kubelora_trainer.utils.errors import OutputError


def assert_same_inputs(began: RunRecord, now: RunRecord, data: str, model: str) -> None:
    """Raise OutputError where data or model are not what the run began with.

    began, now: only what both know is compared. data, model: where they are, for the sentence.
    """
    changed = []
    if _differ(began.dataset_sha256, now.dataset_sha256):
        before, after = began.dataset_images, now.dataset_images
        what = (
            "as many images, but other bytes, captions, categories or order"
            if before == after
            else f"{before} usable images then, {after} now"
        )
        changed.append(f"the data in {data} ({what})")
    if _differ(began.model_sha256, now.model_sha256):
        changed.append(f"the base model in {model}")
    if changed:
        raise OutputError(
            f"{' and '.join(changed)} changed since this run began, so it can't go on from its "
            "checkpoint: put back what was there, or create a new job with another "
            "spec.output.uri"
        )


def _differ(before: str | None, now: str | None) -> bool:
    return before is not None and now is not None and before != now
