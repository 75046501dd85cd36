#include "cpu/packed_weights.h"

#include "core/torch_internals.h"

#include <atomic>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string_view>

namespace fused::cpu::packed {
namespace {

using internals::identity;

// Identifies a weight's values: writing counts up the version, and `.data =` changes the memory.
class Weight {
 public:
  explicit Weight(const Tensor& weight)
      : counter_(weight.unsafeGetTensorImpl()->version_counter()),
        version_(counter_.current_version()),
        accumulator_(weight),
        storage_(weight.storage().getWeakStorageImpl()),
        data_(weight.const_data_ptr()),
        sizes_(weight.sizes().vec()),
        strides_(weight.strides().vec()) {}

  bool is_alive() const { return !counter_.unique() && !storage_.expired(); }

  bool is_unchanged(const Tensor& weight) const {
    return version_ == weight._version() &&
           storage_._unsafe_get_target() == weight.storage().unsafeGetStorageImpl() &&
           data_ == weight.const_data_ptr() && sizes_ == weight.sizes() &&
           strides_ == weight.strides();
  }

  // Fused optimizers write to trained weights without counting up the version.
  bool was_trained(const Tensor& weight) const {
    return weight.requires_grad() || accumulator_ != internals::Accumulator(weight);
  }

 private:
  c10::VariableVersion counter_;
  uint32_t version_;
  internals::Accumulator accumulator_;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  const void* data_;
  std::vector<int64_t> sizes_, strides_;
};

struct Entry {
  Weight weight;
  Parts parts;  // null until the first call
};

struct Declared {
  std::shared_mutex mutex;
  std::map<internals::Identity, Entry> entries;
  std::atomic<size_t> count{0};  // 0 lets calls pass without the lock
};

Declared& declared() {
  static auto* it = new Declared;  // tensors must not be freed at exit, after torch is gone
  return *it;
}

// The caller holds the lock.
void forget_the_dead() {
  auto& entries = declared().entries;
  std::erase_if(entries, [](const auto& item) { return !item.second.weight.is_alive(); });
  declared().count = entries.size();
}

}  // namespace

void declare(const Tensor& weight, std::string_view name) {
  const auto expects = [name](const char* what) {
    return c10::str("pack_weights: '", name, "' must be ", what, ", got ");
  };
  TORCH_CHECK_NOT_IMPLEMENTED(is_supported(weight.scalar_type()),
                              expects("of dtype Double, Float, Half or BFloat16"),
                              weight.scalar_type());
  TORCH_CHECK_VALUE(weight.layout() == at::kStrided && weight.dim() == 2,
                    expects("a strided tensor [out_features, in_features]"), weight.sizes(), ", ",
                    weight.layout());
  TORCH_CHECK_VALUE(weight.device().is_cpu(), expects("on the CPU"), weight.device());
  TORCH_CHECK_VALUE(!weight.requires_grad(), expects("frozen (requires_grad False)"),
                    "requires_grad True");
  TORCH_CHECK_VALUE(!weight.is_inference(), expects("a tensor that counts what is written to it"),
                    "an inference tensor");
  TORCH_CHECK_VALUE(!weight.is_view(), expects("a tensor of its own"), "a view");
  const std::unique_lock lock(declared().mutex);
  declared().entries.insert_or_assign(identity(weight), Entry{Weight(weight), nullptr});
  forget_the_dead();
}

bool drop(const Tensor& weight) {
  if (declared().count == 0) return false;
  const std::unique_lock lock(declared().mutex);
  const bool found = declared().entries.erase(identity(weight)) != 0;
  declared().count = declared().entries.size();
  return found;
}

Parts find(const Tensor& weight, c10::function_ref<std::vector<Tensor>()> pack) {
  if (declared().count == 0) return nullptr;
  bool was_trained;
  {
    const std::shared_lock lock(declared().mutex);
    const auto found = declared().entries.find(identity(weight));
    if (found == declared().entries.end()) return nullptr;
    const Entry& entry = found->second;
    was_trained = entry.weight.was_trained(weight);
    if (!was_trained && entry.parts && entry.weight.is_unchanged(weight)) return entry.parts;
  }
  // A weight that was trained is no longer frozen.
  if (was_trained) return drop(weight), nullptr;
  // The version is read before packing, so that a write by another thread meanwhile is noticed.
  Entry entry{Weight(weight), nullptr};
  entry.parts = std::make_shared<const std::vector<Tensor>>(pack());
  const Parts parts = entry.parts;
  const std::unique_lock lock(declared().mutex);
  const auto found = declared().entries.find(identity(weight));
  if (found != declared().entries.end()) found->second = std::move(entry);
  forget_the_dead();
  return parts;
}

}  // namespace fused::cpu::packed
