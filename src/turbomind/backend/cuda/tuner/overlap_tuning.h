#pragma once

// Whether launches begin before the ones before them have ended (OverlapLaunches).

#include "turbomind/backend/cuda/runtime/context.h"
#include "turbomind/backend/cuda/tuner/tuner.h"

namespace turbomind::cuda {

inline constexpr char kOverlapQuestion[] = "a chain of launches, 1 row";
inline constexpr char kOrdered[] = "ordered";
inline constexpr char kOverlapped[] = "overlapped";

// Find or measure, with a graph of small launches that depend on each other, whether they should
// overlap, and set it for ctx.stream. Overlapping launches whose results differ from those of
// ordered ones are wrong: they are not used.
//
// REQUIRES: calls with `ctx` are not deterministic. Its workspace is not used.
void TuneOverlap(const Context& ctx, Tuner& tuner);

}  // namespace turbomind::cuda
