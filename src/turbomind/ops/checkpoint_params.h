#pragma once

#include <cstdint>

#include "turbomind/kv/state_format.h"
#include "turbomind/kv/state_view.h"

namespace turbomind {

// A copy between a working slot and a checkpoint.
struct StateCopy {
  int32_t slot = 0;
  int32_t checkpoint = 0;
};

// Copies states to checkpoints, or back. Both views cover whole slots of `shape`, those of
// checkpoints in `format`. kBf16 rounds to nearest even. kInt8 stores for each row its scale, and
// every value as the nearest multiple of the scale, ties to even.
struct StateCopyParams {
  StateView states;
  StateView checkpoints;
  StateShape shape;
  StateFormat format = StateFormat::kF32;
  const StateCopy* copies = nullptr;  // [num_copies], on the host; no slot is written twice
  int num_copies = 0;
};

}  // namespace turbomind
