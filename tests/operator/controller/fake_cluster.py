"""An API server in memory with the requests that a reconciler makes, and the faults of a test."""

from collections import Counter
from collections.abc import Callable

from kubelora_api import names
from kubelora_api.schema import JsonObject
from kubelora_operator.attempt.manifests import child_name
from kubelora_operator.kube.client import ApiError
from tests.operator.world import document

Fault = Callable[[str, JsonObject], None]


class FakeCluster:
    """Objects by name, with versions; ``fault`` may raise before a request is carried out."""

    def __init__(self, fault: Fault = lambda verb, body: None) -> None:
        self.fault = fault
        self.requests: Counter[str] = Counter()
        self.jobs: dict[str, JsonObject] = {}
        self.children: dict[str, JsonObject] = {}
        self.objects: dict[tuple[str, str], JsonObject] = {}
        self.pods: dict[str, list[JsonObject]] = {}
        self.version = 0
        self.echo: Callable[[str], None] = lambda name: None

    def add_job(self, name: str) -> JsonObject:
        """Create a LoraTrainingJob whose uid is its name."""
        job = document()
        job["metadata"] |= {"name": name, "uid": f"uid-{name}"}
        self._store(job)
        return job

    def add_running_job(self, name: str, address: str) -> None:
        """Create a job whose first attempt has a running pod at this address."""
        uid = str(self.add_job(name)["metadata"]["uid"])
        child = child_name(name, uid, 1)
        owner = {"kind": names.KIND, "name": name, "uid": uid, "controller": True}
        metadata = {"name": child, "uid": child, "labels": {"uid": uid}, "ownerReferences": [owner]}
        self.children[child] = {"metadata": metadata}
        job = {"kind": "Job", "name": child, "uid": child, "controller": True}
        container = {
            "name": names.TRAINER_CONTAINER,
            "state": {"running": {"startedAt": "2026-03-01T12:00:00Z"}},
        }
        status = {"phase": "Running", "podIP": address, "containerStatuses": [container]}
        pod = {"name": f"{child}-0", "uid": f"pod-{name}", "ownerReferences": [job]}
        self.pods[uid] = [{"metadata": pod, "status": status}]

    def _store(self, job: JsonObject) -> None:
        self.version += 1
        name = job["metadata"]["name"]
        metadata = job["metadata"] | {"resourceVersion": str(self.version)}
        self.jobs[name] = job | {"metadata": metadata}
        self.echo(name)

    def _count(self, verb: str, body: JsonObject) -> None:
        self.requests[verb] += 1
        self.fault(verb, body)

    async def get_job(self, namespace: str, name: str) -> JsonObject | None:
        return self.jobs.get(name)

    async def children_of(self, namespace: str, uid: str) -> list[JsonObject]:
        return [c for c in self.children.values() if c["metadata"]["labels"].get("uid") == uid]

    async def pods_of(self, namespace: str, uid: str) -> list[JsonObject]:
        return self.pods.get(uid, [])

    async def get_child(self, namespace: str, name: str) -> JsonObject | None:
        return self.children.get(name)

    async def get_config_map(self, namespace: str, name: str) -> JsonObject | None:
        return None

    async def get_object(self, kind: str, namespace: str, name: str) -> JsonObject | None:
        return self.objects.get((kind, name))

    async def create_object(self, kind: str, manifest: JsonObject) -> JsonObject:
        name = manifest["metadata"]["name"]
        if (kind, name) in self.objects:
            raise ApiError(409, "AlreadyExists", f"{kind} {name} exists")
        uid = {"uid": f"{kind}-{name}"}
        stored = manifest | {"metadata": manifest["metadata"] | uid}
        return self.objects.setdefault((kind, name), stored)

    async def delete_object(self, kind: str, document: JsonObject) -> None:
        self._count("delete_object", document)
        del self.objects[kind, document["metadata"]["name"]]

    async def warnings_about(self, namespace: str, uid: str) -> list[JsonObject]:
        return []

    async def put_status(self, job: JsonObject) -> JsonObject:
        self._count("put_status", job)
        name = job["metadata"]["name"]
        old = self.jobs[name]
        if old["metadata"]["resourceVersion"] != job["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", "the object has been modified")
        if old.get("status") != job.get("status"):
            self._store(job)
        return self.jobs[name]

    async def delete_job(self, job: JsonObject) -> None:
        self._count("delete_job", job)
        found = self.jobs.get(job["metadata"]["name"])
        if found and found["metadata"]["resourceVersion"] == job["metadata"]["resourceVersion"]:
            del self.jobs[job["metadata"]["name"]]

    async def create_child(self, manifest: JsonObject) -> JsonObject:
        self._count("create_child", manifest)
        metadata = manifest["metadata"]
        labels = metadata["labels"] | {"uid": metadata["labels"][names.LABEL_JOB_UID]}
        child = manifest | {"metadata": metadata | {"uid": metadata["name"], "labels": labels}}
        self.children[metadata["name"]] = child
        return child

    async def create_event(self, event: JsonObject) -> None:
        self.requests["create_event"] += 1
