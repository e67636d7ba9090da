"""Generator of ``docs/job-reference.md``, the page on all fields of a job."""

from kubelora_api.field_docs import FieldDoc, field_docs

_HEAD = """\
<!-- Generated from kubelora_api by `python -m charts.generate`. Do not edit. -->
# Every field of a job

The CRD, `kubectl explain ltj.spec`, `kubelora explain` and this page come from the same models. A
field in **bold** is required. A field that is not said to change later is fixed once the job has
started: the API server refuses the change, and `kubelora train` refuses to resume with it.
Limits that involve several fields are listed at their group.
"""


def job_page() -> str:
    """Render the page, with a section for each group of fields."""
    spec = field_docs()
    groups = [group for group in spec.walk() if group.below]
    return "\n".join([_HEAD, *(_section(group) for group in groups)])


def _section(group: FieldDoc) -> str:
    lines = [f"## {group.path}", "", group.description, ""]
    lines += [f"- {_cell(limit)}" for limit in group.limits]
    lines += [""] if group.limits else []
    lines += ["| Field | Type | Meaning |", "|---|---|---|"]
    lines += [_row(field) for field in group.below]
    return "\n".join([*lines, ""])


def _row(field: FieldDoc) -> str:
    name = f"**{field.name}**" if field.required else field.name
    if field.below:
        anchor = "".join(c for c in field.path.lower() if c.isalnum())
        return f"| [{name}](#{anchor}) | {field.type} | {_cell(field.description)} |"
    limits = "; ".join(field.limits)
    notes = [field.description, f"Limits: {limits}." if limits else ""]
    notes.append(f"It {field.change}." if field.change else "")
    return f"| {name} | {field.type} | {_cell(' '.join(n for n in notes if n))} |"


def _cell(text: str) -> str:
    """Escape what Markdown would read as markup in a table's cell."""
    escaped = "".join(f"\\{c}" if c in "|*_<>[]`\\" else c for c in text)
    return escaped.replace("](", "]\\(")  # a pattern is no link
