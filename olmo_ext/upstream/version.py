"""Check that the installed ai2-olmo is the version that the patches were written for."""

from __future__ import annotations

import functools
import importlib.metadata

from olmo_ext.base.errors import InputError

SUPPORTED = ("0.6.0",)
"""The last release; the package is frozen."""


@functools.cache
def check_upstream() -> str:
    """The installed version of ai2-olmo.

    :raises InputError: if it is not one that the patches of this package are known to fit.
    """
    try:
        version = importlib.metadata.version("ai2-olmo")
    except importlib.metadata.PackageNotFoundError:
        raise InputError("ai2-olmo is not installed", right=f"pip install ai2-olmo=={SUPPORTED[-1]}") from None
    if version not in SUPPORTED:
        raise InputError(
            f"ai2-olmo {version} is installed, and this package patches {', '.join(SUPPORTED)}",
            right=f"pip install ai2-olmo=={SUPPORTED[-1]}",
        )
    return version
