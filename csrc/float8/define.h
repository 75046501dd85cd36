#pragma once

#include <ATen/core/enum_tag.h>
#include <torch/library.h>

#include <vector>

namespace fused::float8 {

// Puts the operators' schemas into the library `fused`.
void define(torch::Library& m, const std::vector<at::Tag>& tags);

}  // namespace fused::float8
