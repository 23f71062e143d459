#pragma once

// Whether launches begin before the ones before them have ended (OverlapLaunches).

#include "turbomind/backend/cuda/runtime/context.h"
#include "turbomind/core/function_ref.h"
#include "turbomind/ops/tuning.h"

namespace turbomind::cuda {

inline constexpr char kOverlapQuestion[] = "a chain of launches, 1 row";
inline constexpr char kOrdered[] = "ordered";
inline constexpr char kOverlapped[] = "overlapped";

// The names of questions and kernels are those above. `time` returns the microseconds of `work`.
using OverlapClock = FunctionRef<double(const char* kernel, FunctionRef<void()> work)>;

// Find in `saved`, or measure with a graph of small launches that depend on each other, whether
// they should overlap. Sets it for ctx.stream, and adds to `result`. Overlapping launches whose
// results differ from those of ordered ones are wrong: they are not used.
//
// REQUIRES: calls with `ctx` are not deterministic. Its workspace is not used.
void TuneOverlap(const Context& ctx, const std::vector<TunedChoice>& saved, OverlapClock time,
                 TuningResult* result);

}  // namespace turbomind::cuda
