#pragma once

// ⑥⑦ Launchers of the CUDA kernels that write the KV cache and read it back as dense rows. All
// pointers are GPU addresses, those of the batch included; counts are the host's. Work is done in
// the order of the context's stream; nothing waits, allocates or depends on values in GPU memory,
// so every launch can be recorded in a graph.
//
// REQUIRES: a cache dtype of 16 bits; head_dim a multiple of 16, at most 256; qkv, cos, sin, bias,
// norm weights and mean 16-byte aligned, as dense rows.

#include <cstdint>

#include "turbomind/backend/cuda/runtime/context.h"
#include "turbomind/core/host_device.h"
#include "turbomind/ops/params.h"

namespace turbomind::cuda {

// Equal to the CPU's, bit for bit (but for which NaN a sum gives): qkv, q_dot_mean, the bytes of
// the cache. A token whose block id is -1 is not stored and not counted.
void CudaWriteKv(const Context& context, const WriteKvParams& params);
// Moves without blocks (-1) may be among them: nothing is done for these.
void CudaQuantizeBlocks(const Context& context, const QuantizeBlocksParams& params);
// Equal to the CPU's, bit for bit.
void CudaFlattenKV(const Context& context, const FlattenKVParams& params);

// Positions [begin, end) of a sequence; none where begin >= end.
struct PositionSpan {
  int32_t begin = 0;
  int32_t end = 0;
};

// The positions that some query of a chunk sees in each view of the cache (kv/precision_window.h);
// with a window perhaps some between them. Which view the query at p reads at position t, p itself
// included, follows from the rule alone: 16-bit where t < SinkEnd() or t >= RecentBegin(p), else
// quantized. `quantized` and `recent` overlap: there an older query still reads 16 bits and a newer
// one the format.
struct SeenSpans {
  PositionSpan quantized;  // all positions where the rule is off
  PositionSpan sinks;      // 16-bit, the first blocks
  PositionSpan recent;     // 16-bit
};

// Of the queries at positions [first_query, context_len), which look back `window` (0: all).
SeenSpans SpansOf(const PrecisionWindow& rule, int window, int first_query, int context_len);

inline constexpr int kMaxFlattenSpans = 128;

// Where a span of one sequence goes.
struct FlattenSpan {
  int32_t sequence = 0;  // of the batch: the row of the block table
  int32_t begin = 0;     // first position
  int32_t row = 0;       // of the output that takes it
};

// One view of the cache → dense rows of 16 bits for prefill: called once for the layer's pool and,
// with 16-bit blocks, once more for the 16-bit pool, each with its own spans and output.
//
// Mode none: as stored (FP16 or BF16), unless all_half. All others: FP16, of
//   FP4        E2M1 * scale, exact; without g
//   FP8        the code's value, exact (below SM 89 an E4M3 NaN is read as 480); without g
//   int8, int4 code * scale + zero in FP32, rounded once to FP16, at most 65504 in size
// g stays the reader's: part of the softmax scale of quantized scores (K) and of the weights or of
// the output (V), as AttentionParams says. A position whose block is -1 gives zeros.
struct FlattenHalfParams {
  uint16_t* k = nullptr;  // [kv_heads, num_rows, head_dim], 16-byte aligned
  uint16_t* v = nullptr;  // same
  int64_t num_rows = 0;   // positions of all spans
  // At least one; their rows follow one another: 0, then the row behind the last span's.
  FlattenSpan spans[kMaxFlattenSpans] = {};
  int num_spans = 0;
  KvLayerView kv;                         // the layer's pool or the 16-bit one
  const int32_t* block_tables = nullptr;  // of that pool: [sequences, block_table_stride]
  int64_t block_table_stride = 0;
  bool all_half = false;  // BF16 is rounded to FP16, at most 65504 in size
};
static_assert(sizeof(FlattenHalfParams) <= 4096);  // of a kernel

void CudaFlattenToHalf(const Context& context, const FlattenHalfParams& params);

}  // namespace turbomind::cuda
