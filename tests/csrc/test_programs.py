"""The C++ tests. `make asan` and `make tsan` run most of them, too."""

import itertools
from pathlib import Path

import cpp_programs
import pytest

HERE = Path(__file__).parent
ON_CPU = f"-I{HERE / 'cuda_on_cpu'}"
# The sources of each program, and its flags. Those that read the same headers are compiled as one,
# because torch's take longer than all of the tests.
PROGRAMS = {
    "gemm_test.cpp plan_test.cpp plan_file_test.cpp": ["-O1"],
    "invariant_test.cpp": ["-O1"],
    "ordered_product_test.cpp": ["-O2", "-Wno-attributes", "-Wno-unknown-pragmas", ON_CPU],
    "quick_math_test.cpp": ["-O1", ON_CPU],
    "small_product_test.cpp": ["-O2", "-Wno-attributes", "-Wno-unknown-pragmas", ON_CPU],
    "threads_test.cpp conv_test.cpp": ["-O0"],
}
NEED_CUDA = ("small_product_test.cpp", "ordered_product_test.cpp")


@pytest.mark.parametrize("program", PROGRAMS)
def test_program(program, tmp_path):
    sources, flags = program.split(), PROGRAMS[program]
    if sources[0] in NEED_CUDA and not cpp_programs.WITH_CUDA:
        pytest.skip("needs a build with CUDA, for its headers")
    others = [word for source in sources[:-1] for word in ("-include", str(HERE / source))]
    libraries = ("torch", "torch_cpu", "c10")
    built = cpp_programs.build(sources[-1], tmp_path, *flags, *others, libraries=libraries)
    ran = cpp_programs.run(built, "all", cwd=tmp_path).split()
    assert ran == sorted(itertools.chain(*map(cpp_programs.names_in, sources)))
