"""The API client: the only module that talks to the API server, with plain JSON.

Deserializing into the client library's models costs more than the request itself, so paths and
bodies are plain. The library still does the hard part: kubeconfig, service accounts, token
rotation, TLS.
"""

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Final, Literal
from urllib.parse import quote, urlencode

import aiohttp
from kubernetes.aio import client, config

from kubelora_api import names
from kubelora_api.schema import JsonObject

JOBS_PATH: Final = f"/apis/{names.API_VERSION}"
REQUEST_TIMEOUT: Final = 30.0
"""Seconds. Lease requests have a shorter timeout of their own."""
PAGE: Final = 200
"""Objects of a list's page: a larger page doubles the memory at the start."""
_RETRY_AFTER_MAX: Final = 300.0
"""Seconds: a longer wait than after a refusal would look like a stopped operator."""
_METADATA_ONLY: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
"""Asks for a list without specs and statuses, a tenth of the bytes."""
_USER_AGENT: Final = f"kubelora-operator/{version('kubelora')}"
"""Names the operator in the API server's audit log and metrics."""


class ApiError(Exception):
    """An error response from the API server, or no response (code 0).

    retry_after: Seconds that the server asked to wait, with 429 or 503.
    """

    def __init__(
        self, code: int, reason: str, message: str, retry_after: float | None = None
    ) -> None:
        super().__init__(f"{code} {reason}: {message}" if code else message)
        self.code, self.reason, self.message = code, reason, message
        self.retry_after = retry_after


AttemptKind = Literal["ConfigMap", "NetworkPolicy", "Service"]
_ATTEMPT_KINDS: Final[Mapping[AttemptKind, tuple[str, str]]] = {
    "ConfigMap": ("/api/v1", "configmaps"),
    "NetworkPolicy": ("/apis/networking.k8s.io/v1", "networkpolicies"),
    "Service": ("/api/v1", "services"),
}
"""What an attempt has besides its Job: the path of each kind's group, and its plural."""


class Cluster:
    """The API requests that the operator makes.

    on_error: Called with the HTTP code of each failure, 0 for no response.
    """

    def __init__(self, api: client.ApiClient, on_error: Callable[[int], None]) -> None:
        self._api, self._on_error = api, on_error

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()  # type: ignore[no-untyped-call]

    async def get_job(self, namespace: str, name: str) -> JsonObject | None:
        """Get a LoraTrainingJob, or None if it does not exist."""
        return await self._find(_path(JOBS_PATH, namespace, names.PLURAL, name))

    async def list_versions(
        self, job: bool, plural: str, namespace: str | None
    ) -> dict[tuple[str, str], tuple[str, str]]:
        """List objects by namespace and name, with uid and resourceVersion, page by page.

        Only metadata is requested, and of Jobs and pods only the operator's own.

        Args:
            job: Whether they are LoraTrainingJobs.
            plural: Plural name of the kind: of LoraTrainingJobs, ``jobs`` or ``pods``.
            namespace: Namespace, or None for all.
        """
        group = JOBS_PATH if job else "/apis/batch/v1" if plural == "jobs" else "/api/v1"
        selector = (
            {} if job else {"labelSelector": f"{names.LABEL_MANAGED_BY}={names.OPERATOR_APP}"}
        )
        found: dict[tuple[str, str], tuple[str, str]] = {}
        token: dict[str, str] = {}
        while True:
            page = await self._request(
                "GET",
                _path(group, namespace, plural),
                query={"limit": str(PAGE)} | selector | token,
                accept=f"{_METADATA_ONLY},application/json",
            )
            for metadata in (item["metadata"] for item in page.get("items") or []):
                key = (metadata["namespace"], metadata["name"])
                found[key] = (metadata["uid"], metadata["resourceVersion"])
            token = {"continue": page.get("metadata", {}).get("continue") or ""}
            if not token["continue"]:
                return found

    async def put_status(self, job: JsonObject) -> JsonObject:
        """Update the status; uid and resourceVersion in ``job`` make a stale update fail."""
        metadata = job["metadata"]
        path = _path(JOBS_PATH, metadata["namespace"], names.PLURAL, metadata["name"], "status")
        return await self._request("PUT", path, body=job)

    async def delete_job(self, job: JsonObject) -> None:
        """Delete this LoraTrainingJob as it is in ``job``; ignore one that is gone or changed.

        What it owns is deleted by Kubernetes. Its output is on a volume that it does not own.
        """
        metadata = job["metadata"]
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {
                "uid": metadata["uid"],
                "resourceVersion": metadata["resourceVersion"],
            },
        }
        path = _path(JOBS_PATH, metadata["namespace"], names.PLURAL, metadata["name"])
        try:
            await self._request("DELETE", path, body)
        except ApiError as error:
            if error.code not in (404, 409):
                raise

    async def get_child(self, namespace: str, name: str) -> JsonObject | None:
        """Get a batch/v1 Job by name, or None."""
        return await self._find(_path("/apis/batch/v1", namespace, "jobs", name))

    async def create_child(self, manifest: JsonObject) -> JsonObject:
        """Create a batch/v1 Job."""
        path = _path("/apis/batch/v1", manifest["metadata"]["namespace"], "jobs")
        return await self._request("POST", path, body=manifest)

    async def delete_child(self, namespace: str, name: str, uid: str) -> None:
        """Delete this batch/v1 Job, and its pods in the background; ignore one that is gone.

        Args:
            namespace: Its namespace.
            name: Its name.
            uid: Its uid: a newer Job of the same name is not deleted.
        """
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": uid},
        }
        try:
            await self._request("DELETE", _path("/apis/batch/v1", namespace, "jobs", name), body)
        except ApiError as error:
            if error.code not in (404, 409):
                raise

    async def get_node(self, name: str) -> JsonObject | None:
        """Get a node, or None."""
        return await self._find(_path("/api/v1", None, "nodes", name))

    async def force_delete_pod(self, namespace: str, name: str, uid: str) -> None:
        """Delete this pod without waiting for its kubelet; ignore one that is gone.

        Args:
            namespace: Its namespace.
            name: Its name.
            uid: Its uid: a newer pod of the same name is not deleted.
        """
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "gracePeriodSeconds": 0,
            "preconditions": {"uid": uid},
        }
        try:
            await self._request("DELETE", _path("/api/v1", namespace, "pods", name), body)
        except ApiError as error:
            if error.code not in (404, 409):
                raise

    async def get_config_map(self, namespace: str, name: str) -> JsonObject | None:
        """Get a ConfigMap by name, or None."""
        return await self.get_object("ConfigMap", namespace, name)

    async def get_object(self, kind: AttemptKind, namespace: str, name: str) -> JsonObject | None:
        """Get an object of an attempt by name, or None.

        Args:
            kind: Its kind.
            namespace: Its namespace.
            name: Its name.
        """
        group, plural = _ATTEMPT_KINDS[kind]
        return await self._find(_path(group, namespace, plural, name))

    async def create_object(self, kind: AttemptKind, manifest: JsonObject) -> JsonObject:
        """Create an object of an attempt."""
        group, plural = _ATTEMPT_KINDS[kind]
        path = _path(group, manifest["metadata"]["namespace"], plural)
        return await self._request("POST", path, body=manifest)

    async def delete_object(self, kind: AttemptKind, document: JsonObject) -> None:
        """Delete this object of an attempt; ignore one that is gone."""
        metadata, (group, plural) = document["metadata"], _ATTEMPT_KINDS[kind]
        preconditions = {"preconditions": {"uid": metadata["uid"]}}
        body = {"apiVersion": "v1", "kind": "DeleteOptions", **preconditions}
        path = _path(group, metadata["namespace"], plural, metadata["name"])
        try:
            await self._request("DELETE", path, body)
        except ApiError as error:
            if error.code not in (404, 409):
                raise

    async def warnings_about(self, namespace: str, uid: str) -> list[JsonObject]:
        """List the Warning Events about the object with this uid."""
        query = {"fieldSelector": f"involvedObject.uid={uid},type=Warning", "limit": "50"}
        page = await self._request("GET", _path("/api/v1", namespace, "events"), query=query)
        return list(page.get("items") or [])

    async def create_event(self, event: JsonObject) -> None:
        """Create an Event."""
        path = _path("/api/v1", event["metadata"]["namespace"], "events")
        await self._request("POST", path, body=event)

    async def patch_event(self, namespace: str, name: str, patch: JsonObject) -> None:
        """Apply a merge patch to an Event.

        Args:
            namespace: Its namespace.
            name: Its name.
            patch: The fields to change.
        """
        path = _path("/api/v1", namespace, "events", name)
        await self._request("PATCH", path, body=patch, content="application/merge-patch+json")

    async def get_lease(self, namespace: str, name: str, timeout: float) -> JsonObject | None:
        """Get a Lease, or None.

        Args:
            namespace: Its namespace.
            name: Its name.
            timeout: Seconds for the request.
        """
        path = _path("/apis/coordination.k8s.io/v1", namespace, "leases", name)
        return await self._find(path, timeout=timeout)

    async def create_lease(self, lease: JsonObject, timeout: float) -> JsonObject:
        """Create a Lease."""
        path = _path("/apis/coordination.k8s.io/v1", lease["metadata"]["namespace"], "leases")
        return await self._request("POST", path, body=lease, timeout=timeout)

    async def put_lease(self, lease: JsonObject, timeout: float) -> JsonObject:
        """Update a Lease; its resourceVersion makes a concurrent update fail."""
        metadata = lease["metadata"]
        path = _path(
            "/apis/coordination.k8s.io/v1", metadata["namespace"], "leases", metadata["name"]
        )
        return await self._request("PUT", path, body=lease, timeout=timeout)

    async def _find(self, path: str, timeout: float = REQUEST_TIMEOUT) -> JsonObject | None:
        try:
            return await self._request("GET", path, timeout=timeout, missing_is_fine=True)
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    async def _request(
        self,
        method: str,
        path: str,
        body: JsonObject | None = None,
        *,
        query: Mapping[str, str] | None = None,
        timeout: float = REQUEST_TIMEOUT,
        content: str = "application/json",
        accept: str = "application/json",
        missing_is_fine: bool = False,
    ) -> JsonObject:
        """Send one request, without retries because the work queue retries the job."""
        headers = {
            "Accept": accept,
            "Content-Type": content,
            "User-Agent": _USER_AGENT,
        }
        url = self._api.configuration.host + path + (f"?{urlencode(query)}" if query else "")
        try:
            async with asyncio.timeout(timeout):
                await self._api.update_params_for_auth(
                    headers, [], ["BearerToken"], path, method, body
                )
                answer = await self._api.rest_client.request(  # type: ignore[no-untyped-call]
                    method, url, headers=headers, body=body, _request_timeout=timeout
                )
                raw = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._on_error(0)
            cause = str(error) or type(error).__name__
            raise ApiError(0, "NoAnswer", f"no response from the API server: {cause}") from error
        if answer.status >= 400:
            if not (missing_is_fine and answer.status == 404):
                self._on_error(answer.status)
            raise _error_from(answer.status, raw, answer.headers.get("Retry-After"))
        return _object(raw)


async def connect(on_error: Callable[[int], None]) -> Cluster:
    """Create a client from the pod's service account, else from KUBECONFIG.

    Raises ConfigException, whose message names what is missing.
    """
    settings = client.Configuration()
    if os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("KUBECONFIG"):
        config.load_incluster_config(settings)  # type: ignore[no-untyped-call]
    else:
        await config.load_kube_config(  # type: ignore[no-untyped-call]
            client_configuration=settings
        )
    return Cluster(client.ApiClient(configuration=settings), on_error)


def _path(group: str, namespace: str | None, *parts: str) -> str:
    scope = f"/namespaces/{quote(namespace, safe='')}" if namespace else ""
    return group + scope + "".join(f"/{quote(part, safe='')}" for part in parts)


def _object(raw: bytes) -> JsonObject:
    parsed = json.loads(raw)
    return parsed if isinstance(parsed, dict) else {}


def _error_from(code: int, raw: bytes, retry_after: str | None = None) -> ApiError:
    try:
        status = _object(raw)
    except ValueError:
        status = {}
    message = status.get("message") or raw[:300].decode(errors="replace")
    reason = str(status.get("reason") or "Error")
    wait = parse_retry_after(retry_after) if code in (429, 503) else None
    return ApiError(code, reason, str(message), wait)


def parse_retry_after(header: str | None) -> float | None:
    """Return the seconds of a Retry-After header, at most 5 minutes; None without usable ones.

    The API server and its priority levels send seconds, never a date.
    """
    if header is None or not header.strip().isdecimal():
        return None
    return min(float(header), _RETRY_AFTER_MAX)
