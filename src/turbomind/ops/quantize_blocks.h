#pragma once

// ⑥ Moves blocks out of the 16-bit pool.

#include "turbomind/ops/device.h"

namespace turbomind {

// Encodes every slot of each 16-bit block into its quantized block, after the step's WriteKv and
// before its attention. Checks the shapes and ids, then calls the device; nothing to do without
// moves. Throws InternalError.
void invokeQuantizeBlocks(Device& device, const QuantizeBlocksParams& params);

}  // namespace turbomind
