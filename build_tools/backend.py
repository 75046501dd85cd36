"""The build backend: setuptools', which also sees the torch that the library will run with.

pip builds in an environment that hides what is installed. The library fits one torch only, the one
it is compiled against, so the packages of the Python that pip runs on are put last on the path.
"""

import site
import sys

import setuptools
from setuptools.build_meta import *  # noqa: F403  the hooks that pip calls

# The first with bdist_wheel and licence expressions in it.
NEEDED = 77

if int(setuptools.__version__.split(".")[0]) < NEEDED:
    sys.exit(
        f"torch_fused_linear: setuptools {NEEDED} or newer is needed to build without isolation, "
        f"and {sys.executable} has {setuptools.__version__}.\n"
        "Either: pip install .   (pip then fetches what the build needs)\n"
        f"or:     pip install 'setuptools>={NEEDED},<82' ninja"
    )
for folder in (*site.getsitepackages(), site.getusersitepackages()):
    if folder not in sys.path:
        sys.path.append(folder)
