"""Certificates, tokens and kubeconfigs, made anew for each cluster."""

from __future__ import annotations

import base64
import json
import secrets
import subprocess
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


def write_pki(
    places: Places,
    node_address: str,
    api_port: int = API_PORT,
    identities: tuple[Identity, ...] = IDENTITIES,
) -> None:
    """Write the authorities, certificates, the token file and one kubeconfig an identity.

    Args:
        places: Folders of the cluster.
        node_address: Address of the machine, for the API server's certificate.
        api_port: Port of the API server on 127.0.0.1, for the kubeconfigs.
        identities: Who gets a token.
    """
    places.pki.mkdir(parents=True, exist_ok=True)
    places.pki.chmod(0o700)
    for authority in ("ca", "front-proxy-ca"):
        _authority(places.pki, authority)
    names = [f"IP:{address}" for address in ("127.0.0.1", API_SERVICE_ADDRESS, node_address)] + [
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
    server = f"subjectAltName={','.join(names)}"
    _certificate(places.pki, "ca", "apiserver", "/CN=kube-apiserver", server)
    # `kubectl logs` and `exec` go from the API server to the kubelet with this one.
    _certificate(places.pki, "ca", "kubelet-client", "/O=system:masters/CN=kube-apiserver", client)
    front = "front-proxy-client"
    _certificate(places.pki, "front-proxy-ca", front, f"/CN={front}", client)
    key = places.pki / "service-account.key"
    _openssl("genrsa", "-out", str(key), "2048")
    _openssl("rsa", "-in", str(key), "-pubout", "-out", str(key.with_suffix(".pub")))
    _write_tokens(places, api_port, identities)


def _write_tokens(places: Places, api_port: int, identities: tuple[Identity, ...]) -> None:
    rows = []
    for identity in identities:
        token = secrets.token_hex(24)
        groups = ",".join(identity.groups)
        rows.append(f'{token},{identity.user},{identity.name},"{groups}"')
        path = kubeconfig_of(places, identity.name)
        config = _kubeconfig(places, identity.name, token, api_port)
        _write_secret(path, json.dumps(config, indent=2))
    _write_secret(places.pki / "tokens.csv", "\n".join(rows) + "\n")


def kubeconfig_of(places: Places, identity: str) -> Path:
    return places.kubeconfig if identity == "admin" else places.config / f"{identity}.kubeconfig"


def token_of(places: Places, identity: str) -> str:
    """The bearer token of an identity of a running cluster."""
    config = json.loads(kubeconfig_of(places, identity).read_text())
    return str(config["users"][0]["user"]["token"])


def _kubeconfig(places: Places, name: str, token: str, api_port: int) -> dict[str, object]:
    authority = base64.b64encode((places.pki / "ca.crt").read_bytes()).decode()
    server = {"server": f"https://127.0.0.1:{api_port}", "certificate-authority-data": authority}
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
    files = ("-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.crt"))
    options = ("-x509", "-newkey", "rsa:2048", "-nodes", "-days", "365", "-subj", f"/CN={name}")
    _openssl("req", *options, *files)


def _certificate(folder: Path, authority: str, name: str, subject: str, extensions: str) -> None:
    request, extension_file = str(folder / f"{name}.csr"), folder / f"{name}.ext"
    extension_file.write_text(extensions + "\n")
    key = ("-keyout", str(folder / f"{name}.key"))
    _openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", subject, *key, "-out", request)
    signer = ("-CA", f"{folder / authority}.crt", "-CAkey", f"{folder / authority}.key")
    _openssl(
        *("x509", "-req", "-in", request, "-days", "365", "-CAcreateserial", *signer),
        *("-extfile", str(extension_file), "-out", str(folder / f"{name}.crt")),
    )


def _openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HarnessError(f"`openssl {arguments[0]}` failed: {done.stderr.strip()[-800:]}")
