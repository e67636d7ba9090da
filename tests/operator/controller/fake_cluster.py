"""An API server in memory with the requests that a reconciler makes, and the faults of a test."""

import time
import zlib
from collections import Counter
from collections.abc import Callable

from kubelora_api import names
from kubelora_api.schema import JsonObject
from kubelora_operator.attempt.manifests import child_name
from kubelora_operator.controller.object_store import ObjectStore, OnChange
from kubelora_operator.controller.trim import Kind
from kubelora_operator.controller.watches import sources_of
from kubelora_operator.kube.client import ApiError
from tests.operator.world import document

Fault = Callable[[str, JsonObject], None]


class FakeCluster:
    """Objects by name, with versions, and the store that its watches feed.

    ``fault`` may raise before a request is carried out, and ``lost`` after it, as if the answer had
    been lost. While ``watching`` is False, no event arrives.
    """

    def __init__(self, fault: Fault = lambda verb, body: None) -> None:
        self.fault = fault
        self.lost: Fault = lambda verb, body: None
        self.requests: Counter[str] = Counter()
        self.jobs: dict[str, JsonObject] = {}
        self.children: dict[str, JsonObject] = {}
        self.objects: dict[tuple[str, str], JsonObject] = {}
        self.pods: dict[str, JsonObject] = {}
        self.version = 0
        self.watching = True
        self.connect(lambda key, urgent: None)

    def connect(self, changed: OnChange, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the watches of a new operator, with complete lists."""
        sources = sources_of(())
        self.store = ObjectStore(sources, changed, clock)
        for source in sources:
            listed = self._objects(source.kind)
            for found in listed.values():
                self.store.deliver(source.kind, found)
            self.store.listed(source, {str(o["metadata"]["uid"]) for o in listed.values()}, clock())

    def _objects(self, kind: Kind) -> dict[str, JsonObject]:
        return {Kind.JOB: self.jobs, Kind.CHILD: self.children, Kind.POD: self.pods}[kind]

    def put(self, kind: Kind, document: JsonObject) -> JsonObject:
        """Store an object with the next version, and send its event."""
        self.version += 1
        metadata = {"namespace": "studio", "generation": 1} | document["metadata"]
        name = str(metadata["name"])
        added = name not in self._objects(kind)
        stored = document | {"metadata": metadata | {"resourceVersion": str(self.version)}}
        self._objects(kind)[name] = stored
        if self.watching:
            self.store.deliver(kind, stored, added=added)
        return stored

    def take(self, kind: Kind, name: str) -> None:
        """Delete an object, and send its event."""
        gone = self._objects(kind).pop(name)
        self.version += 1
        if self.watching:
            metadata = gone["metadata"] | {"resourceVersion": str(self.version)}
            self.store.remove(kind, gone | {"metadata": metadata})

    def add_job(self, name: str, namespace: str = "studio") -> JsonObject:
        """Create a LoraTrainingJob whose uid is made of its name."""
        job = document()
        job["metadata"] |= {"name": name, "namespace": namespace, "uid": uid_of(name)}
        return self.put(Kind.JOB, job)

    def add_running_job(self, name: str, address: str, namespace: str = "studio") -> None:
        """Create a job whose first attempt has a running pod at this address."""
        uid = str(self.add_job(name, namespace)["metadata"]["uid"])
        child = child_name(name, uid, 1)
        owner = {"kind": names.KIND, "name": name, "uid": uid, "controller": True}
        metadata: JsonObject = {"name": child, "namespace": namespace, "uid": child}
        metadata |= {"ownerReferences": [owner]}
        self.put(Kind.CHILD, {"metadata": metadata})
        self.run_pod(child, address)

    def run_pod(self, child: str, address: str = "127.0.0.1") -> None:
        """Create a running pod of a child."""
        job = self.children[child]["metadata"]
        uid, namespace = job["uid"], job["namespace"]
        owner = {"kind": "Job", "name": child, "uid": uid, "controller": True}
        container = {
            "name": names.TRAINER_CONTAINER,
            "state": {"running": {"startedAt": "2026-03-01T12:00:00Z"}},
        }
        status = {"phase": "Running", "podIP": address, "containerStatuses": [container]}
        pod: JsonObject = {"name": f"{child}-0", "namespace": namespace, "uid": f"pod-{uid}"}
        pod |= {"ownerReferences": [owner]}
        self.put(Kind.POD, {"metadata": pod, "status": status})

    def _count(self, verb: str, body: JsonObject) -> None:
        self.requests[verb] += 1
        self.fault(verb, body)

    async def get_job(self, namespace: str, name: str) -> JsonObject | None:
        self._count("get_job", {})
        return self.jobs.get(name)

    async def get_child(self, namespace: str, name: str) -> JsonObject | None:
        self._count("get_child", {})
        return self.children.get(name)

    async def get_config_map(self, namespace: str, name: str) -> JsonObject | None:
        self._count("get_config_map", {})
        return self.objects.get(("ConfigMap", name))

    async def get_object(self, kind: str, namespace: str, name: str) -> JsonObject | None:
        self._count(f"get_{kind}", {})
        return self.objects.get((kind, name))

    async def create_object(self, kind: str, manifest: JsonObject) -> JsonObject:
        self._count(f"create_{kind}", manifest)
        name = manifest["metadata"]["name"]
        if (kind, name) in self.objects:
            raise ApiError(409, "AlreadyExists", f"{kind} {name} exists")
        uid = {"uid": f"{kind}-{name}"}
        stored = manifest | {"metadata": manifest["metadata"] | uid}
        self.objects[kind, name] = stored
        self.lost(f"create_{kind}", manifest)
        return stored

    async def delete_object(self, kind: str, document: JsonObject) -> None:
        self._count("delete_object", document)
        del self.objects[kind, document["metadata"]["name"]]

    async def warnings_about(self, namespace: str, uid: str) -> list[JsonObject]:
        self._count("warnings_about", {})
        return []

    async def list_versions(
        self, job: bool, plural: str, namespace: str | None
    ) -> dict[tuple[str, str], tuple[str, str]]:
        kind = Kind.JOB if job else Kind(plural)
        self._count(f"list_{plural}", {})
        return {
            (m["namespace"], name): (m["uid"], m["resourceVersion"])
            for name, o in self._objects(kind).items()
            for m in [o["metadata"]]
        }

    async def put_status(self, job: JsonObject) -> JsonObject:
        self._count("put_status", job)
        name = job["metadata"]["name"]
        old = self.jobs.get(name)
        if old is None:
            raise ApiError(404, "NotFound", "no such job")
        if old["metadata"]["resourceVersion"] != job["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", "the object has been modified")
        if old.get("status") != job.get("status"):
            self.put(Kind.JOB, old | {"status": job["status"]})
        self.lost("put_status", job)
        return self.jobs[name]

    async def delete_job(self, job: JsonObject) -> None:
        self._count("delete_job", job)
        found = self.jobs.get(job["metadata"]["name"])
        if found and found["metadata"]["resourceVersion"] == job["metadata"]["resourceVersion"]:
            del self.jobs[job["metadata"]["name"]]

    async def create_child(self, manifest: JsonObject) -> JsonObject:
        self._count("create_child", manifest)
        metadata = manifest["metadata"]
        if metadata["name"] in self.children:
            raise ApiError(409, "AlreadyExists", f"{metadata['name']} already exists")
        uid = f"{metadata['name']}.{self.version}"
        child = self.put(Kind.CHILD, manifest | {"metadata": metadata | {"uid": uid}})
        self.lost("create_child", manifest)
        return child

    async def delete_child(self, namespace: str, name: str, uid: str) -> None:
        self._count("delete_child", {})
        found = self.children.get(name)
        if found and found["metadata"]["uid"] == uid:
            self.take(Kind.CHILD, name)
        self.lost("delete_child", {})

    async def create_event(self, event: JsonObject) -> None:
        self._count("create_event", event)


def uid_of(name: str) -> str:
    """Return a uid whose first five characters have no hyphen, as a real one."""
    return f"{zlib.crc32(name.encode()):08x}-{name}"
