"""A hub on this machine: what huggingface_hub's client asks when it pushes a folder and loads a model, kept in memory.

Repositories, commits and large files are there, and the checks that refuse a push: metadata of a card, content that is
not what was announced, large files that never came. Not there: accounts, branches, pull requests, Xet.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

LARGE = (".safetensors", ".bin", ".pt", ".pth")
OWNER = "tester"
_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass
class Repository:
    """Files after each commit, newest last, and the messages of the commits."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"0" * 40: {}})
    messages: list[str] = field(default_factory=list)
    large: dict[str, bytes] = field(default_factory=dict)

    @property
    def head(self) -> str:
        return list(self.commits)[-1]

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[self.head]


class Hub(ThreadingHTTPServer):
    """The server. A repository whose name begins with "slow" takes its time for large files, one that begins with
    "full" takes none at all."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.repositories: dict[str, Repository] = {}
        Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


def problems_of(card: str) -> list[str]:
    """What the hub would refuse in the metadata of a card."""
    found = re.match(r"\s*---\n(.*?)\n---", card, re.DOTALL)
    data = yaml.safe_load(found[1]) if found else {}
    ids = {"base_model": data.get("base_model"), "datasets": data.get("datasets")}
    lists = {name: value if isinstance(value, list) else [value] for name, value in ids.items() if value is not None}
    return [f'"{name}" with value "{v}" is not valid.' for name, vs in lists.items() for v in vs if not _is_id(v)]


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and _ID.fullmatch(value) is not None


class _Requests(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            problems = [{"message": text} for text in problems_of(json.loads(body)["content"])]
            self._answer(400 if problems else 200, {"errors": problems, "warnings": []})
        elif asked := re.fullmatch(r"/api/models/(.+)/preupload/main", path):
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(LARGE) else "regular" for name in files}
            answer = [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes.items()]
            self._answer(200 if asked[1] in self.server.repositories else 404, {"files": answer})
        elif asked := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            self._announce(asked[1], json.loads(body)["objects"])
        elif asked := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            self._commit(asked[1], [json.loads(line) for line in body.splitlines()])
        else:
            self._answer(404, {"error": f"POST {path} is not known here"})

    def do_PUT(self) -> None:
        name, oid = re.fullmatch(r"/(.+)/large/(\w+)", self.path).groups()
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if name.startswith(f"{OWNER}/slow"):
            time.sleep(0.3)
        is_whole = hashlib.sha256(content).hexdigest() == oid
        if is_whole:
            self.server.repositories[name].large[oid] = content
        self._answer(200 if is_whole else 400, {})

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if asked := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)(?:/revision/\w+)?", path):
            repository = self._repository(asked[1])
            if repository is not None:
                self._answer(200, {"id": asked[1], "sha": repository.head, "siblings": []})
        elif asked := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)/tree/(\w+)(?:/(.+))?", path):
            self._list(*asked.groups())
        elif asked := re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/(\w+)/(.+)", path):
            self._give(*asked.groups())
        else:
            self._answer(404, {"error": f"GET {path} is not known here"})

    do_HEAD = do_GET

    def _create(self, asked: Mapping[str, Any]) -> None:
        name = f"{asked.get('organization') or OWNER}/{asked['name']}"
        is_new = name not in self.server.repositories
        self.server.repositories.setdefault(name, Repository())
        self._answer(200 if is_new else 409, {"url": f"{self.server.url}/{name}"})

    def _announce(self, name: str, objects: list[dict[str, Any]]) -> None:
        """Where to bring each large file; nowhere what is there already."""
        if name.startswith(f"{OWNER}/full"):
            self._answer(403, {"error": "the storage is full"})
            return
        for entry in objects:
            if entry["oid"] not in self.server.repositories[name].large:
                entry["actions"] = {"upload": {"href": f"{self.server.url}/{name}/large/{entry['oid']}"}}
        self._answer(200, {"transfer": "basic", "objects": objects})

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        repository = self.server.repositories[name]
        files = dict(repository.files)
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in repository.large:
                    self._answer(400, {"error": f"{value['path']} was never brought"})
                    return
                files[value["path"]] = repository.large[value["oid"]]
        oid = hashlib.sha1(f"{name} {len(repository.commits)}".encode()).hexdigest()
        repository.commits[oid] = files
        repository.messages.append(lines[0]["value"]["summary"])
        self._answer(200, {"commitUrl": f"{self.server.url}/{name}/commit/{oid}", "commitOid": oid})

    def _list(self, name: str, revision: str, folder: str | None) -> None:
        repository = self._repository(name)
        if repository is None:
            return
        files = self._at(repository, revision)
        inside = {path: content for path, content in files.items() if folder is None or path.startswith(f"{folder}/")}
        if folder is not None and not inside:
            self._missing("EntryNotFound", repository.head)
            return
        entries = [{"type": "file", "path": p, "size": len(c), "oid": _etag(c)} for p, c in inside.items()]
        self._answer(200, entries)

    def _give(self, name: str, revision: str, path: str) -> None:
        repository = self._repository(name)
        if repository is None:
            return
        content = self._at(repository, revision).get(path)
        if content is None:
            self._missing("EntryNotFound", repository.head)
            return
        self._send(200, content, {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": repository.head})

    @staticmethod
    def _at(repository: Repository, revision: str) -> dict[str, bytes]:
        return repository.commits[repository.head if revision == "main" else revision]

    def _repository(self, name: str) -> Repository | None:
        repository = self.server.repositories.get(name)
        if repository is None:
            self._missing("RepoNotFound", "")
        return repository

    def _missing(self, code: str, commit: str) -> None:
        self._send(404, b"", {"X-Error-Code": code, "X-Repo-Commit": commit})

    def _answer(self, status: int, value: Any) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Nothing: a test says by its claims what was asked."""


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
