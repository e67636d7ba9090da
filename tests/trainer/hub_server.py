"""A Hub on this machine: enough of its API to push to and to download from, over real HTTP."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest


class Hub(ThreadingHTTPServer):
    """The part of the Hub's API that pushes and downloads use.

    files: what repositories hold, by ``org/repo``, revision and path. committed: what was pushed.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _HubHandler)
        self.refuse = False
        self.requests: list[str] = []
        self.created: dict[str, object] = {}
        self.committed: dict[str, bytes] = {}
        self.files: dict[tuple[str, str], dict[str, bytes]] = {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        self.server.requests.append(path)
        if self.server.refuse:
            self._answer(403, {"error": "no"})
        elif path == "/api/repos/create":
            self.server.created = json.loads(body)
            self._answer(200, {"url": f"{self.server.address}/studio/bottles"})
        elif path.endswith("/preupload/main"):
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                for f in json.loads(body)["files"]
            ]
            self._answer(200, {"files": files})
        elif path.endswith("/commit/main"):
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    content = base64.b64decode(entry["value"]["content"])
                    self.server.committed[entry["value"]["path"]] = content
            url = f"{self.server.address}/studio/bottles/commit/1"
            self._answer(200, {"success": True, "commitUrl": url, "commitOid": "1" * 40})
        else:
            self._answer(200, {})

    def do_GET(self) -> None:
        self._get(with_body=True)

    def do_HEAD(self) -> None:
        self._get(with_body=False)

    def _get(self, with_body: bool) -> None:
        path = unquote(self.path.partition("?")[0])
        self.server.requests.append(f"{self.command} {path}")
        refs = re.fullmatch(r"/api/(?:models|datasets)/([^/]+/[^/]+)/refs", path)
        about = re.fullmatch(r"/api/(?:models|datasets)/([^/]+/[^/]+)/(?:revision|tree)/(.+)", path)
        content = re.fullmatch(r"(?:/datasets)?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        found = about or content
        key = (found[1], self._revision(found[1], found[2])) if found else ("", "")
        if refs:
            names = [revision for known, revision in self.server.files if known == refs[1]]
            listed = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": n} for n in names]
            self._answer(200, {"branches": listed, "converts": [], "tags": []})
        elif key not in self.server.files:
            known = {repository for repository, _ in self.server.files}
            code = "RevisionNotFound" if found and found[1] in known else "RepoNotFound"
            self._answer(404, {"error": "no"}, {"X-Error-Code": code})
        elif about and "/tree/" in path:
            files = self.server.files[key]
            found_files = [
                {"type": "file", "path": f, "size": len(files[f]), "oid": f} for f in files
            ]
            self._answer(200, found_files)
        elif about:
            siblings = [{"rfilename": name} for name in self.server.files[key]]
            self._answer(200, {"id": key[0], "sha": _commit(key[1]), "siblings": siblings})
        elif content and content[3] in self.server.files[key]:
            body = self.server.files[key][content[3]]
            tag = hashlib.sha256(body).hexdigest()
            headers = {"ETag": f'"{tag}"', "X-Repo-Commit": _commit(key[1])}
            self._answer(200, body, headers, with_body)
        else:
            self._answer(404, {"error": "no"}, {"X-Error-Code": "EntryNotFound"})

    def _revision(self, repository: str, asked: str) -> str:
        """A revision by its name or by its commit."""
        for known, revision in self.server.files:
            if known == repository and asked in (revision, _commit(revision)):
                return revision
        return asked

    def _answer(
        self,
        status: int,
        content: object,
        headers: Mapping[str, str] | None = None,
        with_body: bool = True,
    ) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""


def download_from(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let downloads of this process ask ``hub``, and keep what they get in ``cache``."""
    constants = "huggingface_hub.constants"
    template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(f"{constants}.ENDPOINT", hub.address)
    monkeypatch.setattr(f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", str(cache))


def _commit(revision: str) -> str:
    return hashlib.sha1(revision.encode()).hexdigest()
