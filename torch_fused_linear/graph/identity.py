"""By what the compiler's caches know our passes."""

from functools import cache
from hashlib import sha256
from pathlib import Path

from .. import activations
from .._support import library
from .._support.torch_internals import custom_graph_pass
from ..policy import get_policy

SOURCES = (*sorted(Path(__file__).parent.glob("*.py")), Path(activations.__file__))


@cache
def fingerprint() -> str:
    """Returns a digest of a pass's behaviour: its source and the library's."""
    # Not torch's get_hash_for_files, which remembers one result only.
    hasher = sha256(str(library.build_info().get("fingerprint")).encode())
    for path in SOURCES:
        hasher.update(path.read_bytes())
    return hasher.hexdigest()


class GraphPass(custom_graph_pass()):
    """A pass that the compiler's caches know; ``options`` are what it was made with."""

    options: tuple = ()

    def uuid(self) -> str:
        # The operators are traced into other operations under this policy.
        policy = "batch_invariant" if get_policy() == "batch_invariant" else ""
        return f"{type(self).__name__}{self.options} {fingerprint()} {policy}"

    def __reduce__(self):
        # The caches pickle the configuration, the pass in it: equal passes must give equal bytes,
        # whatever they have counted.
        return (_restore, (type(self), self.options, self.uuid()))

    def __deepcopy__(self, memo) -> "GraphPass":
        # AOTInductor copies its options; what is counted is to be seen by who gave them.
        return self


def _restore(cls: type[GraphPass], options: tuple, uuid: str) -> GraphPass:
    return cls(*options)
