#pragma once

// ⑦ Times the kernels of prefill attention on random rows, and sets the choices of a device.

#include "turbomind/backend/cuda/prefill/prefill_choice.h"
#include "turbomind/backend/cuda/runtime/context.h"
#include "turbomind/core/function_ref.h"
#include "turbomind/ops/tuning.h"

namespace turbomind::cuda {

// How TunePrefill measures. `time` returns the microseconds that `work` takes on ctx.stream.
struct PrefillClock {
  FunctionRef<double(const PrefillQuestion& question, PrefillProducts products,
                     FunctionRef<void()> work)>
      time;
  FunctionRef<double()> seconds;  // since some fixed time
  double deadline = 0;            // no question begins later
};

// Find in params.saved, or measure, which products attention with the head_dims of params.attention
// should use. Sets `choices` and adds to `result`. Products whose results differ from those of kMma
// are wrong: they are not used. A question is left if memory is too small, or after the deadline.
// Those that no launch on this GPU has are skipped.
//
// REQUIRES: calls with `ctx` are not deterministic. Its workspace is not used.
void TunePrefill(const Context& ctx, PrefillChoices& choices, const TuningParams& params,
                 const PrefillClock& clock, TuningResult* result);

}  // namespace turbomind::cuda
