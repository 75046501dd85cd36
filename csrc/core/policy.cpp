#include "core/policy.h"

#include "core/environment.h"

#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <atomic>

namespace fused {
namespace {

constexpr const char* names[] = {"auto", "cublaslt", "eager", "batch_invariant"};

std::atomic<Policy>& current() {
  static std::atomic<Policy> value = [] {
    const char* wish = environment("TORCH_FUSED_LINEAR_POLICY");
    return wish ? parse_policy(wish, "TORCH_FUSED_LINEAR_POLICY") : Policy::automatic;
  }();
  return value;
}

thread_local std::optional<Policy> held;

}  // namespace

HeldPolicy::HeldPolicy(Policy policy) : before_(held) { held = policy; }
HeldPolicy::~HeldPolicy() { held = before_; }

void refuse_batch_dependence(const char* op, const at::TensorBase& like, std::string_view expected,
                             std::string_view got) {
  if (!is_batch_invariant() || like.is_meta()) return;
  TORCH_CHECK_NOT_IMPLEMENTED(false, op, ": under the policy 'batch_invariant' expected ", expected,
                              ", got ", got,
                              "; a row's bits would depend on the batch (set_policy('auto') allows "
                              "that)");
}

void refuse_batch_dependence(const char* op, const at::TensorBase& like) {
  if (!is_batch_invariant()) return;  // most calls, which build no message
  refuse_batch_dependence(op, like, "a linear layer of dense tensors on a CUDA device",
                          c10::str(op, " of a ", like.layout(), " tensor on ", like.device()));
}

bool is_traced(const at::TensorBase& input) {
  return input.key_set().has(c10::DispatchKey::Python) || input.is_meta() ||
         c10::impl::TorchDispatchModeTLS::any_modes_set();
}

Policy policy_for_graph(const at::TensorBase& input) {
  const auto now = policy();
  const bool outlasts = now == Policy::automatic || now == Policy::batch_invariant;
  return outlasts || !is_traced(input) ? now : Policy::automatic;
}

Policy policy() { return held ? *held : current().load(std::memory_order_relaxed); }
void set_policy(Policy policy) { current().store(policy, std::memory_order_relaxed); }

const char* name(Policy policy) { return names[static_cast<int>(policy)]; }

Policy parse_policy(std::string_view text, const char* what) {
  const auto it = std::ranges::find(names, text);
  TORCH_CHECK_VALUE(it != std::end(names), what,
                    " must be 'auto', 'cublaslt', 'eager' or 'batch_invariant', got '", text, "'");
  return static_cast<Policy>(it - names);
}

}  // namespace fused
