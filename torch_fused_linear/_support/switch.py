"""Process-wide settings that are also context managers and decorators."""

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from .torch_internals import DecoratorContextManager


class Switch(DecoratorContextManager):
    """A process-wide setting. Making the object sets it; a ``with`` block or a decorated call sets
    it for its length.

    The end of a block puts back what was in force when it was entered. The first block puts back
    what was in force before the object was made, unless the setting was changed in between.
    """

    _get: ClassVar[str]
    _set: ClassVar[str]
    _argument: ClassVar[str]
    _expected: ClassVar[str]
    _types: ClassVar[tuple[type, ...]]

    def __init__(self, value: Any) -> None:
        if type(value) not in self._types:
            expected = f"{self._argument} must be {self._expected}"
            raise TypeError(f"{type(self).__name__}: {expected}, got {value!r}")
        self._value = value
        self._entered: list[Any] = []  # what each block that is open has to put back
        self._before: list[Any] = [self._now()]  # empty once it is known whether a block follows
        self._put(value)
        self._made = self._now()

    def _now(self) -> Any:
        return getattr(torch.ops.fused, self._get)()

    def _put(self, value: Any) -> None:
        getattr(torch.ops.fused, self._set)(value)

    def __enter__(self) -> "Switch":
        now = self._now()
        before = self._before.pop() if self._before else now
        self._entered.append(before if now == self._made else now)
        self._put(self._value)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._put(self._entered.pop())

    def __call__(self, function: Callable) -> Callable:
        if self._before:  # it was made to decorate, not to set
            self._put(self._before.pop())
        return super().__call__(function)

    def clone(self) -> "Switch":
        """One for each call of a decorated function, which may call itself."""
        other = copy.copy(self)
        other._entered, other._before = [], []
        return other
