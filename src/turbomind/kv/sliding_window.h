#pragma once

#include "turbomind/core/host_device.h"

namespace turbomind {

// Returns the first position that a query at `position` sees. A window includes the query's own
// position; 0 means no window.
template <class Position>
TM_HD Position FirstVisible(int window, Position position) {
  return window > 0 && position >= window ? position + 1 - window : 0;
}

}  // namespace turbomind
