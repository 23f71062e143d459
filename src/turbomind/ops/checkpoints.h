#pragma once

// ⑥⑦ Copies between working states and checkpoints. Each function checks its parameters and calls
// the device. Throws InternalError, because the engine builds these arguments.

#include "turbomind/ops/device.h"

namespace turbomind {

void invokeSaveCheckpoints(Device& device, const StateCopyParams& params);
void invokeRestoreCheckpoints(Device& device, const StateCopyParams& params);

}  // namespace turbomind
