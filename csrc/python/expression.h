// What stands in code that fuse_ has rewritten: torch_fused_linear/fuse/call.py in C.
#pragma once

#include <Python.h>

namespace fused {

// step, last, call, end, later, product and know, for PyModule_AddFunctions.
extern PyMethodDef expression_methods[8];

}  // namespace fused
