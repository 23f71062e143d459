#pragma once

// Batches of a layer with its cache on a simulated GPU, and their errors against FP64 attention
// over the values that the codecs define, for the tests of prefill attention.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "cpu/attention_fixture.h"
#include "cuda/gpu_array.h"
#include "turbomind/backend/cuda/attention/attention_ops.h"
#include "turbomind/backend/cuda/linear/linear_wide.h"
#include "turbomind/backend/cuda/prefill/prefill_ops.h"

namespace turbomind::cuda::prefill_step {

using enum KvCacheMode;

// Relative to the output's L2 norm. FP16 operands have 11 bits; weights of a BF16 cache have 8.
inline constexpr double kMaxHalfError = 1e-3;
inline constexpr double kMaxBFloatError = 6e-3;
inline constexpr int kManySms = 1 << 20;  // no chunk fills so many, which selects the smaller tiles

// The queries at positions [begin, end) of the cache's sequence. Each chunk is one sequence of the
// batch.
struct Chunk {
  int begin = 0;
  int end = 0;
};

struct Batch {
  std::vector<Chunk> chunks;  // decode sequences first, with one token each
  int num_decode = 0;
  int num_sms = 1;
  bool deterministic = false;
  PrefillProducts products = PrefillProducts::kMma;  // where it can run
  int64_t scratch_bytes = kPrefillScratchBytes;
  // Factors for the scales of the quantized pool and for the softmax scale.
  float key_scale = 1.f;
  float value_scale = 1.f;
  float softmax_factor = 1.f;

  int num_tokens() const {
    int tokens = 0;
    for (const Chunk& chunk : chunks) {
      tokens += chunk.end - chunk.begin;
    }
    return tokens;
  }
};

// The arrays of a batch on the host.
struct HostBatch {
  HostBatch(const Case& c, Caches& caches, const Inputs& in, const Batch& b);

  int width;
  std::vector<int32_t> cu_seqlens = {0};
  std::vector<int32_t> context_lens;
  std::vector<int32_t> positions;
  std::vector<int32_t> tables;
  std::vector<int32_t> window16_tables;
  std::vector<float> q;  // q_heads of a wider row, as in qkv
  std::vector<float> q_dot_mean;
};

inline HostBatch::HostBatch(const Case& c, Caches& caches, const Inputs& in, const Batch& b)
    : width((c.group + 2) * c.shape.kv_heads * c.shape.head_dim) {
  const int q_heads = c.group * c.shape.kv_heads;
  const int row = q_heads * c.shape.head_dim;
  const CpuKvKernels kernels = CpuKvKernelsFor("scalar");
  ThreadPool pool(1);
  for (const Chunk& chunk : b.chunks) {
    for (int position = chunk.begin; position < chunk.end; ++position) {
      positions.push_back(position);
      const float* from = in.q.data() + int64_t{position} * row;
      q.insert(q.end(), from, from + row);
      q.resize(positions.size() * static_cast<size_t>(width), NAN);
      const float* means = in.q_dot_mean.data() + int64_t{position} * q_heads;
      q_dot_mean.insert(q_dot_mean.end(), means, means + q_heads);
    }
    cu_seqlens.push_back(static_cast<int32_t>(positions.size()));
    context_lens.push_back(chunk.end);
    const StepTables step =
        TablesOf({kernels, pool, c, caches, in}, chunk.begin, chunk.end - chunk.begin);
    tables.insert(tables.end(), step.quantized.begin(), step.quantized.end());
    window16_tables.insert(window16_tables.end(), step.window16.begin(), step.window16.end());
  }
}

// All arrays on the simulated GPU.
struct GpuRun {
  GpuRun(const Case& c, Caches& caches, const Inputs& in, const Batch& b);
  ~GpuRun() {
    memory.clear();
    DestroyStream(stream);
  }

  template <class T>
  T* Upload(const std::vector<T>& values) {
    const auto array = std::make_shared<GpuArray<T>>(stream, values);
    memory.push_back(array);
    return array->data();
  }
  KvLayerView Upload(TestCache& cache, const Batch& b);
  std::vector<float> Run(const Batch& b);

  HostBatch host;
  Stream stream = CreateStream();
  std::vector<std::shared_ptr<void>> memory;
  AttentionParams params;
  size_t num_out;
};

inline KvLayerView GpuRun::Upload(TestCache& cache, const Batch& b) {
  KvLayerView view = cache.view();
  view.data = Upload(cache.data()) + (view.data - cache.data().data());
  if (view.scales != nullptr) {
    view.scales = Upload(cache.scales()) + (view.scales - cache.scales().data());
  }
  for (int side = 0; side < 2; ++side) {
    if (view.global_scale[side] != nullptr) {
      std::vector<float> global_scale(view.global_scale[side],
                                      view.global_scale[side] + view.kv_heads);
      for (float& x : global_scale) {
        x *= side == 0 ? b.key_scale : b.value_scale;
      }
      view.global_scale[side] = Upload(global_scale);
    }
  }
  return view;
}

inline GpuRun::GpuRun(const Case& c, Caches& caches, const Inputs& in, const Batch& b)
    : host(c, caches, in, b) {
  const auto seqs = static_cast<int>(b.chunks.size());
  params.q = Upload(host.q);
  params.q_stride = host.width;
  params.q_heads = c.group * c.shape.kv_heads;
  num_out = host.positions.size() * static_cast<size_t>(params.q_heads * c.shape.head_dim);
  params.out = Upload(std::vector<float>(num_out));
  params.softmax_scale = b.softmax_factor / std::sqrt(static_cast<float>(c.shape.head_dim));
  params.score_cap = c.score_cap;
  params.window = c.window;
  params.sinks = c.sinks ? Upload(in.sinks) : nullptr;
  params.q_dot_mean = c.mean ? Upload(host.q_dot_mean) : nullptr;
  params.fast_bias = {c.fast_pairs, Upload(in.directions), Upload(in.waves_of), Upload(in.waves),
                      in.num_positions};
  params.kv = Upload(caches.quantized, b);
  params.rule = caches.rule;
  BatchView& batch = params.batch;
  batch.num_seqs = seqs;
  batch.num_decode = b.num_decode;
  batch.num_tokens = host.cu_seqlens.back();
  batch.cu_seqlens = Upload(host.cu_seqlens);
  batch.context_lens = Upload(host.context_lens);
  batch.positions = Upload(host.positions);
  batch.block_tables = Upload(host.tables);
  batch.block_table_stride = static_cast<int64_t>(host.tables.size()) / seqs;
  if (caches.rule.enabled()) {
    params.window16 = Upload(caches.window16, b);
    batch.window16_tables = Upload(host.window16_tables);
  }
}

inline std::vector<float> GpuRun::Run(const Batch& b) {
  const std::vector<float> sentinels(num_out, kSentinel);
  CopyBytes(params.out, sentinels.data(), num_out * sizeof(float), stream);
  Workspace workspace(stream);
  Context context;
  context.stream = stream;
  context.gpu = PropertiesOf(0);
  context.gpu.num_sms = b.num_sms;
  context.deterministic = b.deterministic;
  context.has_warp_groups = ProbeWarpGroups(stream);
  context.workspace = &workspace;
  BatchView batch = params.batch;
  batch.cu_seqlens = host.cu_seqlens.data();
  batch.context_lens = host.context_lens.data();
  batch.positions = host.positions.data();
  batch.block_tables = host.tables.data();
  batch.window16_tables = host.window16_tables.data();
  PrefillChoices choices;
  for (DataType type : {DataType::kFloat16, DataType::kBFloat16}) {
    for (bool fills_gpu : {false, true}) {
      choices.Set({type, params.kv.head_dim, fills_gpu}, b.products);
    }
  }
  CudaPrefillAttention(context, choices, params, batch, {batch.num_decode, batch.num_seqs},
                       b.scratch_bytes);
  std::vector<float> out(num_out);
  CopyBytes(out.data(), params.out, num_out * sizeof(float), stream);
  Synchronize(stream);
  return out;
}

// Return the error of `out` for the tokens of `b`. Check that rows of decode sequences are
// untouched.
inline double RelativeError(const Case& c, Caches& caches, const Inputs& in, const Batch& b,
                            const std::vector<float>& out) {
  const int q_heads = c.group * c.shape.kv_heads;
  const float* got = out.data();
  double error = 0;
  double norm = 0;
  for (size_t i = 0; i < b.chunks.size(); ++i) {
    for (int position = b.chunks[i].begin; position < b.chunks[i].end; ++position) {
      for (int head = 0; head < q_heads; ++head, got += c.shape.head_dim) {
        if (static_cast<int>(i) < b.num_decode) {
          CHECK(std::all_of(got, got + c.shape.head_dim, [](float x) { return x == kSentinel; }));
          continue;
        }
        const std::vector<double> want = Reference(c, caches, in, position, head);
        for (size_t d = 0; d < want.size(); ++d) {
          error += (got[d] - want[d]) * (got[d] - want[d]);
          norm += want[d] * want[d];
        }
      }
    }
  }
  return std::sqrt(error / norm);
}

inline double Limit(const Case& c) {
  const bool bfloat =
      c.shape.k == kNone && c.shape.v == kNone && c.shape.dtype == DataType::kBFloat16;
  return bfloat ? kMaxBFloatError : kMaxHalfError;
}

// Run a batch with its kernel, and check the error.
inline std::vector<float> CheckKernel(const Case& c, const Batch& b) {
  const std::string name = Name(c, "cuda") + ", " + NameOf(b.products);
  CAPTURE(name);
  Caches caches(c);
  const Inputs in = MakeInputs(c);
  GpuRun run(c, caches, in, b);
  const std::vector<float> out = run.Run(b);
  CHECK(RelativeError(c, caches, in, b, out) < Limit(c));
  return out;
}

// Check both kernels, of which products of warp groups need a batch that fills the GPU. Return the
// results of the other one.
inline std::vector<float> CheckBatch(const Case& c, Batch b) {
  std::vector<float> out = CheckKernel(c, b);
  if (!b.deterministic && c.shape.head_dim != 80) {
    b.products = PrefillProducts::kWarpGroups;
    b.num_sms = 1;
    CheckKernel(c, b);
  }
  return out;
}

inline Case MakeCase(const FormatPair& pair, int head_dim, DataType dtype = DataType::kFloat16) {
  Case c;
  c.shape.k = pair.k;
  c.shape.v = pair.v;
  c.shape.head_dim = head_dim;
  c.shape.dtype = dtype;
  c.shape.context = 150;
  c.group = 2;
  return c;
}

}  // namespace turbomind::cuda::prefill_step
