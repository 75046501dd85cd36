"""By what the compiler's caches know our passes."""

from collections import Counter
from functools import cache
from hashlib import sha256
from pathlib import Path

from torch._inductor.custom_graph_pass import CustomGraphPass

from .. import _library, activations

SOURCES = (*sorted(Path(__file__).parent.glob("*.py")), Path(activations.__file__))


@cache
def fingerprint() -> str:
    """Of what a pass does: its source and the library's."""
    # Not torch's get_hash_for_files, which remembers one result only.
    hasher = sha256(str(_library.build_info().get("fingerprint")).encode())
    for path in SOURCES:
        hasher.update(path.read_bytes())
    return hasher.hexdigest()


class CountingPass(CustomGraphPass):
    """A pass that counts what it does; ``options`` are what it was made with."""

    options: tuple = ()

    def uuid(self) -> str:
        return f"{type(self).__name__}{self.options} {fingerprint()}"

    def __reduce__(self):
        # The caches pickle the configuration, the pass in it: equal passes must give equal bytes,
        # whatever they have counted.
        return (_restore, (type(self), self.options, self.uuid()))

    def __deepcopy__(self, memo) -> "CountingPass":
        # AOTInductor copies its options; what is counted is to be seen by who gave them.
        return self


def _restore(cls: type[CountingPass], options: tuple, uuid: str) -> CountingPass:
    return cls(*options)


def in_words(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
