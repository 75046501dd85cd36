#include "core/policy.h"

#include "core/environment.h"

#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <atomic>
#include <optional>

namespace fused {
namespace {

constexpr const char* names[] = {"auto", "cublaslt", "eager"};

std::atomic<Policy>& current() {
  static std::atomic<Policy> value = [] {
    const char* wish = environment("TORCH_FUSED_LINEAR_POLICY");
    return wish ? parse_policy(wish, "TORCH_FUSED_LINEAR_POLICY") : Policy::automatic;
  }();
  return value;
}

thread_local std::optional<Policy> held;

}  // namespace

HeldPolicy::HeldPolicy() : is_outermost_(!held) {
  if (is_outermost_) held = policy();
}
HeldPolicy::~HeldPolicy() {
  if (is_outermost_) held.reset();
}

bool is_traced(const at::TensorBase& input) {
  return input.key_set().has(c10::DispatchKey::Python) || input.is_meta() ||
         c10::impl::TorchDispatchModeTLS::any_modes_set();
}

Policy policy_for_graph(const at::TensorBase& input) {
  return is_traced(input) ? Policy::automatic : policy();
}

Policy policy() { return held ? *held : current().load(std::memory_order_relaxed); }
void set_policy(Policy policy) { current().store(policy, std::memory_order_relaxed); }

const char* name(Policy policy) { return names[static_cast<int>(policy)]; }

Policy parse_policy(std::string_view text, const char* what) {
  const auto it = std::ranges::find(names, text);
  TORCH_CHECK_VALUE(it != std::end(names), what, " must be 'auto', 'cublaslt' or 'eager', got '",
                    text, "'");
  return static_cast<Policy>(it - names);
}

}  // namespace fused
