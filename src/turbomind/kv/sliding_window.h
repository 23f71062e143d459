#pragma once

#include <limits>

#include "turbomind/core/host_device.h"

namespace turbomind {

// Which positions before its own a query sees, as one number:
//   0             all (full attention)
//   w > 0         the last w positions, including its own (a sliding window)
//   -c < 0        those of its own chunk; chunks of c positions begin at multiples of c
//   kNoAttention  none: the layer has no attention, and no K and V (a recurrent layer)
inline constexpr int kNoAttention = std::numeric_limits<int>::min();

// Returns the first position that a query at `position` sees. It never falls as `position` grows.
// REQUIRES: the layer has attention.
template <class Position>
TM_HD Position FirstVisible(int window, Position position) {
  if (window < 0) {
    return position - position % window;  // % truncates: position % -c is position % c
  }
  return window > 0 && position >= window ? position + 1 - window : 0;
}

// Returns the most positions that a query sees, or 0 for all. REQUIRES: the layer has attention.
TM_HD int WindowReach(int window) { return window < 0 ? -window : window; }

}  // namespace turbomind
