"""A Hugging Face hub on loopback, as far as uploads need it: repositories, branches, and commits through git LFS."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

ACCOUNT, TOKEN = "mira", "hf_write"  # an account and its token with the right to write


@dataclass
class Repository:
    private: bool
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    messages: list[str] = field(default_factory=list)


@dataclass
class Hub:
    address: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    fail_uploads: bool = False

    def commit(self, name: str, branch: str, lines: list[dict[str, Any]]) -> None:
        repository, files = self.repositories[name], self.repositories[name].branches[branch]
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                repository.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        if not self._authorized():
            return
        _, _, kind, *rest = self.path.split("/")
        name = "/".join(rest[:2])
        if kind == "models" and name in self.hub.repositories:
            self._reply(200, {"id": name, "private": self.hub.repositories[name].private, "siblings": []})
        else:
            self._reply(404, {"error": f"{self.path} not found"})

    def do_PUT(self) -> None:
        body = self._body()
        if self.hub.fail_uploads:
            self._reply(400, {"error": "the store is full"})
            return
        oid = self.path.rpartition("/")[2]
        assert hashlib.sha256(body).hexdigest() == oid
        self.hub.objects[oid] = body
        self._reply(200, {})

    def do_POST(self) -> None:
        body = self._body()
        if not self._authorized():
            return
        path = urlsplit(self.path).path
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._reply(200, {"errors": [], "warnings": []})
        elif path.endswith("/info/lfs/objects/batch"):
            found = [
                {"oid": each["oid"], "size": each["size"], "actions": {"upload": {"href": self._object(each["oid"])}}}
                for each in json.loads(body)["objects"]
            ]
            self._reply(200, {"transfer": "basic", "objects": found})
        elif parts[:2] == ["api", "models"] and parts[4] == "branch":
            self.hub.repositories["/".join(parts[2:4])].branches.setdefault(parts[5], {})
            self._reply(200, {})
        elif parts[:2] == ["api", "models"] and parts[4] == "preupload":
            files = [
                {"path": each["path"], "uploadMode": "lfs" if each["path"].endswith(".safetensors") else "regular"}
                | {"shouldIgnore": False}
                for each in json.loads(body)["files"]
            ]
            self._reply(200, {"files": files})
        elif parts[:2] == ["api", "models"] and parts[4] == "commit":
            name = "/".join(parts[2:4])
            self.hub.commit(name, parts[5], [json.loads(line) for line in body.splitlines()])
            self._reply(200, {"commitUrl": f"{self.hub.address}/{name}/commit/{'0' * 40}", "commitOid": "0" * 40})
        else:
            self._reply(404, {"error": f"{path} not found"})

    def _create(self, wanted: dict[str, Any]) -> None:
        owner = wanted.get("organization") or ACCOUNT
        name = f"{owner}/{wanted['name']}"
        address = {"url": f"{self.hub.address}/{name}"}
        if owner != ACCOUNT:
            self._reply(403, {"error": f"You don't have the rights to create a model under the namespace {owner}"})
        elif name in self.hub.repositories:
            self._reply(409, {"error": "You already created this model repo", **address})
        else:
            self.hub.repositories[name] = Repository(
                wanted.get("visibility") == "private" or bool(wanted.get("private"))
            )
            self._reply(200, {"name": name, **address})

    def _object(self, oid: str) -> str:
        return f"{self.hub.address}/objects/{oid}"

    def _authorized(self) -> bool:
        self.hub.requests.append(f"{self.command} {self.path}")
        if self.headers.get("authorization") == f"Bearer {TOKEN}":
            return True
        self._reply(401, {"error": "Invalid username or password."})
        return False

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("transfer-encoding", ""):
            return self.rfile.read(int(self.headers.get("content-length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _reply(self, code: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@contextmanager
def open_hub() -> Iterator[Hub]:
    """A hub that is empty and listens on loopback."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
