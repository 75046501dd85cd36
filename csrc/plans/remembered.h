#pragma once

// What was found out once for each problem, of kinds that no plan is of.

#include "plans/registry.h"

#include <map>
#include <mutex>
#include <optional>

namespace fused::plans {

// Shared between threads. Bounded, and forgotten with the plans (generation).
template <typename Key, typename Value>
class Remembered {
 public:
  struct Known {
    Value value;
    bool due;  // it was not final, and is to be found out again now
  };

  std::optional<Known> find(const Key& key) {
    const std::lock_guard lock(mutex_);
    keep_up();
    const auto it = entries_.find(key);
    if (it == entries_.end()) return std::nullopt;
    auto& entry = it->second;
    return Known{entry.value, !entry.is_final && --entry.calls_left < 0};
  }

  // What is not final is due after some calls, ever later. Nothing is remembered where all was to
  // be forgotten since `generation`.
  void add(const Key& key, const Value& value, bool is_final, uint64_t generation) {
    const std::lock_guard lock(mutex_);
    keep_up();
    if (generation != generation_) return;
    constexpr size_t most = 4096;
    if (entries_.size() >= most && !entries_.contains(key)) entries_.clear();
    auto& entry = entries_[key];
    entry.value = value, entry.is_final = is_final;
    if (!is_final) entry.calls_left = calls_until_retry(++entry.failures);
  }

 private:
  struct Entry {
    Value value;
    bool is_final = true;
    int64_t calls_left = 0;
    int failures = 0;
  };

  void keep_up() {
    if (generation_ != generation()) entries_.clear();
    generation_ = generation();
  }

  std::mutex mutex_;
  uint64_t generation_ = 0;
  std::map<Key, Entry> entries_;
};

}  // namespace fused::plans
