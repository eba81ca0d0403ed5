"""Parameters by the names that the bare model gives them, whatever wraps it."""

from __future__ import annotations

WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def clean_name(name: str) -> str:
    """A parameter's name in the bare model: DDP's prefix and the wrappers that sit anywhere are left out."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")
