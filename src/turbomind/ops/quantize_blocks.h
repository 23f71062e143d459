#pragma once

// ⑥ Moves blocks out of the 16-bit pool.

#include "turbomind/ops/device.h"

namespace turbomind {

// Encodes every slot of each hot block into its cold block, after the step's ProcessKV and before
// its attention. Checks the shapes and ids, then calls the device; nothing to do without moves.
// Throws InternalError.
void invokeQuantiseBlocks(Device& device, const QuantiseBlocksParams& params);

}  // namespace turbomind
