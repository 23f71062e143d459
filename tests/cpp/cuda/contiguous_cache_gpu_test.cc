// KVCache with a GPU: attention over the codes equals that of the CPU, for arrays in GPU memory.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cuda/gpu_array.h"
#include "cuda/test_stream.h"
#include "kv_cache/contiguous_cache.h"
#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/backend/cuda/cuda_device.h"
#include "turbomind/core/float_convert.h"

namespace turbomind::cuda {
namespace {

// Of the largest output. The GPU rounds queries and softmax weights to 16 bits, and BF16 outputs
// have 8 bits.
constexpr float kTolerance = 4e-3f;
constexpr int kSteps[] = {70, 1, 5, 1};  // tokens of the calls

ContiguousCacheConfig MakeConfig(KvCacheMode k, KvCacheMode v) {
  ContiguousCacheConfig config;
  config.layers = {{k, v}, {k, v}};
  config.q_heads = 4;
  config.kv_heads = 2;
  config.head_dim = 64;
  config.max_seq_len = 130;
  config.batch_size = 2;
  config.exact = true;  // on the CPU
  return config;
}

// Random values [batch, heads, tokens, head_dim], stored with tokens before heads.
struct Array {
  Array(const ContiguousCacheConfig& config, int heads, int tokens, DataType type, unsigned seed)
      : dtype(type) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const auto count = static_cast<size_t>(config.batch_size) * heads * tokens * config.head_dim;
    bytes.resize(count * static_cast<size_t>(SizeOf(dtype)));
    for (size_t i = 0; i < count; ++i) {
      StoreAs(normal(random), dtype, bytes.data(), static_cast<int>(i));
    }
    const int64_t row = config.head_dim * SizeOf(dtype);
    strides = {tokens * heads * row, row, heads * row, SizeOf(dtype)};
  }
  HeadRows Rows(const uint8_t* data) const {
    return {reinterpret_cast<const std::byte*>(data), dtype, strides};
  }

  DataType dtype;
  std::vector<uint8_t> bytes;
  std::array<int64_t, 4> strides;
};

std::vector<float> Floats(const std::vector<uint8_t>& bytes, DataType dtype) {
  std::vector<float> values;
  for (size_t i = 0; i < bytes.size() / static_cast<size_t>(SizeOf(dtype)); ++i) {
    values.push_back(LoadAs(bytes.data(), dtype, static_cast<int>(i)));
  }
  return values;
}

struct Pair {
  ContiguousCache cpu;
  ContiguousCache gpu;

  explicit Pair(const ContiguousCacheConfig& config)
      : cpu(MakeCpuDevice(1), config), gpu(std::shared_ptr<Device>(MakeDevice(0, {})), config) {}
};

// Attends in both caches and returns the largest difference, relative to the largest output.
float Attend(Pair& pair, int layer, int tokens, DataType dtype, bool has_sinks) {
  const ContiguousCacheConfig& config = pair.cpu.config();
  const auto seed = static_cast<unsigned>(pair.cpu.seq_len() + 1000 * layer);
  const Array q(config, config.q_heads, tokens, dtype, seed);
  const Array k(config, config.kv_heads, tokens, dtype, seed + 1);
  const Array v(config, config.kv_heads, tokens, dtype, seed + 2);
  const std::vector<float> sinks = {0.5f, -1.f, 2.f, 0.f};
  std::vector<uint8_t> out(q.bytes.size());
  Queries queries = {.q = q.Rows(q.bytes.data()),
                     .out = reinterpret_cast<std::byte*>(out.data()),
                     .out_dtype = dtype,
                     .softmax_scale = 0.125f,
                     .sinks = has_sinks ? sinks.data() : nullptr};
  pair.cpu.Attend(layer, {k.Rows(k.bytes.data()), v.Rows(v.bytes.data()), tokens}, queries);
  const TestStream stream;
  const GpuArray<uint8_t> gpu_q(stream, q.bytes);
  const GpuArray<uint8_t> gpu_k(stream, k.bytes);
  const GpuArray<uint8_t> gpu_v(stream, v.bytes);
  const GpuArray<float> gpu_sinks(stream, sinks);
  const GpuArray<uint8_t> gpu_out(stream, std::vector<uint8_t>(out.size(), 0xff));
  queries.q = q.Rows(gpu_q.data());
  queries.out = reinterpret_cast<std::byte*>(gpu_out.data());
  queries.sinks = has_sinks ? gpu_sinks.data() : nullptr;
  queries.stream = stream;
  pair.gpu.Attend(layer, {k.Rows(gpu_k.data()), v.Rows(gpu_v.data()), tokens}, queries);
  const std::vector<float> wanted = Floats(out, dtype);
  const std::vector<float> got = Floats(gpu_out.Read(), dtype);
  float largest = 0.f;
  float error = 0.f;
  for (size_t i = 0; i < wanted.size(); ++i) {
    largest = std::max(largest, std::fabs(wanted[i]));
    const float difference = std::fabs(wanted[i] - got[i]);
    error = difference <= error ? error : difference;  // keeps NaN
  }
  return error / largest;
}

struct Shape {
  KvCacheMode k = KvCacheMode::kNone;
  KvCacheMode v = KvCacheMode::kNone;
  DataType dtype = DataType::kFloat16;
  int window = 0;
  bool rotate = false;
  bool sinks = false;
};

TEST_CASE("a cache on a GPU attends like one on the CPU") {
  using enum KvCacheMode;
  const Shape shapes[] = {{},
                          {.k = kFp4Nv, .v = kFp4Nv, .dtype = DataType::kFloat32, .rotate = true},
                          {.k = kInt8, .v = kInt4, .sinks = true},
                          {.k = kFp8E4m3, .v = kFp8E4m3, .window = 50},
                          {.k = kFp4Mx, .v = kFp4Mx, .dtype = DataType::kFloat32, .window = 64}};
  for (const Shape& shape : shapes) {
    ContiguousCacheConfig config = MakeConfig(shape.k, shape.v);
    config.window = shape.window;
    config.rotate_k = shape.rotate;
    Pair pair(config);
    for (const int tokens : kSteps) {
      CAPTURE(tokens);
      for (int layer = 0; layer < 2; ++layer) {
        CAPTURE(layer);
        CHECK(Attend(pair, layer, tokens, shape.dtype, shape.sinks) < kTolerance);
      }
      pair.cpu.Advance(tokens);
      pair.gpu.Advance(tokens);
    }
    CHECK(pair.gpu.seq_len() == 77);
    pair.cpu.Truncate(72);
    pair.gpu.Truncate(72);
    CHECK(Attend(pair, 0, 2, shape.dtype, shape.sinks) < kTolerance);
    CHECK(pair.gpu.num_nonfinite() == 0);
  }
}

TEST_CASE("a cache on a GPU attends to arrays of BF16") {
  Pair pair(MakeConfig(KvCacheMode::kFp4Nv, KvCacheMode::kFp4Nv));
  CHECK(Attend(pair, 0, 9, DataType::kBFloat16, false) < 2 * kTolerance);
}

TEST_CASE("a cache on a GPU stores as much as one on the CPU in blocks of 64 tokens") {
  ContiguousCacheConfig config = MakeConfig(KvCacheMode::kFp4Nv, KvCacheMode::kFp4Nv);
  config.max_seq_len = 256;
  const Pair pair(config);
  CHECK(pair.gpu.num_bytes() == pair.cpu.num_bytes());
  config.max_seq_len = 193;  // the CPU's block has a power of two
  config.paged = true;
  CHECK(ContiguousCache::PoolBytes(config) == pair.cpu.num_bytes());
  config.max_seq_len = 192;
  CHECK(ContiguousCache::PoolBytes(config) == pair.cpu.num_bytes() * 3 / 4);
}

TEST_CASE("values that are not finite are counted on the GPU") {
  ContiguousCacheConfig config = MakeConfig(KvCacheMode::kInt8, KvCacheMode::kInt8);
  config.batch_size = 1;
  ContiguousCache cache(std::shared_ptr<Device>(MakeDevice(0, {})), config);
  const TestStream stream;
  const std::vector<float> values(static_cast<size_t>(config.q_heads) * 64, INFINITY);
  const GpuArray<float> array(stream, values);
  const HeadRows rows = {
      reinterpret_cast<const std::byte*>(array.data()), DataType::kFloat32, {0, 256, 256, 4}};
  cache.Attend(0, {rows, rows, 1},
               {.q = rows, .out = reinterpret_cast<std::byte*>(array.data()), .stream = stream});
  CHECK(cache.num_nonfinite() == 2 * 2 * 64);
}

TEST_CASE("a cache on a GPU refuses arrays of the host and dense reads") {
  ContiguousCache cache(std::shared_ptr<Device>(MakeDevice(0, {})),
                        MakeConfig(KvCacheMode::kFp4Nv, KvCacheMode::kFp4Nv));
  std::vector<float> memory(2 * 4 * 64);
  const HeadRows rows = {
      reinterpret_cast<const std::byte*>(memory.data()), DataType::kFloat32, {256, 256, 256, 4}};
  const Queries queries = {.q = rows, .out = reinterpret_cast<std::byte*>(memory.data())};
  CHECK_THROWS_AS(cache.Attend(0, {rows, rows, 1}, queries), InvalidArgument);
  CHECK_THROWS_AS(cache.Advance(1), InvalidArgument);  // nothing was stored
  CHECK_THROWS_AS(cache.Append(0, {rows, rows, 1}), InvalidArgument);
  CHECK_THROWS_AS(cache.Read(0, {}), InvalidArgument);
  ContiguousCacheConfig floats = MakeConfig(KvCacheMode::kNone, KvCacheMode::kNone);
  floats.dtype = DataType::kFloat32;
  CHECK_THROWS_AS(ContiguousCache(std::shared_ptr<Device>(MakeDevice(0, {})), floats),
                  InvalidArgument);
}

}  // namespace
}  // namespace turbomind::cuda
