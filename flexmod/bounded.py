"""A dictionary that forgets its oldest entries."""

from __future__ import annotations

from contextlib import suppress
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Bounded(dict[Key, Value]):
    """At most `most` entries; read it as any dictionary, and write by `keep`."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def keep(self, key: Key, value: Value) -> Value:
        if len(self) >= self.most:
            with suppress(StopIteration, KeyError, RuntimeError):  # another thread was faster
                del self[next(iter(self))]
        return self.setdefault(key, value)
