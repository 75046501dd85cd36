#pragma once

// The user's process-wide choice of how work is done.

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

namespace fused {

enum class Policy {
  automatic,        // the fastest way known that keeps torch's semantics
  cublaslt,         // the library's fused epilogues, with bit masks for ReLU, wherever they exist
  eager,            // the plain formula in ATen
  batch_invariant,  // each row's bits do not depend on the other rows, or an error
};

Policy policy();

// While one lives, policy() does not change for this thread, so that a call sees one policy
// everywhere.
class HeldPolicy {
 public:
  HeldPolicy() : HeldPolicy(policy()) {}
  explicit HeldPolicy(Policy policy);
  ~HeldPolicy();
  HeldPolicy& operator=(HeldPolicy&&) = delete;

 private:
  const std::optional<Policy> before_;
};

inline bool is_batch_invariant() { return policy() == Policy::batch_invariant; }

// Throws (NotImplementedError) under the policy "batch_invariant", because this way of `op` may
// give a row other bits in another batch. Tensors on the meta device have no bits and pass.
void refuse_batch_dependence(const char* op, const at::TensorBase& like, std::string_view expected,
                             std::string_view got);
// Throws likewise for a device or a layout that no kernel of ours multiplies.
void refuse_batch_dependence(const char* op, const at::TensorBase& like);

// Returns whether calls may be recorded, by tracing or by a mode or tensor class in Python.
bool is_traced(const at::TensorBase& input);

// Returns the policy by which a call's operators are chosen. A graph outlives 'eager' and
// 'cublaslt', so tracing sees `automatic`, and the kernels ask again when they run. A graph for
// 'batch_invariant' is traced for it.
Policy policy_for_graph(const at::TensorBase& input);
void set_policy(Policy policy);

const char* name(Policy policy);
Policy parse_policy(std::string_view text, const char* what);

// Calls fn with the backend, or with the reference under the policy "eager" and on a device without
// our kernels. The kernel asks, so that the policy holds in compiled graphs too. Only backends that
// say so are batch-invariant.
template <class Backend, class Reference, typename Fn>
auto under_policy(const char* op, const at::Tensor& like, const Fn& fn) {
  const HeldPolicy held;
  if constexpr (requires { &Backend::batch_dependence; }) {
    const char* why = is_batch_invariant() ? Backend::batch_dependence(like) : nullptr;
    if (why != nullptr) {
      refuse_batch_dependence(op, like, "fp32, fp64, or 16 bits on a GPU that was tried", why);
    }
  } else {
    refuse_batch_dependence(op, like);
  }
  if constexpr (requires { Backend::obeys_policy; }) {
    if (policy() == Policy::eager) return fn(Reference());
  }
  if constexpr (requires { &Backend::is_usable; }) {
    if (!Backend::is_usable(like)) {
      refuse_batch_dependence(op, like, "kernels of this build, and fp32 multiplied in fp32",
                              "a device without kernels, or fp32 multiplied in bf16x9");
      return fn(Reference());
    }
  }
  return fn(Backend());
}

}  // namespace fused
