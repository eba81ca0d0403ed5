"""Names to what answers to them: one mechanism behind every axis that a plugin can extend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from olmo_ext.base.errors import InputError, did_you_mean

T = TypeVar("T")
C = TypeVar("C", bound=type)


class Registry(Generic[T]):
    """Names to one instance of each registered class, with an error that lists what there is.

    :param kind: what is registered, as in "FFN type".
    :param key: where a name is written, for errors.
    """

    def __init__(self, kind: str, key: str) -> None:
        self._kind, self._key = kind, key
        self._types: dict[str, T] = {}

    def add(self, cls: C) -> C:
        """A class decorator: make a class known under its `name`. A module that is imported again replaces its own.

        :raises InputError: if another class has the name.
        """
        name = cls.name  # type: ignore[attr-defined]
        known = type(self._types.get(name, cls))
        if name in self._types and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise InputError(
                f"{self._kind} {name!r} is registered twice, by {known.__module__} and {cls.__module__}",
                right="give one of them another name",
            )
        self._types[name] = cls()
        return cls

    def get(self, name: str, *, where: str | None = None) -> T:
        """What is registered under a name.

        :raises InputError: for an unknown name, with the nearest known one.
        """
        if name not in self._types:
            known = f"known: {', '.join(self)}; name the module of your own in `plugins:`"
            raise InputError(
                f"unknown {self._kind} {name!r}",
                where=where or self._key,
                right=f"{did_you_mean(name, self._types, otherwise='')} {known}".lstrip(),
            )
        return self._types[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._types))

    def entries(self) -> list[T]:
        """All that is registered, in the order of registration."""
        return list(self._types.values())
