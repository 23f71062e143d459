#pragma once

// ⑥ Parameters of the linear kernels, and the part that each block computes.

#include <cstdint>

#include "turbomind/backend/cuda/dense/elementwise.cuh"
#include "turbomind/backend/cuda/linear/matrix_layout.h"
#include "turbomind/backend/cuda/runtime/intrinsics.cuh"
#include "turbomind/backend/cuda/runtime/vector_types.cuh"
#include "turbomind/core/float_convert.h"

namespace turbomind::cuda {

// One of several matrices that are stacked along the outputs. Its blocks of outputs are
// [first_block, first_block of the next segment).
struct LinearSegment {
  const char* weight = nullptr;
  const float* bias = nullptr;  // bias of its outputs, or null
  int32_t first_block = 0;
  int32_t first_output = 0;  // its column of y
  int32_t outputs = 0;
  float factor = 1.f;  // of the matrix
};

struct ExpertWeight {
  const char* weight = nullptr;
  const float* bias = nullptr;
  float factor = 1.f;
};

// All matrices have one format and the same cols. Unless a kernel says otherwise, rows of x begin
// at multiples of 16 bytes, cols are whole units, and the grid is slots of rows × blocks of
// outputs.
struct LinearKernelParams {
  const float* x = nullptr;
  int64_t x_stride = 0;
  const int32_t* x_rows = nullptr;  // [num_rows] or null
  float* y = nullptr;
  int64_t y_stride = 0;
  int num_rows = 0;
  bool accumulate = false;
  int cols = 0;
  int num_segments = 0;
  LinearSegment segments[kMaxSegments] = {};
  // Grouped: one segment, whose weight, bias and factor are replaced by those of the expert.
  const ExpertWeight* experts = nullptr;  // [num_experts] or null
  const int32_t* offsets = nullptr;       // [num_experts + 1]
  int num_experts = 0;
  // If set, expert e has the rows [e, e + 1) * expert_rows, and row r of it is at r * y_stride + e
  // * y_expert_stride in y.
  int expert_rows = 0;
  int64_t y_expert_stride = 0;
  bool slot_is_row = false;  // how slots are numbered, see SlotCount
};

// An RMSNorm of x that a kernel computes on the way. As y = w (x ∘ g) / rms(x), it multiplies x by
// g as it reads x, adds up squares, and divides the sums at the end. x has contiguous rows, and all
// arrays are 16-byte aligned.
struct FusedNorm {
  const float* weight = nullptr;  // [cols]; null: no norm
  float eps = 0.f;
  float* out = nullptr;  // [num_rows, cols] receives the normed rows; may be null
};

// The part of one block.
struct LinearBlock {
  const char* weight;
  const float* bias;
  float factor;
  int first_row;  // in y
  int num_rows;
  int first_output;  // in the weight
  int num_outputs;   // in the weight
  int y_column;      // column of the weight's first output
};

// The number of slots that FindBlock needs for tiles of up to `rows` rows of one expert. There are
// two numberings. Either every row is a slot, and only the slots that begin a tile are used. Or
// there is a slot for each tile of the rows as a whole, and one more per expert.
struct SlotCount {
  int64_t slots;
  bool slot_is_row;
};
inline SlotCount CountSlots(int num_rows, int num_experts, int rows) {
  if (num_experts == 0) {
    return {(num_rows + rows - 1) / rows, false};
  }
  const int64_t tiles = int64_t{num_rows} / rows + num_experts;
  return num_rows <= tiles ? SlotCount{num_rows, true} : SlotCount{tiles, false};
}

// Assign each segment its blocks of `outputs` outputs, and return the number of blocks.
inline int64_t CutOutputs(LinearKernelParams* params, int outputs) {
  int64_t blocks = 0;
  for (int i = 0; i < params->num_segments; ++i) {
    params->segments[i].first_block = static_cast<int32_t>(blocks);
    blocks += (params->segments[i].outputs + outputs - 1) / outputs;
  }
  return blocks;
}

// Find the rows of a slot. Return false for a slot without rows.
TM_DEVICE bool FindExpertRows(const LinearKernelParams& p, int slot, int rows, int* expert,
                              LinearBlock* block) {
  const int lane = ThreadIndexX() & 31;
  // Count the experts whose slots begin at or before this one. Of experts with the same begin, only
  // the last has rows.
  int before = 0;
  for (int e = lane; e - lane < p.num_experts; e += 32) {
    const int first = e < p.num_experts ? LoadGlobal(p.offsets + e) : 0;
    const int begin = p.slot_is_row ? first : first / rows + e;
    before += CountInWarp(e < p.num_experts && begin <= slot);
  }
  *expert = before - 1;
  const int first = LoadGlobal(p.offsets + *expert);
  const int end = LoadGlobal(p.offsets + *expert + 1);
  const int at = p.slot_is_row ? slot : first + (slot - first / rows - *expert) * rows;
  if (at >= end || (p.slot_is_row && (slot - first) % rows != 0)) {
    return false;
  }
  block->first_row = at;
  block->num_rows = end - at < rows ? end - at : rows;
  return true;
}

// Find the outputs of a block: `outputs` of them, from block `y` on.
TM_DEVICE void FindOutputs(const LinearKernelParams& p, int y, int outputs, LinearBlock* block) {
  int s = 0;
  for (int i = 1; i < kMaxSegments; ++i) {
    s += i < p.num_segments && p.segments[i].first_block <= y;
  }
  const LinearSegment& segment = p.segments[s];  // a copy would be in local memory
  block->weight = segment.weight;
  block->bias = segment.bias;
  block->factor = segment.factor;
  block->first_output = (y - segment.first_block) * outputs;
  block->num_outputs = segment.outputs;
  block->y_column = segment.first_output;
}

// Use the weight of an expert in place of the segment's.
TM_DEVICE void UseExpert(const LinearKernelParams& p, int expert, LinearBlock* block) {
  const auto weight = LoadGlobal(p.experts + expert);
  block->weight = weight.weight;
  block->bias = weight.bias;
  block->factor = weight.factor;
}

// Find the part of a block of the grid: up to `rows` rows, those of `slot`, and `outputs` outputs.
// All lanes of a warp must call it. Return false for a slot without rows.
TM_DEVICE bool FindBlock(const LinearKernelParams& p, int slot, int rows, int outputs,
                         LinearBlock* block) {
  FindOutputs(p, BlockIndexY(), outputs, block);
  if (p.experts == nullptr) {
    block->first_row = slot * rows;
    block->num_rows = p.num_rows - block->first_row < rows ? p.num_rows - block->first_row : rows;
    return true;
  }
  int expert;
  if (!FindExpertRows(p, slot, rows, &expert, block)) {
    return false;
  }
  UseExpert(p, expert, block);
  return true;
}

// Return row `row` of the block's rows of x. Past the end it is the last row, whose extra results
// are not stored.
TM_DEVICE const float* RowOfX(const LinearKernelParams& p, const LinearBlock& block, int row) {
  const int at = block.first_row + (row < block.num_rows ? row : block.num_rows - 1);
  const int64_t x_row = p.x_rows != nullptr ? LoadGlobal(p.x_rows + at) : at;
  return p.x + x_row * p.x_stride;
}

// Store the block's rows of x, normed. `scale_of` returns 1 / rms of a row.
template <class ScaleOf>
TM_DEVICE void StoreNormed(const LinearKernelParams& p, const LinearBlock& block,
                           const FusedNorm& norm, int threads, ScaleOf scale_of) {
  for (int row = 0; row < block.num_rows; ++row) {
    const float scale = scale_of(row);
    const float* x = RowOfX(p, block, row);
    float* out = norm.out + int64_t{block.first_row + row} * p.cols;
    for (int i = 4 * ThreadIndexX(); i < p.cols; i += 4 * threads) {
      auto piece = LoadFloats<4>(x + i);
      const auto weight = LoadFloats<4>(norm.weight + i);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        piece.v[j] = piece.v[j] * scale * weight.v[j];
      }
      StoreFloats(out + i, piece);
    }
  }
}

// Return factor sum + bias for an output of a matrix. With kFactor false, the factor is 1 and takes
// no register.
template <bool kFactor>
TM_DEVICE float FinishSum(float sum, float factor, const float* bias, int output) {
  if constexpr (kFactor) {
    sum *= factor;
  }
  return bias != nullptr ? sum + LoadGlobal(bias + output) : sum;
}

// Store y (+)= factor sum + bias for one row of the block and one output of the weight, if both
// exist.
template <bool kFactor>
TM_DEVICE void StoreOutput(const LinearKernelParams& p, const LinearBlock& block, int row,
                           int output, float sum) {
  if (row >= block.num_rows || output >= block.num_outputs) {
    return;
  }
  int y_row = block.first_row + row;
  float* y = p.y + block.y_column + output;
  if (p.expert_rows > 0) {
    y += y_row / p.expert_rows * p.y_expert_stride;
    y_row %= p.expert_rows;
  }
  y += y_row * p.y_stride;
  sum = FinishSum<kFactor>(sum, block.factor, block.bias, output);
  if (p.accumulate) {
    sum += LoadGlobal(static_cast<const float*>(y));
  }
  StoreGlobal(y, sum);
}

}  // namespace turbomind::cuda
