#include "dispatch/subclasses.h"

namespace fused::dispatch {

TORCH_LIBRARY_IMPL(fused, PythonTLSSnapshot, m) { register_for_subclasses<Public>(m); }

}  // namespace fused::dispatch
