#pragma once

// ⑥ Reads the cache as dense FP32, for tests and reports. Attention reads the packed form.

#include "turbomind/ops/device.h"

namespace turbomind {

// Dequantizes K (after RoPE, mean removal and rotation) and V of every sequence, as the query at
// its last position reads them. Writes zeros if a sliding-window group has freed the block. Checks
// the shapes, then calls the device. Throws InternalError.
void invokeFlattenKV_v2(Device& device, const FlattenKVParams& params);

}  // namespace turbomind
