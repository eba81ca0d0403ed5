"""Reading byte ranges from http(s), s3, gs or the disk through obstore: right bytes, a retry, or one clear error.

A response counts only if it covers exactly the range that was asked for, belongs to a file of the expected size and
ETag, and has all its bytes; the caller may check the content too. Everything else is tried again with growing pauses
and then reported with the file, the range and the last reason. A missing or changed file is reported at once.
"""

from __future__ import annotations

import asyncio
import base64
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import unquote, urlsplit

from olmo_ext.base.errors import InputError, WorkError
from olmo_ext.base.secrecy import netrc_login, refuse_credentials

REQUEST_SECONDS = 60.0
"""A request that takes longer, a slow drip included, is given up and tried again."""


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """One file at its place, with what every response must agree with."""

    location: str
    num_bytes: int
    etag: str | None = None


class MissingFile(WorkError):
    """The server says that there is no such file."""


class Stores:
    """Opened stores, one for each server or bucket, for as long as an event loop runs.

    :param retries: how often a request is tried again.
    :param request_seconds: see `REQUEST_SECONDS`.
    :param first_pause: seconds before the first retry; doubled each time, at most 15, with jitter.
    """

    def __init__(self, *, retries: int = 8, request_seconds: float = REQUEST_SECONDS, first_pause: float = 0.2) -> None:
        self.retries, self.request_seconds, self.first_pause = retries, request_seconds, first_pause
        self.received_bytes = 0
        self.requests = 0
        self.retried = 0
        self._opened: dict[str, Any] = {}
        self._places: dict[str, tuple[Any, str]] = {}

    def open(self, location: str) -> tuple[Any, str]:
        """The store of a location and the key inside it."""
        place = self._places.get(location)
        if place is None:
            place = self._places[location] = self._open(location)
        return place

    def _open(self, location: str) -> tuple[Any, str]:
        from obstore.store import LocalStore, from_url

        if "://" not in location:
            return self._opened.setdefault("", LocalStore()), os.path.abspath(location).lstrip("/")
        refuse_credentials(location, where="address of a file")
        parts = urlsplit(location)
        if parts.scheme not in ("http", "https", "s3", "gs"):
            raise InputError(f"{parts.scheme}:// is not read", where=location, right="http, https, s3, gs or a path")
        if parts.query or parts.fragment:
            # Neither would be sent: `get?file=1` and `get?file=2` would be one file.
            raise InputError("`?` and `#` in an address are not read", where=location, right="an address without")
        base = f"{parts.scheme}://{parts.netloc}"
        if base not in self._opened:
            timeout = timedelta(seconds=self.request_seconds)
            options: Any = {"timeout": timeout, "connect_timeout": timedelta(seconds=10)}
            if parts.scheme == "http":
                options["allow_http"] = True
            if parts.scheme in ("http", "https") and (login := netrc_login(parts.hostname or "")):
                basic = base64.b64encode(":".join(login).encode()).decode()
                options["default_headers"] = {"Authorization": f"Basic {basic}"}
            # Retries are ours: one place that knows what failed, and bodies are retried too.
            self._opened[base] = from_url(base, client_options=options, retry_config={"max_retries": 0})
        # The store writes %20 for a space by itself; in s3 and gs a % is a % of the key.
        path = unquote(parts.path) if parts.scheme in ("http", "https") else parts.path
        return self._opened[base], path.lstrip("/")

    async def _with_retries(self, what: str, attempt: Callable[[], Any]) -> Any:
        reason = ""
        for number in range(self.retries + 1):
            if number:
                self.retried += 1
                pause = min(self.first_pause * 2 ** (number - 1), 15.0)
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            self.requests += 1
            try:
                return await attempt()
            except FileNotFoundError:
                raise MissingFile(f"{what}: no such file") from None
            except WorkError:
                raise
            except Exception as error:  # noqa: BLE001  (obstore's errors have no useful common base with OSError)
                if type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError"):
                    raise WorkError(f"{what}: access is denied ({_first_line(error)})") from None
                reason = _first_line(error)
        raise WorkError(f"{what}: failed {self.retries + 1} times, last: {reason}")

    async def head(self, location: str) -> dict[str, Any]:
        """Size, ETag and date of a file.

        :raises MissingFile: if there is none.
        """
        store, key = self.open(location)

        async def attempt() -> Any:
            return await store.head_async(key)

        return await self._with_retries(location, attempt)

    async def read(
        self, file: RemoteFile, start: int, end: int, check: Callable[[memoryview], None] | None = None
    ) -> memoryview:
        """Exactly the bytes start..end-1 of a file.

        :param check: raises ValueError for content that cannot be right.
        :raises WorkError: naming file, range and reason.
        """
        store, key = self.open(file.location)

        async def attempt() -> memoryview:
            result = await store.get_async(key, options={"range": (start, end)})
            meta = result.meta
            if meta["size"] != file.num_bytes:
                raise WorkError(
                    f"{file.location}: has {meta['size']} bytes, had {file.num_bytes}: the source has changed"
                )
            etag = meta.get("e_tag")
            if file.etag and etag and etag != file.etag:
                raise WorkError(f"{file.location}: ETag is {etag}, was {file.etag}: the source has changed")
            if tuple(result.range) != (start, end):
                raise ValueError(f"the server sent bytes {result.range[0]}-{result.range[1] - 1}")
            content = memoryview(await result.bytes_async()).cast("B")
            self.received_bytes += len(content)
            if len(content) != end - start:
                raise ValueError(f"the server sent {len(content)} of {end - start} bytes")
            if check is not None:
                check(content)
            return content

        return await self._with_retries(f"{file.location}, bytes {start}-{end - 1}", attempt)

    async def read_unchecked(self, file: RemoteFile, ranges: Sequence[tuple[int, int]]) -> list[memoryview] | None:
        """Several ranges of a file in one call, each of the right length; None if one of them failed.

        Neither size nor ETag of the file are looked at: a checked `read` has to follow.
        """
        store, key = self.open(file.location)
        starts, ends = [start for start, _ in ranges], [end for _, end in ranges]
        self.requests += len(ranges)
        try:
            bodies = await store.get_ranges_async(key, starts=starts, ends=ends, coalesce=0)
        except Exception:  # noqa: BLE001  (read() finds out what it was, and says so)
            return None
        parts = [memoryview(body).cast("B") for body in bodies]
        self.received_bytes += sum(len(body) for body in parts)
        return parts if [len(body) for body in parts] == [end - start for start, end in ranges] else None


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0][:300] if text else type(error).__name__
