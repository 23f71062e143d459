#pragma once

// Times the schedules of decode attention for the layers of a model (DecodeSchedule).

#include <string>
#include <vector>

#include "turbomind/backend/cuda/decode/decode_ops.h"
#include "turbomind/backend/cuda/runtime/context.h"
#include "turbomind/core/function_ref.h"
#include "turbomind/ops/tuning.h"

namespace turbomind::cuda {

// How TuneDecode measures. `time` returns the microseconds that `work` takes on ctx.stream.
struct DecodeClock {
  FunctionRef<double(const std::string& question, const std::string& schedule,
                     FunctionRef<void()> work)>
      time;
  FunctionRef<double()> seconds;  // since some fixed time
  double deadline = 0;            // no question begins later
};

// Return the name of a schedule in TunedChoice, such as "4 per SM, 3 waves, last block merges".
std::string NameOf(const DecodeSchedule& schedule);

// Choose schedules for all layers of params.attention and several numbers of sequences, and set
// them in `planner`. Each measurement is a graph of several calls, which read different rows, as
// the layers of a step do. A schedule whose results differ from those of the table's is wrong: it
// is not used. Adds to `result`.
//
// REQUIRES: calls with `ctx` are not deterministic. Its workspace is not used. The memory that the
// calls need is free again at the end.
void TuneDecode(const Context& ctx, DecodePlanner& planner, const TuningParams& params,
                const DecodeClock& clock, TuningResult* result);

}  // namespace turbomind::cuda
