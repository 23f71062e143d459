#pragma once

// A small step over one layer's cache, on the CPU and on the GPU, for the tests of
// backend/cuda/kv/kv_ops.h.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cuda/gpu_array.h"
#include "kv/format_pairs.h"
#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/backend/cuda/runtime/context.h"
#include "turbomind/core/float_convert.h"
#include "turbomind/kv/layout.h"
#include "turbomind/ops/params.h"

namespace turbomind::cuda::kv_step {

struct Gpu {
  Gpu() { context.stream = CreateStream(); }
  ~Gpu() { DestroyStream(context.stream); }
  Stream stream() const { return context.stream; }
  Context context;
};

template <class T>
bool SameBytes(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// NaN bits may differ between processors.
inline bool SameFloats(const std::vector<float>& a, const std::vector<float>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](float x, float y) {
    return FloatBits(x) == FloatBits(y) || (IsNan(x) && IsNan(y));
  });
}

inline constexpr DataType kTypes[] = {DataType::kFloat16, DataType::kBFloat16};
inline constexpr int kBlocks = 12;  // per pool

struct Shape {
  FormatPair formats = {KvCacheMode::kFp4Nv, KvCacheMode::kFp4Nv};
  DataType dtype = DataType::kBFloat16;
  int head_dim = 64;
  int kv_heads = 2;
  int group = 2;
  int block_seq_len = 16;
  std::vector<int> contexts = {21, 18, 33};  // context lengths of the sequences after the step
  std::vector<int> new_tokens = {1, 2, 1};
  int num_decode = 1;
  float global_scale = 0.75f;
  bool k_offset = false;
  bool window_offset = false;
  KvCacheMode window_format = KvCacheMode::kNone;
  bool only_queries = false;
};

inline std::string Describe(const Shape& s) {
  return std::string(ToString(s.formats.k)) + " / " + ToString(s.formats.v) + ", " +
         ToString(s.dtype) + ", head_dim " + std::to_string(s.head_dim) + ", global scale " +
         std::to_string(s.global_scale) + (s.k_offset ? ", K offset" : "") +
         (s.only_queries ? ", only queries" : "") + ", window in " + ToString(s.window_format);
}

// Returns the window's format for a layer. 16-bit keys keep 16 bits.
inline KvCacheMode WindowFormat(const FormatPair& formats, bool int8) {
  return int8 && formats.k != KvCacheMode::kNone ? KvCacheMode::kInt8 : KvCacheMode::kNone;
}

inline block::Layout LayoutOf(const Shape& s, FormatPair formats, bool k_offset) {
  block::Config config;
  config.layers = {{formats.k, formats.v}};
  config.kv_heads = s.kv_heads;
  config.head_dim = s.head_dim;
  config.block_seq_len = s.block_seq_len;
  config.dtype = s.dtype;
  config.k_offset = k_offset;
  return block::Layout(config);
}

// Makes (scale, zero) of a row finite and smaller than 2.
inline void MakeFinite(uint8_t* params) {
  params[1] &= 0xbf;
  params[3] &= 0xbf;
}

// Makes (scale, zero) of all K offsets and, in an int8 window, of all rows finite.
inline void MakeFinite(const block::Layout& layout, bool rows, std::vector<std::byte>* pool) {
  const KvLayerView view = layout.LayerView(0, pool->data(), nullptr);
  for (int i = 0; i < kBlocks * view.kv_heads; ++i) {
    const int block = i / view.kv_heads;
    const int head = i % view.kv_heads;
    if (view.HasKOffset()) {
      MakeFinite(view.KOffset(block, head).metadata);
    }
    for (int slot = 0; rows && slot < view.block_seq_len; ++slot) {
      MakeFinite(view.Row(KvSide::kK, block, head, slot).metadata);
      MakeFinite(view.Row(KvSide::kV, block, head, slot).metadata);
    }
  }
}

// Everything that an op accesses, in vectors. The pools hold random bytes.
struct Step {
  explicit Step(const Shape& s, unsigned seed = 1);
  int kv_all() const { return (shape.group + (shape.only_queries ? 0 : 2)) * shape.kv_heads; }

  Shape shape;
  block::Layout layout;
  block::Layout window16_layout;
  std::vector<std::byte> data;
  std::vector<std::byte> scales;
  std::vector<std::byte> window16_data;
  std::vector<float> global_scale[2];
  std::vector<int32_t> cu_seqlens = {0};
  std::vector<int32_t> positions;
  std::vector<int32_t> tables;
  std::vector<int32_t> window16_tables;
  int table_stride = 0;
  std::vector<float> qkv;
  std::vector<float> bias;
  std::vector<float> q_norm;
  std::vector<float> k_norm;
  std::vector<float> v_norm;
  std::vector<float> rope_cos;
  std::vector<float> rope_sin;
  std::vector<float> k_mean;
  std::vector<float> k_base;
  std::vector<float> block_cos;
  std::vector<float> block_sin;
  std::vector<float> q_dot_mean;
  std::vector<int64_t> num_nonfinite = {5};
  std::vector<int64_t> num_clipped = {7};
  std::vector<PendingQuantization> blocks_to_quantize;
  int rope_dim = 0;
  bool norm_after_rope = false;
  QueryScaling query_scaling = {};
  bool rotate = false;
  bool search = false;
  bool window16 = false;
  std::mt19937 random;
};

inline std::vector<float> Normals(std::mt19937& random, size_t count, float mean = 0.f) {
  std::normal_distribution<float> normal(mean);
  std::vector<float> out(count);
  for (float& x : out) {
    x = normal(random);
  }
  return out;
}

inline Step::Step(const Shape& s, unsigned seed)
    : shape(s),
      layout(LayoutOf(s, s.formats, s.k_offset)),
      window16_layout(LayoutOf(s, {s.window_format, s.window_format}, s.window_offset)),
      data(static_cast<size_t>(kBlocks * layout.block_bytes())),
      scales(static_cast<size_t>(kBlocks * layout.scale_block_bytes())),
      window16_data(static_cast<size_t>(kBlocks * window16_layout.block_bytes())),
      random(seed) {
  for (std::vector<std::byte>* pool : {&data, &scales, &window16_data}) {
    std::generate(pool->begin(), pool->end(), [&] { return std::byte(random() % 256); });
  }
  MakeFinite(layout, false, &data);
  MakeFinite(window16_layout, s.window_format == KvCacheMode::kInt8, &window16_data);
  for (int side = 0; side < 2; ++side) {
    for (int head = 0; head < s.kv_heads; ++head) {
      global_scale[side].push_back(s.global_scale * static_cast<float>(1 + head + side));
    }
  }
  for (int context : s.contexts) {
    table_stride = std::max(table_stride, (context - 1) / s.block_seq_len + 2);
  }
  std::vector<int32_t> ids(kBlocks);
  std::iota(ids.begin(), ids.end(), 0);
  std::vector<int32_t> window16_ids = ids;
  std::shuffle(ids.begin(), ids.end(), random);
  std::shuffle(window16_ids.begin(), window16_ids.end(), random);
  size_t next = 0;
  for (size_t i = 0; i < s.contexts.size(); ++i) {
    cu_seqlens.push_back(cu_seqlens.back() + s.new_tokens[i]);
    for (int t = s.contexts[i] - s.new_tokens[i]; t < s.contexts[i]; ++t) {
      positions.push_back(t);
    }
    for (int block = 0; block < table_stride; ++block) {
      const bool used = block * s.block_seq_len < s.contexts[i];
      tables.push_back(used ? ids.at(next) : -1);
      window16_tables.push_back(used ? window16_ids.at(next) : -1);
      next += used;
    }
  }
  qkv = Normals(random, positions.size() * static_cast<size_t>(kv_all() * s.head_dim));
}

// The pointers of a step, on the CPU or on the GPU.
struct Pointers {
  std::byte* data;
  std::byte* scales;
  std::byte* window16_data;
  const float* global_scale[2];
  const int32_t* cu_seqlens;
  const int32_t* context_lens;
  const int32_t* positions;
  const int32_t* tables;
  const int32_t* window16_tables;
  float* qkv;
  const float* bias;
  const float* q_norm;
  const float* k_norm;
  const float* v_norm;
  const float* rope_cos;
  const float* rope_sin;
  const float* k_mean;
  const float* k_base;
  const float* block_cos;
  const float* block_sin;
  float* q_dot_mean;
  int64_t* num_nonfinite;
  int64_t* num_clipped;
  const PendingQuantization* blocks_to_quantize;
};

template <class T>
T* OrNull(std::vector<T>& v) {
  return v.empty() ? nullptr : v.data();
}

inline Pointers CpuPointers(Step& s) {
  return {OrNull(s.data),
          OrNull(s.scales),
          OrNull(s.window16_data),
          {OrNull(s.global_scale[0]), OrNull(s.global_scale[1])},
          OrNull(s.cu_seqlens),
          OrNull(s.shape.contexts),
          OrNull(s.positions),
          OrNull(s.tables),
          OrNull(s.window16_tables),
          OrNull(s.qkv),
          OrNull(s.bias),
          OrNull(s.q_norm),
          OrNull(s.k_norm),
          OrNull(s.v_norm),
          OrNull(s.rope_cos),
          OrNull(s.rope_sin),
          OrNull(s.k_mean),
          OrNull(s.k_base),
          OrNull(s.block_cos),
          OrNull(s.block_sin),
          OrNull(s.q_dot_mean),
          OrNull(s.num_nonfinite),
          OrNull(s.num_clipped),
          OrNull(s.blocks_to_quantize)};
}

struct GpuStep {
  GpuStep(const Gpu& gpu, const Step& s)
      : data(gpu.stream(), s.data),
        scales(gpu.stream(), s.scales),
        window16_data(gpu.stream(), s.window16_data),
        g0(gpu.stream(), s.global_scale[0]),
        g1(gpu.stream(), s.global_scale[1]),
        cu_seqlens(gpu.stream(), s.cu_seqlens),
        contexts(gpu.stream(), s.shape.contexts),
        positions(gpu.stream(), s.positions),
        tables(gpu.stream(), s.tables),
        window16_tables(gpu.stream(), s.window16_tables),
        qkv(gpu.stream(), s.qkv),
        bias(gpu.stream(), s.bias),
        q_norm(gpu.stream(), s.q_norm),
        k_norm(gpu.stream(), s.k_norm),
        v_norm(gpu.stream(), s.v_norm),
        rope_cos(gpu.stream(), s.rope_cos),
        rope_sin(gpu.stream(), s.rope_sin),
        k_mean(gpu.stream(), s.k_mean),
        k_base(gpu.stream(), s.k_base),
        block_cos(gpu.stream(), s.block_cos),
        block_sin(gpu.stream(), s.block_sin),
        q_dot_mean(gpu.stream(), s.q_dot_mean),
        num_nonfinite(gpu.stream(), s.num_nonfinite),
        num_clipped(gpu.stream(), s.num_clipped),
        blocks_to_quantize(gpu.stream(), s.blocks_to_quantize) {}
  Pointers pointers() const {
    return {data.data(),
            scales.data(),
            window16_data.data(),
            {g0.data(), g1.data()},
            cu_seqlens.data(),
            contexts.data(),
            positions.data(),
            tables.data(),
            window16_tables.data(),
            qkv.data(),
            bias.data(),
            q_norm.data(),
            k_norm.data(),
            v_norm.data(),
            rope_cos.data(),
            rope_sin.data(),
            k_mean.data(),
            k_base.data(),
            block_cos.data(),
            block_sin.data(),
            q_dot_mean.data(),
            num_nonfinite.data(),
            num_clipped.data(),
            blocks_to_quantize.data()};
  }
  GpuArray<std::byte> data, scales, window16_data;
  GpuArray<float> g0, g1;
  GpuArray<int32_t> cu_seqlens, contexts, positions, tables, window16_tables;
  GpuArray<float> qkv, bias, q_norm, k_norm, v_norm, rope_cos, rope_sin, k_mean, k_base, block_cos,
      block_sin, q_dot_mean;
  GpuArray<int64_t> num_nonfinite, num_clipped;
  GpuArray<PendingQuantization> blocks_to_quantize;
};

inline KvLayerView ViewOf(const Step& s, const Pointers& p) {
  KvLayerView view = s.layout.LayerView(0, p.data, p.scales);
  for (int side = 0; side < 2; ++side) {
    view.global_scale[side] = HasGlobalScale(view.format[side]) && s.shape.global_scale != 1.f
                                  ? p.global_scale[side]
                                  : nullptr;
  }
  return view;
}

inline KvLayerView Window16ViewOf(const Step& s, const Pointers& p) {
  return s.window16 ? s.window16_layout.LayerView(0, p.window16_data, nullptr) : KvLayerView{};
}

inline BatchView BatchOf(const Step& s, const Pointers& p) {
  BatchView batch;
  batch.num_seqs = static_cast<int>(s.shape.contexts.size());
  batch.num_decode = s.shape.num_decode;
  batch.num_tokens = s.cu_seqlens.back();
  batch.cu_seqlens = p.cu_seqlens;
  batch.context_lens = p.context_lens;
  batch.positions = p.positions;
  batch.block_tables = p.tables;
  batch.block_table_stride = s.table_stride;
  batch.window16_tables = s.window16 ? p.window16_tables : nullptr;
  return batch;
}

inline WriteKvParams ProcessParams(const Step& s, const Pointers& p) {
  WriteKvParams params;
  params.qkv = p.qkv;
  params.bias = p.bias;
  params.q_norm = p.q_norm;
  params.k_norm = p.k_norm;
  params.v_norm = p.v_norm;
  params.only_queries = s.shape.only_queries;
  params.rope_cos = p.rope_cos;
  params.rope_sin = p.rope_sin;
  params.rope_dim = s.rope_dim;
  params.norm_after_rope = s.norm_after_rope;
  params.query_scaling = s.query_scaling;
  params.q_heads = s.shape.group * s.shape.kv_heads;
  params.rotate = s.rotate;
  params.search_scales = s.search;
  params.k_mean = p.k_mean;
  params.k_base = p.k_base;
  params.block_cos = p.block_cos;
  params.block_sin = p.block_sin;
  params.q_dot_mean = p.q_dot_mean;
  params.kv = ViewOf(s, p);
  params.window16 = Window16ViewOf(s, p);
  params.batch = BatchOf(s, p);
  params.num_nonfinite = p.num_nonfinite;
  params.num_clipped = p.num_clipped;
  return params;
}

inline Device& Cpu() {
  static const std::unique_ptr<Device> device = MakeCpuDevice(1);
  return *device;
}

}  // namespace turbomind::cuda::kv_step
