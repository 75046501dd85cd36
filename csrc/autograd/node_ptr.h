#pragma once

// How torch holds nodes: by std::shared_ptr, newer versions by c10::intrusive_ptr.

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace fused::autograd {

inline constexpr bool nodes_are_shared = std::is_same_v<decltype(torch::autograd::Edge::function),
                                                        std::shared_ptr<torch::autograd::Node>>;

template <typename T>
using NodePtr = std::conditional_t<nodes_are_shared, std::shared_ptr<T>, c10::intrusive_ptr<T>>;
template <typename T>
using WeakNodePtr =
    std::conditional_t<nodes_are_shared, std::weak_ptr<T>, c10::weak_intrusive_ptr<T>>;

template <typename T, typename... Args>
NodePtr<T> make_node(Args&&... args) {
  if constexpr (nodes_are_shared) {
    // torch's deleter takes long chains apart without recursion; found by the node's type, as newer
    // versions have none
    return NodePtr<T>(new T(std::forward<Args>(args)...), [](T* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<T>(std::forward<Args>(args)...);
  }
}

// The same node as another class of its hierarchy, which it is known to be.
template <typename T, typename Pointer>
NodePtr<T> node_cast(const Pointer& node) {
  if constexpr (nodes_are_shared) {
    return std::static_pointer_cast<T>(node);
  } else {
    return NodePtr<T>::reclaim_copy(static_cast<T*>(node.get()));
  }
}

}  // namespace fused::autograd
