#pragma once

// ⑥⑦ The ops of recurrent layers. Each function checks the shapes and the slots of its parameters,
// then calls the device. Throws InternalError, because the engine builds these arguments.

#include "turbomind/ops/device.h"

namespace turbomind {

void invokeShortConvolution(Device& device, const ShortConvolutionParams& params);
void invokeGatedDelta(Device& device, const GatedDeltaParams& params);
void invokeSelectiveScan(Device& device, const SelectiveScanParams& params);

}  // namespace turbomind
