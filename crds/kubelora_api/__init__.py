"""The contract between users, the operator and the trainer.

Everything that more than one side must agree on is defined here once: the resource's fields and
rules, its status, label keys, exit codes, metric names, the reports of a pod. The CRD in ``crds/``
is generated from this package. It imports nothing but pydantic, so it is cheap to import for both
sides and for `kubelora validate` on a laptop.
"""
