"""Check of a job against the pod policy. Pure."""

from collections.abc import Iterator
from typing import Any, Final

from pydantic import BaseModel

from kubelora_api import names
from kubelora_api.job import LoraTrainingJob
from kubelora_api.pod import PodTemplate
from kubelora_api.schema import model_below
from kubelora_operator.admission.pod_rules import RULES, RuleContext
from kubelora_operator.admission.policy import PodPolicy, matches_any
from kubelora_operator.admission.refusal import Refusal, not_listed

_DEFAULT_ACCOUNT: Final = "default"
"""The API server sets it in a pod that names none."""


def refusals_of(job: LoraTrainingJob, policy: PodPolicy) -> tuple[str, ...]:
    """Return a sentence for each thing that the policy does not let the job's pods have."""
    return tuple(str(refusal) for refusal in _refusals(job, policy))


def _refusals(job: LoraTrainingJob, policy: PodPolicy) -> Iterator[Refusal]:
    template = job.spec.pod_template.document()
    template.setdefault("serviceAccountName", _DEFAULT_ACCOUNT)
    context = RuleContext(policy, template)
    for field, path, value in fields_of(PodTemplate, template, "", "spec.podTemplate"):
        rule = RULES.get(field)
        if rule is None:
            yield Refusal(path, "this field", "this version of the operator has no rule for it")
        else:
            yield from rule(value, path, context)
    priority = job.metadata.labels.get(names.LABEL_PRIORITY_CLASS)
    if priority and not matches_any(priority, policy.workload_priority_classes):
        where = f"metadata.labels[{names.LABEL_PRIORITY_CLASS}]"
        yield not_listed(where, priority, policy, "workload_priority_classes")


def fields_of(
    model: type[BaseModel], document: Any, field: str, path: str
) -> Iterator[tuple[str, str, Any]]:
    """Yield every field that is set: its path in the schema, its path in the document, its value.

    Args:
        model: The model of the document.
        document: The document of a group, as JSON.
        field: Path of the group in the schema.
        path: Path of the group in the complete document.
    """
    fields = model.model_fields.items()
    below = {info.alias or name: model_below(info.annotation) for name, info in fields}
    for name, value in document.items():
        here, where, group = f"{field}.{name}".lstrip("."), f"{path}.{name}", below.get(name)
        if group is None:
            yield here, where, value
        elif isinstance(value, list):
            for index, item in enumerate(value):
                yield from fields_of(group, item, here, f"{where}[{index}]")
        else:
            yield from fields_of(group, value, here, where)
