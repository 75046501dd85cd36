#pragma once

// How the work is to be done: the user's wish, process-wide.

#include <ATen/core/TensorBase.h>

#include <string_view>

namespace fused {

enum class Policy {
  automatic,  // the fastest way known that keeps torch's semantics
  cublaslt,   // the library's fused epilogues, with bit masks for ReLU, wherever they exist
  eager,      // the plain formula in ATen
};

Policy policy();

// policy() stays for this thread meanwhile, so that a call decides alike in several places.
class HeldPolicy {
 public:
  HeldPolicy();
  ~HeldPolicy();
  HeldPolicy& operator=(HeldPolicy&&) = delete;

 private:
  const bool is_outermost_;
};

// Whether what runs may be recorded: by tracing, or by any mode or tensor of Python's.
bool is_traced(const at::TensorBase& input);

// A graph outlives the policy of its tracing: that sees `automatic`, and the kernels ask when they
// run.
Policy policy_for_graph(const at::TensorBase& input);
void set_policy(Policy policy);

const char* name(Policy policy);
Policy parse_policy(std::string_view text, const char* what);

// Calls fn of the backend, or the reference under the policy "eager" and on a device of no use;
// asked where the work is done, it holds in compiled graphs too.
template <class Backend, class Reference, typename Fn>
auto under_policy(const at::TensorBase& like, const Fn& fn) {
  const HeldPolicy held;
  if constexpr (requires { Backend::obeys_policy; }) {
    if (policy() == Policy::eager) return fn(Reference());
  }
  if constexpr (requires { Backend::is_usable(like); }) {
    if (!Backend::is_usable(like)) return fn(Reference());
  }
  return fn(Backend());
}

}  // namespace fused
