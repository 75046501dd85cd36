#pragma once

// A store holds, for each product or convolution, the decision, the results of trials, and the
// number of calls until it is measured again.

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

namespace fused::plans {

// The number of calls until a problem is measured again. All plans made meanwhile share it; null
// means that it is not measured again.
using CallsLeft = std::shared_ptr<std::atomic<int64_t>>;

// One problem's entry. A verdict judges one way to do the problem, and holds for the process.
template <typename Decision, typename Way, typename Verdict>
struct Known {
  std::optional<Decision> decision;
  std::optional<Decision> by_rule;  // used without a decision, so that all threads do the same
  std::map<Way, Verdict> verdicts;
  CallsLeft calls_left;
  int failures = 0;  // times in a row that measuring failed

  bool is_due() const { return calls_left && calls_left->fetch_sub(1) <= 0; }
  CallsLeft decide_in(int64_t calls) {
    return calls_left = std::make_shared<std::atomic<int64_t>>(calls);
  }
  // Measures again later, as memory was short; each failure doubles the number of calls until then.
  // `meanwhile` is used until then.
  CallsLeft decide_later(const std::optional<Decision>& meanwhile = {}) {
    if (meanwhile) decision = meanwhile;
    constexpr int64_t at_first = 64;
    constexpr int most_doublings = 16;
    return decide_in(at_first << std::min(failures++, most_doublings));
  }
  void decide(const Decision& what) {
    decision = what;
    calls_left.reset();
    failures = 0;
  }
  // Keeps the verdicts: trying again would give the same ones.
  void forget() { decision.reset(), by_rule.reset(), calls_left.reset(), failures = 0; }
};

// Threads share a store. When it is full, entries without a decision make room.
template <typename Key, typename Known, typename Hash>
class Store {
 public:
  explicit Store(size_t capacity) : capacity_(capacity) {}

  // Calls fn with the entry, or with an empty one.
  template <typename Fn>
  auto read(const Key& key, const Fn& fn) const {
    const std::lock_guard lock(mutex_);
    const auto it = entries_.find(key);
    const Known nothing;
    return fn(it == entries_.end() ? nothing : it->second);
  }

  // Calls fn with the entry, which it may change. Without room for a new entry the change is lost.
  template <typename Fn>
  auto change(const Key& key, const Fn& fn) {
    const std::lock_guard lock(mutex_);
    if (has_room_for(key)) return fn(entries_[key]);
    Known lost;
    return fn(lost);
  }

  bool is_full_for(const Key& key) {
    const std::lock_guard lock(mutex_);
    return !has_room_for(key);
  }

  template <typename Fn>
  void each(const Fn& fn) {
    const std::lock_guard lock(mutex_);
    refusals_ = 0;  // fn may have emptied entries
    for (auto& [key, known] : entries_) fn(key, known);
  }

 private:
  bool has_room_for(const Key& key) {
    if (entries_.size() < capacity_ || entries_.contains(key)) return true;
    // Searching a full store is slow, so it is searched once in `capacity_` refusals.
    const auto is_open = [](const auto& entry) { return !entry.second.decision; };
    if (refusals_++ % capacity_ == 0 && std::erase_if(entries_, is_open) > 0) refusals_ = 0;
    return entries_.size() < capacity_;
  }

  const size_t capacity_;
  size_t refusals_ = 0;
  mutable std::mutex mutex_;
  std::unordered_map<Key, Known, Hash> entries_;
};

}  // namespace fused::plans
