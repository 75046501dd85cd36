// Defines the operators of dispatch/operators.h and float8/operators.h, and what sets and shows.

#include "autograd/accumulation.h"
#include "core/explain.h"
#include "core/policy.h"
#include "cpu/packed_weights.h"
#include "dispatch/operators.h"
#include "float8/define.h"
#include "plans/registry.h"

#include <torch/library.h>

namespace {

std::string get_policy() { return fused::name(fused::policy()); }
void set_policy(std::string_view text) {
  fused::set_policy(fused::parse_policy(text, "set_policy: policy"));
}

void define_switches(torch::Library& m) {
  // Process-wide choice of how work is done: 'auto', 'cublaslt', 'eager' or 'batch_invariant'.
  m.def("_policy() -> str", get_policy);
  m.def("_set_policy(str policy) -> ()", set_policy);

  // Declares a frozen weight, which a CPU may then keep packed; takes that back.
  m.def("_pack_weight(Tensor weight, str name) -> ()", fused::cpu::packed::declare);
  m.def("_unpack_weight(Tensor weight) -> bool", fused::cpu::packed::drop);

  // Weights whose gradients the product adds to the existing ones: 'grad' or 'main_grad'.
  m.def("_accumulate(Tensor weight, str into, bool begins) -> ()",
        fused::autograd::accumulation::set);
  m.def("_accumulated(Tensor weight) -> str", fused::autograd::accumulation::get);

  m.def("_plans_budget() -> float", fused::plans::budget);
  m.def("_plans_set_budget(float milliseconds) -> ()", fused::plans::set_budget);
  m.def("_plans_patience() -> int", fused::plans::patience);
  m.def("_plans_set_patience(int calls) -> ()", fused::plans::set_patience);
  m.def("_plans_verbosity() -> int", fused::plans::verbosity);
  m.def("_plans_set_verbosity(int level) -> ()", fused::plans::set_verbosity);
  m.def("_plans_save(str path) -> ()", fused::plans::save);
  m.def("_plans_load(str path) -> int", fused::plans::load);
  m.def("_plans_clear() -> ()", fused::plans::clear);
  m.def("_plans_show() -> str[]", fused::plans::show);
  m.def("_plans_from_environment() -> ()", fused::plans::from_environment);

  m.def("_explain_start() -> int", fused::explain::start);
  m.def("_explain_stop(int report) -> str[]", fused::explain::stop);
  m.def("_explain_note(str row) -> ()", fused::explain::note);
}

}  // namespace

TORCH_LIBRARY(fused, m) {
  using namespace fused::dispatch;
  define<Public, Steps>(m);
  m.def(MlpInOne::schema, tags());
  m.def(EnsembleLinear::schema, tags());
  m.def(AccumulatedWeightGradient::schema, tags());
  fused::float8::define(m, tags());

  m.def(IsSharded::schema);
  m.def(MainGrad::schema);

  define_switches(m);
}
