#pragma once

// ⑥ The K offset of a block: the part that its keys have in common. It is removed before the keys
// are quantized, so that their codes spend no steps on it, and it is added again when they are
// read. A query adds q · offset once per block instead of once per key.
//
// The offset is the mean of the block's keys as they are stored when the block leaves the window,
// after RoPE and rotation, where NaN counts as 0 and an infinity as the largest finite value. It is
// summed in FP32: the keys of each run of kOffsetRun slots in order, then the runs in order, so
// that runs can be summed side by side. It is stored as a row of int8 in the cache dtype
// (Codec<kInt8>), and what is subtracted and added is the decoded row. It depends on the block's
// keys alone, so neither chunking nor a prefix hit changes it.
//
// A block whose keys are quantized when they are written cannot know their mean. If the model has a
// bias of K, the block's offset is then the mean of the bias alone, after RoPE at its positions
// (WriteKvParams::k_base). High frequencies turn around within a block and have a mean of zero: see
// ops/fast_bias.h.
//
// In a layer with latents, all of this holds for latents instead of keys (KvLayerView::HasOffset),
// after their rotation. There is no bias.
//
// Compile without FMA contraction, as kv/codec.h.

#include "turbomind/kv/codec.h"
#include "turbomind/kv/layout.h"

namespace turbomind {

using KOffsetCodec = Codec<KvCacheMode::kInt8>;

inline constexpr int kOffsetRun = 16;  // a block has whole runs

// Adds the key of `slot` to the sums of its run [n]. The last key of a run also adds these to the
// sums of the block [n]. REQUIRES: the slots of a block come in order, and its sums begin at 0.
TM_HD void AddToKOffset(const float* key, int slot, int n, DataType dtype, float* run,
                        float* sums) {
  for (int d = 0; d < n; ++d) {
    const float before = slot % kOffsetRun == 0 ? 0.f : run[d];
    run[d] = before + FiniteValue(key[d], dtype);
    sums[d] = slot % kOffsetRun == kOffsetRun - 1 ? sums[d] + run[d] : sums[d];
  }
}

// Stores the mean of `tokens` keys, given their sums [n], and replaces the sums with the decoded
// offset. REQUIRES: `tokens` is a power of two.
TM_HD void StoreKOffset(const KvRow& to, int n, DataType dtype, int tokens, float* sums) {
  const float share = 1.f / static_cast<float>(tokens);
  for (int d = 0; d < n; ++d) {
    sums[d] = sums[d] * share;
  }
  KOffsetCodec::EncodeRow(sums, n, dtype, 1.f, to.payload, to.metadata);
  KOffsetCodec::DecodeRow(to.payload, to.metadata, n, dtype, 1.f, sums);
}

// Decodes the offset row of a block to [head_dim].
TM_HD void DecodeKOffset(const KvLayerView& view, int64_t block, int head, float* offset) {
  const KvRow from = view.KOffset(block, head);
  KOffsetCodec::DecodeRow(from.payload, from.metadata, view.head_dim, view.dtype, 1.f, offset);
}

}  // namespace turbomind
