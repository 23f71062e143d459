#pragma once

// The ops of latents: they check the params of latent_params.h and call the device.

#include "turbomind/ops/device.h"
#include "turbomind/ops/latent_params.h"

namespace turbomind {

void invokeWriteLatents(Device& device, const WriteLatentsParams& params);
void invokeHeadLinear(Device& device, const HeadLinearParams& params);
void invokeLatentAttention(Device& device, const LatentAttentionParams& params);

}  // namespace turbomind
