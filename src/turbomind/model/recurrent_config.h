#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace turbomind {

// Layers that have a recurrent state instead of attention: a short convolution over q, k and v,
// and a gated delta rule (ops/recurrent_params.h).
struct RecurrentConfig {
  std::vector<uint8_t> layers;  // per layer; 1: recurrent, 0: attention. Empty: no recurrent layer
  int num_key_heads = 0;
  int num_value_heads = 0;
  int key_dim = 0;
  int value_dim = 0;
  int kernel = 0;      // of the convolution
  bool tiled = false;  // as in StateHeads

  bool Has(int layer) const { return !layers.empty() && layers[static_cast<size_t>(layer)] != 0; }
  bool HasAny() const { return NumLayers() > 0; }
  int NumLayers() const;
  int64_t KeySize() const { return int64_t{num_key_heads} * key_dim; }
  int64_t ValueSize() const { return int64_t{num_value_heads} * value_dim; }
  // Returns the channels of the convolution: q, k and v.
  int64_t Channels() const { return 2 * KeySize() + ValueSize(); }

  // The state of a layer is that of its convolution, then the matrices of its heads, each at a
  // multiple of 64 bytes. The layers follow each other.
  int64_t ConvolutionBytes() const;
  int64_t MatrixBytes() const;
  int64_t StateBytes() const;  // of all recurrent layers of a sequence

  // Throws InvalidArgument that names the field.
  void Validate(int num_model_layers) const;
};

}  // namespace turbomind
