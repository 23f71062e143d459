#pragma once

#include <cstdint>

#include "turbomind/core/host_device.h"

namespace turbomind {

// How a checkpoint stores the matrices of recurrent layers. Working states are FP32.
enum class StateFormat : uint8_t {
  kF32,
  kBf16,
  kInt8,  // a scale for every row: the largest magnitude of its values / 127
};

// The state of all recurrent layers of a sequence. Each layer has `exact_bytes` of FP32 values that
// every format keeps, the inputs of its convolution, and then `rows` rows of `cols` FP32 values,
// both padded to multiples of 64 bytes. The layers follow each other.
struct StateShape {
  int num_layers = 0;
  int64_t exact_bytes = 0;  // a multiple of 64
  int64_t rows = 0;
  int cols = 0;

  TM_HD int64_t RowBytes(StateFormat format) const {
    switch (format) {
      case StateFormat::kF32:
        return cols * int64_t{4};
      case StateFormat::kBf16:
        return cols * int64_t{2};
      case StateFormat::kInt8:
        return cols + int64_t{4};
    }
    return 0;
  }
  // Returns the bytes of a layer in a slot of a format. kInt8 has all scales of the layer before
  // its codes.
  TM_HD int64_t LayerBytes(StateFormat format) const {
    return exact_bytes + (rows * RowBytes(format) + 63) / 64 * 64;
  }
  TM_HD int64_t Bytes(StateFormat format) const { return num_layers * LayerBytes(format); }
  // Returns where the codes of a layer begin in it, after the scales if there are any.
  TM_HD int64_t CodesOffset(StateFormat format) const {
    return exact_bytes + (format == StateFormat::kInt8 ? rows * int64_t{4} : 0);
  }
};

}  // namespace turbomind
