// The kernels that write rows of latents and read them back (backend/cuda/kv/latent_rows.h), run
// thread by thread on the CPU. Their results must be bit-identical to the CPU backend's.

#include <doctest/doctest.h>

#include "cuda/latent_fixture.h"

namespace turbomind::cuda::latent_step {
namespace {

template <class T>
bool SameBytes(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// NaN bits may differ between processors.
bool SameFloats(const std::vector<float>& a, const std::vector<float>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](float x, float y) {
    return FloatBits(x) == FloatBits(y) || (IsNan(x) && IsNan(y));
  });
}

// Compare every byte of both pools, and what the op rotates and counts.
void CheckPools(const Gpu& gpu, const Places& at, const Layer& want) {
  const Pool* const pools[2] = {&want.quantized, &want.window16};
  for (int i = 0; i < 2; ++i) {
    CHECK(SameBytes(gpu.Read(at.data[i], pools[i]->data.size()), pools[i]->data));
  }
  CHECK(SameBytes(gpu.Read(at.scales[0], want.quantized.scales.size()), want.quantized.scales));
  CHECK(SameFloats(gpu.Read(at.q, want.q.size()), want.q));
  CHECK(gpu.Read(at.num_nonfinite, 1) == want.num_nonfinite);
  CHECK(gpu.Read(at.num_clipped, 1) == want.num_clipped);
}

// Compare the rows that FlattenKV reads, as queries of three positions do.
void CheckFlattened(Gpu& gpu, const Places& at, Layer& layer) {
  const Case& c = layer.c;
  const BatchArrays arrays(layer, {{c.context - 1, c.context}, {0, 1}, {16, 17}});
  FlattenKVParams params = {.max_len = c.context,
                            .kv = QuantizedView(layer, OnHost(layer)),
                            .window16 = Window16View(layer, OnHost(layer)),
                            .rule = layer.rule,
                            .batch = arrays.View(3)};
  std::vector<float> k(static_cast<size_t>(3 * c.context * c.rotary), kSentinel);
  std::vector<float> v(static_cast<size_t>(3 * c.context * c.rank), kSentinel);
  const std::vector<float> unwritten[2] = {k, v};
  params.k = k.data();
  params.v = v.data();
  Cpu().FlattenKV(params);
  params.k = gpu.Upload(unwritten[0]);
  params.v = gpu.Upload(unwritten[1]);
  params.kv = QuantizedView(layer, at);
  params.window16 = Window16View(layer, at);
  params.batch = gpu.Upload(params.batch);
  CudaFlattenKV(gpu.context, params);
  CHECK(SameFloats(gpu.Read(params.k, k.size()), k));
  CHECK(SameFloats(gpu.Read(params.v, v.size()), v));
}

void CheckRows(const Case& c, unsigned seed) {
  CAPTURE(Describe(c));
  Layer layer(c, seed);
  Gpu gpu;
  const Places at = gpu.Upload(layer);
  const BatchArrays batch(layer, {{0, c.context}});
  CudaWriteLatents(gpu.context, WriteParams(layer, at, gpu.Upload(batch.View(0))));
  if (layer.rule.enabled()) {
    const std::vector<PendingQuantization> pending = layer.Pending();
    CudaQuantizeBlocks(gpu.context, QuantizeParams(layer, at, gpu.Upload(pending),
                                                   static_cast<int>(pending.size())));
  }
  layer.Fill();
  CheckPools(gpu, at, layer);
  CheckFlattened(gpu, at, layer);
}

TEST_CASE("rows of latents have the CPU's bytes in every format") {
  unsigned seed = 0;
  for (const KvCacheMode format : kAllKvCacheModes) {
    for (const KvCacheMode rotary : {kNone, kInt8, kFp8E4m3}) {
      for (const DataType dtype : {DataType::kBFloat16, DataType::kFloat16}) {
        const int ranks[] = {512, 256, 272, 16, 64};
        const float scales[] = {1.f, 0.75f, 0.3f};
        ++seed;
        CheckRows({.format = format,
                   .rotary_format = rotary,
                   .dtype = dtype,
                   .heads = 3,
                   .rank = ranks[seed % 5],
                   .rotary = seed % 4 == 0 ? 32 : 64,
                   .block_seq_len = 16,
                   .context = 37,
                   .interleaved = seed % 2 == 0,
                   .rotate = seed / 2 % 2 == 0,
                   .search = seed % 3 == 0,
                   .global_scale = scales[seed % 3],
                   .hard = true},
                  seed);
      }
    }
  }
}

TEST_CASE("a row of 512 latents has one scale of its range, or one per group" *
          doctest::test_suite("small")) {
  for (const KvCacheMode format : kAllKvCacheModes) {
    for (const bool search : {false, true}) {
      CheckRows({.format = format,
                 .heads = 1,
                 .context = 20,
                 .search = search,
                 .global_scale = 0.6f,
                 .hard = true},
                3);
    }
  }
}

TEST_CASE("blocks that leave the 16-bit window have the CPU's bytes") {
  for (const KvCacheMode format : kAllKvCacheModes) {
    for (const KvCacheMode window : {kNone, kInt8}) {
      if (format == kNone && window == kInt8) {
        continue;  // no layer has it
      }
      for (const KvCacheMode rotary : {kNone, kInt8}) {
        CheckRows({.format = format,
                   .rotary_format = rotary,
                   .heads = 2,
                   .block_seq_len = 16,
                   .context = 90,
                   .window16 = {0, 64},
                   .window_format = window,
                   .rotate = rotary == kInt8,
                   .global_scale = 0.7f,
                   .hard = window == kNone},
                  11);
      }
    }
  }
}

TEST_CASE("blocks of latents have the CPU's offsets") {
  unsigned seed = 0;
  for (const KvCacheMode format : kAllKvCacheModes) {
    for (const KvCacheMode window : {kNone, kInt8}) {
      if (format == kNone && window == kInt8) {
        continue;  // no layer has it
      }
      const int ranks[] = {512, 64, 272, 192, 16};
      const int lengths[] = {16, 32, 64, 128};
      const bool hard = ++seed % 4 == 0 && window == kNone;
      CheckRows({.format = format,
                 .dtype = seed % 4 == 0 ? DataType::kFloat16 : DataType::kBFloat16,
                 .heads = 2,
                 .rank = ranks[seed % 5],
                 .block_seq_len = lengths[seed % 4],
                 .context = 256,
                 .window16 = {0, 64},
                 .window_format = window,
                 .rotate = !hard && seed % 2 == 0,
                 .search = seed % 3 == 0,
                 .global_scale = 0.7f,
                 .offset = true,
                 .mean = 3.f,
                 .hard = hard},
                seed);
    }
  }
}

TEST_CASE("a token without a block is neither stored nor counted") {
  const Case c = {.heads = 2, .rank = 64, .block_seq_len = 16, .context = 33, .hard = true};
  Layer layer(c, 5);
  Gpu gpu;
  const Places at = gpu.Upload(layer);
  BatchArrays batch(layer, {{0, c.context}});
  batch.tables[1] = -1;
  CudaWriteLatents(gpu.context, WriteParams(layer, at, gpu.Upload(batch.View(0))));
  layer.Fill();
  CHECK(gpu.Read(at.num_clipped, 1)[0] + gpu.Read(at.num_nonfinite, 1)[0] <
        layer.num_clipped[0] + layer.num_nonfinite[0]);
  const KvLayerView view = QuantizedView(layer, OnHost(layer));
  const std::vector<int32_t> table = layer.Table();
  const std::vector<std::byte> data = gpu.Read(at.data[0], layer.quantized.data.size());
  const auto same = [&](int block) {
    const int64_t begin = table[static_cast<size_t>(block)] * view.block_bytes;
    return std::memcmp(data.data() + begin, view.data + begin,
                       static_cast<size_t>(view.block_bytes)) == 0;
  };
  CHECK(same(0));
  CHECK_FALSE(same(1));
  CHECK(data[static_cast<size_t>(table[1] * view.block_bytes)] == std::byte{0xff});
  CHECK(same(2));
}

}  // namespace
}  // namespace turbomind::cuda::latent_step
