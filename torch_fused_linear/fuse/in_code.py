"""What functions call that fuse_ has rewritten: C where it was built, else call.py itself."""

import operator
from types import ModuleType

import torch
from torch import nn

from .. import _library
from .._when_imported import when_imported
from . import call, plain
from .call import drawn, halves, method_chunk  # noqa: F401  (as the rest of this file's names)
from .plain import method_pow  # noqa: F401

#: This module's name in the globals of a rewritten function.
NAME = "__torch_fused_linear__"

_direct = _library.direct if isinstance(_library.direct, ModuleType) else call
# Of call.py, those that are in C where it was built.
IN_C = ("step", "last", "first", "end", "later", "product", "last_product")
step, last, first, end, later, product, last_product = (getattr(_direct, name) for name in IN_C)
method_relu, method_relu_, method_square = plain.METHODS.values()
power = operator.pow


def run_sequential(self, input):
    """In place of nn.Sequential's loop, where it holds marked layers."""
    for module in self:
        input = step(module, input)
    return end(input)


def _substitute() -> None:
    """Lets torch.compile trace the Python of what is C."""
    for name in IN_C:
        as_c = torch.compiler.substitute_in_graph(getattr(_direct, name), skip_signature_check=True)
        as_c(getattr(call, name))


if _direct is not call:
    _direct.know(plain, call, nn.Linear, nn.Conv2d)
    when_imported("torch._dynamo", _substitute)
