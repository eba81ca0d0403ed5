"""A file server on loopback with Range, keep-alive, ETags, and faults on demand."""

from __future__ import annotations

import contextlib
import hashlib
import re
import socket
import threading
import time
from collections.abc import Callable
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

Fault = Callable[[str, int], str | None]
"""Path and number of the request (from 0) -> what goes wrong with it: one of FAULTS, or None."""

FAULTS = ("503", "reset", "short", "shift", "etag", "200", "drip", "garbage", "404", "403", "size")


class FileServer(ThreadingHTTPServer):
    """Serves a folder; used as a context manager."""

    daemon_threads = True
    request_queue_size = 512

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.fault: Fault = lambda path, number: None
        self.delay = 0.0
        self.authorizations: set[str | None] = set()
        self.requests = 0
        self.connections = 0
        self.body_bytes = 0
        self.lock = threading.Lock()
        self.contents: dict[str, tuple[bytes, str]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> FileServer:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *arguments: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed is not an error of the server."""

    def content(self, path: str) -> tuple[bytes, str] | None:
        if path not in self.contents:
            file = self.folder / path.lstrip("/")
            if not file.is_file():
                return None
            body = file.read_bytes()
            self.contents[path] = (body, f'"{hashlib.md5(body).hexdigest()}"')
        return self.contents[path]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    server: FileServer

    def setup(self) -> None:
        super().setup()
        with self.server.lock:
            self.server.connections += 1

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def _empty(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def answer(self, *, body: bool) -> None:
        with self.server.lock:
            number, self.server.requests = self.server.requests, self.server.requests + 1
        self.server.authorizations.add(self.headers.get("Authorization"))
        if self.server.delay:
            time.sleep(self.server.delay)
        fault = self.server.fault(self.path, number)
        found = self.server.content(self.path)
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            self.close_connection = True
            self.connection.close()
            return
        if fault in ("503", "403") or found is None or fault == "404":
            self._empty(int(fault) if fault in ("503", "403") else 404)
            return
        content, etag = found
        total = len(content)
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = (int(match[1]), min(int(match[2]), total - 1)) if match else (0, total - 1)
        if fault == "shift":
            first, last = first + 128, last + 128
        ranged = bool(match) and fault != "200"
        piece = content[first : last + 1] if ranged else content
        if fault == "garbage":
            piece = b"\xff" * len(piece)
        self.send_response(206 if ranged else 200)
        if ranged:
            size = total + 4096 if fault == "size" else total
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.send_header("Content-Length", str(len(piece)))
        self.send_header("ETag", '"changed"' if fault == "etag" else etag)
        self.send_header("Last-Modified", formatdate(1_700_000_000, usegmt=True))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if not body:
            return
        if fault == "short":
            self.wfile.write(piece[: len(piece) // 2])
            self.close_connection = True
            return
        if fault == "drip":
            with contextlib.suppress(OSError):
                for byte in piece:
                    self.wfile.write(bytes([byte]))
                    self.wfile.flush()
                    time.sleep(0.2)
            self.close_connection = True
            return
        with self.server.lock:
            self.server.body_bytes += len(piece)
        self.wfile.write(piece)
