// Under vmap (torch.func, is_grads_batched) torch's own rules batch the formula.

#include "dispatch/conv_kernels.h"
#include "dispatch/gated_kernels.h"
#include "dispatch/linear_kernels.h"

namespace fused::dispatch {

TORCH_LIBRARY_IMPL(fused, FuncTorchBatched, m) {
  register_linear<reference::LinearFormula>(m);
  register_gated<reference::GluFormula>(m);
  register_conv<reference::ConvFormula>(m);
}

}  // namespace fused::dispatch
