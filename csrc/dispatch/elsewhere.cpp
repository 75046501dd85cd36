#include "dispatch/elsewhere.h"
#include "dispatch/gated_kernels.h"
#include "dispatch/linear_kernels.h"

namespace fused::dispatch {
namespace {

void register_formula(torch::Library& m) {
  register_linear<reference::LinearFormula>(m);
  register_gated<reference::GluFormula>(m);
}

}  // namespace

FUSED_REGISTER_ELSEWHERE(register_formula)

}  // namespace fused::dispatch
