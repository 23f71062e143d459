#pragma once

// ⑥⑦ The kernels over the KV cache, compiled once per instruction set (isa/) and passed as function
// pointers. Only plain structs: files of different instruction sets must share no inline code
// through this header. Every kernel returns the same bits with every instruction set, except those
// of FillBf16KvKernels.
//
// The attention state of one query head over some positions is kStateHeader + head_dim floats: (m,
// l, o[head_dim]). m is the largest score in units of log2, rounded up; l = Σ 2^(score - m) and o =
// Σ 2^(score - m) · v. l == 0 means that no position was visible.

#include <cstdint>

#include "turbomind/backend/cpu/row_kernels.h"
#include "turbomind/ops/params.h"

namespace turbomind {

inline constexpr int kStateHeader = 2;
// Usual maximum number of query rows (new tokens × heads of a group) of one prefill item.
inline constexpr int kPrefillRows = 96;

// One KV head of a sequence's cache.
struct KvHead {
  const KvLayerView* layer = nullptr;
  const int32_t* blocks = nullptr;  // by position / block_seq_len; -1 if the block is not kept
  int head = 0;
};

// Adjacent splits of one query token, for all query heads of a KV head.
struct DecodeSplitsArgs {
  KvHead kv;
  KvHead window16;  // 16-bit window; layer is null without one
  PrecisionWindow rule;
  int position = 0;          // position of the token
  const float* q = nullptr;  // [group, head_dim]
  int group = 0;
  float softmax_scale = 1.f;
  float score_cap = 0.f;
  bool exact = false;
  FastBias fast_bias;
  int begin = 0;  // visible positions [begin, end), not empty
  int end = 0;
  float* states = nullptr;  // [splits, group, kStateHeader + head_dim]
};

// The splits of one query head, in order of position, and the output that they are merged into.
struct MergeSplitsArgs {
  const float* states = nullptr;  // first split; the next ones at state_stride floats
  int64_t state_stride = 0;
  int num_splits = 0;
  int head_dim = 0;
  const float* sink = nullptr;  // one logit or null
  float sink_shift = 0.f;       // subtracted from the sink
  float value_scale = 1.f;
  float* out = nullptr;  // [head_dim]
};

// A run of new tokens of one sequence, for all query heads of a KV head.
struct PrefillRowsArgs {
  KvHead kv;
  KvHead window16;  // 16-bit window; layer is null without one
  PrecisionWindow rule;
  const float* q = nullptr;  // [group, head_dim] of the first token
  int64_t q_stride = 0;      // floats between tokens
  float* out = nullptr;      // [group, head_dim] of the first token
  int64_t out_stride = 0;
  int num_tokens = 0;  // num_tokens * group <= item_rows, or 1 token of a larger group
  int position = 0;    // position of the first token
  int context_len = 0;
  int group = 0;
  float softmax_scale = 1.f;
  float score_cap = 0.f;
  bool exact = false;
  int window = 0;
  const float* sinks = nullptr;  // [group] or null
  // [group] of the first token; the next ones are q_dot_mean_stride apart. Null means no mean.
  const float* q_dot_mean = nullptr;
  int64_t q_dot_mean_stride = 0;
  FastBias fast_bias;
  float* scratch = nullptr;  // PrefillScratchFloats, 64-byte aligned
};

// K and V of one token and KV head. The head and its query heads get bias, norm, RoPE, mean and
// rotation; then K and V are written.
struct WriteHeadArgs {
  const WriteKvParams* params = nullptr;
  int token = 0;
  int head = 0;
  int64_t block = 0;  // block of the 16-bit pool if there is one
  int slot = 0;       // inside the block
  float q_scale = 1.f;
};

struct CpuKvKernels : CpuRowKernels {
  void (*decode_splits)(const DecodeSplitsArgs&) = nullptr;
  void (*merge_splits)(const MergeSplitsArgs&) = nullptr;
  void (*prefill_rows)(const PrefillRowsArgs&) = nullptr;
  int item_rows = kPrefillRows;  // of prefill_rows
  // Returns the counts of K and V.
  RowCounts (*write_head)(const WriteHeadArgs&) = nullptr;
};

// Returns the size of the scratch of prefill_rows, in floats, for up to `max_rows` rows.
constexpr int64_t PrefillScratchFloats(int max_rows, int head_dim) {
  const int64_t rows = max_rows + 8;
  // K and V tile, their metadata, scores, queries (also rounded, three times), running
  // and finished states, visible ranges of the rows, amplitudes of the fast bias.
  return kTileTokens * (2 * head_dim + 16) + 2 * kTileTokens * (head_dim / 16 + 2) +
         rows * kTileTokens + 4 * rows * head_dim + (rows + 16) * (head_dim + 16) + 24 * rows +
         rows * 2 * kMaxFastPairs + 256;
}

namespace scalar {
void FillKvKernels(CpuKvKernels& kernels);
}
namespace avx2 {
void FillKvKernels(CpuKvKernels& kernels);
}
namespace avx512 {
void FillKvKernels(CpuKvKernels& kernels);
}
namespace amx {
void FillKvKernels(CpuKvKernels& kernels);
// Replaces prefill_rows by a kernel that computes items of at least 16 rows in BF16, unless they
// are exact (CpuOptions::deterministic). The bits of a row do not depend on the other rows, but
// they are not those of decode_splits. An output changes by about 2^-9 of the largest |v|, or 2^-8
// if the values are not BF16 numbers (FP16, FP32, int8, int4). REQUIRES: the other kernels are
// those of amx::FillKvKernels.
void FillBf16KvKernels(CpuKvKernels& kernels);
}  // namespace amx

}  // namespace turbomind
