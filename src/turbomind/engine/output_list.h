#pragma once

// ⑧ Outputs on their way from the step to the client.

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "turbomind/engine/request.h"

namespace turbomind {

// A list that takes outputs by swapping them for blank ones, which have room for a token: a
// sequence gets a blank for the one that it gives away, and writes its next token into memory that
// somebody else allocated. So a step allocates no output as long as the blanks last; beyond them
// the list grows. Not thread-safe.
class OutputList {
 public:
  OutputList() = default;
  explicit OutputList(size_t num_blanks) : items_(num_blanks) {
    for (RequestOutput& blank : items_) {
      blank.tokens.reserve(1);
    }
  }

  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }
  std::span<RequestOutput> items() { return {items_.data(), size_}; }

  // Appends `output` and leaves a blank in its place.
  void Add(RequestOutput& output) {
    if (size_ == items_.size()) {
      items_.emplace_back();
    }
    std::swap(items_[size_++], output);
  }

  // REQUIRES: the outputs have been handed on (swapped for blanks), or nobody wants them.
  void Clear() { size_ = 0; }

  // The outputs without the blanks left over.
  std::vector<RequestOutput> TakeItems() && {
    items_.resize(size_);
    return std::move(items_);
  }

 private:
  std::vector<RequestOutput> items_;  // the first size_ are outputs, the others blank
  size_t size_ = 0;
};

}  // namespace turbomind
