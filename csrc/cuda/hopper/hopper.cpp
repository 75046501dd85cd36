#include "cuda/hopper/hopper.h"

#include "cuda/hopper/product.h"
#include "cuda/kernels/activation.h"

#include <ATen/cuda/CUDAContext.h>

namespace fused::cuda::hopper {

using gemm::Pass, gemm::PassProblem, gemm::Type;

namespace {

using Kernel = cudaError_t (*)(const Product&);

// No pre-activation is stored for ReLU, and as a gate it is left to others.
template <Type type>
Kernel kernel_of(const PassProblem& p) {
  return with_activation(p.activation, [&p](auto constant) -> Kernel {
    constexpr Activation activation = constant;
    if constexpr (activation != Activation::none) {
      constexpr bool is_relu = activation == Activation::relu;
      if (p.pass == Pass::dgrad) return backward<type, activation>;
      if (p.pass == Pass::fprop && (is_relu ? gemm::wants_bits(p) : p.aux)) {
        return saving_forward<type, activation>;
      }
      if (p.pass == Pass::fprop) return forward<type, activation>;
      if constexpr (!is_relu) {
        if (p.pass == Pass::gating) return gating<type, activation>;
        if (p.pass == Pass::glu) return glu<type, activation>;
      }
    }
    return nullptr;
  });
}

}  // namespace

bool available(int device) {
  const auto* properties = at::cuda::getDeviceProperties(device);
  return properties->major == 9 && properties->minor == 0;
}

int64_t workspace_bytes(const PassProblem& p) {
  if (p.pass != Pass::dgrad || !p.bias) return 0;
  return gemm::hopper::partial_rows(p.matmul) * gemm::hopper::partial_columns(p.matmul) *
         static_cast<int64_t>(sizeof(float));
}

bool run(const PassProblem& p, const gemm::Algorithm& algorithm, const gemm::Operands& operands,
         void* workspace, cudaStream_t stream) {
  const auto& g = p.matmul;
  const auto order = gemm::hopper::order_of(algorithm);
  const auto kernel = g.type == Type::bf16 ? kernel_of<Type::bf16>(p) : kernel_of<Type::f16>(p);
  if (!order || kernel == nullptr) return false;
  const bool forward = gemm::is_forward(p.pass);
  auto* partials = !forward && p.bias ? static_cast<float*>(workspace) : nullptr;
  const Product product{static_cast<int>(g.m),
                        static_cast<int>(g.n),
                        static_cast<int>(g.k),
                        operands.a,
                        operands.b,
                        operands.d,
                        g.lda,
                        g.ldb,
                        g.ldd,
                        operands.aux,
                        g.ld_aux,
                        forward ? operands.bias : nullptr,
                        partials,
                        *order,
                        at::cuda::getDeviceProperties(g.device)->multiProcessorCount,
                        stream,
                        operands.gating,
                        operands.up};
  if (kernel(product) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return false;
  }
  if (partials != nullptr) {
    kernels::sum_rows(g.type, partials, gemm::hopper::partial_rows(g), g.m,
                      gemm::hopper::partial_columns(g), operands.bias, stream);
  }
  return true;
}

}  // namespace fused::cuda::hopper
