#pragma once

// ⑥⑦ The kernels of recurrent layers, compiled once per instruction set (isa/) and passed as
// function pointers. Only plain structs: files of different instruction sets must share no inline
// code through this header. Every kernel returns the same bits with every instruction set, split of
// the work and cut of a sequence into steps.

#include <cstdint>

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

struct CpuRecurrentKernels {
  void (*short_convolution)(const ShortConvolutionParams& params, const SequenceStep& step,
                            const ChannelRun& run) = nullptr;
  void (*gated_delta)(const GatedDeltaParams& params, const SequenceStep& step,
                      const ColumnRun& run) = nullptr;
  void (*selective_scan)(const SelectiveScanParams& params, const SequenceStep& step,
                         const ColumnRun& run) = nullptr;
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
