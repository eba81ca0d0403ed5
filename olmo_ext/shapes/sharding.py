"""How FSDP's strategies divide the ranks of a run into copies of the model. No torch."""

from __future__ import annotations

from olmo_ext.base.errors import InputError


def model_copies(sharding: str, *, world_size: int, nodes: int, asked: int | None = None) -> int:
    """Whole copies of the model; the ranks of one copy hold a part of it each.

    :param sharding: `fsdp.sharding_strategy`.
    :param asked: `fsdp.hybrid_sharding_num_model_replicas`; the hybrid strategies keep one copy a node without it.
    :raises InputError: for copies that do not divide the ranks, and for the two layouts that train wrongly: FSDP never
        averages gradients between copies of one rank each, and under NO_SHARD OLMo adds up the norms of gradients that
        are already whole, so that they come out sqrt(ranks) too large and are clipped too much.
    """
    if sharding == "NO_SHARD" and world_size > 1:
        raise InputError(
            f"NO_SHARD on {world_size} ranks: the gradient norm would be sqrt({world_size}) times too large",
            where="fsdp.sharding_strategy",
            right="distributed_strategy: ddp, which keeps whole copies too",
        )
    if "HYBRID" not in sharding:
        return 1
    copies = asked or nodes
    where = "fsdp.hybrid_sharding_num_model_replicas"
    if world_size % copies:
        right = f"a divisor of {world_size}"
        raise InputError(f"{copies} copies of the model do not divide {world_size} ranks", where=where, right=right)
    if world_size == copies > 1:
        raise InputError(
            f"{copies} copies of the model on {world_size} ranks: {sharding} never averages the gradients of copies"
            " that hold one rank each",
            where=where,
            right="distributed_strategy: ddp, fsdp.sharding_strategy: FULL_SHARD, or fewer copies",
        )
    return copies
