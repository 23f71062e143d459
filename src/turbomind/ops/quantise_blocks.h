#pragma once
#include "turbomind/core/device.h"
namespace turbomind {
inline void invokeQuantiseBlocks(Device& device, const QuantiseBlocksParams& params) { device.QuantiseBlocks(params); }
}
