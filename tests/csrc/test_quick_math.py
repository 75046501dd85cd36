"""What our GPU kernels compute with, on a CPU."""

import cpp_programs
import pytest

NAMES = (
    "relu",
    "gelu_tanh",
    "gelu_erf",
    "silu",
    "a_trial_takes_what_is_exact",
    "a_trial_sees_flat_regions",
)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    include = f"-I{cpp_programs.ROOT / 'tests/csrc/cuda_on_cpu'}"
    return cpp_programs.build(
        "quick_math_test.cpp", tmp_path_factory.mktemp("math"), "-O1", include
    )


@pytest.mark.parametrize("name", NAMES)
def test_quick_math(program, name):
    cpp_programs.run(program, name)
