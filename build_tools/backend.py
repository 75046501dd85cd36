"""The build backend: setuptools', which also sees the torch that the library will run with.

pip builds in an environment that hides what is installed. The library fits one release of torch,
that which it is compiled against, so the packages of the Python that pip runs on are put last on
the path.
"""

import site
import sys

OLDEST_PYTHON = (3, 10)
# The first with bdist_wheel and licence expressions in it.
OLDEST_SETUPTOOLS = 77


def unfit_python():
    here = ".".join(map(str, sys.version_info[:2]))
    needed = ".".join(map(str, OLDEST_PYTHON))
    return f"torch_fused_linear: Python {needed} or newer is needed, {sys.executable} is {here}"


def unfit_setuptools(version):
    found = "has none" if version is None else f"has {version}"
    return (
        f"torch_fused_linear: a build without isolation needs setuptools {OLDEST_SETUPTOOLS} or "
        f"newer, and {sys.executable} {found}.\n"
        f"  pip install 'setuptools>={OLDEST_SETUPTOOLS},<82'     then the same again"
    )


if sys.version_info < OLDEST_PYTHON:
    sys.exit(unfit_python())
try:
    import setuptools
    from setuptools.build_meta import *  # noqa: F403  the hooks that pip calls
except ImportError:
    sys.exit(unfit_setuptools(None))
if int(setuptools.__version__.split(".")[0]) < OLDEST_SETUPTOOLS:
    sys.exit(unfit_setuptools(setuptools.__version__))
for folder in (*site.getsitepackages(), site.getusersitepackages()):
    if folder not in sys.path:
        sys.path.append(folder)
