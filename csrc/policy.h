#pragma once

// How the work is to be done: the user's wish, process-wide.

#include <string_view>

namespace fused {

enum class Policy {
  automatic,  // the fastest way known that keeps torch's semantics
  cublaslt,   // the library's fused epilogues, with bit masks for ReLU, wherever they exist
  eager,      // the plain formula in ATen
};

Policy policy();
void set_policy(Policy policy);

const char* name(Policy policy);
Policy parse_policy(std::string_view text);

}  // namespace fused
