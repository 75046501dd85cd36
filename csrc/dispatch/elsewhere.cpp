// Tensors of layouts and devices that no kernel of ours takes go torch's own way.

#include "dispatch/conv_kernels.h"
#include "dispatch/gated_kernels.h"
#include "dispatch/linear_kernels.h"

namespace fused::dispatch {
namespace {

void register_formula(torch::Library& m) {
  register_linear<reference::LinearFormula>(m);
  register_gated<reference::GluFormula>(m);
  register_conv<reference::ConvFormula>(m);
}

}  // namespace

TORCH_LIBRARY_IMPL(fused, NestedTensorCPU, m) { register_formula(m); }
TORCH_LIBRARY_IMPL(fused, NestedTensorCUDA, m) { register_formula(m); }
TORCH_LIBRARY_IMPL(fused, SparseCPU, m) { register_formula(m); }
TORCH_LIBRARY_IMPL(fused, SparseCUDA, m) { register_formula(m); }
TORCH_LIBRARY_IMPL(fused, SparseMeta, m) { register_formula(m); }
TORCH_LIBRARY_IMPL(fused, SparseCsrCPU, m) { register_formula(m); }
TORCH_LIBRARY_IMPL(fused, SparseCsrCUDA, m) { register_formula(m); }
TORCH_LIBRARY_IMPL(fused, SparseCsrMeta, m) { register_formula(m); }
TORCH_LIBRARY_IMPL(fused, QuantizedCPU, m) { register_formula(m); }
TORCH_LIBRARY_IMPL(fused, QuantizedCUDA, m) { register_formula(m); }
TORCH_LIBRARY_IMPL(fused, MkldnnCPU, m) { register_formula(m); }
TORCH_LIBRARY_IMPL(fused, MPS, m) { register_formula(m); }
TORCH_LIBRARY_IMPL(fused, XPU, m) { register_formula(m); }
TORCH_LIBRARY_IMPL(fused, HPU, m) { register_formula(m); }
TORCH_LIBRARY_IMPL(fused, MTIA, m) { register_formula(m); }
TORCH_LIBRARY_IMPL(fused, XLA, m) { register_formula(m); }
TORCH_LIBRARY_IMPL(fused, PrivateUse1, m) { register_formula(m); }

}  // namespace fused::dispatch
