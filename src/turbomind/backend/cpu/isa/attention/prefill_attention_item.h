#pragma once

// ⑦ What all prefill attention kernels share: the scratch of one item, the loop over its tiles and
// splits, and the output.

#include <cstdint>

#include "turbomind/backend/cpu/isa/attention/attention_fast_bias.h"
#include "turbomind/backend/cpu/isa/attention/prefill_attention_block.h"
#include "turbomind/kv/sliding_window.h"

namespace turbomind::TM_ISA {

inline Block MakeBlock(const PrefillRowsArgs& args) {
  Block b;
  b.args = &args;
  b.head_dim = args.kv.layer->head_dim;
  b.rows = args.num_tokens * args.group;
  float* free = args.scratch;
  const auto take = [&free](int64_t count) {
    float* at = free;
    free += (count + 15) / 16 * 16;
    return at;
  };
  const int64_t row_floats = static_cast<int64_t>(b.rows) * b.head_dim;
  const int64_t padded_rows = (b.rows + kRegisterRows - 1) / kRegisterRows * kRegisterRows;
  b.keys = take(kTileTokens * (b.head_dim + 16));
  b.values = take(kTileTokens * b.head_dim);
  for (TileSide& side : b.side) {
    side.meta = take(kTileTokens * (b.head_dim / 16 + 2));
  }
  b.scores = take(static_cast<int64_t>(b.rows) * kTileTokens);
  b.q = take(row_floats);
  b.o = take(padded_rows * b.head_dim);
  b.total_o = take(row_floats);
  b.old = take(b.rows);
  b.tile = take(b.rows);
  for (RoundedRows& rounded : b.rounded) {
    rounded.pairs = reinterpret_cast<int32_t*>(take(row_floats / 2));
    rounded.scale = take(b.rows);
    rounded.sum = take(b.rows);
  }
  b.shift = take(static_cast<int64_t>(b.rows) * kTileRuns);
  __builtin_memset(b.shift, 0, sizeof(float) * b.rows * kTileRuns);
  b.amplitudes = take(static_cast<int64_t>(b.rows) * 2 * args.fast_bias.num_pairs);
  b.halves = take(padded_rows * (b.head_dim + 16));
  b.qsum = take(b.rows);
  b.state = reinterpret_cast<SoftmaxState*>(take(2 * padded_rows));
  b.total = reinterpret_cast<SoftmaxState*>(take(2 * b.rows));
  b.visible = reinterpret_cast<Visible*>(take(4 * args.num_tokens));
  for (int token = 0; token < args.num_tokens; ++token) {
    const int position = args.position + token;
    const int begin = FirstVisible(args.window, position);
    b.visible[token] = MakeVisible(args.rule, position, begin, position + 1);
  }
  for (int row = 0; row < b.rows; ++row) {
    b.state[row] = SoftmaxState();
    b.total[row] = SoftmaxState();
    const float* q = args.q + row / args.group * args.q_stride +
                     static_cast<int64_t>(row % args.group) * b.head_dim;
    __builtin_memcpy(b.q + row * b.head_dim, q, b.head_dim * sizeof(float));
    b.qsum[row] = SumRow(q, b.head_dim);
  }
  FillAmplitudes(args.fast_bias, args.kv, b.q, b.rows, args.softmax_scale, b.amplitudes);
  for (int64_t row = b.rows; row < padded_rows; ++row) {
    b.state[row] = SoftmaxState();
  }
  __builtin_memset(b.o, 0, padded_rows * b.head_dim * sizeof(float));
  return b;
}

inline View OpenView(const PrefillRowsArgs& args, bool window16) {
  View view;
  view.kv = window16 ? args.window16 : args.kv;
  view.scale = ScoreScale(view.kv, args.softmax_scale);
  view.offset_scale = args.softmax_scale * kLog2E;
  view.value_scale = args.window16.layer != nullptr ? ValueScale(view.kv) : 1.f;
  view.window16 = window16;
  view.interleave = window16 && HasInterleavedValues(args.kv, args.exact);
  return view;
}

inline void FinishSplit(const Block& b) {
  for (int row = 0; row < b.rows; ++row) {
    float* o = b.o + row * b.head_dim;
    b.total[row].Merge(b.state[row], b.total_o + row * b.head_dim, o, b.head_dim);
    b.state[row] = SoftmaxState();
    __builtin_memset(o, 0, b.head_dim * sizeof(float));
  }
}

inline void WriteRow(const Block& b, int row) {
  const PrefillRowsArgs& args = *b.args;
  const int token = row / args.group;
  const int head = row % args.group;
  const float* sink = args.sinks != nullptr ? args.sinks + head : nullptr;
  const float shift =
      args.q_dot_mean != nullptr
          ? args.softmax_scale * args.q_dot_mean[token * args.q_dot_mean_stride + head]
          : 0.f;
  const float value_scale = args.window16.layer != nullptr ? 1.f : ValueScale(args.kv);
  const float factor = b.total[row].Finish(sink, shift, value_scale);
  float* o = b.total_o + row * b.head_dim;
  if (HasInterleavedValues(args.kv, args.exact)) {
    DeinterleaveRow(o, b.head_dim);
  }
  WriteOutput(o, b.head_dim, factor,
              args.out + token * args.out_stride + static_cast<int64_t>(head) * b.head_dim);
}

// Calls read(tile) for every tile that a row sees, and writes the output.
template <class F>
void ForEachTile(const Block& b, F read) {
  const int begin = b.visible[0].begin;
  const int end = b.visible[b.args->num_tokens - 1].end;
  for (int tile = begin / kTileTokens * kTileTokens; tile < end; tile += kTileTokens) {
    if (tile % kSplitTokens == 0) {
      FinishSplit(b);
    }
    read(tile);
  }
  FinishSplit(b);
  for (int row = 0; row < b.rows; ++row) {
    WriteRow(b, row);
  }
}

}  // namespace turbomind::TM_ISA
