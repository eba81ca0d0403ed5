"""A published `global_indices.npy` in place of the order. No torch.

OLMo's memory map leaves raw uint32 without a header; files of np.save are read too.
"""

from __future__ import annotations

import asyncio

import numpy as np

from olmo_ext.base.errors import InputError
from olmo_ext.data.stores import RemoteFile, Stores

MAX_CUT = 8192
"""OLMo cuts (or fills up) its index to a multiple of the world size: by less than this."""

NAMED_BY = 1024
"""The values at the beginning that name an order."""


def read_indices(location: str, *, count: int, total: int, stores: Stores) -> np.ndarray:
    """The first values of an index, read by range.

    :param count: how many are needed; at least `NAMED_BY` are read where there are as many.
    :param total: instances of the source.
    :return: uint32, at least `count` values.
    :raises InputError: if its length does not belong to the source, or it is no permutation's beginning.
    """

    async def read() -> tuple[int, bytes]:
        meta = await stores.head(location)
        file = RemoteFile(location=location, num_bytes=meta["size"], etag=meta.get("e_tag"))
        head = bytes(await stores.read(file, 0, min(128, file.num_bytes))) if file.num_bytes else b""
        header = 0
        if head.startswith(b"\x93NUMPY"):
            header = int.from_bytes(head[8:10], "little") + 10
            if b"'<u4'" not in head:
                raise InputError("np.save of another type", where=location, right="uint32")
        length, rest = divmod(file.num_bytes - header, 4)
        if rest or abs(length - total) >= min(MAX_CUT, max(total // 8, 1)):
            raise InputError(
                f"{length:,} indices, the source has {total:,} instances",
                where=location,
                right="the index of this very list of files",
            )
        end = header + 4 * min(max(count, NAMED_BY), length)
        pieces = []
        for start in range(header, end, 8 << 20):
            pieces.append(bytes(await stores.read(file, start, min(start + (8 << 20), end))))
        return length, b"".join(pieces)

    length, content = asyncio.run(read())
    values = np.frombuffer(content, dtype="<u4")
    if len(values) < count:
        raise InputError(f"holds {length:,} indices, {count:,} are needed", where=location, right="fewer --instances")
    if len(values) and int(values.max()) >= total:
        at = int(np.argmax(values >= total))
        what, right = f"index {values[at]} at place {at} of {total:,} instances", f"0 to {total - 1}, uint32"
        raise InputError(what, where=location, right=right)
    kept = values[: min(len(values), total)]
    if len(np.unique(kept)) != len(kept):
        raise InputError("an instance comes twice", where=location, right="a permutation")
    return values
