// What runs where fuse_ has rewritten act(linear(x)): torch_fused_linear/fuse/call.py in C.
#pragma once

#include <Python.h>

namespace fused {

// begin, activate, call, gated, down and know_plain, for PyModule_AddFunctions.
extern PyMethodDef expression_methods[7];

}  // namespace fused
