"""A convolution's choice and the terms of its elements without a GPU: C++ programs."""

import ctypes

import cpp_programs
import pytest
import torch
import torch.nn.functional as F
from convolutions import LAST, ODD

NAMES = cpp_programs.names_in("conv_test.cpp")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return cpp_programs.build("conv_test.cpp", tmp_path_factory.mktemp("conv"), "-O1")


@pytest.fixture(scope="module")
def terms(tmp_path_factory):
    folder = tmp_path_factory.mktemp("terms")
    return ctypes.CDLL(cpp_programs.build("conv_terms.cpp", folder, "-O1", "-shared", "-fPIC"))


def test_all_are_found():
    assert len(NAMES) == 6


@pytest.mark.parametrize("name", NAMES)
def test_conv(program, name):
    cpp_programs.run(program, name)


def shape_of(conv, *tensors):
    """ConvShape of csrc/cuda/tune/conv_terms.h, all of whose members are int64_t."""
    numbers = [n for t in tensors for n in (*t.shape, *t.stride())]
    numbers += [*conv.stride, *conv.padding, *conv.dilation, conv.groups]
    return (ctypes.c_int64 * len(numbers))(*numbers)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", [name for name, conv in ODD.items() if conv.batch])
def test_terms_add_up_to_torchs_convolution(terms, name, last):
    conv = ODD[name]
    memory_format = LAST if last else torch.contiguous_format
    x, w, *_ = (t.contiguous(memory_format=memory_format) for t in conv.case().inputs[:2])
    want = F.conv2d(x, w, None, *conv.options)
    magnitudes = F.conv2d(x.abs(), w.abs(), None, *conv.options)
    got = [torch.full_like(want, torch.nan) for _ in range(2)]
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, w, *got)]
    terms.sum_terms(shape_of(conv, x, w, got[0]), *pointers)
    for result, wanted in zip(got, (want, magnitudes)):
        torch.testing.assert_close(result, wanted, rtol=0, atol=1e-12)
