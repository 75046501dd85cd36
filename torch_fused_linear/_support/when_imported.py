"""Registers something with a module of torch's when that module is first imported."""

import importlib.abc
import sys
from collections.abc import Callable


def when_imported(module: str, register: Callable[[], None]) -> None:
    """Calls a function once after a module, by its full name, has been run and is in
    ``sys.modules``: at once, or when it is first imported."""
    if module in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _Finder(module, register))


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the others find the module, and registers after it has been run: whoever only asks where
    it is does not run it, and the first import may fail."""

    def __init__(self, module: str, register: Callable[[], None]) -> None:
        self.module, self.register = module, register

    def find_spec(self, name, path=None, target=None):
        if name != self.module:
            return None
        others = (finder for finder in sys.meta_path if not isinstance(finder, _Finder))
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            exec_module = spec.loader.exec_module

            def exec_and_register(module) -> None:
                exec_module(module)
                if self in sys.meta_path and module.__name__ == self.module:
                    sys.meta_path.remove(self)
                    self.register()

            spec.loader.exec_module = exec_and_register
        return spec
