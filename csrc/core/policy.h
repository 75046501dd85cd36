#pragma once

// How the work is to be done: the user's wish, process-wide.

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

// policy() stays for this thread meanwhile, so that a call decides alike in several places.
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

// Throws (NotImplementedError) under the policy "batch_invariant": this way of `op` may give a row
// other bits in another batch. Shapes alone, on the meta device, have none.
void refuse_batch_dependence(const char* op, const at::TensorBase& like, std::string_view expected,
                             std::string_view got);
// Throws likewise, for a device or a layout that no kernel of ours multiplies.
void refuse_batch_dependence(const char* op, const at::TensorBase& like);

// Whether what runs may be recorded: by tracing, or by any mode or tensor of Python's.
bool is_traced(const at::TensorBase& input);

// The policy that a call's operators are chosen by. A graph outlives 'eager' and 'cublaslt': its
// tracing sees `automatic`, and the kernels ask when they run. Graphs for 'batch_invariant' are
// traced for it.
Policy policy_for_graph(const at::TensorBase& input);
void set_policy(Policy policy);

const char* name(Policy policy);
Policy parse_policy(std::string_view text, const char* what);

// Calls fn of the backend, or the reference under the policy "eager" and on a device of no use;
// asked where the work is done, it holds in compiled graphs too. Only backends that say so are
// batch-invariant.
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
