#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "turbomind/kv/state_format.h"

namespace turbomind {

// How a recurrent layer computes (ops/recurrent_params.h). The first two rules have a convolution
// over q, k and v, and a norm with a gate.
enum class RecurrentRule : uint8_t {
  kGatedDelta,        // Qwen3-Next, Qwen3.5
  kSelectiveScan,     // Mamba-2, where q, k and v are called C, B and x
  kShortConvolution,  // LFM2: only a convolution, between two gates
};

// Layers that have a recurrent state, instead of attention or beside it.
struct RecurrentConfig {
  RecurrentRule rule = RecurrentRule::kGatedDelta;
  std::vector<uint8_t> layers;  // per layer; 1: recurrent. Empty: no recurrent layer
  int num_key_heads = 0;
  int num_value_heads = 0;
  int key_dim = 0;
  int value_dim = 0;
  int width = 0;            // channels of kShortConvolution, which has no heads
  int kernel = 0;           // of the convolution
  int norm_groups = 0;      // parts of the output that are normalized; 0: there is no norm
  bool gate_first = false;  // the gate precedes the norm
  bool tiled = false;       // as in StateHeads

  bool Has(int layer) const { return !layers.empty() && layers[static_cast<size_t>(layer)] != 0; }
  bool HasAny() const { return NumLayers() > 0; }
  int NumLayers() const;
  int64_t KeySize() const { return int64_t{num_key_heads} * key_dim; }
  int64_t ValueSize() const { return int64_t{num_value_heads} * value_dim + width; }
  // Returns the channels of the convolution.
  int64_t Channels() const { return 2 * KeySize() + ValueSize(); }
  // Returns the outputs of the projection of a layer's input.
  int64_t InputSize() const;

  // Returns the state of a sequence: for each recurrent layer that of its convolution, which every
  // format keeps, and then the matrices of its heads.
  StateShape State() const;
  int64_t StateBytes() const { return State().Bytes(StateFormat::kF32); }

  // Throws InvalidArgument that names the field.
  void Validate(int num_model_layers) const;
};

}  // namespace turbomind
