"""A stand-in for the Hugging Face hub on 127.0.0.1, as far as downloads ask for it."""

import contextlib
import hashlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".gguf")


class Hub:
    """Serves ``repositories``: name -> revision -> file -> content. The first revision is what ``main`` points to.

    ``gated`` and ``private`` are names that need ``token``. ``cut`` maps a file to the number of bytes after which the
    connection breaks, once; ``stall`` likewise, but the connection stays open without a byte more. ``requests`` are
    (method, path, Range header) as they came.
    """

    def __init__(self):
        self.repositories = {}
        self.gated, self.private, self.token = set(), set(), "secret"
        self.cut, self.stall, self.lies = {}, {}, {}
        self.stalled = threading.Event()
        self.requests = []
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def add(self, name, files, commit="a" * 40):
        self.repositories.setdefault(name, {})[commit] = files
        return commit

    def ranges(self, file):
        return [range for method, path, range in self.requests if method == "GET" and path.endswith(file)]

    def close(self):
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def _answer(self):
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        api = path.startswith("/api/models/")
        owner, name, *rest = path.removeprefix("/api/models/" if api else "/").split("/")
        repository = f"{owner}/{name}"
        allowed = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        if repository not in self.hub.repositories or (repository in self.hub.private and not allowed):
            return self._error(401, "RepoNotFound", "Invalid username or password.")
        if repository in self.hub.gated and not allowed:
            return self._error(403, "GatedRepo", f"Access to model {repository} is restricted.")
        revisions = self.hub.repositories[repository]
        revision = rest[1] if rest else "main"
        commit = next(iter(revisions)) if revision == "main" else revision
        if commit not in revisions:
            return self._error(404, "RevisionNotFound", "Invalid rev id")
        files = revisions[commit]
        if not api:
            return self._file(files, commit, "/".join(rest[2:]))
        if rest[:1] == ["tree"]:
            return self._json(
                [{"type": "file", "path": name, **self._sizes(name, data)} for name, data in files.items()]
            )
        siblings = [{"rfilename": name, **self._sizes(name, data)} for name, data in files.items()]
        return self._json({"id": repository, "sha": commit, "siblings": siblings})

    def _sizes(self, name, data):
        described = {"size": len(data), "oid": hashlib.sha1(data).hexdigest(), "blobId": hashlib.sha1(data).hexdigest()}
        if name.endswith(LFS_SUFFIXES):
            sha256 = self.hub.lies.get(name, hashlib.sha256(data).hexdigest())
            described["lfs"] = {"sha256": sha256, "oid": sha256, "size": len(data), "pointerSize": 134}
        return described

    def _file(self, files, commit, name):
        if name not in files:
            return self._error(404, "EntryNotFound", "Entry not found")
        data, start, status = files[name], 0, 200
        if range := self.headers.get("Range"):
            start, status = int(range.removeprefix("bytes=").split("-")[0]), 206
        self.send_response(status)
        self.send_header("X-Repo-Commit", commit)
        etag = hashlib.sha256(data).hexdigest() if name.endswith(LFS_SUFFIXES) else hashlib.sha1(data).hexdigest()
        self.send_header("ETag", f'"{etag}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - start))
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if (cut := self.hub.cut.pop(name, None)) is not None:
            self.wfile.write(data[start:cut])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        elif (stall := self.hub.stall.pop(name, None)) is not None:
            self.wfile.write(data[start:stall])
            self.wfile.flush()
            self.hub.stalled.set()
            with contextlib.suppress(ConnectionError):
                self.connection.recv(1)
            self.close_connection = True
        else:
            self.wfile.write(data[start:])

    def _json(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def _error(self, status, code, message):
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()
