#pragma once

// The tensors that a WeightsBuilder expects, by name.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "turbomind/model/weights.h"

namespace turbomind {

struct MatrixSlot {
  std::unique_ptr<PackedMatrix>* target = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  bool required = true;
  bool exact = false;  // packed for FP32 compute, whatever the other matrices use
};

struct VectorSlot {
  VectorWeight* target = nullptr;  // null for the bias of a part, see JoinBiases
  int64_t size = 0;
  bool required = true;
  int repeats = 1;  // of the values in the target
  std::vector<float> values = {};
};

// A vector to upload and its target.
struct VectorUpload {
  VectorWeight* target = nullptr;
  std::vector<float> values;
};

// An expert whose gate and up matrices may be added in either form.
struct ExpertSlot {
  ExpertWeights* expert = nullptr;
  std::string prefix;
  LinearWeight interleaved;
};

}  // namespace turbomind
