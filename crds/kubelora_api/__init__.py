"""The contract between users, the operator and the trainer.

Everything that more than one side must agree on lives here once: the resource's fields and rules,
its status, label keys, exit codes, metric names, the reports a pod gives of itself. The CRD in
``crds/`` is generated from this package. It imports pydantic and nothing else, so both sides (and
`kubelora validate` on a laptop) can afford it.
"""
