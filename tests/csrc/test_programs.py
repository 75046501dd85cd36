"""The C++ tests: each program is compiled, and run test by test. `make asan` and `make tsan` run
most of them, too."""

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
    "handover_test.cpp": (10, ["-O0"], {"libraries": LIBTORCH}),
    "threads_test.cpp": (5, ["-O0"], {"libraries": LIBTORCH}),
}
NAMES = [(source, name) for source in PROGRAMS for name in cpp_programs.names_in(source)]


@pytest.fixture(scope="module")
def program(request, tmp_path_factory):
    if request.param == "small_product_test.cpp" and not cpp_programs.WITH_CUDA:
        pytest.skip("needs a build with CUDA, for its headers")
    _, flags, options = PROGRAMS[request.param]
    folder = tmp_path_factory.mktemp("program")
    return cpp_programs.build(request.param, folder, *flags, **options)


@pytest.mark.parametrize("source", PROGRAMS)
def test_all_are_found(source):
    assert len(cpp_programs.names_in(source)) == PROGRAMS[source][0]


@pytest.mark.parametrize(("program", "name"), NAMES, indirect=["program"])
def test_program(program, name, tmp_path):
    cpp_programs.run(program, name, cwd=tmp_path)
