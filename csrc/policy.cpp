#include "policy.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <cstdlib>

namespace fused {
namespace {

std::atomic<Policy>& current() {
  static std::atomic<Policy> value = [] {
    const char* wish = std::getenv("TORCH_FUSED_LINEAR_POLICY");
    return wish ? parse_policy(wish) : Policy::automatic;
  }();
  return value;
}

}  // namespace

Policy policy() { return current().load(std::memory_order_relaxed); }
void set_policy(Policy policy) { current().store(policy, std::memory_order_relaxed); }

const char* name(Policy policy) {
  switch (policy) {
    case Policy::automatic:
      return "auto";
    case Policy::cublaslt:
      return "cublaslt";
    case Policy::eager:
      return "eager";
  }
  return "?";
}

Policy parse_policy(std::string_view text) {
  for (auto policy : {Policy::automatic, Policy::cublaslt, Policy::eager}) {
    if (text == name(policy)) return policy;
  }
  TORCH_CHECK_VALUE(false, "policy must be 'auto', 'cublaslt' or 'eager', got '", text, "'");
}

}  // namespace fused
