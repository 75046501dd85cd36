#include "autograd/recompute.h"

#include "autograd/handover.h"
#include "core/aten_activation.h"
#include "core/explain.h"

#include <ATen/SavedTensorHooks.h>

#include <string>

namespace fused::autograd {

KeptInput input_to_keep(const Tensor& input) {
  if (are_kept_as_they_are() && !input.is_leaf() && !input.is_view() && input.output_nr() == 0 &&
      input._version() == 0) {
    if (auto* producer = dynamic_cast<handover::Producer*>(input.grad_fn().get())) {
      try {
        if (auto kept = producer->lend_output()) return *std::move(kept);
      } catch (const c10::Error&) {  // what it keeps was written to since
      }
    }
  }
  return {{}, {input, {}}};
}

Tensor recompute(const KeptInput& kept) {
  const auto& [first, second] = kept.tensors;
  if (kept.form.is_gated) {
    return steps::glu(first, second.defined() ? OptionalTensor(second) : std::nullopt,
                      kept.form.activation);
  }
  return kept.form.activation == Activation::none ? first : activated(first, kept.form.activation);
}

bool are_kept_as_they_are() { return !at::SavedTensorDefaultHooks::get_hooks(); }

Tensor activated(const Tensor& preactivation, Activation activation, Time time) {
  const auto op = is_gelu(activation) ? "gelu" : fused::name(activation);
  const explain::Row row(op, preactivation, {});
  if (explain::enabled()) {
    const auto how = std::string("ATen ") + op + (time == Time::again ? ", recomputed" : "");
    explain::append(how.c_str());
  }
  return activate(preactivation, activation);
}

}  // namespace fused::autograd
