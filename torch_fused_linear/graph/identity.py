"""By what the compiler's caches know our passes."""

import logging
from collections import Counter
from functools import cache
from hashlib import sha256
from pathlib import Path

from .. import _library, activations
from .._torch_internals import custom_graph_pass
from ..policy import get_policy

logger = logging.getLogger("torch_fused_linear")
SOURCES = (*sorted(Path(__file__).parent.glob("*.py")), Path(activations.__file__))


@cache
def fingerprint() -> str:
    """Of what a pass does: its source and the library's."""
    # Not torch's get_hash_for_files, which remembers one result only.
    hasher = sha256(str(_library.build_info().get("fingerprint")).encode())
    for path in SOURCES:
        hasher.update(path.read_bytes())
    return hasher.hexdigest()


class CountingPass(custom_graph_pass()):
    """A pass that counts what it does; ``options`` are what it was made with."""

    options: tuple = ()

    def uuid(self) -> str:
        # What the operators are traced into depends on it.
        policy = "batch_invariant" if get_policy() == "batch_invariant" else ""
        return f"{type(self).__name__}{self.options} {fingerprint()} {policy}"

    def count(self, total: Counter[str], counts: Counter[str], what: str) -> None:
        """Adds to what was counted so far, and logs it."""
        total.update(counts)
        if counts:
            each = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
            logger.info("%s: %s", what, each)

    def __reduce__(self):
        # The caches pickle the configuration, the pass in it: equal passes must give equal bytes,
        # whatever they have counted.
        return (_restore, (type(self), self.options, self.uuid()))

    def __deepcopy__(self, memo) -> "CountingPass":
        # AOTInductor copies its options; what is counted is to be seen by who gave them.
        return self


def _restore(cls: type[CountingPass], options: tuple, uuid: str) -> CountingPass:
    return cls(*options)
