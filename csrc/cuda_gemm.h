#pragma once

// From tensors to the lower storey: matrices, settings of the process, workspace.

#include "gemm/problem.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <optional>

namespace fused {

using at::Tensor;

std::optional<gemm::Type> gemm_type(at::ScalarType type);

// Scratch of the current stream, from PyTorch's allocator: safe in CUDA graphs, and given back to
// the stream's pool at once.
class Workspace {
 public:
  explicit Workspace(int64_t bytes)
      : data_(bytes > 0 ? c10::cuda::CUDACachingAllocator::get()->allocate(bytes) : at::DataPtr()) {
  }
  void* data() const { return data_.get(); }

 private:
  at::DataPtr data_;
};

// result = epilogue(left · right) through cuBLASLt on the current stream. The tensors are matrices
// (two dimensions, any strides; the result's rows have unit stride). bias is read by a forward
// epilogue and written by a backward one; aux likewise, the other way round. Says false, with
// nothing launched, where the library cannot or must not do it.
bool multiply(const Tensor& left, const Tensor& right, const Tensor& result,
              gemm::Epilogue epilogue, const Tensor& bias = {}, const Tensor& aux = {});

// left · right, through cuBLASLt or else ATen; also for empty matrices.
Tensor product(const Tensor& left, const Tensor& right);

}  // namespace fused
