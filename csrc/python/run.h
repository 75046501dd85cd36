// The functions that code calls which fuse_ has rewritten: torch_fused_linear/fuse/run.py in C.
#pragma once

#include <Python.h>

namespace fused::python {

// run, nested, alone, leads, sequence, gated, halves and know, for PyModule_AddFunctions.
extern PyMethodDef run_methods[9];

}  // namespace fused::python
