#pragma once

// What a bias of K becomes where K is quantized. A quantized row would spend its steps on a large
// bias, so the bias is taken out first. RoPE turns it from position to position:
//  - slow pairs of channels turn little within a block: their bias is in the block's K offset;
//  - of fast pairs an offset would leave too much: attention adds their products with the queries
//    (FastBias).

#include <cstdint>
#include <vector>

#include "turbomind/model/model_config.h"
#include "turbomind/model/weights.h"
#include "turbomind/ops/params.h"
#include "turbomind/ops/rope.h"

namespace turbomind {

// Returns k_base of WriteKvParams, [kv_heads, head_dim], for a bias of K of the same shape. RoPE of
// it at position s + block_seq_len / 2 is the mean of RoPE of the bias over the positions s to
// s + block_seq_len - 1 of a block. `rope` is null for a layer without RoPE.
//
// The mean over n positions of a turn by theta each is the turn to their middle times
// sin(n theta / 2) / (n sin(theta / 2)): about 1 for low frequencies, about 0 for high ones.
std::vector<float> MakeKBase(std::vector<float> bias, int head_dim, const RopeTable* rope,
                             int block_seq_len);

// The fast pairs of a layer, up to kMaxFastPairs per KV head. A head with fewer pairs than another
// repeats a pair with zeros.
struct FastPairs {
  int num_pairs = 0;
  std::vector<int32_t> pairs;     // [kv_heads, num_pairs] frequencies of the RoPE
  std::vector<float> directions;  // FastBias::directions, before the rotation of K
};

// Moves the fast pairs from `bias`, [kv_heads, head_dim], to the result: those of which a K offset
// leaves more than an amplitude of kMinFastBias, the largest ones first. Keys have a spread of
// about 1, so a smaller rest hardly widens the range that their codes cover.
FastPairs TakeFastPairs(std::vector<float>* bias, int head_dim, const RopeTable& rope,
                        int block_seq_len);
inline constexpr double kMinFastBias = 1.;

// Returns the waves of some pairs, [pairs.size(), 2, num_positions]: RoPE's cos and sin.
std::vector<float> MakeWaves(const std::vector<int32_t>& pairs, const RopeTable& rope,
                             int64_t num_positions);

// Returns the bias of a layer's K, [kv_heads, head_dim], on the host; zeros if it has none or if a
// norm follows it.
std::vector<float> ReadKBias(const ModelConfig& model, const LayerWeights& layer,
                             DeviceMemory& device);

// Returns the largest amplitude of a pair of channels that stays in quantized keys, over all
// layers: neither a K offset nor FastBias takes it out.
float KBiasLeft(const ModelConfig& model, const Weights& weights, DeviceMemory& device,
                int block_seq_len);

}  // namespace turbomind
