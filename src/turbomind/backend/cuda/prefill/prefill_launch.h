#pragma once

// ⑦ Launches the kernels of prefill attention over dense rows.

#include <cstdint>

#include "turbomind/backend/cuda/prefill/prefill_choice.h"
#include "turbomind/backend/cuda/prefill/prefill_shape.cuh"
#include "turbomind/backend/cuda/runtime/context.h"

namespace turbomind::cuda {

// Return which choice a launch uses. If there is one, products of warp groups can run it.
struct PrefillUse {
  bool has_choice = false;
  PrefillQuestion question;
};
PrefillUse FindPrefillUse(const Context& context, DataType type, int head_dim,
                          const PrefillParams& params);

// Run attention over the views. The members of `params` for tiles are not used.
// REQUIRES: head_dim 64, 80, 96, 128 or 256; `type` is kFloat16 or kBFloat16.
void LaunchPrefill(const Context& context, const PrefillChoices& choices, DataType type,
                   int head_dim, const PrefillParams& params);

}  // namespace turbomind::cuda
