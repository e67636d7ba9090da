"""Certificates, tokens and kubeconfigs of one cluster: made anew for each, never kept in the repository."""

from __future__ import annotations

import base64
import json
import secrets
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import HarnessError
from .places import Places
from .settings import API_PORT, API_SERVICE_ADDRESS, NODE


@dataclass(frozen=True)
class Identity:
    """Someone who talks to the API server, and the groups that give the rights."""

    name: str
    user: str
    groups: tuple[str, ...] = ()


# Kubernetes ships roles for all of these but CoreDNS and Prometheus, which `addons` grants.
IDENTITIES = (
    Identity("admin", "admin", ("system:masters",)),
    Identity("node", f"system:node:{NODE}", ("system:nodes",)),
    Identity("controller-manager", "system:kube-controller-manager"),
    Identity("scheduler", "system:kube-scheduler"),
    Identity("kube-proxy", "system:kube-proxy"),
    Identity("coredns", "system:coredns"),
)


def write_pki(places: Places, node_address: str) -> None:
    """Write the authorities, certificates, the token file and one kubeconfig an identity."""
    places.pki.mkdir(parents=True, exist_ok=True)
    places.pki.chmod(0o700)
    for authority in ("ca", "front-proxy-ca"):
        _authority(places.pki, authority)
    names = [
        f"IP:{address}" for address in ("127.0.0.1", API_SERVICE_ADDRESS, node_address)
    ] + [
        f"DNS:{name}"
        for name in (
            "localhost",
            "kubernetes",
            "kubernetes.default",
            "kubernetes.default.svc",
            "kubernetes.default.svc.cluster.local",
        )
    ]
    client = "extendedKeyUsage=clientAuth"
    _certificate(places.pki, "ca", "apiserver", "/CN=kube-apiserver", f"subjectAltName={','.join(names)}")
    # `kubectl logs` and `exec` go from the API server to the kubelet with this one.
    _certificate(places.pki, "ca", "kubelet-client", "/O=system:masters/CN=kube-apiserver", client)
    _certificate(places.pki, "front-proxy-ca", "front-proxy-client", "/CN=front-proxy-client", client)
    _openssl(["genrsa", "-out", str(places.pki / "service-account.key"), "2048"])
    _openssl(
        ["rsa", "-in", str(places.pki / "service-account.key"), "-pubout"]
        + ["-out", str(places.pki / "service-account.pub")]
    )
    _write_tokens(places)


def _write_tokens(places: Places) -> None:
    rows = []
    for identity in IDENTITIES:
        token = secrets.token_hex(24)
        groups = ",".join(identity.groups)
        rows.append(f'{token},{identity.user},{identity.name},"{groups}"')
        path = kubeconfig_of(places, identity.name)
        _write_secret(path, json.dumps(_kubeconfig(places, identity.name, token), indent=2))
    _write_secret(places.pki / "tokens.csv", "\n".join(rows) + "\n")


def kubeconfig_of(places: Places, identity: str) -> Path:
    return places.kubeconfig if identity == "admin" else places.config / f"{identity}.kubeconfig"


def token_of(places: Places, identity: str) -> str:
    """The bearer token of an identity of a running cluster."""
    config = json.loads(kubeconfig_of(places, identity).read_text())
    return str(config["users"][0]["user"]["token"])


def _kubeconfig(places: Places, name: str, token: str) -> dict[str, object]:
    authority = base64.b64encode((places.pki / "ca.crt").read_bytes()).decode()
    server = {"server": f"https://127.0.0.1:{API_PORT}", "certificate-authority-data": authority}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "kubelora", "cluster": server}],
        "users": [{"name": name, "user": {"token": token}}],
        "contexts": [{"name": "kubelora", "context": {"cluster": "kubelora", "user": name}}],
        "current-context": "kubelora",
    }


def _write_secret(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(text)


def _authority(folder: Path, name: str) -> None:
    _openssl(
        ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "365", "-subj", f"/CN={name}"]
        + ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.crt")]
    )


def _certificate(folder: Path, authority: str, name: str, subject: str, extensions: str) -> None:
    request, extension_file = folder / f"{name}.csr", folder / f"{name}.ext"
    extension_file.write_text(extensions + "\n")
    _openssl(
        ["req", "-newkey", "rsa:2048", "-nodes", "-subj", subject]
        + ["-keyout", str(folder / f"{name}.key"), "-out", str(request)]
    )
    _openssl(
        ["x509", "-req", "-in", str(request), "-days", "365", "-CAcreateserial"]
        + ["-CA", str(folder / f"{authority}.crt"), "-CAkey", str(folder / f"{authority}.key")]
        + ["-extfile", str(extension_file), "-out", str(folder / f"{name}.crt")]
    )


def _openssl(arguments: Sequence[str]) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HarnessError(f"`openssl {arguments[0]}` failed: {done.stderr.strip()[-800:]}")
