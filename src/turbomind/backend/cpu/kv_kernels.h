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
#include "turbomind/ops/latent_params.h"
#include "turbomind/ops/params.h"

namespace turbomind {

inline constexpr int kStateHeader = 2;
static_assert(kMaxLatentDim <= kMaxHeadDim);  // buffers of rows hold latents, too
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

// Attention over latents: lanes are query rows, that is a token's heads, and then those of the next
// token. kLatentLanes rows are a block, whose state is kStateHeader + rank runs of kLatentLanes
// floats.
inline constexpr int kLatentLanes = 16;

// Query rows [first_row, first_row + num_rows) of a run of tokens.
struct LatentRows {
  const float* q = nullptr;       // [tokens, heads, rank] of the first token
  int64_t q_stride = 0;           // floats between tokens
  const float* rotary = nullptr;  // [tokens, heads, rotary_dim] of the first token
  int64_t rotary_stride = 0;
  int64_t rotary_head_stride = 0;
  int heads = 0;
  int first_row = 0;
  int num_rows = 0;
  bool rotate = false;  // as in LatentAttentionParams

  int num_blocks() const { return (num_rows + kLatentLanes - 1) / kLatentLanes; }
};

// Adjacent splits of the positions, for some query rows.
struct LatentSplitsArgs {
  KvHead kv;
  KvHead window16;  // 16-bit window; layer is null without one
  PrecisionWindow rule;
  LatentRows rows;
  int position = 0;  // of the first token
  float softmax_scale = 1.f;
  bool exact = false;
  int begin = 0;  // positions [begin, end), not empty; a row sees none after its own
  int end = 0;
  float* states = nullptr;   // [splits, blocks, kStateHeader + rank, kLatentLanes]
  float* later = nullptr;    // if set, memory for one split: `states` then has the merged state
  float* scratch = nullptr;  // LatentScratchFloats, 64-byte aligned
};

// Merges the states of a later split into others. Their number of blocks is that of the rows.
struct LatentMergeArgs {
  float* states = nullptr;
  const float* later = nullptr;
  int num_blocks = 0;
  int rank = 0;
};

// Writes the output of the rows.
struct LatentOutputArgs {
  const float* states = nullptr;
  LatentRows rows;
  int rank = 0;
  float* out = nullptr;  // [tokens, heads, rank] of the first token, q_stride floats apart
};

// The queries and the row of one token.
struct WriteLatentArgs {
  const WriteLatentsParams* params = nullptr;
  int token = 0;
  int64_t block = 0;  // as in WriteHeadArgs
  int slot = 0;
};

struct CpuKvKernels : CpuRowKernels {
  void (*latent_splits)(const LatentSplitsArgs&) = nullptr;
  void (*latent_merge)(const LatentMergeArgs&) = nullptr;
  void (*latent_output)(const LatentOutputArgs&) = nullptr;
  RowCounts (*write_latent)(const WriteLatentArgs&) = nullptr;
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

// Returns the size of a block's state, in floats.
constexpr int64_t LatentStateFloats(int rank) {
  return int64_t{kStateHeader + rank} * kLatentLanes;
}

// Bytes between the rounded keys of a tile, whatever their rank: offsets of a loop over tokens are
// then part of its instructions. Not a power of two, which would give the rows few sets of L1.
inline constexpr int kLatentKeyStride = kMaxLatentDim + 64;

// Returns the size of the scratch of latent_splits, in floats.
constexpr int64_t LatentScratchFloats(int num_rows, int rank, int rotary_dim) {
  const int64_t width = rank + rotary_dim;
  const int64_t rows = num_rows + kLatentLanes;
  // Queries, also rounded; the tile, also rounded; the metadata of both sides; scores.
  return 2 * rows * width + 2 * kTileTokens * width + kTileTokens * (width / 16 + 4) +
         kTileTokens * (kLatentKeyStride / 4 + kLatentLanes) + 9 * rows + 320;
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
