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

// While one lives, policy() gives this thread what it gave first: what a call decides in several
// places it decides alike, though another thread switches meanwhile.
class HeldPolicy {
 public:
  HeldPolicy();
  ~HeldPolicy();
  HeldPolicy(const HeldPolicy&) = delete;
  HeldPolicy& operator=(const HeldPolicy&) = delete;

 private:
  const bool is_outermost_;
};

// Whether what runs may be recorded: by tracing, or by any mode or tensor of Python's.
bool is_traced(const at::TensorBase& input);

// The policy as far as it may shape a graph. A compiled graph outlives the policy in force while it
// was traced, even the process; so tracing sees `automatic`, and the kernels that the graph calls
// ask for the policy when they run.
Policy policy_for_graph(const at::TensorBase& input);
void set_policy(Policy policy);

const char* name(Policy policy);
Policy parse_policy(std::string_view text, const char* what);

// fn of the backend, or of the reference: under the policy "eager", if the backend obeys one, and
// on a device that the backend cannot use. It is asked where the work is done, so that it holds in
// compiled graphs too.
template <class Backend, class Reference, typename Fn>
auto under_policy(const at::TensorBase& like, const Fn& fn) {
  const HeldPolicy held;
  if constexpr (Backend::obeys_policy) {
    if (policy() == Policy::eager) return fn(Reference());
  }
  if constexpr (requires { Backend::is_usable(like); }) {
    if (!Backend::is_usable(like)) return fn(Reference());
  }
  return fn(Backend());
}

}  // namespace fused
