#pragma once

#include <map>
#include <mutex>
#include <optional>

namespace fused::plans {

// Shared between threads. Where it is full, all is forgotten.
template <typename Key, typename Value, size_t most>
class BoundedMap {
 public:
  std::optional<Value> find(const Key& key) {
    const std::lock_guard lock(mutex_);
    const auto it = entries_.find(key);
    return it == entries_.end() ? std::nullopt : std::optional(it->second);
  }
  void put(const Key& key, const Value& value) {
    const std::lock_guard lock(mutex_);
    if (entries_.size() >= most && !entries_.contains(key)) entries_.clear();
    entries_.insert_or_assign(key, value);
  }

 private:
  std::mutex mutex_;
  std::map<Key, Value> entries_;
};

}  // namespace fused::plans
