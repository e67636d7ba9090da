"""What each field decides is declared at the field, and the rules that follow from it.

The expectations are written out by hand: a run that exists must be able to resume with what it may
resume with today, whatever becomes of the declarations.
"""

from typing import Annotated, Literal

import pytest
from pydantic import Field

from kubelora_api.decides import Decides, Effect, declarations, declared, in_key, select, where_all
from kubelora_api.job import TRANSITIONS, LoraTrainingJob, transitions_of
from kubelora_api.schema import ApiModel
from kubelora_api.spec import Checkpoint, JobSpec
from tests.trainer.fixtures.engine import job

EVERY_FIELD = dict(declarations(JobSpec))


def _paths(effect: Effect) -> set[str]:
    return {path for path, found in EVERY_FIELD.items() if found and effect in found.effects}


def test_every_field_declares_what_it_decides() -> None:
    assert len(EVERY_FIELD) > 120
    silent = [f"spec.{path}" for path, found in EVERY_FIELD.items() if found is None]
    assert not silent, f"add Decides(...) to the annotation of {', '.join(silent)}"


def test_a_field_that_declares_nothing_is_found_and_counts_as_deciding_everything() -> None:
    class Silent(Checkpoint):
        compress: bool = False

    assert [p for p, found in declarations(Silent, "checkpoint.") if found is None] == [
        "checkpoint.compress"
    ]
    document = {"everySteps": 5, "compress": True}
    assert select(document, Silent, lambda found: found.resume != "yes") == {"compress": True}


def test_only_the_pod_template_declares_for_all_fields_below_it() -> None:
    groups = {
        name
        for name, info in JobSpec.model_fields.items()
        if declared(info) and any(path.startswith(f"{info.alias}.") for path in EVERY_FIELD)
    }
    assert groups == {"pod_template"}


def test_a_run_may_resume_after_these_fields_changed_and_no_others() -> None:
    assert where_all(JobSpec, lambda found: found.resume == "yes") == [
        "health",
        "checkpoint",
        "tracking",
        "workers",
        "podTemplate",
        "queueName",
        "suspend",
        "restartPolicy",
        "activeDeadlineSeconds",
        "pendingDeadlineSeconds",
        "ttlSecondsAfterFinished",
        "dataset.captions.maxMissing",
        "dataset.cache",
        "output.dtype",
        "output.push",
        "output.replaceExisting",
    ]
    lengths = [path for path, found in EVERY_FIELD.items() if found and found.resume == "length"]
    assert lengths == ["training.steps", "training.epochs"]


def test_these_groups_are_fixed_once_a_job_has_started() -> None:
    fixed = "model dataset adapter training precision validation checkpoint output workers"
    assert [rule.path for rule in TRANSITIONS] == [f"spec.{group}" for group in fixed.split()]
    started = "!has(oldSelf.status) || !has(oldSelf.status.attempt) || oldSelf.status.attempt < 1"
    assert TRANSITIONS[0].cel == f"{started} || self.spec.model == oldSelf.spec.model"


def test_what_the_fields_decide() -> None:
    in_latent_key, in_text_key = (
        in_key("pixels", ("model", "file", "view")),
        in_key("text", ("model", "caption")),
    )
    assert {p for p, d in EVERY_FIELD.items() if d and in_latent_key(d)} == {
        "dataset.background",
        "dataset.alpha",
    }
    assert {p for p, d in EVERY_FIELD.items() if d and in_text_key(d)} == {"adapter.textEncoders"}
    assert _paths("norms") == {
        "adapter.rank",
        "adapter.rankPattern",
        "adapter.targets",
        "adapter.targetPatterns",
        "training.batchSize",
        "training.gradientAccumulation",
    }
    assert {path.split(".")[0] for path in _paths("samples")} == {"validation"}
    assert {path.split(".")[0] for path in _paths("nothing")} == {
        "dataset",
        "health",
        "checkpoint",
        "output",
        "tracking",
        "podTemplate",
        "queueName",
        "suspend",
        "restartPolicy",
        "activeDeadlineSeconds",
        "pendingDeadlineSeconds",
        "ttlSecondsAfterFinished",
    }
    assert _paths("nothing") & {p for p in EVERY_FIELD if p.startswith("dataset.")} == {
        "dataset.cache",
        "dataset.captions.maxMissing",
        "dataset.columns.category",
        "dataset.extraSources.category",
    }


def test_a_field_held_in_another_key_alone_is_in_this_one_by_value() -> None:
    both = Decides("pixels", "text", held_as=("caption",))
    assert in_key("pixels", ("model", "file", "view"))(both)
    assert not in_key("text", ("model", "caption"))(both)


@pytest.mark.parametrize(
    "declare",
    [
        lambda: Decides(),
        lambda: Decides("nothing", "weights"),
        lambda: Decides("weights", live=True),
        lambda: Decides("nothing", at_once=True),
    ],
)
def test_a_declaration_that_contradicts_itself_is_refused(declare: object) -> None:
    assert callable(declare)
    with pytest.raises(ValueError, match=r"declare what the field decides|can't change"):
        declare()


class _Keeping(Checkpoint):
    keep: Annotated[int, Field(ge=1), Decides("nothing", live=True)] = 3
    pause: Annotated[bool, Decides("nothing", live=True)] = False


class _KeepingSpec(JobSpec):
    checkpoint: _Keeping = Field(default_factory=_Keeping)


def test_one_field_of_a_fixed_group_can_be_free_in_a_started_job() -> None:
    """Field by field then: an absent group and one without the field are alike to the rule."""
    rules = {rule.path: rule for rule in transitions_of(_KeepingSpec)}
    assert "spec.checkpoint" not in rules
    assert "spec.checkpoint.keep" not in rules
    rule = rules["spec.checkpoint.everySteps"]
    new = "(has(self.spec.checkpoint) && has(self.spec.checkpoint.everySteps))"
    old = new.replace("self", "oldSelf")
    assert rule.cel.endswith(
        f"|| ({new} == {old} && (!{new} || "
        "self.spec.checkpoint.everySteps == oldSelf.spec.checkpoint.everySteps))"
    )
    before = _started(every_steps=5, keep=3)
    assert rule.check(_started(every_steps=5, keep=9), before)
    assert not rule.check(_started(every_steps=6, keep=3), before)


def _started(**checkpoint: int) -> LoraTrainingJob:
    one = job()
    spec = one.spec.model_copy(update={"checkpoint": _Keeping.model_validate(checkpoint)})
    status = one.status.model_copy(update={"attempt": 1})
    return one.model_copy(update={"spec": spec, "status": status})


def test_a_field_of_another_version_is_kept_where_its_group_keeps_any() -> None:
    class Group(ApiModel):
        tone: Annotated[Literal["colour", "gray"], Decides("pixels")] = "colour"

    assert select({"tone": "gray", "hue": 3}, Group, lambda found: True) == {
        "tone": "gray",
        "hue": 3,
    }
    assert select({"tone": "gray", "hue": 3}, Group, lambda found: False) == {}
