"""Reading the instances of one window: many ranges a call, every file checked, every row checked. No torch.

A call from Python to the store costs as much as a request. So the ranges of one file go out in batches, and the last
range of a batch is a checked read: a file whose size and ETag are right after the others were read was right before.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from olmo_ext.data.byte_ranges import Request
from olmo_ext.data.stores import RemoteFile, Stores

IN_FLIGHT = 10
"""Ranges of one call that obstore asks for at the same time."""

BATCH = 2 * IN_FLIGHT + 1
"""Ranges of one file in one call, the checked one included."""


class WindowReader:
    """Reads windows; those that are read at the same time share the connections.

    :param files: for each entry of the source, where it lies.
    :param concurrency: requests in flight, over all windows.
    """

    def __init__(
        self,
        stores: Stores,
        files: Sequence[RemoteFile],
        *,
        concurrency: int,
        instance_bytes: int,
        vocabulary_size: int | None,
    ) -> None:
        self.stores, self.files, self.concurrency = stores, files, concurrency
        self.instance_bytes, self.vocabulary_size = instance_bytes, vocabulary_size
        self._gate: asyncio.Semaphore | None = None

    async def read(
        self, requests: Sequence[Request], *, num_rows: int, progress: Callable[[float], None]
    ) -> np.ndarray:
        """All rows of a window.

        :param requests: sorted by file, as `plan_requests` gives them.
        :param progress: told the bytes of every batch.
        :return: uint8, shape (num_rows, instance_bytes).
        :raises WorkError: naming file, range and reason, if a range stays wrong.
        """
        batches = [
            list(members)[k : k + BATCH]
            for members in (list(group) for _, group in itertools.groupby(requests, key=lambda request: request.entry))
            for k in range(0, len(members), BATCH)
        ]
        if self._gate is None:  # the first window tells how many requests of a batch are in flight
            at_once = min(IN_FLIGHT, len(requests) / len(batches))
            self._gate = asyncio.Semaphore(max(1, round(self.concurrency / at_once)))
        gate = self._gate
        content = np.empty((num_rows, self.instance_bytes), dtype=np.uint8)
        queue = iter(batches)

        async def work() -> None:
            for batch in queue:
                async with gate:
                    await self._read_batch(batch, content)
                progress(sum(len(request.rows) for request in batch) * self.instance_bytes)

        workers = [asyncio.create_task(work()) for _ in range(min(self.concurrency, len(batches)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        await self._read_wrong_rows_again(requests, content)
        return content

    async def _read_batch(self, batch: Sequence[Request], content: np.ndarray) -> None:
        file, early = self.files[batch[0].entry], batch[:-1]
        bodies: Sequence[memoryview] | None = []
        if early:
            bodies = await self.stores.read_unchecked(file, [(request.start, request.end) for request in early])
        if bodies is None:  # one of them failed: each for itself, with retries
            early, bodies = [], []
            for request in batch[:-1]:
                self._place(request, await self.stores.read(file, request.start, request.end), content)
        last = batch[-1]
        self._place(last, await self.stores.read(file, last.start, last.end), content)
        for request, body in zip(early, bodies, strict=True):
            self._place(request, body, content)

    def _place(self, request: Request, body: memoryview, content: np.ndarray) -> None:
        whole = np.frombuffer(body, np.uint8)
        for row, offset in zip(request.rows, request.offsets, strict=True):
            content[row] = whole[offset : offset + self.instance_bytes]

    async def _read_wrong_rows_again(self, requests: Sequence[Request], content: np.ndarray) -> None:
        """Rows with ids beyond the vocabulary are asked for again, until they are right or retries end."""
        if self.vocabulary_size is None:
            return
        largest = await asyncio.to_thread(content.view(np.uint32).max, 1)
        wrong = set(np.flatnonzero(largest >= self.vocabulary_size).tolist())
        if not wrong:
            return
        for request in requests:
            if wrong.intersection(request.rows):
                self.stores.retried += 1
                check = self._vocabulary_check(request)
                body = await self.stores.read(self.files[request.entry], request.start, request.end, check)
                self._place(request, body, content)

    def _vocabulary_check(self, request: Request) -> Callable[[memoryview], None]:
        vocabulary = self.vocabulary_size

        def check(body: memoryview) -> None:
            for offset in request.offsets:
                tokens = np.frombuffer(body, np.uint32, self.instance_bytes // 4, offset)
                if vocabulary is not None and tokens.max() >= vocabulary:
                    at = int(np.argmax(tokens >= vocabulary))
                    place = request.start + offset + 4 * at
                    raise ValueError(f"id {tokens[at]} at offset {place} is beyond the vocabulary of {vocabulary:,}")

        return check
