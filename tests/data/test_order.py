"""The first values of the official order equal numpy's own shuffle, however they are made."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import olmo_ext.data.order as order
from olmo_ext.base.errors import InputError
from olmo_ext.data.order import first_of_order

METHODS = ("sparse", "sparse-numpy")


def numpys_shuffle(num_instances: int, count: int, seed: int) -> np.ndarray:
    indices = np.arange(num_instances, dtype=np.uint32)
    np.random.Generator(np.random.PCG64(seed)).shuffle(indices)
    return indices[:count]


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int]:
    near_a_power_of_two = st.builds(lambda k, d: max(1, 2**k + d), st.integers(1, 12), st.integers(-2, 2))
    num_instances = draw(st.one_of(st.integers(1, 60), st.integers(1, 6000), near_a_power_of_two))
    return num_instances, draw(st.integers(0, num_instances))


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=150)
@given(sizes(), st.integers(0, 2**40), st.integers(0, 5), st.sampled_from([7, 300, 1 << 20]))
def test_the_sparse_order_is_numpys(method: str, size: tuple[int, int], seed: int, epoch: int, block: int) -> None:
    (num_instances, count), usual = size, order._BLOCK
    order._BLOCK = block
    try:
        found = first_of_order(num_instances, count, seed=seed, epoch=epoch, method=method)
    finally:
        order._BLOCK = usual
    assert found.dtype == np.uint32
    np.testing.assert_array_equal(found, numpys_shuffle(num_instances, count, seed + epoch))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [1, 30_000, 900_000])
def test_the_sparse_order_is_numpys_over_many_blocks(method: str, count: int) -> None:
    found = first_of_order(3_000_000, count, seed=6198, method=method)
    np.testing.assert_array_equal(found, numpys_shuffle(3_000_000, count, 6198))


def test_the_order_is_upstreams() -> None:
    from olmo.data import IterableDataset

    class Numbers:
        def __len__(self) -> int:
            return 5000

    for epoch in (0, 3):
        theirs = IterableDataset(Numbers(), 1, seed=6198, epoch=epoch, rank=0, world_size=1, fs_local_rank=0)  # type: ignore[arg-type]
        ours = first_of_order(5000, 700, seed=6198, epoch=epoch, method="sparse")
        np.testing.assert_array_equal(ours, theirs.get_global_indices()[:700])


@pytest.mark.parametrize("count", [0, 40, 2000])
def test_a_longer_order_begins_with_the_shorter(count: int) -> None:
    longer = first_of_order(100_000, 5000, seed=1, method="sparse")
    np.testing.assert_array_equal(first_of_order(100_000, count, seed=1, method="sparse"), longer[:count])


def test_progress_is_told_and_ends_at_one() -> None:
    for method in METHODS:
        shares: list[float] = []
        first_of_order(200_000, 100, seed=1, method=method, progress=shares.append)
        assert shares == sorted(shares) and shares[-1] == 1.0


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match="the first 11 of 10 instances"):
        first_of_order(10, 11, seed=1)
    with pytest.raises(InputError, match="the index is uint32"):
        first_of_order(2**32, 1, seed=1)
    with pytest.raises(InputError, match="method 'fast'"):
        first_of_order(10, 1, seed=1, method="fast")


def test_without_numba_the_slower_path_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "compiled_available", lambda: False)
    monkeypatch.setattr(order, "_SPARSE_NUMPY_FROM", 10)
    np.testing.assert_array_equal(first_of_order(40_000, 100, seed=1), numpys_shuffle(40_000, 100, 1))
    with pytest.raises(InputError, match="needs numba"):
        first_of_order(40_000, 100, seed=1, method="sparse")
