#pragma once

// ⑥⑦ The kernels of recurrent layers, compiled once per instruction set (isa/) and passed as
// function pointers. Only plain structs: files of different instruction sets must share no inline
// code through this header. Every kernel returns the same bits with every instruction set, split of
// the work and cut of a sequence into steps.

#include <cstddef>
#include <cstdint>

#include "turbomind/kv/state_format.h"
#include "turbomind/ops/recurrent_params.h"

namespace turbomind {

// The new tokens of a sequence, and where its state is written.
struct SequenceStep {
  int32_t slot = 0;     // of the working state
  int first_token = 0;  // in the batch
  int num_tokens = 0;
  bool is_first = false;             // the step has the first position: the state is zero
  const StateSave* saves = nullptr;  // [num_saves] of this sequence
  int num_saves = 0;
};

// Channels [begin, end) of a convolution. REQUIRES: both are multiples of 16, and the run has at
// most kMaxChannelRun channels.
struct ChannelRun {
  int begin = 0;
  int end = 0;
};
inline constexpr int kMaxChannelRun = 256;  // whose weights and inputs lie in L1

// Columns [begin, end) of the state of a value head. REQUIRES: both are multiples of 16.
struct ColumnRun {
  int head = 0;
  int begin = 0;
  int end = 0;
};
inline constexpr int kMinColumnRun = 64;  // unless a head has fewer

// Rows of a state, and what a checkpoint has of them.
struct StateRows {
  float* values = nullptr;     // [num_rows, cols]
  std::byte* codes = nullptr;  // same, in `format`
  float* scales = nullptr;     // [num_rows]; for kInt8
  int64_t num_rows = 0;
  int cols = 0;
  StateFormat format = StateFormat::kF32;
};

struct CpuRecurrentKernels {
  void (*short_convolution)(const ShortConvolutionParams& params, const SequenceStep& step,
                            const ChannelRun& run) = nullptr;
  void (*gated_delta)(const GatedDeltaParams& params, const SequenceStep& step,
                      const ColumnRun& run) = nullptr;
  void (*selective_scan)(const SelectiveScanParams& params, const SequenceStep& step,
                         const ColumnRun& run) = nullptr;
  void (*encode_state)(const StateRows& rows) = nullptr;  // from values to codes
  void (*decode_state)(const StateRows& rows) = nullptr;  // back
};

namespace scalar {
void FillRecurrentKernels(CpuRecurrentKernels& kernels);
}
namespace avx2 {
void FillRecurrentKernels(CpuRecurrentKernels& kernels);
}
namespace avx512 {
void FillRecurrentKernels(CpuRecurrentKernels& kernels);
}

}  // namespace turbomind
