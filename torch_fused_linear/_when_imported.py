"""Registers something with a module of torch's when that module is first imported."""

import importlib.abc
import importlib.util
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
    """Lets the others find the module, and registers after it has been run."""

    def __init__(self, module: str, register: Callable[[], None]) -> None:
        self.module, self.register = module, register

    def find_spec(self, name, path=None, target=None):
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            exec_module = spec.loader.exec_module

            def exec_and_register(module) -> None:
                exec_module(module)
                self.register()

            spec.loader.exec_module = exec_and_register
        return spec
