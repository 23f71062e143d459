#pragma once

// ⑥ Writes the K and V of a step's tokens into the cache.

#include "turbomind/ops/device.h"

namespace turbomind {

// Bias, qk-norm and RoPE on Q and K in place, K less its mean, both rotated; K and V rounded to the
// cache dtype, quantized and stored: with 16-bit blocks in 16 bit, in the 16-bit pool. Checks the
// shapes and that every new token has a block, then calls the device. Throws InternalError: the
// engine builds these arguments.
void invokeProcessKV_v2(Device& device, const WriteKvParams& params);

}  // namespace turbomind
