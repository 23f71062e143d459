#pragma once

#include <vector>

#include "turbomind/model/model_config.h"
#include "turbomind/model/weights.h"
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

// Returns the bias of a layer's K, [kv_heads, head_dim], on the host; zeros if it has none or if a
// norm follows it.
std::vector<float> ReadKBias(const ModelConfig& model, const LayerWeights& layer,
                             DeviceMemory& device);

// Returns the largest amplitude of a pair of channels that a K offset leaves of a bias of K, over
// all layers: what the quantized keys still contain.
float KBiasLeft(const ModelConfig& model, const Weights& weights, DeviceMemory& device,
                int block_seq_len);

}  // namespace turbomind
