"""The releases of torch that this version is tested with. Reads nothing of torch: the build asks,
too."""

import hashlib
from pathlib import Path

TESTED = ("2.11", "2.12", "2.13", "2.14", "2.15")
_SUPPORTED = f"{TESTED[0]} to {TESTED[-1]} are supported"


def minor(version: str) -> str:
    """``2.11.0+cu130`` is ``2.11``, within which torch's C++ interface holds."""
    return ".".join(version.split(".")[:2])


def _number(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in minor(release).split("."))


def too_old(version: str) -> str | None:
    """Returns the message for a torch that is older than all supported releases, or None."""
    if _number(version) >= _number(TESTED[0]):
        return None
    command = f"pip install '{requirement(list(TESTED))}'"
    return f"torch_fused_linear: torch {version} is too old; {_SUPPORTED}: {command}"


def untested(version: str) -> str | None:
    """Returns the message for a torch that is newer than all tested releases, or None."""
    if _number(version) <= _number(TESTED[-1]):
        return None
    return f"torch_fused_linear: torch {version} is untested; {_SUPPORTED}"


def requirement(releases: list[str]) -> str:
    """Returns the requirement on torch of a wheel with a library for each of these releases."""
    numbers = sorted(map(_number, releases))
    names = [f"{major}.{number}" for major, number in numbers]
    between = [f"{numbers[0][0]}.{n}" for n in range(numbers[0][1], numbers[-1][1])]
    holes = "".join(f",!={name}.*" for name in between if name not in names)
    return f"torch>={names[0]},<{numbers[-1][0]}.{numbers[-1][1] + 1}{holes}"


def digest_of_headers(torch: Path) -> str:
    """Returns a digest of the headers that fix the memory layout of torch's C++ objects. Builds of
    torch with the same digest can load each other's libraries.
    """
    folders = ("c10/core", "c10/util", "ATen/core", "torch/csrc/autograd", "torch/csrc/dynamo")
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((torch / "include" / folder).rglob("*.h")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
