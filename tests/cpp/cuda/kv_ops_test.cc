// The kernels that write the KV cache (backend/cuda/kv/kv_ops.h), run thread by thread on the CPU.
// Their results must be bit-identical to the CPU backend's.

#include "turbomind/backend/cuda/kv/kv_ops.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>
#include <vector>

#include "cuda/kv_step.h"
#include "turbomind/backend/cuda/kv/kv_encode.cuh"
#include "turbomind/kv/codec.h"

namespace turbomind::cuda::kv_step {
namespace {

// Check that the GPU's bytes and numbers equal the CPU's.
void CheckProcess(Step step) {
  CAPTURE(Describe(step.shape));
  const Gpu gpu;
  const GpuStep on_gpu(gpu, step);
  CudaWriteKv(gpu.context, ProcessParams(step, on_gpu.pointers()));
  Cpu().WriteKv(ProcessParams(step, CpuPointers(step)));
  CHECK(SameBytes(on_gpu.data.Read(), step.data));
  CHECK(SameBytes(on_gpu.scales.Read(), step.scales));
  CHECK(SameBytes(on_gpu.window16_data.Read(), step.window16_data));
  CHECK(SameFloats(on_gpu.qkv.Read(), step.qkv));
  CHECK(SameFloats(on_gpu.q_dot_mean.Read(), step.q_dot_mean));
  CHECK(on_gpu.num_nonfinite.Read() == step.num_nonfinite);
  CHECK(on_gpu.num_clipped.Read() == step.num_clipped);
}

// Fill in rows of every kind: all magnitudes, zeros, constants, ties between codes, NaN and
// infinities.
void FillHardRows(Step& step) {
  const auto n = static_cast<size_t>(step.shape.head_dim);
  std::mt19937& random = step.random;
  for (size_t row = 0; row < step.qkv.size() / n; ++row) {
    float* x = step.qkv.data() + row * n;
    const float size = std::ldexp(1.f, static_cast<int>(random() % 40) - 20);
    const unsigned kind = random() % 8;
    for (size_t d = 0; d < n; ++d) {
      switch (kind) {
        case 0:
          x[d] = d % 3 == 0 ? -0.f : 0.f;
          break;
        case 1:
          x[d] = size;
          break;
        case 2:  // midpoints of every format
          x[d] = size * 0.25f * static_cast<float>(static_cast<int>(random() % 49) - 24);
          break;
        case 3:
          x[d] *= random() % 8 == 0 ? INFINITY : size;
          break;
        case 4:
          x[d] =
              random() % 8 == 0 ? BitsFloat(static_cast<uint32_t>(random()) | kInfinityBits) : x[d];
          break;
        case 5:  // any bits
          x[d] = BitsFloat(static_cast<uint32_t>(random()));
          break;
        default:
          x[d] *= size;
      }
    }
    if (random() % 4 == 0) {
      std::fill(x, x + 16, 0.f);
    }
  }
}

TEST_CASE("Quotient equals IEEE division") {
  std::mt19937 random(1);
  constexpr float kLimit = 512.f;
  int wrong = 0;
  const auto check = [&](float x, float d) {
    const float want = std::min(x / d, kLimit);
    const float got = Quotient(x, MakeDivisor(d), kLimit);
    wrong += want >= 0x1p-20f ? got != want : got > 0x1p-19f;
  };
  constexpr float kMidpoints[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.f, 100.5f, 9.5f};
  for (int i = 0; i < 100000; ++i) {
    const float global_scale = std::ldexp(BitsFloat(0x3f800000u | (random() & 0x7fffffu)),
                                          static_cast<int>(random() % 128) - 64);
    const float d = E4M3ToFloat(static_cast<uint8_t>(1 + random() % 0x7e)) * global_scale;
    check(BFloat16ToFloat(static_cast<uint16_t>(random() % 0x7f81)), d);
    check(HalfToFloat(static_cast<uint16_t>(random() % 0x7c01)), d);
    // Values next to a midpoint between codes.
    const float x = kMidpoints[random() % 9] * d;
    check(RoundTo(x, DataType::kBFloat16), d);
    check(BitsFloat(FloatBits(x) + static_cast<uint32_t>(random() % 5) - 2), d);
  }
  CHECK(wrong == 0);
}

TEST_CASE("E2M1 codes from a sum equal the definition") {
  int wrong = 0;
  const auto check = [&](uint32_t bits) {
    const float x = BitsFloat(bits);
    const auto code = FloatToE2M1(x);
    wrong += E2m1Byte(x, -x) != static_cast<uint32_t>(code | (code ^ 8) << 4);
    wrong += NearestE2m1(Magnitude(x)).value() != Magnitude(E2M1ToFloat(code));
  };
  for (uint32_t bits = 0; bits < FloatBits(7.f); bits += 1021) {
    check(bits);
  }
  for (float x : {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.f, 1.f, 2.f, 4.f, 6.f}) {
    for (uint32_t near = 0; near < 5; ++near) {
      check(FloatBits(x) + near - 2);
    }
  }
  check(0);
  CHECK(wrong == 0);
}

TEST_CASE("WriteKv writes the CPU's bytes for every pair of formats, head_dim and dtype") {
  unsigned seed = 0;
  for (const FormatPair& formats : ListedPairs()) {
    for (int head_dim : {64, 80, 96, 128, 256, 512}) {
      for (DataType dtype : kTypes) {
        for (bool search : {false, true}) {
          Shape shape = {.formats = formats, .dtype = dtype, .head_dim = head_dim};
          const float global_scales[] = {1.f, 0.75f, 0.3f, 0x1p-64f, 0x1.8p60f};
          shape.global_scale = global_scales[++seed % 5];
          Step step(shape, seed);
          step.search = search;
          FillHardRows(step);
          CheckProcess(std::move(step));
        }
      }
    }
  }
}

TEST_CASE("WriteKv handles small and odd head_dims" * doctest::test_suite("small")) {
  for (int head_dim : {16, 32, 48, 112, 144, 240, 272, 320, 496}) {
    Step step({.head_dim = head_dim});
    step.rotate = true;
    FillHardRows(step);
    CheckProcess(std::move(step));
  }
}

struct Ingredients {
  bool bias = false;
  bool norm = false;
  int rope_dim = 0;
  bool norm_after_rope = false;
  bool mean = false;
  bool rotate = false;
  bool window16 = false;
};

Step MakeStep(const Shape& shape, const Ingredients& with, unsigned seed) {
  Step step(shape, seed);
  const auto n = static_cast<size_t>(shape.head_dim);
  const size_t tokens = step.positions.size();
  const auto heads = static_cast<size_t>(shape.kv_heads);
  if (with.bias) {
    step.bias = Normals(step.random, static_cast<size_t>(step.kv_all()) * n);
  }
  if (with.norm) {
    step.q_norm = Normals(step.random, n, 1.f);
    step.k_norm = Normals(step.random, n, 1.f);
    if (seed % 2 == 0) {
      step.v_norm = Normals(step.random, n, 1.f);
    }
  }
  if (with.rope_dim > 0) {
    step.rope_dim = with.rope_dim;
    step.rope_cos = Normals(step.random, tokens * static_cast<size_t>(with.rope_dim / 2));
    step.rope_sin = Normals(step.random, step.rope_cos.size());
  }
  step.norm_after_rope = with.norm_after_rope;
  step.query_scaling = {.beta = seed % 3 == 1 ? 0.3f : 0.f, .length = 9};
  if (with.mean) {
    step.k_mean = Normals(step.random, heads * n, 2.f);
    step.q_dot_mean.assign(tokens * heads * static_cast<size_t>(shape.group), -1.f);
  }
  step.rotate = with.rotate;
  step.window16 = with.window16;
  if ((with.window16 ? Window16ViewOf : ViewOf)(step, CpuPointers(step)).HasKOffset()) {
    step.k_base = Normals(step.random, heads * n, 2.f);
    step.block_cos = Normals(step.random, step.rope_cos.size());
    step.block_sin = Normals(step.random, step.rope_sin.size());
  }
  return step;
}

TEST_CASE("bias, norm, RoPE, mean and rotation have the CPU's bits") {
  unsigned seed = 0;
  for (int head_dim : {64, 80, 96, 128, 256, 512}) {
    // With 20, half is not a multiple of eight values. 32 is a part of the head.
    for (int rope_dim : {0, 20, 32, head_dim}) {
      for (int with = 0; with < 32; with += 1 + static_cast<int>(seed % 3)) {
        Shape shape = {.dtype = kTypes[seed % 2], .head_dim = head_dim};
        shape.formats = ListedPairs()[seed % ListedPairs().size()];
        shape.window_format = WindowFormat(shape.formats, seed % 2 == 0);
        shape.k_offset = shape.window_offset = seed % 5 < 3;
        shape.only_queries = seed % 7 == 6;
        CAPTURE(rope_dim);
        CAPTURE(with);
        CheckProcess(MakeStep(shape,
                              {.bias = (with & 1) != 0,
                               .norm = (with & 2) != 0,
                               .rope_dim = rope_dim,
                               .norm_after_rope = seed % 4 == 3,
                               .mean = (with & 4) != 0,
                               .rotate = (with & 8) != 0,
                               .window16 = (with & 16) != 0},
                              ++seed));
      }
    }
  }
}

TEST_CASE("a token without a block is neither stored nor counted" * doctest::test_suite("small")) {
  for (bool window16 : {false, true}) {
    Step step = MakeStep({}, {.window16 = window16}, 1);
    const int row = step.kv_all() * step.shape.head_dim;
    step.qkv[static_cast<size_t>(row) - 1] = NAN;  // in V of the first sequence's token
    std::fill(step.tables.begin(), step.tables.begin() + step.table_stride, -1);
    std::fill(step.window16_tables.begin(), step.window16_tables.begin() + step.table_stride, -1);
    const Gpu gpu;
    const GpuStep on_gpu(gpu, step);
    CudaWriteKv(gpu.context, ProcessParams(step, on_gpu.pointers()));
    CHECK(on_gpu.num_nonfinite.Read() == step.num_nonfinite);
    // The same step without that token.
    Step rest = MakeStep({}, {.window16 = window16}, 1);
    rest.qkv.erase(rest.qkv.begin(), rest.qkv.begin() + row);
    rest.tables.erase(rest.tables.begin(), rest.tables.begin() + rest.table_stride);
    rest.window16_tables.erase(rest.window16_tables.begin(),
                               rest.window16_tables.begin() + rest.table_stride);
    rest.shape.contexts.erase(rest.shape.contexts.begin());
    rest.shape.num_decode = 0;
    rest.cu_seqlens = {0, 2, 3};
    rest.positions.erase(rest.positions.begin());
    Cpu().WriteKv(ProcessParams(rest, CpuPointers(rest)));
    CHECK(SameBytes(on_gpu.data.Read(), rest.data));
    CHECK(SameBytes(on_gpu.scales.Read(), rest.scales));
    CHECK(SameBytes(on_gpu.window16_data.Read(), rest.window16_data));
  }
}

TEST_CASE("a recorded write can be replayed" * doctest::test_suite("small")) {
  Step step = MakeStep({}, {.bias = true, .norm = true, .rope_dim = 64}, 3);
  const Gpu gpu;
  const GpuStep on_gpu(gpu, step);
  BeginCapture(gpu.context.stream);
  CudaWriteKv(gpu.context, ProcessParams(step, on_gpu.pointers()));
  const Graph graph = EndCapture(gpu.context.stream);
  LaunchGraph(graph, gpu.context.stream);
  Synchronize(gpu.context.stream);
  DestroyGraph(graph);
  Cpu().WriteKv(ProcessParams(step, CpuPointers(step)));
  CHECK(SameBytes(on_gpu.data.Read(), step.data));
}

// Check that two blocks have the CPU's bytes after they leave the window.
void CheckQuantization(Step step) {
  CAPTURE(Describe(step.shape));
  step.window16 = true;
  step.blocks_to_quantize = {{3, 7}, {5, 2}};
  const auto num_to_quantize = static_cast<int>(step.blocks_to_quantize.size());
  step.blocks_to_quantize.resize(4);  // the added entries have no blocks
  const Gpu gpu;
  const GpuStep on_gpu(gpu, step);
  const auto params = [&](const Pointers& p, int blocks_to_quantize) {
    return QuantizeBlocksParams{ViewOf(step, p),      Window16ViewOf(step, p), step.search,
                                p.blocks_to_quantize, blocks_to_quantize,      p.num_clipped};
  };
  CudaQuantizeBlocks(gpu.context, params(on_gpu.pointers(), 4));
  Cpu().QuantizeBlocks(params(CpuPointers(step), num_to_quantize));
  CHECK(SameBytes(on_gpu.data.Read(), step.data));
  CHECK(SameBytes(on_gpu.scales.Read(), step.scales));
  CHECK(SameBytes(on_gpu.window16_data.Read(), step.window16_data));
  CHECK(on_gpu.num_clipped.Read() == step.num_clipped);
}

// Write rows to the window whose keys have a large common part.
void FillWindow(Step& step) {
  const Shape& s = step.shape;
  const KvLayerView view = step.window16_layout.LayerView(0, step.window16_data.data(), nullptr);
  const auto n = static_cast<size_t>(s.head_dim);
  const std::vector<float> common = Normals(step.random, n, 2.f);
  for (int i = 0; i < 2 * kBlocks * s.kv_heads * s.block_seq_len; ++i) {
    const auto side = static_cast<KvSide>(i % 2);
    const int slot = i / 2 % s.block_seq_len;
    const int head = i / 2 / s.block_seq_len % s.kv_heads;
    std::vector<float> row = Normals(step.random, n);
    for (size_t d = 0; d < n; ++d) {
      row[d] = 0.25f * row[d] + (side == KvSide::kK ? common[d] : 0.f);
    }
    const KvRow to = view.Row(side, i / 2 / s.block_seq_len / s.kv_heads, head, slot);
    DispatchFormat(s.window_format, [&]<KvCacheMode M>() {
      Codec<M>::EncodeRow(row.data(), s.head_dim, s.dtype, 1.f, to.payload, to.metadata);
    });
  }
}

TEST_CASE("blocks that leave the window are quantized as on the CPU") {
  unsigned seed = 0;
  for (const FormatPair& formats : ListedPairs()) {
    for (int head_dim : {64, 80, 96, 128, 256, 512}) {
      for (bool k_offset : {false, true}) {
        for (bool int8 : {false, true}) {
          Shape shape = {.formats = formats, .dtype = kTypes[++seed % 2], .head_dim = head_dim};
          shape.global_scale = seed % 3 == 0 ? 0.3f : 1.f;
          shape.k_offset = k_offset;
          shape.window_offset = seed % 4 < 2;
          shape.window_format = WindowFormat(formats, int8);
          Step step(shape, seed);  // the window holds arbitrary bits
          step.search = seed % 2 == 0;
          if (seed % 5 < 3) {
            FillWindow(step);
          }
          CheckQuantization(std::move(step));
        }
      }
    }
  }
}

TEST_CASE("the sum of a block's keys is in the order of slots" * doctest::test_suite("small")) {
  for (int block_seq_len : {16, 64}) {
    for (bool int8 : {false, true}) {
      Shape shape = {.dtype = DataType::kFloat16, .block_seq_len = block_seq_len};
      shape.k_offset = true;
      shape.window_format = WindowFormat(shape.formats, int8);
      Step step(shape, 1);
      FillWindow(step);
      CheckQuantization(std::move(step));
    }
  }
}

TEST_CASE("values that a format clips are counted" * doctest::test_suite("small")) {
  Step step = MakeStep({.formats = {KvCacheMode::kFp8E4m3, KvCacheMode::kFp8E4m3}}, {}, 1);
  const size_t before = static_cast<size_t>(step.num_clipped.front());
  float* v = step.qkv.data() + (step.kv_all() - 1) * step.shape.head_dim;  // of the first token
  v[0] = 10000.f;
  v[1] = -20000.f;
  v[2] = INFINITY;
  v[3] = NAN;
  const Gpu gpu;
  const GpuStep on_gpu(gpu, step);
  CudaWriteKv(gpu.context, ProcessParams(step, on_gpu.pointers()));
  Cpu().WriteKv(ProcessParams(step, CpuPointers(step)));
  CHECK(step.num_clipped.front() == static_cast<int64_t>(before) + 2);
  CHECK(on_gpu.num_clipped.Read() == step.num_clipped);
}

}  // namespace
}  // namespace turbomind::cuda::kv_step
