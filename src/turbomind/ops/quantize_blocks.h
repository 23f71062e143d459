#pragma once

// ⑥ Quantizes blocks that leave the 16-bit window.

#include "turbomind/ops/device.h"

namespace turbomind {

// Encodes every slot of each 16-bit block into its quantized block. Call it after the step's
// WriteKv and before its attention. Checks the shapes and ids, then calls the device. Does nothing
// if there are no blocks to quantize. Throws InternalError.
void invokeQuantizeBlocks(Device& device, const QuantizeBlocksParams& params);

}  // namespace turbomind
