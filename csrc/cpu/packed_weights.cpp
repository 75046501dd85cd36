#include "cpu/packed_weights.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <string_view>
#include <unordered_map>

namespace fused::cpu::packed {
namespace {

// Which tensor it is: its counter of versions, which we hold so that no other comes to lie there. A
// weak reference to the tensor would do as well, but be in the way of torch.utils.swap_tensors.
const void* identity(const Tensor& weight) {
  const c10::VariableVersion& counter = weight.unsafeGetTensorImpl()->version_counter();
  const void* address;
  static_assert(sizeof(counter) == sizeof(address));  // a pointer that nobody gives us
  std::memcpy(&address, &counter, sizeof(address));
  return address;
}

// A weight as it was. What is written to it counts up the version; `.data = ` and the like give it
// other memory.
class Weight {
 public:
  explicit Weight(const Tensor& weight)
      : counter_(weight.unsafeGetTensorImpl()->version_counter()),
        version_(counter_.current_version()),
        storage_(weight.storage().getWeakStorageImpl()),
        offset_(weight.storage_offset()),
        sizes_(weight.sizes().vec()),
        strides_(weight.strides().vec()) {}

  bool is_alive() const { return !counter_.unique() && !storage_.expired(); }

  bool is_unchanged(const Tensor& weight) const {
    return version_ == weight._version() &&
           storage_._unsafe_get_target() == weight.storage().unsafeGetStorageImpl() &&
           offset_ == weight.storage_offset() && sizes_ == weight.sizes() &&
           strides_ == weight.strides();
  }

 private:
  c10::VariableVersion counter_;
  uint32_t version_;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  int64_t offset_;
  std::vector<int64_t> sizes_, strides_;
};

struct Entry {
  Weight weight;
  Parts parts;  // null: met once
};

struct Cache {
  std::shared_mutex mutex;
  std::unordered_map<const void*, Entry> entries;
};

Cache& cache() {
  static Cache* const it = new Cache;  // tensors must not be freed at exit, after torch is gone
  return *it;
}

std::atomic<bool>& switched_on() {
  static std::atomic<bool> value = [] {
    const char* wish = std::getenv("TORCH_FUSED_LINEAR_PACK_WEIGHTS");
    return wish && std::string_view(wish) == "1";
  }();
  return value;
}

// Inference tensors count no versions; a view is a new tensor each time it is taken.
bool can_be_watched(const Tensor& weight) { return !weight.is_inference() && !weight.is_view(); }

void keep(const Tensor& weight, Entry entry) {
  const std::unique_lock lock(cache().mutex);
  if (!enabled()) return;
  auto& entries = cache().entries;
  std::erase_if(entries, [](const auto& item) { return !item.second.weight.is_alive(); });
  entries.insert_or_assign(identity(weight), std::move(entry));
}

}  // namespace

bool enabled() { return switched_on().load(std::memory_order_relaxed); }

void set_enabled(bool enabled) {
  switched_on() = enabled;
  if (enabled) return;
  decltype(Cache::entries) freed;
  const std::unique_lock lock(cache().mutex);
  freed.swap(cache().entries);
}

Parts find(const Tensor& weight, c10::function_ref<std::vector<Tensor>()> pack) {
  if (!enabled() || !can_be_watched(weight)) return nullptr;
  bool met_before = false;
  {
    const std::shared_lock lock(cache().mutex);
    const auto found = cache().entries.find(identity(weight));
    met_before = found != cache().entries.end() && found->second.weight.is_unchanged(weight);
    if (met_before && found->second.parts) return found->second.parts;
  }
  // Looked at before it is packed: what another thread writes meanwhile is then noticed.
  Entry entry{Weight(weight), nullptr};
  if (met_before) entry.parts = std::make_shared<const std::vector<Tensor>>(pack());
  const Parts parts = entry.parts;
  keep(weight, std::move(entry));
  return parts;
}

}  // namespace fused::cpu::packed
