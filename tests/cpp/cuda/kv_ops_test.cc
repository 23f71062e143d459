// The kernels that write and flatten the KV cache (backend/cuda/kv_ops.h), run thread by thread on
// the CPU: their bits are those of the CPU backend and of the codecs.

#include "turbomind/backend/cuda/kv_ops.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/backend/cuda/kv_encode.h"
#include "turbomind/kv/codec.h"
#include "turbomind/kv/layout.h"

namespace turbomind::cuda {
namespace {

// A vector's copy on the GPU; null for an empty one.
template <class T>
class GpuArray {
 public:
  explicit GpuArray(const std::vector<T>& from) : size_(from.size()), stream_(CreateStream()) {
    if (size_ > 0) {
      data_ = static_cast<T*>(AllocateGpu(size_ * sizeof(T)));
      CopyBytes(data_, from.data(), size_ * sizeof(T), stream_);
    }
  }
  ~GpuArray() {
    DestroyStream(stream_);
    if (data_ != nullptr) {
      FreeGpu(data_);
    }
  }
  GpuArray(const GpuArray&) = delete;
  GpuArray& operator=(const GpuArray&) = delete;
  T* get() const { return data_; }
  std::vector<T> Read() const {
    std::vector<T> out(size_);
    CopyBytes(out.data(), data_, size_ * sizeof(T), stream_);
    Synchronize(stream_);
    return out;
  }

 private:
  size_t size_;
  Stream stream_;
  T* data_ = nullptr;
};

struct Gpu {
  Gpu() { context.stream = CreateStream(); }
  ~Gpu() { DestroyStream(context.stream); }
  Context context;
};

template <class T>
bool SameBytes(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// A NaN of one processor need not have the bits of another's.
bool SameFloats(const std::vector<float>& a, const std::vector<float>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](float x, float y) {
    return FloatBits(x) == FloatBits(y) || (IsNan(x) && IsNan(y));
  });
}

struct Pair {
  KvCacheMode k;
  KvCacheMode v;
};

std::vector<Pair> AllPairs() {
  std::vector<Pair> pairs;
  for (KvCacheMode mode : kAllKvCacheModes) {
    pairs.push_back({mode, mode});
  }
  for (KvCacheMode k : {KvCacheMode::kNone, KvCacheMode::kInt8, KvCacheMode::kFp8E4m3}) {
    for (KvCacheMode v : {KvCacheMode::kInt4, KvCacheMode::kFp4Mx, KvCacheMode::kFp4Nv}) {
      pairs.push_back({k, v});
    }
  }
  return pairs;
}

constexpr DataType kTypes[] = {DataType::kFloat16, DataType::kBFloat16};
constexpr int kBlocks = 12;  // of a pool

struct Shape {
  Pair modes = {KvCacheMode::kFp4Nv, KvCacheMode::kFp4Nv};
  DataType dtype = DataType::kBFloat16;
  int head_dim = 64;
  int kv_heads = 2;
  int group = 2;
  int block_seq_len = 16;
  std::vector<int> contexts = {21, 18, 33};  // of the sequences, after the step
  std::vector<int> new_tokens = {1, 2, 1};
  int num_decode = 1;
  float factor = 0.75f;
};

std::string Describe(const Shape& s) {
  return std::string(ToString(s.modes.k)) + " / " + ToString(s.modes.v) + ", " + ToString(s.dtype) +
         ", head_dim " + std::to_string(s.head_dim) + ", factor " + std::to_string(s.factor);
}

block::Layout LayoutOf(const Shape& s, Pair modes) {
  block::Config config;
  config.layers = {{modes.k, modes.v}};
  config.kv_heads = s.kv_heads;
  config.head_dim = s.head_dim;
  config.block_seq_len = s.block_seq_len;
  config.dtype = s.dtype;
  return block::Layout(config);
}

// Everything an op touches, in vectors; the pools hold random bytes.
struct Step {
  explicit Step(const Shape& s, unsigned seed = 1);
  int kv_all() const { return shape.group * shape.kv_heads + 2 * shape.kv_heads; }

  Shape shape;
  block::Layout layout;
  block::Layout hot_layout;
  std::vector<std::byte> data;
  std::vector<std::byte> scales;
  std::vector<std::byte> hot_data;
  std::vector<float> g[2];
  std::vector<int32_t> cu_seqlens = {0};
  std::vector<int32_t> positions;
  std::vector<int32_t> tables;
  std::vector<int32_t> hot_tables;
  int table_stride = 0;
  std::vector<float> qkv;
  std::vector<float> bias;
  std::vector<float> q_norm;
  std::vector<float> k_norm;
  std::vector<float> rope_cos;
  std::vector<float> rope_sin;
  std::vector<float> k_mean;
  std::vector<float> q_dot_mean;
  std::vector<int64_t> num_nonfinite = {5};
  std::vector<BlockMove> moves;
  int rope_dim = 0;
  bool rotate = false;
  bool search = false;
  bool hot = false;
  std::mt19937 random;
};

std::vector<float> Normals(std::mt19937& random, size_t count, float mean = 0.f) {
  std::normal_distribution<float> normal(mean);
  std::vector<float> out(count);
  for (float& x : out) {
    x = normal(random);
  }
  return out;
}

Step::Step(const Shape& s, unsigned seed)
    : shape(s),
      layout(LayoutOf(s, s.modes)),
      hot_layout(LayoutOf(s, {KvCacheMode::kNone, KvCacheMode::kNone})),
      data(static_cast<size_t>(kBlocks * layout.block_bytes())),
      scales(static_cast<size_t>(kBlocks * layout.scale_block_bytes())),
      hot_data(static_cast<size_t>(kBlocks * hot_layout.block_bytes())),
      random(seed) {
  for (std::vector<std::byte>* pool : {&data, &scales, &hot_data}) {
    std::generate(pool->begin(), pool->end(), [&] { return std::byte(random() % 256); });
  }
  for (int side = 0; side < 2; ++side) {
    for (int head = 0; head < s.kv_heads; ++head) {
      g[side].push_back(s.factor * static_cast<float>(1 + head + side));
    }
  }
  for (int context : s.contexts) {
    table_stride = std::max(table_stride, (context - 1) / s.block_seq_len + 2);
  }
  std::vector<int32_t> ids(kBlocks);
  std::iota(ids.begin(), ids.end(), 0);
  std::vector<int32_t> hot_ids = ids;
  std::shuffle(ids.begin(), ids.end(), random);
  std::shuffle(hot_ids.begin(), hot_ids.end(), random);
  size_t next = 0;
  for (size_t i = 0; i < s.contexts.size(); ++i) {
    cu_seqlens.push_back(cu_seqlens.back() + s.new_tokens[i]);
    for (int t = s.contexts[i] - s.new_tokens[i]; t < s.contexts[i]; ++t) {
      positions.push_back(t);
    }
    for (int block = 0; block < table_stride; ++block) {
      const bool used = block * s.block_seq_len < s.contexts[i];
      tables.push_back(used ? ids.at(next) : -1);
      hot_tables.push_back(used ? hot_ids.at(next) : -1);
      next += used;
    }
  }
  qkv = Normals(random, positions.size() * static_cast<size_t>(kv_all() * s.head_dim));
}

// The pointers of a step, on the CPU or on the GPU.
struct Pointers {
  std::byte* data;
  std::byte* scales;
  std::byte* hot_data;
  const float* g[2];
  const int32_t* cu_seqlens;
  const int32_t* context_lens;
  const int32_t* positions;
  const int32_t* tables;
  const int32_t* hot_tables;
  float* qkv;
  const float* bias;
  const float* q_norm;
  const float* k_norm;
  const float* rope_cos;
  const float* rope_sin;
  const float* k_mean;
  float* q_dot_mean;
  int64_t* num_nonfinite;
  const BlockMove* moves;
};

template <class T>
T* OrNull(std::vector<T>& v) {
  return v.empty() ? nullptr : v.data();
}

Pointers CpuPointers(Step& s) {
  return {OrNull(s.data),       OrNull(s.scales),
          OrNull(s.hot_data),   {OrNull(s.g[0]), OrNull(s.g[1])},
          OrNull(s.cu_seqlens), OrNull(s.shape.contexts),
          OrNull(s.positions),  OrNull(s.tables),
          OrNull(s.hot_tables), OrNull(s.qkv),
          OrNull(s.bias),       OrNull(s.q_norm),
          OrNull(s.k_norm),     OrNull(s.rope_cos),
          OrNull(s.rope_sin),   OrNull(s.k_mean),
          OrNull(s.q_dot_mean), OrNull(s.num_nonfinite),
          OrNull(s.moves)};
}

struct GpuStep {
  explicit GpuStep(const Step& s)
      : data(s.data),
        scales(s.scales),
        hot_data(s.hot_data),
        g0(s.g[0]),
        g1(s.g[1]),
        cu_seqlens(s.cu_seqlens),
        contexts(s.shape.contexts),
        positions(s.positions),
        tables(s.tables),
        hot_tables(s.hot_tables),
        qkv(s.qkv),
        bias(s.bias),
        q_norm(s.q_norm),
        k_norm(s.k_norm),
        rope_cos(s.rope_cos),
        rope_sin(s.rope_sin),
        k_mean(s.k_mean),
        q_dot_mean(s.q_dot_mean),
        num_nonfinite(s.num_nonfinite),
        moves(s.moves) {}
  Pointers pointers() const {
    return {data.get(),       scales.get(),        hot_data.get(),  {g0.get(), g1.get()},
            cu_seqlens.get(), contexts.get(),      positions.get(), tables.get(),
            hot_tables.get(), qkv.get(),           bias.get(),      q_norm.get(),
            k_norm.get(),     rope_cos.get(),      rope_sin.get(),  k_mean.get(),
            q_dot_mean.get(), num_nonfinite.get(), moves.get()};
  }
  GpuArray<std::byte> data, scales, hot_data;
  GpuArray<float> g0, g1;
  GpuArray<int32_t> cu_seqlens, contexts, positions, tables, hot_tables;
  GpuArray<float> qkv, bias, q_norm, k_norm, rope_cos, rope_sin, k_mean, q_dot_mean;
  GpuArray<int64_t> num_nonfinite;
  GpuArray<BlockMove> moves;
};

KvLayerView ViewOf(const Step& s, const Pointers& p) {
  KvLayerView view = s.layout.LayerView(0, p.data, p.scales);
  for (int side = 0; side < 2; ++side) {
    const KvCacheMode mode = view.mode[side];
    const bool has_factor = mode == KvCacheMode::kFp8E4m3 || mode == KvCacheMode::kFp8E5m2 ||
                            mode == KvCacheMode::kFp4Nv;
    view.g[side] = has_factor && s.shape.factor != 1.f ? p.g[side] : nullptr;
  }
  return view;
}

KvLayerView HotViewOf(const Step& s, const Pointers& p) {
  return s.hot ? s.hot_layout.LayerView(0, p.hot_data, nullptr) : KvLayerView{};
}

BatchView BatchOf(const Step& s, const Pointers& p) {
  BatchView batch;
  batch.num_seqs = static_cast<int>(s.shape.contexts.size());
  batch.num_decode = s.shape.num_decode;
  batch.num_tokens = s.cu_seqlens.back();
  batch.cu_seqlens = p.cu_seqlens;
  batch.context_lens = p.context_lens;
  batch.positions = p.positions;
  batch.block_tables = p.tables;
  batch.block_table_stride = s.table_stride;
  batch.hot_tables = s.hot ? p.hot_tables : nullptr;
  return batch;
}

ProcessKVParams ProcessParams(const Step& s, const Pointers& p) {
  ProcessKVParams params;
  params.qkv = p.qkv;
  params.bias = p.bias;
  params.q_norm = p.q_norm;
  params.k_norm = p.k_norm;
  params.rope_cos = p.rope_cos;
  params.rope_sin = p.rope_sin;
  params.rope_dim = s.rope_dim;
  params.q_heads = s.shape.group * s.shape.kv_heads;
  params.rotate = s.rotate;
  params.search_scales = s.search;
  params.k_mean = p.k_mean;
  params.q_dot_mean = p.q_dot_mean;
  params.kv = ViewOf(s, p);
  params.hot = HotViewOf(s, p);
  params.batch = BatchOf(s, p);
  params.num_nonfinite = p.num_nonfinite;
  return params;
}

Device& Cpu() {
  static const std::unique_ptr<Device> device = MakeCpuDevice(1);
  return *device;
}

// The GPU's bytes and numbers are the CPU's.
void CheckProcess(Step step) {
  CAPTURE(Describe(step.shape));
  const Gpu gpu;
  const GpuStep on_gpu(step);
  CudaProcessKV(gpu.context, ProcessParams(step, on_gpu.pointers()));
  Cpu().ProcessKV(ProcessParams(step, CpuPointers(step)));
  CHECK(SameBytes(on_gpu.data.Read(), step.data));
  CHECK(SameBytes(on_gpu.scales.Read(), step.scales));
  CHECK(SameBytes(on_gpu.hot_data.Read(), step.hot_data));
  CHECK(SameFloats(on_gpu.qkv.Read(), step.qkv));
  CHECK(SameFloats(on_gpu.q_dot_mean.Read(), step.q_dot_mean));
  CHECK(on_gpu.num_nonfinite.Read() == step.num_nonfinite);
}

// Rows of every kind: of all sizes, zero, constant, ties between codes, NaN, infinities.
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

TEST_CASE("a quotient is what division gives") {
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
    const float g = std::ldexp(BitsFloat(0x3f800000u | (random() & 0x7fffffu)),
                               static_cast<int>(random() % 128) - 64);
    const float d = E4M3ToFloat(static_cast<uint8_t>(1 + random() % 0x7e)) * g;
    check(BFloat16ToFloat(static_cast<uint16_t>(random() % 0x7f81)), d);
    check(HalfToFloat(static_cast<uint16_t>(random() % 0x7c01)), d);
    // Beside a midpoint between codes.
    const float x = kMidpoints[random() % 9] * d;
    check(RoundTo(x, DataType::kBFloat16), d);
    check(BitsFloat(FloatBits(x) + static_cast<uint32_t>(random() % 5) - 2), d);
  }
  CHECK(wrong == 0);
}

TEST_CASE("E2M1 by a sum is E2M1 by its definition") {
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

TEST_CASE("what is written is what the CPU writes: every pair of formats, head_dim and dtype") {
  unsigned seed = 0;
  for (const Pair& modes : AllPairs()) {
    for (int head_dim : {64, 80, 96, 128, 256}) {
      for (DataType dtype : kTypes) {
        for (bool search : {false, true}) {
          Shape shape = {.modes = modes, .dtype = dtype, .head_dim = head_dim};
          const float factors[] = {1.f, 0.75f, 0.3f, 0x1p-64f, 0x1.8p60f};
          shape.factor = factors[++seed % 5];
          Step step(shape, seed);
          step.search = search;
          FillHardRows(step);
          CheckProcess(std::move(step));
        }
      }
    }
  }
}

TEST_CASE("conversions of the newest GPUs change no byte") {
  newest_gpu = true;
  for (const Pair& modes : AllPairs()) {
    Step step({.modes = modes, .head_dim = 96});
    FillHardRows(step);
    CheckProcess(std::move(step));
  }
  newest_gpu = false;
}

TEST_CASE("small and odd head_dims") {
  for (int head_dim : {16, 32, 48, 112, 144, 240}) {
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
  bool mean = false;
  bool rotate = false;
  bool hot = false;
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
  }
  if (with.rope_dim > 0) {
    step.rope_dim = with.rope_dim;
    step.rope_cos = Normals(step.random, tokens * static_cast<size_t>(with.rope_dim / 2));
    step.rope_sin = Normals(step.random, step.rope_cos.size());
  }
  if (with.mean) {
    step.k_mean = Normals(step.random, heads * n, 2.f);
    step.q_dot_mean.assign(tokens * heads * static_cast<size_t>(shape.group), -1.f);
  }
  step.rotate = with.rotate;
  step.hot = with.hot;
  return step;
}

TEST_CASE("bias, norm, RoPE, mean and rotation have the CPU's bits") {
  unsigned seed = 0;
  for (int head_dim : {64, 80, 96, 128, 256}) {
    // 20: halves that are no multiple of eight values; 32: a part of the head.
    for (int rope_dim : {0, 20, 32, head_dim}) {
      for (int with = 0; with < 32; with += 1 + static_cast<int>(seed % 3)) {
        Shape shape = {.dtype = kTypes[seed % 2], .head_dim = head_dim};
        shape.modes = AllPairs()[seed % AllPairs().size()];
        CAPTURE(rope_dim);
        CAPTURE(with);
        CheckProcess(MakeStep(shape,
                              {.bias = (with & 1) != 0,
                               .norm = (with & 2) != 0,
                               .rope_dim = rope_dim,
                               .mean = (with & 4) != 0,
                               .rotate = (with & 8) != 0,
                               .hot = (with & 16) != 0},
                              ++seed));
      }
    }
  }
}

TEST_CASE("a token without a block is not stored and not counted") {
  for (bool hot : {false, true}) {
    Step step = MakeStep({}, {.hot = hot}, 1);
    const int row = step.kv_all() * step.shape.head_dim;
    step.qkv[static_cast<size_t>(row) - 1] = NAN;  // of V of the first sequence's token
    std::fill(step.tables.begin(), step.tables.begin() + step.table_stride, -1);
    std::fill(step.hot_tables.begin(), step.hot_tables.begin() + step.table_stride, -1);
    const GpuStep on_gpu(step);
    const Gpu gpu;
    CudaProcessKV(gpu.context, ProcessParams(step, on_gpu.pointers()));
    CHECK(on_gpu.num_nonfinite.Read() == step.num_nonfinite);
    // The same step without that token.
    Step rest = MakeStep({}, {.hot = hot}, 1);
    rest.qkv.erase(rest.qkv.begin(), rest.qkv.begin() + row);
    rest.tables.erase(rest.tables.begin(), rest.tables.begin() + rest.table_stride);
    rest.hot_tables.erase(rest.hot_tables.begin(), rest.hot_tables.begin() + rest.table_stride);
    rest.shape.contexts.erase(rest.shape.contexts.begin());
    rest.shape.num_decode = 0;
    rest.cu_seqlens = {0, 2, 3};
    rest.positions.erase(rest.positions.begin());
    Cpu().ProcessKV(ProcessParams(rest, CpuPointers(rest)));
    CHECK(SameBytes(on_gpu.data.Read(), rest.data));
    CHECK(SameBytes(on_gpu.scales.Read(), rest.scales));
    CHECK(SameBytes(on_gpu.hot_data.Read(), rest.hot_data));
  }
}

TEST_CASE("a recorded write runs again") {
  Step step = MakeStep({}, {.bias = true, .norm = true, .rope_dim = 64}, 3);
  const GpuStep on_gpu(step);
  const Gpu gpu;
  BeginCapture(gpu.context.stream);
  CudaProcessKV(gpu.context, ProcessParams(step, on_gpu.pointers()));
  const Graph graph = EndCapture(gpu.context.stream);
  LaunchGraph(graph, gpu.context.stream);
  DestroyGraph(graph);
  Cpu().ProcessKV(ProcessParams(step, CpuPointers(step)));
  CHECK(SameBytes(on_gpu.data.Read(), step.data));
}

TEST_CASE("blocks that leave the recent window are quantised as the CPU does") {
  unsigned seed = 0;
  for (const Pair& modes : AllPairs()) {
    for (int head_dim : {64, 80, 96, 128, 256}) {
      Shape shape = {.modes = modes, .dtype = kTypes[++seed % 2], .head_dim = head_dim};
      shape.factor = seed % 3 == 0 ? 0.3f : 1.f;
      Step step(shape, seed);  // the hot pool holds all kinds of bits
      step.hot = true;
      step.moves = {{3, 7}, {5, 2}};
      CAPTURE(Describe(shape));
      const GpuStep on_gpu(step);
      const Gpu gpu;
      const auto params = [&](const Pointers& p) {
        return QuantiseBlocksParams{ViewOf(step, p), HotViewOf(step, p), seed % 2 == 0, p.moves,
                                    static_cast<int>(step.moves.size())};
      };
      CudaQuantiseBlocks(gpu.context, params(on_gpu.pointers()));
      Cpu().QuantiseBlocks(params(CpuPointers(step)));
      CHECK(SameBytes(on_gpu.data.Read(), step.data));
      CHECK(SameBytes(on_gpu.scales.Read(), step.scales));
      CHECK(SameBytes(on_gpu.hot_data.Read(), step.hot_data));
    }
  }
}

// Only scales that the encoder stores.
void MakeScalesLegal(Step& step) {
  const KvLayerView view = step.layout.LayerView(0, step.data.data(), step.scales.data());
  const int stride = view.ScaleStride();
  for (size_t i = 0; i < step.scales.size(); ++i) {
    const int side = static_cast<int>(i) % stride < view.scale_bytes[0] ? 0 : 1;
    const int byte = static_cast<int>(step.scales[i]);
    step.scales[i] = static_cast<std::byte>(view.mode[side] == KvCacheMode::kFp4Mx
                                                ? kMxLeast + byte % (kMxMost - kMxLeast + 1)
                                                : byte % (kNvMost + 1));
  }
}

TEST_CASE("flattened FP32 has the CPU's bits") {
  unsigned seed = 0;
  for (const Pair& modes : AllPairs()) {
    for (int head_dim : {64, 80, 96, 128, 256}) {
      for (bool hot : {false, true}) {
        Shape shape = {.modes = modes, .dtype = kTypes[++seed % 2], .head_dim = head_dim};
        Step step(shape, seed);
        step.hot = hot;
        step.tables[1] = -1;
        MakeScalesLegal(step);
        CAPTURE(Describe(shape));
        constexpr int kMaxLen = 40;
        const size_t size = shape.contexts.size() * static_cast<size_t>(2 * kMaxLen * head_dim);
        std::vector<float> k(size, -7.f);
        std::vector<float> v(size, -7.f);
        const GpuStep on_gpu(step);
        const GpuArray<float> gpu_k(k);
        const GpuArray<float> gpu_v(v);
        FlattenKVParams params;
        params.max_len = kMaxLen;
        params.rule = hot ? HotRule{shape.block_seq_len, 1, 0} : HotRule{};
        const auto with = [&](const Pointers& p, float* to_k, float* to_v) {
          params.k = to_k;
          params.v = to_v;
          params.kv = ViewOf(step, p);
          params.hot = HotViewOf(step, p);
          params.batch = BatchOf(step, p);
          return params;
        };
        const Gpu gpu;
        CudaFlattenKV(gpu.context, with(on_gpu.pointers(), gpu_k.get(), gpu_v.get()));
        Cpu().FlattenKV(with(CpuPointers(step), k.data(), v.data()));
        CHECK(SameBytes(gpu_k.Read(), k));
        CHECK(SameBytes(gpu_v.Read(), v));
      }
    }
  }
}

// One position as the codec decodes it without g; zeros where its block is not there.
std::vector<float> Decoded(Step& step, const KvLayerView& view, const FlattenSpan& span, int t,
                           KvSide side, int head) {
  const int s = static_cast<int>(side);
  const int index = t / view.block_seq_len;
  const int block = step.tables[static_cast<size_t>(span.sequence * step.table_stride + index)];
  std::vector<float> row(static_cast<size_t>(view.head_dim));
  if (block < 0) {
    return row;
  }
  const int slot = t % view.block_seq_len;
  const std::byte* meta = nullptr;
  if (view.scale_bytes[s] > 0) {
    meta = view.Scales(side, block, head) + slot * view.ScaleStride();
  } else if (view.param_bytes[s] > 0) {
    meta = view.Params(side, block, head) + slot * view.param_bytes[s];
  }
  DispatchMode(view.mode[s], [&]<KvCacheMode M>() {
    Codec<M>::DecodeRow(reinterpret_cast<const uint8_t*>(view.Payload(side, block, head) +
                                                         slot * view.row_bytes[s]),
                        reinterpret_cast<const uint8_t*>(meta), view.head_dim, view.dtype, 1.f,
                        row.data());
  });
  return row;
}

bool IsExpected(uint16_t got, float want, KvCacheMode mode, DataType dtype) {
  if (IsNan(want)) {
    return true;  // E4M3 on a GPU without conversions has none
  }
  if (mode == KvCacheMode::kNone) {
    return RoundTo(want, dtype) == LoadAs(reinterpret_cast<const uint8_t*>(&got), dtype, 0);
  }
  if (mode == KvCacheMode::kInt8 || mode == KvCacheMode::kInt4) {
    return got == FloatToHalf(std::clamp(want, -65504.f, 65504.f));
  }
  return HalfToFloat(got) == want;
}

TEST_CASE("flattened 16 bits hold the values without their factor") {
  unsigned seed = 0;
  for (const Pair& modes : AllPairs()) {
    for (int head_dim : {64, 80, 96, 128, 256}) {
      Shape shape = {.modes = modes, .dtype = kTypes[++seed % 2], .head_dim = head_dim};
      Step step(shape, seed);
      step.tables[static_cast<size_t>(2 * step.table_stride)] = -1;
      MakeScalesLegal(step);
      CAPTURE(Describe(shape));
      // Begins inside a block, ends inside one; sequence 2 in two spans.
      const std::vector<FlattenSpan> spans = {{0, 3, 0}, {2, 0, 18}, {2, 32, 35}, {1, 17, 36}};
      constexpr int kRows = 37;
      const size_t size = static_cast<size_t>(shape.kv_heads * kRows * head_dim);
      const GpuArray<uint16_t> k(std::vector<uint16_t>(size, 0xffff));
      const GpuArray<uint16_t> v(std::vector<uint16_t>(size, 0xffff));
      const GpuArray<FlattenSpan> gpu_spans(spans);
      const GpuStep on_gpu(step);
      const Gpu gpu;
      CudaFlattenToHalf(gpu.context,
                        {k.get(), v.get(), kRows, gpu_spans.get(), static_cast<int>(spans.size()),
                         ViewOf(step, on_gpu.pointers()), on_gpu.tables.get(), step.table_stride});
      const KvLayerView view = ViewOf(step, CpuPointers(step));
      int wrong = 0;
      for (KvSide side : {KvSide::kK, KvSide::kV}) {
        const std::vector<uint16_t> got = (side == KvSide::kK ? k : v).Read();
        for (int row = 0; row < kRows; ++row) {
          const auto after =
              std::upper_bound(spans.begin(), spans.end(), row,
                               [](int r, const FlattenSpan& s) { return r < s.row; });
          const FlattenSpan& span = *(after - 1);
          for (int head = 0; head < shape.kv_heads; ++head) {
            const std::vector<float> want =
                Decoded(step, view, span, span.begin + row - span.row, side, head);
            for (int d = 0; d < head_dim; ++d) {
              wrong += !IsExpected(got[static_cast<size_t>((head * kRows + row) * head_dim + d)],
                                   want[static_cast<size_t>(d)], view.mode[static_cast<int>(side)],
                                   shape.dtype);
            }
          }
        }
      }
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("the spans of a chunk hold what its queries see in each view") {
  constexpr int kLength = 4;  // of a block
  for (const HotRule& rule :
       {HotRule{}, HotRule{kLength, 0, 0}, HotRule{kLength, 1, 0}, HotRule{kLength, 2, 1}}) {
    for (int window : {0, 1, 5, 13}) {
      for (int context = 1; context <= 30; ++context) {
        for (int first = 0; first < context; ++first) {
          const SeenSpans spans = SpansOf(rule, window, first, context);
          int wrong = 0;
          for (int t = 0; t < context; ++t) {
            bool cold = false;
            bool hot = false;
            for (int p = std::max(first, t); p < context; ++p) {
              const bool seen = window == 0 || t > p - window;
              const bool is_hot = rule.enabled() && rule.IsHot(t / kLength, p);
              cold = cold || (seen && !is_hot);
              hot = hot || (seen && is_hot);
            }
            const auto in = [&](const PositionSpan& s) { return t >= s.begin && t < s.end; };
            const bool in_hot = in(spans.sinks) || in(spans.recent);
            wrong += (cold && !in(spans.cold)) || (hot && !in_hot);
            if (window == 0) {
              wrong += cold != in(spans.cold) || hot != in_hot;
            }
            wrong += in(spans.sinks) && in(spans.recent);
          }
          CAPTURE(window);
          CAPTURE(context);
          CAPTURE(first);
          CHECK(wrong == 0);
        }
      }
    }
  }
}

}  // namespace
}  // namespace turbomind::cuda
