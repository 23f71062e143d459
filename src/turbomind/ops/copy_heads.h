#pragma once

// ⑥⑦ Copies heads between an array of a caller and the FP32 rows of a step.

#include <array>
#include <cstddef>
#include <cstdint>

#include "turbomind/core/dtype.h"
#include "turbomind/core/function_ref.h"

namespace turbomind {

class Device;

struct CopyHeadsParams {
  std::byte* array = nullptr;  // [num_seqs, num_heads, num_tokens, head_dim], read if to_rows
  DataType dtype = DataType::kFloat32;
  std::array<int64_t, 4> strides = {};  // of the array: bytes, of any sign
  int num_seqs = 0;
  int num_heads = 0;
  int num_tokens = 0;  // of each sequence
  int head_dim = 0;
  float* rows = nullptr;  // [num_seqs * num_tokens, row_heads, head_dim], written if to_rows
  int row_heads = 0;
  int first_head = 0;  // of the copied ones in a row
  bool to_rows = true;
};

// The op on memory of the host, with the device's host threads.
void CopyHeadsOnHost(Device& device, const CopyHeadsParams& params);

// Runs fn(row) for all rows of `row_values` values, on the device's host threads if they pay.
void ForEachRowOnHost(Device& device, int64_t num_rows, int row_values,
                      FunctionRef<void(int64_t row)> fn);

}  // namespace turbomind
