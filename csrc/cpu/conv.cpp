// The CPU's convolution is ATen's.

#include "dispatch/conv_kernels.h"

namespace fused::cpu {

TORCH_LIBRARY_IMPL(fused, CPU, m) { dispatch::register_conv<reference::Conv>(m); }

}  // namespace fused::cpu
