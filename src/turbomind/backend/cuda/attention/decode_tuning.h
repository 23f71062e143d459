#pragma once

// Times the schedules of decode attention for the layers of a model (DecodeSchedule).

#include <string>
#include <vector>

#include "turbomind/backend/cuda/decode/decode_ops.h"
#include "turbomind/backend/cuda/runtime/context.h"
#include "turbomind/backend/cuda/tuner/tuner.h"
#include "turbomind/ops/tuning.h"

namespace turbomind::cuda {

// Return the name of a schedule in TunedChoice, such as "4 per SM, 3 waves, last block merges".
std::string NameOf(const DecodeSchedule& schedule);

// Choose schedules for all layers and several numbers of sequences, and set them in `planner`. Each
// measurement is a graph of several calls, which read different rows, as the layers of a step do. A
// schedule whose results differ from those of the table's is wrong: it is not used.
//
// REQUIRES: calls with `ctx` are not deterministic. Its workspace is not used. The memory that the
// calls need is free again at the end.
void TuneDecode(const Context& ctx, DecodePlanner& planner, const std::vector<AttentionToTune>& all,
                Tuner& tuner);

}  // namespace turbomind::cuda
