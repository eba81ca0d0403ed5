"""Check that ranks which should hold the same weights do hold them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from olmo_ext.base.errors import WorkError
from olmo_ext.training.distributed import Ranks

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PRIME = 1_000_003
_LARGEST = 2**62


def weights_hash(model: torch.nn.Module) -> int:
    """A hash of this rank's weights that changes when one weight changes by one bit; reads every weight once."""
    total = 0
    for parameter in model.parameters():
        bits = parameter.detach().view(_BITS[parameter.element_size()])
        total = (total * _PRIME + int(bits.sum(dtype=torch.int64))) % _LARGEST
    return total


def ranks_of_one_copy(wrapped: Any) -> int:
    """Ranks that share one copy of the model: those of a shard group under FSDP, one under DDP."""
    return dist.get_world_size(wrapped.process_group) if isinstance(wrapped, FSDP) else 1


def check_replicas_agree(wrapped: Any, ranks: Ranks, *, when: str) -> None:
    """Compare the weights of all copies of the model; every rank takes part, and fails with the others.

    :param wrapped: the model in DDP or FSDP. Rank r holds part r mod (ranks of one copy) of it.
    :param when: what has just happened, for the error.
    :raises WorkError: naming the ranks that differ from the first copy.
    """
    shards = ranks_of_one_copy(wrapped)
    if shards == ranks.world_size:
        return
    own = torch.tensor([weights_hash(wrapped)], dtype=torch.int64, device=ranks.device)
    hashes = [torch.empty_like(own) for _ in range(ranks.world_size)]
    dist.all_gather(hashes, own)
    by_part: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for rank, value in enumerate(hashes):
        by_part[rank % shards].append((rank, int(value)))
    odd = [rank for part in by_part.values() for rank, value in part if value != part[0][1]]
    if odd:
        raise WorkError(
            f"the weights differ between ranks that should hold the same {when}: "
            f"rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, sorted(odd)))} against the first copy's"
        )
