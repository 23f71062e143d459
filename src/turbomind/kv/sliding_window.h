#pragma once

#include "turbomind/core/host_device.h"

namespace turbomind {

// First position that a query at `position` sees. A window counts the query's own position; 0: no
// window.
template <class Position>
TM_HD Position FirstVisible(int window, Position position) {
  return window > 0 && position >= window ? position + 1 - window : 0;
}

}  // namespace turbomind
