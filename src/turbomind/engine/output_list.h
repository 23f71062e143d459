#pragma once

// ⑧ Passes outputs from the step to the client.

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "turbomind/engine/request.h"

namespace turbomind {

// A list that swaps each added output for a blank one with room for a token. The sequence writes
// its next token into the blank, whose memory another thread allocated. A step therefore allocates
// no output until the blanks run out; then the list grows. Not thread-safe.
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

  // Removes all outputs and keeps their memory as blanks. REQUIRES: the outputs were passed on
  // (swapped for blanks) or are not needed.
  void Clear() { size_ = 0; }

  // Returns the outputs without the remaining blanks.
  std::vector<RequestOutput> TakeItems() && {
    items_.resize(size_);
    return std::move(items_);
  }

 private:
  std::vector<RequestOutput> items_;  // the first size_ are outputs, the others are blank
  size_t size_ = 0;
};

}  // namespace turbomind
