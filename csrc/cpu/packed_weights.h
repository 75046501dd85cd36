#pragma once

// Weights in the layout that oneDNN multiplies with, made once instead of in every call. On request
// only: a weight may be written to in ways that leave no trace.

#include "core/check.h"

#include <c10/util/FunctionRef.h>

#include <memory>
#include <vector>

namespace fused::cpu::packed {

bool enabled();
void set_enabled(bool enabled);  // what is kept is let go of when it is switched off

// What `pack` has made of this very weight, as it is now. Null, and the weight is multiplied with
// as it is, where packing is off and when the weight is met for the first time: one that is
// computed or trained anew for each call is not worth it.
using Parts = std::shared_ptr<const std::vector<Tensor>>;
Parts find(const Tensor& weight, c10::function_ref<std::vector<Tensor>()> pack);

}  // namespace fused::cpu::packed
