// ⑥⑦ The convolution of some channels of one sequence over its new tokens. Each output is the bias,
// to which the products are added from the oldest input on.

#include "turbomind/backend/cpu/isa/recurrent/recurrent.h"
#include "turbomind/backend/cpu/isa/simd/simd.h"
#include "turbomind/backend/cpu/isa/simd/simd_math.h"

namespace turbomind::TM_ISA {
namespace {

constexpr float kZeros[kMaxChannelRun] = {};

// The inputs of a run of channels, before and in the step.
struct Inputs {
  const float* x = nullptr;     // of the first new token
  const float* gate = nullptr;  // same: a factor of x, or null
  int64_t stride = 0;
  const float* state = nullptr;  // null: zeros
  int64_t state_stride = 0;
  int history = 0;  // rows of the state

  // Returns the inputs of `token`, counted from the first new one, without the gate.
  // REQUIRES: token >= -history.
  TM_HD const float* Row(int token) const {
    return token >= 0         ? x + token * stride
           : state == nullptr ? kZeros
                              : state + (history + token) * state_stride;
  }
  // Returns the factors of this row, or null.
  TM_HD const float* Gate(int token) const {
    return token >= 0 && gate != nullptr ? gate + token * stride : nullptr;
  }
};

// 16 inputs from `channel` on. A row of the state has no gate.
template <bool kGated>
TM_HD F32x16 Read(const float* row, const float* gate, int channel) {
  const F32x16 x = Load(row + channel);
  return kGated && gate != nullptr ? Mul(x, Load(gate + channel)) : x;
}

template <int kKernel, bool kGated>
void Convolve(const ShortConvolutionParams& p, const Inputs& inputs, const SequenceStep& step,
              const ChannelRun& run) {
  for (int t = 0; t < step.num_tokens; ++t) {
    const float* rows[kKernel];
    const float* gates[kKernel];
    for (int j = 0; j < kKernel; ++j) {
      rows[j] = inputs.Row(t + j - (kKernel - 1));
      gates[j] = inputs.Gate(t + j - (kKernel - 1));
    }
    const int64_t token = int64_t{step.first_token} + t;
    float* out = p.out + token * p.channels;
    for (int c = run.begin; c < run.end; c += kLanes) {
      F32x16 sum = p.bias != nullptr ? Load(p.bias + c) : Zero();
      for (int j = 0; j < kKernel; ++j) {
        const F32x16 x = Read<kGated>(rows[j], gates[j], c - run.begin);
        sum = Fma(Load(p.weight + int64_t{j} * p.channels + c), x, sum);
      }
      sum = p.silu ? Silu(sum) : sum;
      if (p.out_gate != nullptr) {
        sum = Mul(sum, Load(p.out_gate + token * p.x_stride + c));
      }
      Store(out + c, sum);
    }
  }
}

// Writes the state after `num_tokens` new tokens. `to` may be the state that `inputs` reads.
void WriteState(const Inputs& inputs, int num_tokens, const ChannelRun& run, float* to) {
  for (int i = 0; i < inputs.history; ++i) {
    const float* from = inputs.Row(num_tokens - inputs.history + i);
    const float* gate = inputs.Gate(num_tokens - inputs.history + i);
    for (int c = 0; c < run.end - run.begin; c += kLanes) {
      Store(to + i * inputs.state_stride + c, Read<true>(from, gate, c));
    }
  }
}

template <bool kGated>
void ConvolveAny(const ShortConvolutionParams& p, const Inputs& inputs, const SequenceStep& step,
                 const ChannelRun& run) {
  static_assert(kMaxConvolutionKernel == 8);
  switch (p.kernel) {
    case 2:
      return Convolve<2, kGated>(p, inputs, step, run);
    case 3:
      return Convolve<3, kGated>(p, inputs, step, run);
    case 4:
      return Convolve<4, kGated>(p, inputs, step, run);
    case 5:
      return Convolve<5, kGated>(p, inputs, step, run);
    case 6:
      return Convolve<6, kGated>(p, inputs, step, run);
    case 7:
      return Convolve<7, kGated>(p, inputs, step, run);
    default:
      return Convolve<8, kGated>(p, inputs, step, run);
  }
}

}  // namespace

void ShortConvolutionRun(const ShortConvolutionParams& params, const SequenceStep& step,
                         const ChannelRun& run) {
  float* state = params.state.At(step.slot) + run.begin;
  const int64_t first = step.first_token * params.x_stride + run.begin;
  const Inputs inputs = {.x = params.x + first,
                         .gate = params.in_gate != nullptr ? params.in_gate + first : nullptr,
                         .stride = params.x_stride,
                         .state = step.is_first ? nullptr : state,
                         .state_stride = params.channels,
                         .history = params.kernel - 1};
  if (params.in_gate != nullptr) {
    ConvolveAny<true>(params, inputs, step, run);
  } else {
    ConvolveAny<false>(params, inputs, step, run);
  }
  for (int i = 0; i < step.num_saves; ++i) {
    const StateSave& save = step.saves[i];
    float* to = params.state.At(save.slot) + run.begin;
    WriteState(inputs, save.num_tokens, run, to);
  }
  WriteState(inputs, step.num_tokens, run, state);
}

}  // namespace turbomind::TM_ISA
