#pragma once

// Frozen weights in oneDNN's layout; only declared ones, as writing may leave no trace.

#include "core/check.h"

#include <c10/util/FunctionRef.h>

#include <memory>
#include <string_view>
#include <vector>

namespace fused::cpu::packed {

// Keeps this very weight packed, until it is dropped, dies or asks for gradients. Throws, with its
// name, where torch could not tell whether it has changed.
void declare(const Tensor& weight, std::string_view name);

bool drop(const Tensor& weight);

// Gives what `pack` made of this weight as it is now; null for one that was not declared.
using Parts = std::shared_ptr<const std::vector<Tensor>>;
Parts find(const Tensor& weight, c10::function_ref<std::vector<Tensor>()> pack);

}  // namespace fused::cpu::packed
