"""Jobs of the product in one namespace of a cluster, read as a test speaks of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .kubectl import Kubectl
from .probes import wait_until


@dataclass(frozen=True)
class Jobs:
    """kubectl: within the namespace of the jobs."""

    kubectl: Kubectl

    def status(self, job: str) -> dict[str, Any]:
        """Empty while the operator has said nothing."""
        found: Any = self.kubectl.get("ltj", job)
        status: dict[str, Any] = found.get("status", {})
        return status

    def condition(self, job: str, kind: str) -> dict[str, Any]:
        """A condition of a job; empty while there is none of that type."""
        conditions = self.status(job).get("conditions", [])
        return next((c for c in conditions if c["type"] == kind), {})

    def is_true(self, job: str, kind: str) -> bool:
        return self.condition(job, kind).get("status") == "True"

    def wait(self, job: str, kind: str, seconds: float) -> None:
        """Until a condition is True; fails with what kubectl describes."""
        assert wait_until(lambda: self.is_true(job, kind), seconds), self.describe(job)

    def pods(self, job: str, attempt: int | None = None) -> list[Any]:
        """By name, which ends with their index."""
        labels = [f"kubelora.dev/job={job}"]
        labels += [f"kubelora.dev/attempt={attempt}"] if attempt is not None else []
        found: list[Any] = list(self.kubectl.items("pods", "-l", ",".join(labels)))
        return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))

    def owned(self, job: str) -> list[str]:
        """Everything in the namespace that carries the job's label."""
        kinds = "jobs,pods,configmaps,services,secrets,networkpolicies,persistentvolumeclaims"
        return self.kubectl("get", kinds, "-l", f"kubelora.dev/job={job}", "-o", "name").split()

    def describe(self, job: str) -> str:
        """The job and its pods' last words, for the message of a test that waited in vain."""
        told = self.kubectl.attempt("describe", "ltj", job).stdout
        for pod in self.pods(job):
            name = pod["metadata"]["name"]
            told += f"\n--- {name}\n" + self.kubectl.attempt("logs", name, "--tail=20").stdout
        return told
