#pragma once

// ⑥ The cache as dense FP32, for tests and reports; attention reads the packed form.

#include "turbomind/ops/device.h"

namespace turbomind {

// K (after RoPE, mean and rotation) and V of every sequence as the query at its last position sees
// them, dequantized; zeros where a sliding group has freed the block. Checks the shapes, then calls
// the device. Throws InternalError.
void invokeFlattenKV_v2(Device& device, const FlattenKVParams& params);

}  // namespace turbomind
