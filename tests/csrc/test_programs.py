"""The C++ tests: each program is compiled, and run test by test. `make asan` and `make tsan` run
most of them, too."""

import functools

import cpp_programs
import pytest

LIBTORCH = ("torch", "torch_cpu", "c10")
ON_CPU = f"-I{cpp_programs.ROOT / 'tests/csrc/cuda_on_cpu'}"
# The tests of each, and how it is built.
PROGRAMS = {
    "gemm_test.cpp": (6, ["-O1"], {}),
    "plan_test.cpp": (21, ["-O1"], {}),
    "plan_file_test.cpp": (11, ["-O1"], {}),
    "quick_math_test.cpp": (6, ["-O1", ON_CPU], {}),
    "small_product_test.cpp": (9, ["-O2", "-Wno-attributes", "-Wno-unknown-pragmas", ON_CPU], {}),
    "conv_test.cpp": (3, ["-O0"], {"libraries": LIBTORCH}),
    "handover_test.cpp": (6, ["-O0"], {"libraries": LIBTORCH}),
    "threads_test.cpp": (5, ["-O0"], {"libraries": LIBTORCH}),
}
NAMES = [(source, name) for source in PROGRAMS for name in cpp_programs.names_in(source)]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Compiles each program once; a fixture with a parameter would for every test of it."""

    @functools.cache
    def build(source):
        _, flags, options = PROGRAMS[source]
        return cpp_programs.build(source, tmp_path_factory.mktemp("program"), *flags, **options)

    return build


@pytest.mark.parametrize("source", PROGRAMS)
def test_all_are_found(source):
    assert len(cpp_programs.names_in(source)) == PROGRAMS[source][0]


@pytest.mark.parametrize(("source", "name"), NAMES)
def test_program(source, name, built, tmp_path):
    if source == "small_product_test.cpp" and not cpp_programs.WITH_CUDA:
        pytest.skip("needs a build with CUDA, for its headers")
    cpp_programs.run(built(source), name, cwd=tmp_path)
