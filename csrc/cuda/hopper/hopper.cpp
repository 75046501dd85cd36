#include "cuda/hopper/hopper.h"

#include "cuda/hopper/product.h"
#include "cuda/kernels/activation.h"

#include <ATen/cuda/CUDAContext.h>

namespace fused::cuda::hopper {

using gemm::Pass, gemm::PassProblem, gemm::Type;

namespace {

using Kernel = cudaError_t (*)(const Product&);

template <Type type>
Kernel forward_of(Activation activation, bool aux) {
  switch (activation) {
    case Activation::relu:
      return aux ? nullptr : forward<type, Activation::relu, false>;
    case Activation::gelu_tanh:
      return aux ? forward<type, Activation::gelu_tanh, true>
                 : forward<type, Activation::gelu_tanh, false>;
    case Activation::gelu_erf:
      return aux ? forward<type, Activation::gelu_erf, true>
                 : forward<type, Activation::gelu_erf, false>;
    case Activation::silu:
      return aux ? forward<type, Activation::silu, true> : forward<type, Activation::silu, false>;
    case Activation::none:
      break;
  }
  return nullptr;
}

template <Type type>
Kernel backward_of(Activation activation) {
  switch (activation) {
    case Activation::relu:
      return backward<type, Activation::relu>;
    case Activation::gelu_tanh:
      return backward<type, Activation::gelu_tanh>;
    case Activation::gelu_erf:
      return backward<type, Activation::gelu_erf>;
    case Activation::silu:
      return backward<type, Activation::silu>;
    case Activation::none:
      break;
  }
  return nullptr;
}

template <Type type>
Kernel gating_of(Activation activation) {
  switch (activation) {
    case Activation::gelu_tanh:
      return gating<type, Activation::gelu_tanh>;
    case Activation::gelu_erf:
      return gating<type, Activation::gelu_erf>;
    case Activation::silu:
      return gating<type, Activation::silu>;
    case Activation::relu:
    case Activation::none:
      break;
  }
  return nullptr;
}

template <Type type>
Kernel glu_of(Activation activation) {
  switch (activation) {
    case Activation::gelu_tanh:
      return glu<type, Activation::gelu_tanh>;
    case Activation::gelu_erf:
      return glu<type, Activation::gelu_erf>;
    case Activation::silu:
      return glu<type, Activation::silu>;
    case Activation::relu:
    case Activation::none:
      break;
  }
  return nullptr;
}

template <Type type>
Kernel kernel_of(const PassProblem& p) {
  if (p.pass == Pass::gating) return gating_of<type>(p.activation);
  if (p.pass == Pass::glu) return glu_of<type>(p.activation);
  return p.pass == Pass::fprop ? forward_of<type>(p.activation, p.aux)
                               : backward_of<type>(p.activation);
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
