#pragma once

// ⑦ Times the kernels of prefill attention on random rows, and sets the choices of a device.

#include <vector>

#include "turbomind/backend/cuda/prefill/prefill_choice.h"
#include "turbomind/backend/cuda/runtime/context.h"
#include "turbomind/backend/cuda/tuner/tuner.h"
#include "turbomind/ops/tuning.h"

namespace turbomind::cuda {

// Find or measure which products attention with the head_dims of `all` should use, and set them in
// `choices`. Products whose results differ from those of kMma are wrong: they are not used.
// Questions that no launch on this GPU has are skipped.
//
// REQUIRES: calls with `ctx` are not deterministic. Its workspace is not used.
void TunePrefill(const Context& ctx, PrefillChoices& choices,
                 const std::vector<AttentionToTune>& all, Tuner& tuner);

}  // namespace turbomind::cuda
