#pragma once

// ⑦ The part of the scores that comes from the K offsets of blocks (kv/k_offset.h): one product per
// query row and block, in FP32. q · offset = scale · (q · codes) + zero · Σ q.

#include <cstdint>

#include "turbomind/backend/cpu/isa/attention/attention_load.h"
#include "turbomind/backend/cpu/isa/attention/attention_softmax_rows.h"
#include "turbomind/backend/cpu/isa/attention/attention_views.h"
#include "turbomind/core/float_convert.h"

namespace turbomind::TM_ISA {

inline constexpr int kTileRuns = kTileTokens / 16;  // a block has whole runs of 16 tokens

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

// Writes the shifts of the rows [row, row + N) for the runs [run, run + num_runs) of one block.
template <int N>
TM_HD void ShiftFewRows(const KvLayerView& layer, const KvRow& offset, const ShiftedRows& to,
                        int row, int run, int num_runs) {
  F32x16 sum[4] = {Zero(), Zero(), Zero(), Zero()};
  const float* q = to.q + static_cast<int64_t>(row) * layer.head_dim;
  for (int d = 0; d < layer.head_dim; d += kLanes) {
    const F32x16 code = ToFloat(LoadBytes(offset.payload + d));
    Unroll<N>([&](auto r) __attribute__((always_inline)) {
      constexpr int i = decltype(r)::value;
      sum[i] = Fma(code, Load(q + i * layer.head_dim + d), sum[i]);
    });
  }
  const FourSums sums = SumsOf(sum);
  const float scale = LoadAs(offset.metadata, layer.dtype, 0);
  const float zero = LoadAs(offset.metadata, layer.dtype, 1);
  for (int i = 0; i < N; ++i) {
    const float shift = to.factor * (scale * sums.of[i] + zero * to.qsum[row + i]);
    float* at = to.shift + (row + i) * to.stride + run;
    for (int j = 0; j < num_runs; ++j) {
      at[j] = shift;
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
  for (int run = 0; run < num_runs;) {
    const int first = begin / 16 + run;
    const int count = MinOf(num_runs - run, runs_of_block - first % runs_of_block);
    const int64_t block = kv.blocks[(begin + 16 * run) >> block_shift];
    if (block < 0) {
      for (int row = 0; row < to.rows; ++row) {
        __builtin_memset(to.shift + row * to.stride + run, 0, sizeof(float) * count);
      }
    } else {
      const KvRow offset = layer.KOffset(block, kv.head);
      int row = 0;
      for (; row + 4 <= to.rows; row += 4) {
        ShiftFewRows<4>(layer, offset, to, row, run, count);
      }
      if (row + 3 == to.rows) {
        ShiftFewRows<3>(layer, offset, to, row, run, count);
      } else if (row + 2 == to.rows) {
        ShiftFewRows<2>(layer, offset, to, row, run, count);
      } else if (row + 1 == to.rows) {
        ShiftFewRows<1>(layer, offset, to, row, run, count);
      }
    }
    run += count;
  }
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
