#pragma once

// Tensors of layouts and devices that no kernel of ours takes go torch's own way:
// `register_formula` puts an operator's formula into a library.

#include <torch/library.h>

#define FUSED_REGISTER_ELSEWHERE(register_formula)                        \
  TORCH_LIBRARY_IMPL(fused, NestedTensorCPU, m) { register_formula(m); }  \
  TORCH_LIBRARY_IMPL(fused, NestedTensorCUDA, m) { register_formula(m); } \
  TORCH_LIBRARY_IMPL(fused, SparseCPU, m) { register_formula(m); }        \
  TORCH_LIBRARY_IMPL(fused, SparseCUDA, m) { register_formula(m); }       \
  TORCH_LIBRARY_IMPL(fused, SparseMeta, m) { register_formula(m); }       \
  TORCH_LIBRARY_IMPL(fused, SparseCsrCPU, m) { register_formula(m); }     \
  TORCH_LIBRARY_IMPL(fused, SparseCsrCUDA, m) { register_formula(m); }    \
  TORCH_LIBRARY_IMPL(fused, SparseCsrMeta, m) { register_formula(m); }    \
  TORCH_LIBRARY_IMPL(fused, QuantizedCPU, m) { register_formula(m); }     \
  TORCH_LIBRARY_IMPL(fused, QuantizedCUDA, m) { register_formula(m); }    \
  TORCH_LIBRARY_IMPL(fused, MkldnnCPU, m) { register_formula(m); }        \
  TORCH_LIBRARY_IMPL(fused, MPS, m) { register_formula(m); }              \
  TORCH_LIBRARY_IMPL(fused, XPU, m) { register_formula(m); }              \
  TORCH_LIBRARY_IMPL(fused, HPU, m) { register_formula(m); }              \
  TORCH_LIBRARY_IMPL(fused, MTIA, m) { register_formula(m); }             \
  TORCH_LIBRARY_IMPL(fused, XLA, m) { register_formula(m); }              \
  TORCH_LIBRARY_IMPL(fused, PrivateUse1, m) { register_formula(m); }
