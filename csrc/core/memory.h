#pragma once

// What a layer keeps for its backward, where there is a choice.

#include <c10/util/Exception.h>

#include <string_view>

namespace fused {

enum class Memory {
  standard,  // whatever makes the step fastest, never more than torch keeps
  low,       // only what the backward cannot recompute, bit for bit
};

inline Memory parse_memory(const char* op, std::string_view text) {
  if (text == "default") return Memory::standard;
  if (text == "low") return Memory::low;
  TORCH_CHECK_VALUE(false, op, ": memory must be 'default' or 'low', got '", text, "'");
}

}  // namespace fused
