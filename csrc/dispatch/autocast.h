#pragma once

// Under autocast the operators run in the user's dtype, with casts of weights cached in the region.
// The steps keep their dtypes: what they call of ATen's would cast again.

#include "core/check.h"
#include "dispatch/operators.h"
#include "fused_linear.h"

#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace fused::dispatch {

template <auto step>
struct Kept;

template <typename Result, typename... Args, Result (*step)(Args...)>
struct Kept<step> {
  static Result call(Args... args) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    return step(args...);
  }
};

template <c10::DeviceType device>
struct Cast {
  static Tensor cast(const Tensor& tensor) {
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), tensor, device);
  }
  static OptionalTensor cast(const OptionalTensor& tensor) {
    return has_value(tensor) ? OptionalTensor(cast(*tensor)) : std::nullopt;
  }
  static std::vector<Tensor> cast(at::TensorList tensors) {
    std::vector<Tensor> made;
    for (const auto& tensor : tensors) made.push_back(cast(tensor));
    return made;
  }
  static c10::List<OptionalTensor> cast(const c10::List<OptionalTensor>& tensors) {
    c10::List<OptionalTensor> made;
    for (const OptionalTensor& tensor : tensors) made.push_back(cast(tensor));
    return made;
  }
  template <typename Value>
  static const Value& cast(const Value& value) {
    return value;
  }
};

template <c10::DeviceType device, typename Op, typename Signature = typename Op::Signature>
struct Autocast;

template <c10::DeviceType device, typename Op, typename... Args>
struct Autocast<device, Op, Tensor(Args...)> {
  static Tensor call(Args... args) {
    constexpr auto key =
        device == c10::kCUDA ? c10::DispatchKey::AutocastCUDA : c10::DispatchKey::AutocastCPU;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(key);
    return Op::call(Cast<device>::cast(args)...);
  }
};

// Registers autocast for all operators of two lists.
template <c10::DeviceType device, class Public, class Steps>
void register_autocast(torch::Library& m) {
  for_each_row<Public>([&m](auto row) { m.impl(row.name, Autocast<device, decltype(row)>::call); });
  for_each_row<Steps>([&m](auto row) {
    using Row = decltype(row);
    m.impl(Row::name, &Row::template flat<Kept<Row::step>::call>);
  });
}

}  // namespace fused::dispatch
