"""Throughput of `data fetch` against a plain parallel range downloader of the same store library, on loopback.

The plain one keeps as many requests in flight and throws the bytes away: no order, no checks, no hashes, no disk.
A server process of its own serves one large file; rounds are interleaved, the median counts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import numpy as np

SERVER = """
import asyncio, os, re, sys

async def serve(reader, writer):
    file = os.open(sys.argv[1], os.O_RDONLY)
    total = os.fstat(file).st_size
    try:
        while True:
            head = (await reader.readuntil(b"\\r\\n\\r\\n")).decode()
            match = re.search(r"range: bytes=(\\d+)-(\\d+)", head, re.IGNORECASE)
            common = 'ETag: "one"\\r\\nLast-Modified: Tue, 14 Nov 2023 22:13:20 GMT\\r\\nAccept-Ranges: bytes\\r\\n'
            if match is None:
                writer.write(f"HTTP/1.1 200 OK\\r\\n{common}Content-Length: {total}\\r\\n\\r\\n".encode())
            else:
                first, last = int(match[1]), int(match[2])
                body = os.pread(file, last - first + 1, first)
                writer.write(f"HTTP/1.1 206 Partial Content\\r\\n{common}Content-Range: bytes {first}-{last}/{total}"
                             f"\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n".encode() + body)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        os.close(file)
        writer.close()

async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


async def plain(url: str, starts: np.ndarray, size: int, concurrency: int) -> int:
    from obstore.store import from_url

    options = {"allow_http": True, "timeout": timedelta(seconds=60)}
    store = from_url(url, client_options=options)  # type: ignore[call-overload]
    queue, received = iter(starts.tolist()), 0

    async def work() -> None:
        nonlocal received
        for start in queue:
            body = await store.get_range_async("tokens.npy", start=start, length=size)
            received += len(body)

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return received


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file-mib", type=int, default=4096, help="size of the source")
    parser.add_argument("--instances", type=int, default=40000)
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--memory-mib", type=int, default=96, help="of the windows: reading and writing overlap")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    from olmo_ext.data.fetch import FetchOptions, SubsetFetch
    from olmo_ext.data.order import full_order
    from olmo_ext.data.survey import SourceFile, SourceManifest

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "tokens.npy"
        block = np.random.default_rng(0).integers(0, 100278, 1 << 22, dtype=np.uint32).tobytes()
        with open(path, "wb") as file:
            for _ in range(arguments.file_mib * 2**20 // len(block)):
                file.write(block)
        server = subprocess.Popen([sys.executable, "-c", SERVER, str(path)], stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
            manifest = SourceManifest(
                name="benchmark",
                dtype="uint32",
                sequence_length=4096,
                vocabulary_size=100278,
                tokenizer=None,
                surveyed="",
                locations={},
                files=[SourceFile(path=f"{url}/tokens.npy", bytes=os.path.getsize(path), etag='"one"')],
            )
            size = manifest.instance_bytes
            starts = full_order(manifest.instances, seed=6198)[: arguments.instances].astype(np.int64) * size
            rates: dict[str, list[float]] = {"plain": [], "fetch": []}
            for _ in range(arguments.rounds):
                begin = time.perf_counter()
                received = asyncio.run(plain(url, starts, size, arguments.concurrency))
                rates["plain"].append(received / (time.perf_counter() - begin) / 2**20)
                target = folder / "subset"
                options = FetchOptions(quiet=True, concurrency=arguments.concurrency, memory=arguments.memory_mib << 20)
                begin = time.perf_counter()
                job = SubsetFetch(target, manifest, instances=arguments.instances, seed=6198, options=options)
                report = job.run()
                rates["fetch"].append(report.kept_bytes / (time.perf_counter() - begin) / 2**20)
                shutil.rmtree(target)
        finally:
            server.terminate()
            server.wait()
    median = {label: statistics.median(values) for label, values in rates.items()}
    print(f"{arguments.instances} instances of 16 KiB, {arguments.concurrency} requests in flight")
    for label, value in median.items():
        print(f"{label:6s} {value:8.1f} MiB/s  (rounds: {' '.join(f'{rate:.0f}' for rate in rates[label])})")
    print(
        f"ratio {median['fetch'] / median['plain']:.2f}; {report.requests} requests,"
        f" {report.received_bytes / report.kept_bytes:.3f} x the bytes kept were transferred"
    )


if __name__ == "__main__":
    main()
