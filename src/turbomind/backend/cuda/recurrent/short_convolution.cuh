#pragma once

// ⑥⑦ The short convolution, gated norms and sigmoid gates on the GPU. All are bound by the bytes of
// the activations.

#include <cmath>
#include <cstdint>

#include "turbomind/backend/cuda/dense/elementwise.cuh"
#include "turbomind/backend/cuda/recurrent/sequence_step.cuh"
#include "turbomind/backend/cuda/runtime/intrinsics.cuh"

namespace turbomind::cuda {

inline constexpr int kConvolutionWarps = 8;
static_assert(kMaxConvolutionKernel - 1 <= kConvolutionWarps);

// Grid: sequences × ⌈channels / 32⌉. A lane owns a channel, and the warps take turns with tokens.
// Warp w also writes row w of the state, after every warp has read the old one.
__global__ void __launch_bounds__(32 * kConvolutionWarps)
    ShortConvolutionKernel(ShortConvolutionParams p) {
  BeginKernel();
  const int warp = ThreadIndexX() / 32;
  const int runs = (p.channels + 31) / 32;
  const int channel = BlockIndexX() % runs * 32 + (ThreadIndexX() & 31);
  const bool has_channel = channel < p.channels;
  const int seq = BlockIndexX() / runs;
  SequenceStep step(p.batch, p.states, seq);
  const int history = p.kernel - 1;
  float* state = p.state.At(step.slot);
  // Return the input of a token, counted from the first new one.
  const auto input = [&](int t) {
    if (!has_channel || (t < 0 && step.is_first)) {
      return 0.f;
    }
    if (t < 0) {
      return LoadGlobal(state + int64_t{history + t} * p.channels + channel);
    }
    const int64_t at = (step.first_token + t) * p.x_stride + channel;
    const float x = LoadGlobal(p.x + at);
    return p.in_gate == nullptr ? x : x * LoadGlobal(p.in_gate + at);
  };
  const float bias = p.bias != nullptr && has_channel ? LoadGlobal(p.bias + channel) : 0.f;
  float weight[kMaxConvolutionKernel];
#pragma unroll
  for (int j = 0; j < kMaxConvolutionKernel; ++j) {
    weight[j] = j < p.kernel && has_channel
                    ? LoadGlobal(p.weight + int64_t{j} * p.channels + channel)
                    : 0.f;
  }
  for (int t = warp; t < step.num_tokens; t += kConvolutionWarps) {
    float sum = bias;
#pragma unroll
    for (int j = 0; j < kMaxConvolutionKernel; ++j) {
      if (j < p.kernel) {
        sum += weight[j] * input(t + j - history);
      }
    }
    if (has_channel) {
      const int64_t token = step.first_token + t;
      float value = p.silu ? sum * Sigmoid(sum) : sum;
      if (p.out_gate != nullptr) {
        value *= LoadGlobal(p.out_gate + token * p.x_stride + channel);
      }
      StoreGlobal(p.out + token * p.channels + channel, value);
    }
  }
  const int64_t offset = int64_t{warp} * p.channels + channel;
  for (; warp < history && step.save_tokens > 0; step.FindSave(seq)) {
    const float value = input(step.save_tokens - history + warp);
    if (has_channel) {
      StoreGlobal(p.state.At(step.save_slot) + offset, value);
    }
  }
  const float last = warp < history ? input(step.num_tokens - history + warp) : 0.f;
  SyncBlock();
  if (warp < history && has_channel) {
    StoreGlobal(state + offset, last);
  }
}

inline constexpr int kGatedNormWarps = 4;
inline constexpr int kLongRun = 512;  // values from which on a run has a block

// A warp owns a run of `group` values, or a block owns a long one, and then has 4 kGatedNormWarps
// bytes of shared memory. The values are read twice if there is a norm.
template <bool kIsLong>
__global__ void __launch_bounds__(32 * kGatedNormWarps) GatedNormKernel(GatedNormParams p) {
  BeginKernel();
  constexpr int kThreads = kIsLong ? 32 * kGatedNormWarps : 32;
  const int64_t first_run = int64_t{BlockIndexX()} * (kIsLong ? 1 : kGatedNormWarps);
  const int64_t run = first_run + ThreadIndexX() / kThreads;
  const int thread = ThreadIndexX() % kThreads;
  const int runs = p.dim / p.group;
  if (run >= int64_t{p.num_rows} * runs) {
    return;
  }
  const int first = static_cast<int>(run % runs) * p.group;
  const float* x = p.x + run * p.group;
  const float* z = p.z + run / runs * p.z_stride + first;
  const auto gate = [&](int i) {
    const float value = LoadGlobal(z + i);
    return value * Sigmoid(value);
  };
  const auto input = [&](int i) { return LoadGlobal(x + i) * (p.gate_first ? gate(i) : 1.f); };
  float scale = 1.f;
  if (p.weight != nullptr) {
    float squares = 0.f;
    for (int i = thread; i < p.group; i += kThreads) {
      const float value = input(i);
      squares += value * value;
    }
    squares = kIsLong ? AddInBlock(squares, thread, kGatedNormWarps) : AddInWarp(squares);
    scale = 1.f / sqrtf(squares / static_cast<float>(p.group) + p.eps);
  }
  for (int i = thread; i < p.group; i += kThreads) {
    const float weight = p.weight != nullptr ? LoadGlobal(p.weight + first + i) : 1.f;
    const float normed = input(i) * scale * weight;
    StoreGlobal(p.out + run * p.group + i, p.gate_first ? normed : normed * gate(i));
  }
}

inline constexpr int kSigmoidThreads = 256;

// One thread per value.
__global__ void __launch_bounds__(kSigmoidThreads) SigmoidGateKernel(SigmoidGateParams p) {
  BeginKernel();
  const int64_t at = int64_t{BlockIndexX()} * kSigmoidThreads + ThreadIndexX();
  if (at < p.count) {
    StoreGlobal(p.x + at, LoadGlobal(p.x + at) * Sigmoid(LoadGlobal(p.gate + at)));
  }
}

}  // namespace turbomind::cuda
