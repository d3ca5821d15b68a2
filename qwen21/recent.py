"""A memory of what was asked for last."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """The results of the `most` keys that were asked for last; the one that was not for longest goes first."""

    def __init__(self, most: int):
        self.most = most
        self._known: dict[Hashable, Value] = {}

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """What is known under `key`, or what `make` gives and is known from now on; nothing is, if it raises."""
        value = self._known.pop(key) if key in self._known else make()
        self._known[key] = value  # the last one now
        if len(self._known) > self.most:
            del self._known[next(iter(self._known))]
        return value
