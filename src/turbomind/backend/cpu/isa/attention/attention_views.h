#pragma once

// ⑦ The part of a tile that a query sees in each view of the cache (kv/precision_window.h): the
// layer's quantized pool and its 16-bit window.

#include "turbomind/backend/cpu/isa/simd/simd.h"
#include "turbomind/backend/cpu/kv_kernels.h"

namespace turbomind::TM_ISA {

TM_HD int MaxOf(int a, int b) { return a > b ? a : b; }
TM_HD int MinOf(int a, int b) { return a < b ? a : b; }

// The visible positions [begin, end) of one query. [sink_end, recent_begin) of them are quantized.
struct Visible {
  int begin;
  int end;
  int sink_end;
  int recent_begin;
};

TM_HD Visible MakeVisible(const PrecisionWindow& rule, int position, int begin, int end) {
  if (!rule.enabled()) {
    return {begin, end, 0, end};
  }
  return {begin, end, rule.SinkEnd(), rule.RecentBegin(position)};
}

// Positions [begin, end) of a tile; empty if begin >= end.
struct Seen {
  int begin;
  int end;
};

// Returns what a query sees of a tile in one view. It is a single range, because sink_end is a
// multiple of kTileTokens.
TM_HD Seen SeenOf(const Visible& v, int tile, bool window16) {
  const bool sinks = tile < v.sink_end;
  const int begin =
      window16 ? (sinks ? v.begin : MaxOf(v.begin, v.recent_begin)) : MaxOf(v.begin, v.sink_end);
  const int end = window16 ? v.end : MinOf(v.end, v.recent_begin);
  return {MinOf(MaxOf(begin - tile, 0), kTileTokens), MinOf(MaxOf(end - tile, 0), kTileTokens)};
}

TM_HD float ValueScale(const KvHead& kv) {
  const float* g = kv.layer->global_scale[1];
  return g != nullptr ? g[kv.head] : 1.f;
}

// Multiplies the softmax weights of a tile with the factor of its values.
TM_HD void ScaleWeights(float* weights, float factor) {
  if (factor == 1.f) {
    return;
  }
  for (int i = 0; i < kTileTokens; i += kLanes) {
    Store(weights + i, Mul(Load(weights + i), Set1(factor)));
  }
}

}  // namespace turbomind::TM_ISA
