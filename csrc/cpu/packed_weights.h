#pragma once

// Keeps frozen weights in oneDNN's layout. The user must declare them, because some writes leave no
// trace.

#include "core/check.h"

#include <c10/util/FunctionRef.h>

#include <memory>
#include <string_view>
#include <vector>

namespace fused::cpu::packed {

// Keeps this weight packed until it is dropped, freed or asks for gradients. Throws, with its name,
// if torch could not tell whether it has changed.
void declare(const Tensor& weight, std::string_view name);

bool drop(const Tensor& weight);

// Returns the result of `pack` for this weight as it is now; null if it was not declared.
using Parts = std::shared_ptr<const std::vector<Tensor>>;
Parts find(const Tensor& weight, c10::function_ref<std::vector<Tensor>()> pack);

}  // namespace fused::cpu::packed
