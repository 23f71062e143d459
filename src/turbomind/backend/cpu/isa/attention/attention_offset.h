#pragma once

// ⑦ The part of the scores that comes from the K offsets of blocks (kv/k_offset.h): one product per
// query row and block, in FP32. q · offset = scale · (q · codes) + zero · Σ q. Decode computes
// those of a split at once, after its first scores: by then the offsets have arrived from memory.

#include <cstdint>

#include "turbomind/backend/cpu/isa/attention/attention_load.h"
#include "turbomind/backend/cpu/isa/attention/attention_softmax_rows.h"
#include "turbomind/backend/cpu/isa/attention/attention_views.h"
#include "turbomind/core/float_convert.h"

namespace turbomind::TM_ISA {

inline constexpr int kTileRuns = kTileTokens / 16;  // a block has whole runs of 16 tokens
inline constexpr int kSplitRuns = kSplitTokens / 16;

// The query rows whose scores are shifted.
struct ShiftedRows {
  const float* q;     // [rows, head_dim]
  const float* qsum;  // [rows] SumRow
  int rows;
  float factor;  // from q · offset to scores
  float* shift;  // [rows, stride] for the runs from the first one on
  int stride;
};

// Returns the sums of the lanes of each vector.
struct FourSums {
  float of[4];
};
TM_HD FourSums SumsOf(const F32x16 (&a)[4]) {
  FourSums sums;
#if defined(TM_ISA_avx512)
  _mm512_mask_storeu_ps(sums.of, 0xf, SumOfEach(a));
#else
  for (int i = 0; i < 4; ++i) {
    sums.of[i] = ReduceAdd(a[i]);
  }
#endif
  return sums;
}

// A block's offset row, and the runs of 16 tokens whose shift it gives.
struct RunsOfBlock {
  KvRow offset;
  int run;
  int num_runs;
};

// Writes the shifts of the rows [row, row + R) for B blocks: up to four sums at once, because one
// alone waits for its additions.
template <int R, int B>
TM_HD void ShiftFew(const KvLayerView& layer, const RunsOfBlock* blocks, const ShiftedRows& to,
                    int row) {
  static_assert(R * B <= 4);
  F32x16 sum[4] = {Zero(), Zero(), Zero(), Zero()};
  const float* q = to.q + static_cast<int64_t>(row) * layer.head_dim;
  for (int d = 0; d < layer.head_dim; d += kLanes) {
    Unroll<B>([&](auto block) __attribute__((always_inline)) {
      constexpr int b = decltype(block)::value;
      const F32x16 code = ToFloat(LoadBytes(blocks[b].offset.payload + d));
      Unroll<R>([&](auto r) __attribute__((always_inline)) {
        constexpr int i = decltype(r)::value;
        sum[i * B + b] = Fma(code, Load(q + i * layer.head_dim + d), sum[i * B + b]);
      });
    });
  }
  const FourSums sums = SumsOf(sum);
  for (int b = 0; b < B; ++b) {
    const float scale = LoadAs(blocks[b].offset.metadata, layer.dtype, 0);
    const float zero = LoadAs(blocks[b].offset.metadata, layer.dtype, 1);
    for (int i = 0; i < R; ++i) {
      const float shift = to.factor * (scale * sums.of[i * B + b] + zero * to.qsum[row + i]);
      float* at = to.shift + (row + i) * to.stride + blocks[b].run;
      for (int j = 0; j < blocks[b].num_runs; ++j) {
        at[j] = shift;
      }
    }
  }
}

// Writes the shifts of all rows for up to four blocks.
inline void ShiftBlocks(const KvLayerView& layer, const RunsOfBlock* blocks, int num_blocks,
                        const ShiftedRows& to) {
  if (num_blocks == 4 && to.rows < 4) {
    for (int row = 0; row < to.rows; ++row) {
      ShiftFew<1, 4>(layer, blocks, to, row);
    }
    return;
  }
  for (const RunsOfBlock* block = blocks; block < blocks + num_blocks; ++block) {
    int row = 0;
    for (; row + 4 <= to.rows; row += 4) {
      ShiftFew<4, 1>(layer, block, to, row);
    }
    if (row + 3 == to.rows) {
      ShiftFew<3, 1>(layer, block, to, row);
    } else if (row + 2 == to.rows) {
      ShiftFew<2, 1>(layer, block, to, row);
    } else if (row + 1 == to.rows) {
      ShiftFew<1, 1>(layer, block, to, row);
    }
  }
}

// Writes the shifts of all rows for the runs of 16 tokens that positions [begin, end) touch. Runs
// of a block that the view does not keep get 0. `begin` is a multiple of 16.
inline void ShiftRows(const KvHead& kv, int begin, int end, const ShiftedRows& to) {
  const KvLayerView& layer = *kv.layer;
  const int block_shift = __builtin_ctz(static_cast<unsigned>(layer.block_seq_len));
  const int runs_of_block = layer.block_seq_len / 16;
  const int num_runs = (end - begin + 15) / 16;
  RunsOfBlock blocks[4];
  int num_blocks = 0;
  for (int run = 0; run < num_runs;) {
    const int first = begin / 16 + run;
    const int count = MinOf(num_runs - run, runs_of_block - (first & (runs_of_block - 1)));
    const int64_t block = kv.blocks[(begin + 16 * run) >> block_shift];
    if (block < 0) {
      for (int row = 0; row < to.rows; ++row) {
        __builtin_memset(to.shift + row * to.stride + run, 0, sizeof(float) * count);
      }
    } else {
      blocks[num_blocks++] = {layer.KOffset(block, kv.head), run, count};
      if (num_blocks == 4) {
        ShiftBlocks(layer, blocks, num_blocks, to);
        num_blocks = 0;
      }
    }
    run += count;
  }
  ShiftBlocks(layer, blocks, num_blocks, to);
}

// Prefetches the offsets of the blocks of positions [begin, end).
inline void PrefetchOffsets(const KvHead& kv, int begin, int end) {
  const KvLayerView& layer = *kv.layer;
  const int block_shift = __builtin_ctz(static_cast<unsigned>(layer.block_seq_len));
  for (int position = begin; position < end; position += layer.block_seq_len) {
    const int64_t block = kv.blocks[position >> block_shift];
    if (block >= 0) {
      const KvRow offset = layer.KOffset(block, kv.head);
      PrefetchBytes(reinterpret_cast<const std::byte*>(offset.payload), layer.head_dim);
      __builtin_prefetch(offset.metadata);
    }
  }
}

}  // namespace turbomind::TM_ISA
