#pragma once

// ⑤→⑥ The arrays on a device that a decoder needs for biases of K (k_bias.h).

#include <cstdint>
#include <span>
#include <vector>

#include "turbomind/core/device_array.h"
#include "turbomind/model/k_bias.h"
#include "turbomind/model/weights.h"
#include "turbomind/ops/params.h"
#include "turbomind/ops/rope.h"

namespace turbomind {

struct DecoderConfig;

// Immutable after construction. The weights, which other decoders share, stay as they are.
class KBiasArrays {
 public:
  KBiasArrays() = default;
  // `ropes` has the tables of the model.
  KBiasArrays(const DecoderConfig& config, const Weights& weights, std::span<const RopeTable> ropes,
              DeviceMemory& device);

  // Returns WriteKvParams::bias: that of the weights, without fast pairs if there are any.
  const float* qkv_bias(int layer) const;
  // Returns k_base of WriteKvParams; null unless keys are written to a pool with K offsets.
  const float* base(int layer) const { return layers_[static_cast<size_t>(layer)].base.data(); }
  FastBias fast(int layer) const;
  // Returns the block length of the pools with k_base; 0 if there are none.
  int base_block_seq_len() const { return base_block_seq_len_; }

 private:
  struct Layer {
    const float* of_weights = nullptr;
    DeviceArray qkv;
    DeviceArray base;
    DeviceArray directions;
    DeviceArrayOf<int32_t> waves_of;
    int num_pairs = 0;
    size_t rope = 0;
  };

  std::vector<Layer> layers_;
  std::vector<DeviceArray> waves_;  // by RoPE
  int64_t num_positions_ = 0;
  int base_block_seq_len_ = 0;
};

}  // namespace turbomind
