#pragma once

namespace turbomind::block {

// Block lengths are powers of two, so that kernels find a slot by shifting. A paged cache has short
// blocks. A contiguous cache (components/kv_cache) has one block per sequence.
inline constexpr int kMinBlockSeqLen = 16;
inline constexpr int kMaxBlockSeqLen = 1 << 20;
inline constexpr int kMaxPagedBlockSeqLen = 128;

constexpr bool IsBlockSeqLen(int tokens) {
  return tokens >= kMinBlockSeqLen && tokens <= kMaxBlockSeqLen && (tokens & (tokens - 1)) == 0;
}
constexpr bool IsPagedBlockSeqLen(int tokens) {
  return IsBlockSeqLen(tokens) && tokens <= kMaxPagedBlockSeqLen;
}

}  // namespace turbomind::block
