#include "dispatch/autocast.h"

namespace fused::dispatch {

TORCH_LIBRARY_IMPL(fused, AutocastCUDA, m) { register_autocast<c10::kCUDA, Public, Steps>(m); }
TORCH_LIBRARY_IMPL(fused, AutocastCPU, m) { register_autocast<c10::kCPU, Public, Steps>(m); }

}  // namespace fused::dispatch
