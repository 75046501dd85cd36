#include "cuda/hopper/hopper.h"

#include "cuda/hopper/product.h"
#include "cuda/kernels/activation.h"

namespace fused::cuda::hopper {

using gemm::Pass, gemm::PassProblem, gemm::Type;

namespace {

template <Type type, bool transposed>
Launch kernel_for(const PassProblem& p, Tiles tiles) {
  switch (p.pass) {
    case Pass::fprop:
      if (tiles == Tiles::narrow && p.keeps == gemm::Keeps::nothing) {
        return kernel_of<Kind::narrow_forward, type, transposed>(p.activation);
      }
      // ReLU's output is kept, or its bits, and no pre-activation.
      return p.keeps != gemm::Keeps::nothing
                 ? kernel_of<Kind::saving_forward, type, transposed>(p.activation)
                 : kernel_of<Kind::forward, type, transposed>(p.activation);
    case Pass::dgrad:
      return kernel_of<Kind::backward, type, transposed>(p.activation);
    case Pass::gating:
      return kernel_of<Kind::gating, type, transposed>(p.activation);
    case Pass::glu:
      return kernel_of<Kind::glu, type, transposed>(p.activation);
    case Pass::wgrad:
    case Pass::chain:
      break;
  }
  return nullptr;
}

template <Type type>
Launch kernel_for(const PassProblem& p, Tiles tiles) {
  return p.matmul.transpose_a ? kernel_for<type, true>(p, tiles)
                              : kernel_for<type, false>(p, tiles);
}

}  // namespace

bool available(int arch) { return arch == 90; }

int64_t workspace_bytes(const PassProblem& p) {
  if (p.pass != Pass::dgrad || !p.bias) return 0;
  return gemm::hopper::partial_rows(p.matmul) * gemm::hopper::partial_columns(p.matmul) *
         static_cast<int64_t>(sizeof(float));
}

bool run(const PassProblem& p, const gemm::Algorithm& algorithm, const gemm::Operands& operands,
         void* workspace, int processors, cudaStream_t stream, Tiles tiles) {
  const auto& g = p.matmul;
  const auto order = gemm::hopper::order_of(algorithm);
  const auto kernel =
      g.type == Type::bf16 ? kernel_for<Type::bf16>(p, tiles) : kernel_for<Type::f16>(p, tiles);
  if (!order || kernel == nullptr) return false;
  auto* partials = !gemm::is_forward(p.pass) && p.bias ? static_cast<float*>(workspace) : nullptr;
  Product product{operands};
  product.m = static_cast<int>(g.m), product.n = static_cast<int>(g.n);
  product.k = static_cast<int>(g.k);
  product.lda = g.lda, product.ldb = g.ldb, product.ldd = g.ldd;
  product.ld_aux = g.ld_aux, product.partials = partials;
  product.order = *order, product.processors = processors, product.stream = stream;
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
