#pragma once

#include <algorithm>
#include <cstdint>

namespace turbomind {

// Returns the first position that a query at `position` sees, by a search: the definition of a
// window in words, for tests of FirstVisible and of everything that uses it.
inline int64_t FirstSeen(int window, int64_t position) {
  int64_t first = position;
  const auto sees = [&](int64_t other) {
    if (window < 0) {
      return other / -window == position / -window;
    }
    return window == 0 || position - other < window;
  };
  while (first > 0 && sees(first - 1)) {
    --first;
  }
  return first;
}

}  // namespace turbomind
