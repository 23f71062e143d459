#pragma once

// ⑥⑦ The kernels of dense_ops.h for independent rows: RoPE tables, norm, activations, argmax. A
// row's result does not depend on its batch. kWidth is 4 if every row is 16-byte aligned, otherwise
// 1.

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "turbomind/backend/cuda/dense/activation.cuh"
#include "turbomind/backend/cuda/dense/elementwise.cuh"
#include "turbomind/ops/params.h"

namespace turbomind::cuda {

struct RopeParams {
  const float* inv_freq = nullptr;     // [num_sets, half]
  const int32_t* positions = nullptr;  // [num_tokens]
  const int32_t* sets = nullptr;       // [num_tokens]; null: all 0
  float* cos = nullptr;                // [num_tokens, half]
  float* sin = nullptr;                // same
  int64_t num_values = 0;              // num_tokens * half
  int half = 0;
  float attention_factor = 1.f;
  int block_seq_len = 0;  // as in FillRopeParams
};

inline constexpr int kRopeThreads = 128;

// One thread per value of cos.
__global__ void __launch_bounds__(kRopeThreads) FillRopeKernel(RopeParams p) {
  BeginKernel();
  const int64_t at = static_cast<int64_t>(BlockIndexX()) * kRopeThreads + ThreadIndexX();
  if (at >= p.num_values) {
    return;
  }
  const int i = static_cast<int>(at % p.half);
  const int64_t token = at / p.half;
  int position = LoadGlobal(p.positions + token);
  if (p.block_seq_len > 0) {
    position = position / p.block_seq_len * p.block_seq_len + p.block_seq_len / 2;
  }
  const int set = p.sets == nullptr ? 0 : LoadGlobal(p.sets + token);
  const float frequency = LoadGlobal(p.inv_freq + set * p.half + i);
  float sin;
  float cos;
  sincosf(frequency * static_cast<float>(position), &sin, &cos);
  StoreGlobal(p.cos + at, cos * p.attention_factor);
  StoreGlobal(p.sin + at, sin * p.attention_factor);
}

struct NormTask {
  NormParams op;
  int num_warps = 0;
};

inline constexpr int kNormHeld = 4;  // pieces of x and of the weight per thread, in registers
inline constexpr int kMaxNormWarps = 32;

// One block of num_warps warps per row, with 4 num_warps bytes of shared memory. Pieces beyond
// kNormHeld per thread are read twice.
template <int kWidth>
__global__ void __launch_bounds__(32 * kMaxNormWarps) NormKernel(NormTask task) {
  BeginKernel();
  const NormParams& p = task.op;
  const int thread = ThreadIndexX();
  const int threads = 32 * task.num_warps;
  const int count = p.dim / kWidth;
  const int64_t stride = p.stride != 0 ? p.stride : p.dim;
  const float* x = p.x + BlockIndexX() * stride;
  float* out = p.out + BlockIndexX() * stride;
  Floats<kWidth> held[kNormHeld] = {};
  Floats<kWidth> weight[kNormHeld] = {};
#pragma unroll
  for (int i = 0; i < kNormHeld; ++i) {
    const int at = thread + i * threads;
    if (at < count) {
      held[i] = LoadFloats<kWidth>(x + at * kWidth);
      weight[i] = LoadFloats<kWidth>(p.weight + at * kWidth);
    }
  }
  // Add fn(value) of the thread's values. Values that are not held are 0 where i exceeds the row.
  const auto sum_of = [&](auto fn) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kNormHeld; ++i) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        sum += thread + i * threads < count ? fn(held[i].v[j]) : 0.f;
      }
    }
    for (int at = thread + kNormHeld * threads; at < count; at += threads) {
      const Floats<kWidth> piece = LoadFloats<kWidth>(x + at * kWidth);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        sum += fn(piece.v[j]);
      }
    }
    return AddInBlock(sum, thread, task.num_warps) / static_cast<float>(p.dim);
  };
  float mean = 0.f;
  if (p.centered) {
    mean = sum_of([](float value) { return value; });
    SyncBlock();  // every thread has read the sums before the next ones are written
  }
  const float variance = sum_of([mean](float value) { return (value - mean) * (value - mean); });
  const float scale = 1.f / sqrtf(variance + p.eps);
  const auto store = [&](int at, Floats<kWidth> piece, const Floats<kWidth>& by) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      piece.v[j] = (piece.v[j] - mean) * scale * by.v[j];
    }
    if (p.bias != nullptr) {
      const Floats<kWidth> bias = LoadFloats<kWidth>(p.bias + at * kWidth);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        piece.v[j] += bias.v[j];
      }
    }
    StoreFloats(out + at * kWidth, piece);
  };
#pragma unroll
  for (int i = 0; i < kNormHeld; ++i) {
    const int at = thread + i * threads;
    if (at < count) {
      store(at, held[i], weight[i]);
    }
  }
  for (int at = thread + kNormHeld * threads; at < count; at += threads) {
    const Floats<kWidth> piece = LoadFloats<kWidth>(x + at * kWidth);
    store(at, piece, LoadFloats<kWidth>(p.weight + at * kWidth));
  }
}

inline constexpr int kValueThreads = 256;

// One thread per value.
__global__ void __launch_bounds__(kValueThreads) AddKernel(AddParams p) {
  BeginKernel();
  const int64_t at = static_cast<int64_t>(BlockIndexX()) * kValueThreads + ThreadIndexX();
  if (at < p.count) {
    StoreGlobal(p.out + at, LoadGlobal(p.out + at) + MulRounded(p.scale, LoadGlobal(p.x + at)));
  }
}

// One thread per value.
__global__ void __launch_bounds__(kValueThreads) SoftCapKernel(SoftCapParams p) {
  BeginKernel();
  const int64_t at = static_cast<int64_t>(BlockIndexX()) * kValueThreads + ThreadIndexX();
  if (at < p.count) {
    const float x = LoadGlobal(p.x + at) * p.scale;
    StoreGlobal(p.x + at, p.cap == 0.f ? x : p.cap * tanhf(x / p.cap));
  }
}

inline constexpr int kGateThreads = 256;

// Grid: rows × ⌈dim / (kGateThreads kWidth)⌉.
template <int kWidth>
__global__ void __launch_bounds__(kGateThreads) GatedActivationKernel(GatedActivationParams p) {
  BeginKernel();
  const int at = (BlockIndexY() * kGateThreads + ThreadIndexX()) * kWidth;
  if (at >= p.dim) {
    return;
  }
  const float* row = p.gate_up + (p.gated ? 2 : 1) * static_cast<int64_t>(BlockIndexX()) * p.dim;
  Floats<kWidth> out;
  const int first = p.interleaved ? 2 * at : at;
  const int second = p.interleaved ? first + kWidth : (p.gated ? p.dim : 0) + at;
  const auto a = LoadFloats<kWidth>(row + first);
  const float* other = p.other + static_cast<int64_t>(BlockIndexX()) * p.other_stride + at;
  const auto b = LoadFloats<kWidth>(p.other != nullptr ? other : row + second);
  const float scale = p.row_scales != nullptr ? LoadGlobal(p.row_scales + BlockIndexX()) : 1.f;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    float gate = a.v[j];
    float up = b.v[j];
    if (p.interleaved && kWidth > 1) {
      const auto& half = 2 * j < kWidth ? a : b;
      gate = half.v[2 * j % kWidth];
      up = half.v[(2 * j + 1) % kWidth];
    }
    const float factor = p.other != nullptr ? up : 1.f;
    out.v[j] = ActivateGate(p, MulRounded(gate, scale), p.gated ? MulRounded(up, scale) : factor);
  }
  StoreFloats(p.out + static_cast<int64_t>(BlockIndexX()) * p.dim + at, out);
}

struct ArgMaxTask {
  ArgMaxRowsParams op;
  uint64_t* best = nullptr;  // [num_rows, num_parts]
  int num_parts = 0;
  int part = 0;  // values per part, a multiple of 4
};

inline constexpr int kArgMaxThreads = 256;
inline constexpr uint64_t kRefusedKey = ~uint64_t{0};  // above every RankKey

// Grid: parts of a row × rows. Writes the largest RankKey of each part: 0 if nothing is above
// -infinity, kRefusedKey for NaN or +infinity.
template <int kWidth>
__global__ void __launch_bounds__(kArgMaxThreads) ArgMaxPartsKernel(ArgMaxTask task) {
  BeginKernel();
  constexpr int kWarps = kArgMaxThreads / 32;
  constexpr float kHighest = FLT_MAX;
  const int thread = ThreadIndexX();
  const int row = BlockIndexY();
  const int begin = BlockIndexX() * task.part;
  const int left = task.op.vocab_size - begin;
  const int size = left < task.part ? left : task.part;
  const float* logits = task.op.logits + static_cast<int64_t>(row) * task.op.vocab_size + begin;
  float max_logit = -INFINITY;
  int at_max = -1;
  bool refused = false;
#pragma unroll 4
  for (int at = thread * kWidth; at < size; at += kArgMaxThreads * kWidth) {
    const auto piece = LoadFloats<kWidth>(logits + at);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float x = piece.v[j];
      refused |= !(x <= kHighest);
      at_max = x > max_logit ? at + j : at_max;
      max_logit = x > max_logit ? x : max_logit;
    }
  }
  uint64_t key = at_max < 0 ? 0 : RankKey(max_logit, begin + at_max);
  key = MaxKeyInWarp(refused ? kRefusedKey : key);
  if (thread % 32 == 0) {
    StoreShared(SharedMemory() + thread / 32 * sizeof(key), key);
  }
  SyncBlock();
  if (thread < 32) {
    key = thread < kWarps ? LoadShared<uint64_t>(SharedMemory() + thread * sizeof(key)) : 0;
    key = MaxKeyInWarp(key);
    if (thread == 0) {
      StoreGlobal(task.best + static_cast<int64_t>(row) * task.num_parts + BlockIndexX(), key);
    }
  }
}

// One block of kThreads threads, a warp, per row.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) ArgMaxRowsKernel(ArgMaxTask task) {
  BeginKernel();
  const uint64_t* best = task.best + static_cast<int64_t>(BlockIndexX()) * task.num_parts;
  uint64_t key = 0;
#pragma unroll 1
  for (int i = ThreadIndexX(); i < task.num_parts; i += kThreads) {
    const uint64_t other = LoadGlobal(best + i);
    key = other > key ? other : key;
  }
  key = MaxKeyInWarp(key);
  if (ThreadIndexX() == 0) {
    StoreGlobal(task.op.ids + BlockIndexX(), key == 0 || key == kRefusedKey ? -1 : IdOfKey(key));
  }
}

}  // namespace turbomind::cuda
