// What stands in code that fuse_ has rewritten: torch_fused_linear/fuse/call.py in C.
#pragma once

#include <Python.h>

namespace fused::python {

// step, last, first, end, later, product, last_product and know, for PyModule_AddFunctions.
extern PyMethodDef expression_methods[9];

}  // namespace fused::python
