#pragma once

// What is known of each product and convolution: the decision, the ways tried, when to try again.

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

namespace fused::plans {

// Until something is decided anew, shared by all plans that were made meanwhile; null: never.
using CallsLeft = std::shared_ptr<std::atomic<int64_t>>;

// Of one problem. A verdict is about a way to do it, and holds for the process.
template <typename Decision, typename Way, typename Verdict>
struct Known {
  std::optional<Decision> decision;
  std::optional<Decision> by_rule;  // for want of one, so that all threads and captures do the same
  std::map<Way, Verdict> verdicts;
  CallsLeft calls_left;
  int failures = 0;  // to decide it

  bool is_due() const { return calls_left && calls_left->fetch_sub(1) <= 0; }
  CallsLeft decide_in(int64_t calls) {
    return calls_left = std::make_shared<std::atomic<int64_t>>(calls);
  }
  // Tries again ever later, as memory was short; `meanwhile` goes until then.
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
  // All but the verdicts, which no later look would change.
  void forget() { decision.reset(), by_rule.reset(), calls_left.reset(), failures = 0; }
};

// Shared between threads. What nothing was decided of makes room where it is full.
template <typename Key, typename Known, typename Hash>
class Store {
 public:
  explicit Store(size_t capacity) : capacity_(capacity) {}

  // fn(what is known): of nothing, if that is nothing.
  template <typename Fn>
  auto read(const Key& key, const Fn& fn) const {
    const std::lock_guard lock(mutex_);
    const auto it = entries_.find(key);
    const Known nothing;
    return fn(it == entries_.end() ? nothing : it->second);
  }

  // The same, to change it. Where there is no room the change is lost.
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
    refusals_ = 0;  // as fn may forget
    for (auto& [key, known] : entries_) fn(key, known);
  }

 private:
  bool has_room_for(const Key& key) {
    if (entries_.size() < capacity_ || entries_.contains(key)) return true;
    // Looked through for every call, a full store would cost each call its time.
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
