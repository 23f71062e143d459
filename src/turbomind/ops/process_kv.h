#pragma once

// ⑥ Writes the K and V of a step's tokens into the cache.

#include "turbomind/ops/device.h"

namespace turbomind {

// Applies bias, qk-norm and RoPE to Q and K in place, subtracts K's mean and rotates both. Rounds K
// and V to the cache dtype, quantizes and stores them; with a 16-bit window it stores 16 bits in
// the 16-bit pool. Checks the shapes and that every new token has a block, then calls the device.
// Throws InternalError, because the engine builds these arguments.
void invokeProcessKV_v2(Device& device, const WriteKvParams& params);

}  // namespace turbomind
