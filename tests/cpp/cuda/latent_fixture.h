#pragma once

// A layer of latents with its cache on the CPU and on a simulated GPU, for the tests of
// backend/cuda/kv/latent_rows.h and backend/cuda/latent.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cuda/gpu_array.h"
#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/backend/cuda/decode/decode_ops.h"
#include "turbomind/backend/cuda/kv/kv_ops.h"
#include "turbomind/backend/cuda/kv/latent_rows.h"
#include "turbomind/backend/cuda/latent/latent_ops.h"
#include "turbomind/core/float_convert.h"
#include "turbomind/kv/layout.h"

namespace turbomind::cuda::latent_step {

using enum KvCacheMode;

inline constexpr float kSentinel = 12345.f;

struct Case {
  KvCacheMode format = kFp4Nv;
  KvCacheMode rotary_format = kNone;
  DataType dtype = DataType::kBFloat16;
  int heads = 16;
  int rank = 512;
  int rotary = 64;
  int nope = 16;
  int block_seq_len = 32;
  int context = 300;
  PrecisionWindowTokens window16 = {};
  KvCacheMode window_format = kNone;
  bool interleaved = false;
  bool rotate = false;
  bool search = false;
  float global_scale = 1.f;  // of the latents; twice as much for the rotary part
  float softmax_factor = 1.f;
  bool offset = false;  // of blocks that leave the window
  float mean = 0.f;     // the size of the means of blocks
  bool hard = false;    // rows of all magnitudes, with NaN and infinities unless they are rotated
};

inline std::string Describe(const Case& c) {
  return std::string(ToString(c.format)) + " beside " + ToString(c.rotary_format) + ", " +
         ToString(c.dtype) + ", " + std::to_string(c.heads) + " heads, rank " +
         std::to_string(c.rank) + " + " + std::to_string(c.rotary) + ", window in " +
         ToString(c.window_format) + (c.rotate ? ", rotated" : "") +
         (c.offset ? ", offsets of " + std::to_string(c.block_seq_len) + " tokens" : "");
}

inline Device& Cpu() {
  static const std::unique_ptr<Device> device = MakeCpuDevice(1);
  return *device;
}

// The new tokens of a sequence: the positions [begin, end) of the cache's text.
struct Chunk {
  int begin = 0;
  int end = 0;
};

// One of the two pools of a layer. Every second block is not used, and all bytes that are not
// written are poisoned.
struct Pool {
  Pool(const Case& c, KvCacheMode k, KvCacheMode v, bool offset)
      : layout({.layers = {{k, v}},
                .kv_heads = 1,
                .head_dim = c.rank,
                .rotary_dim = c.rotary,
                .block_seq_len = c.block_seq_len,
                .dtype = c.dtype,
                .k_offset = offset}) {
    const auto blocks = static_cast<size_t>(2 * ((c.context - 1) / c.block_seq_len + 1));
    data.assign(blocks * static_cast<size_t>(layout.block_bytes()), std::byte{0xff});
    scales.assign(blocks * static_cast<size_t>(layout.scale_block_bytes()), std::byte{0xff});
  }

  block::Layout layout;
  std::vector<std::byte> data;
  std::vector<std::byte> scales;
};

// A layer on the host, with what WriteLatents receives. Rows are those of the whole text.
struct Layer {
  explicit Layer(const Case& of, unsigned seed = 1);

  // The ids of a pool's blocks by position.
  std::vector<int32_t> Table() const;
  std::vector<PendingQuantization> Pending() const;
  // Write the rows of a pool on the CPU, and quantize all blocks if there is a 16-bit window.
  void Fill();

  Case c;
  PrecisionWindow rule;
  Pool quantized;
  Pool window16;
  std::vector<float> global_scales;  // of the rotary part and of the latents
  std::vector<float> rows;
  std::vector<float> q;  // before RoPE
  std::vector<float> cos;
  std::vector<float> sin;
  std::vector<int64_t> num_nonfinite = {5};
  std::vector<int64_t> num_clipped = {7};
};

inline std::vector<float> Normals(std::mt19937& random, int64_t count) {
  std::normal_distribution<float> normal;
  std::vector<float> out(static_cast<size_t>(count));
  std::generate(out.begin(), out.end(), [&] { return normal(random); });
  return out;
}

// Make rows of every kind: zeros, constants, midpoints of codes, and unless all must be finite, all
// magnitudes, NaN and infinities. Processors differ in the sign of a NaN that a sum gives.
inline void MakeHard(std::mt19937& random, bool finite, size_t width, std::vector<float>* rows) {
  for (size_t row = 0; row < rows->size() / width; ++row) {
    float* x = rows->data() + row * width;
    const float size = std::ldexp(1.f, static_cast<int>(random() % 40) - 20);
    const unsigned kind = random() % (finite ? 4 : 6);
    for (size_t d = 0; d < width; ++d) {
      const unsigned one = random();
      x[d] = kind == 0                    ? (d % 3 == 0 ? -0.f : 0.f)
             : kind == 1                  ? size
             : kind == 2                  ? size * 0.25f * static_cast<float>(one % 49) - 6.f * size
             : kind == 4 && one % 64 == 0 ? BitsFloat(one | 0x7f800000u)
             : kind == 5                  ? BitsFloat(one)
                                          : x[d] * size;
    }
  }
}

inline Layer::Layer(const Case& of, unsigned seed)
    : c(of),
      rule(MakePrecisionWindow(c.window16, c.block_seq_len)),
      quantized(c, c.rotary_format, c.format, c.offset),
      window16(c, kNone, c.window_format, false),
      global_scales({2.f * c.global_scale, c.global_scale}) {
  std::mt19937 random(seed);
  rows = Normals(random, int64_t{c.context} * (c.rank + c.rotary));
  for (size_t i = 0; i < rows.size(); ++i) {
    const size_t width = rows.size() / static_cast<size_t>(c.context);
    const size_t block = i / width / static_cast<size_t>(c.block_seq_len);
    rows[i] += c.mean * std::sin(static_cast<float>(i % width + 7 * block));
  }
  if (c.hard) {
    MakeHard(random, c.rotate, static_cast<size_t>(c.rank + c.rotary), &rows);
  }
  q = Normals(random, int64_t{c.context} * c.heads * (c.nope + c.rotary));
  for (int i = 0; i < c.context * c.rotary / 2; ++i) {
    const float angle = static_cast<float>(random() % 628) * 0.01f;
    cos.push_back(std::cos(angle));
    sin.push_back(std::sin(angle));
  }
}

inline std::vector<int32_t> Layer::Table() const {
  const int blocks = (c.context - 1) / c.block_seq_len + 1;
  std::vector<int32_t> table;
  for (int i = 0; i < blocks; ++i) {
    table.push_back(2 * (blocks - 1 - i) + 1);
  }
  return table;
}

inline std::vector<PendingQuantization> Layer::Pending() const {
  std::vector<PendingQuantization> pending;
  for (const int32_t block : Table()) {
    pending.push_back({block, block});
  }
  pending.push_back({});  // an entry without blocks
  return pending;
}

// The arrays of a batch whose sequences are chunks of the text.
struct BatchArrays {
  BatchArrays(const Layer& layer, const std::vector<Chunk>& chunks) {
    for (const Chunk& chunk : chunks) {
      for (int position = chunk.begin; position < chunk.end; ++position) {
        positions.push_back(position);
      }
      cu_seqlens.push_back(static_cast<int32_t>(positions.size()));
      context_lens.push_back(chunk.end);
      const std::vector<int32_t> table = layer.Table();
      tables.insert(tables.end(), table.begin(), table.end());
    }
    stride = static_cast<int64_t>(layer.Table().size());
  }
  BatchView View(int num_decode) const {
    return {.num_seqs = static_cast<int>(context_lens.size()),
            .num_decode = num_decode,
            .num_tokens = cu_seqlens.back(),
            .cu_seqlens = cu_seqlens.data(),
            .context_lens = context_lens.data(),
            .positions = positions.data(),
            .block_tables = tables.data(),
            .block_table_stride = stride,
            .window16_tables = tables.data()};
  }

  std::vector<int32_t> cu_seqlens = {0};
  std::vector<int32_t> context_lens;
  std::vector<int32_t> positions;
  std::vector<int32_t> tables;
  int64_t stride = 0;
};

// Where the arrays of a layer are: on the host or on the GPU.
struct Places {
  std::byte* data[2];    // of the layer's pool and of the 16-bit window
  std::byte* scales[2];  // null without FP4
  const float* global_scales;
  float* rows;
  float* q;
  const float* cos;
  const float* sin;
  int64_t* num_nonfinite;
  int64_t* num_clipped;
};

inline Places OnHost(Layer& layer) {
  return {{layer.quantized.data.data(), layer.window16.data.data()},
          {layer.quantized.scales.data(), nullptr},
          layer.global_scales.data(),
          layer.rows.data(),
          layer.q.data(),
          layer.cos.data(),
          layer.sin.data(),
          layer.num_nonfinite.data(),
          layer.num_clipped.data()};
}

inline KvLayerView QuantizedView(const Layer& layer, const Places& at) {
  KvLayerView view = layer.quantized.layout.LayerView(0, at.data[0], at.scales[0]);
  for (int side = 0; side < 2; ++side) {
    if (HasGlobalScale(view.format[side]) && layer.c.global_scale != 1.f) {
      view.global_scale[side] = at.global_scales + side;
    }
  }
  return view;
}

inline KvLayerView Window16View(const Layer& layer, const Places& at) {
  return layer.rule.enabled() ? layer.window16.layout.LayerView(0, at.data[1], at.scales[1])
                              : KvLayerView{};
}

inline WriteLatentsParams WriteParams(const Layer& layer, const Places& at,
                                      const BatchView& batch) {
  return {.q = at.q,
          .rows = at.rows,
          .q_heads = layer.c.heads,
          .nope_dim = layer.c.nope,
          .rope_cos = at.cos,
          .rope_sin = at.sin,
          .interleaved = layer.c.interleaved,
          .rotate = layer.c.rotate,
          .search_scales = layer.c.search,
          .kv = QuantizedView(layer, at),
          .window16 = Window16View(layer, at),
          .batch = batch,
          .num_nonfinite = at.num_nonfinite,
          .num_clipped = at.num_clipped};
}

inline QuantizeBlocksParams QuantizeParams(const Layer& layer, const Places& at,
                                           const PendingQuantization* pending, int count) {
  return {.kv = QuantizedView(layer, at),
          .window16 = Window16View(layer, at),
          .search_scales = layer.c.search,
          .blocks_to_quantize = pending,
          .num_to_quantize = count,
          .num_clipped = at.num_clipped};
}

inline void Layer::Fill() {
  const BatchArrays batch(*this, {{0, c.context}});
  const Places at = OnHost(*this);
  Cpu().WriteLatents(WriteParams(*this, at, batch.View(0)));
  const std::vector<PendingQuantization> pending = Pending();
  if (rule.enabled()) {  // the CPU does not pad its lists with entries without blocks
    Cpu().QuantizeBlocks(
        QuantizeParams(*this, at, pending.data(), static_cast<int>(pending.size()) - 1));
  }
}

// A stream and the memory of a simulated GPU.
struct Gpu {
  Gpu() {
    context.stream = CreateStream();
    context.gpu = PropertiesOf(0);
    workspace = std::make_unique<Workspace>(context.stream);
    context.workspace = workspace.get();
  }
  ~Gpu() {
    arrays.clear();
    workspace.reset();
    DestroyStream(context.stream);
  }
  template <class T>
  T* Upload(const std::vector<T>& values) {
    const auto array = std::make_shared<GpuArray<T>>(context.stream, values);
    arrays.push_back(array);
    return array->data();
  }
  template <class T>
  std::vector<T> Read(const T* values, size_t count) const {
    std::vector<T> out(count);
    CopyBytes(out.data(), values, count * sizeof(T), context.stream);
    Synchronize(context.stream);
    return out;
  }
  BatchView Upload(const BatchView& host) {
    const auto copy = [&](const int32_t* from, int64_t count) {
      return Upload(std::vector<int32_t>(from, from + count));
    };
    BatchView batch = host;
    const int64_t table = host.num_seqs * host.block_table_stride;
    batch.cu_seqlens = copy(host.cu_seqlens, host.num_seqs + 1);
    batch.context_lens = copy(host.context_lens, host.num_seqs);
    batch.positions = copy(host.positions, host.num_tokens);
    batch.block_tables = copy(host.block_tables, table);
    batch.window16_tables = copy(host.window16_tables, table);
    return batch;
  }
  Places Upload(const Layer& layer) {
    return {{Upload(layer.quantized.data), Upload(layer.window16.data)},
            {Upload(layer.quantized.scales), nullptr},
            Upload(layer.global_scales),
            Upload(layer.rows),
            Upload(layer.q),
            Upload(layer.cos),
            Upload(layer.sin),
            Upload(layer.num_nonfinite),
            Upload(layer.num_clipped)};
  }

  Context context;
  std::unique_ptr<Workspace> workspace;
  std::vector<std::shared_ptr<void>> arrays;
};

}  // namespace turbomind::cuda::latent_step
