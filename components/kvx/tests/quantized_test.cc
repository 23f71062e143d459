// Tests of quantized layers against the engine's own ops: the bytes that WriteKv stores, and the
// rows that FlattenKV reads.

#include <doctest/doctest.h>

#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kvx/kvx_turbomind.h"
#include "kvx/tests/kvx_fixture.h"
#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/kv/layout.h"
#include "turbomind/ops/flatten_kv.h"
#include "turbomind/ops/process_kv.h"

namespace kvx {
namespace {

using turbomind::DataType;
using turbomind::KvCacheMode;
using turbomind::KvLayerView;

constexpr int kTokens = 21;
constexpr int kHeads = 2;
constexpr int kBlockSize = 16;
constexpr int kBlocks = 4;
// Rotating back adds FP32 rounding of log2(128) stages, relative to the largest value.
constexpr float kRotationError = 2e-6f;

// A layer in two memories: one for kvx, and one for the engine.
struct Layer {
  Layer(KvCacheMode mode, bool changes_k, int head_dim, bool search)
      : dim(head_dim), rotated(changes_k), searched(search) {
    layer.size = sizeof(layer);
    layer.k_mode = layer.v_mode = static_cast<kvx_tm_mode_t>(mode);
    layer.dtype = KVX_DTYPE_BF16;
    layer.memory = KVX_MEMORY_HOST;
    layer.block_size = kBlockSize;
    layer.num_kv_heads = kHeads;
    layer.head_dim = static_cast<uint32_t>(head_dim);
    layer.num_blocks = kBlocks;
    layer.flags = static_cast<uint32_t>((changes_k ? KVX_TM_FLAG_ROTATED : KVX_TM_FLAG_NONE) |
                                        (search ? KVX_TM_FLAG_SEARCH : KVX_TM_FLAG_NONE));
    REQUIRE(kvx_tm_describe(&layer) == KVX_STATUS_OK);
    data = RandomBytes(layer.block_bytes * kBlocks, 1);
    scales = RandomBytes(layer.scale_block_bytes * kBlocks, 2);
    engine_data = data;
    engine_scales = scales;
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    for (auto* rows : {&key, &value, &mean}) {
      rows->resize(rows == &mean ? size_t{kHeads} * dim : size_t{kTokens} * kHeads * dim);
      std::generate(rows->begin(), rows->end(), [&] { return normal(random); });
    }
    layer.data = data.data();
    layer.scales = scales.data();
    layer.k_mean = changes_k ? mean.data() : nullptr;
    if (turbomind::HasGlobalScale(mode)) {
      layer.k_factors = factors;
      layer.v_factors = factors + 1;
    }
    const turbomind::block::Layout layout({.layers = {{mode, mode}},
                                           .kv_heads = kHeads,
                                           .head_dim = dim,
                                           .block_seq_len = kBlockSize,
                                           .dtype = DataType::kBFloat16});
    view = layout.LayerView(0, engine_data.data(), engine_scales.data());
    view.global_scale[0] = layer.k_factors;
    view.global_scale[1] = layer.v_factors;
  }

  turbomind::BatchView Batch() const {
    return {1, 0, kTokens, cu_seqlens, context_lens, positions.data(), table, 2};
  }

  // The engine's WriteKv of the same rows, after one query head per KV head.
  void WriteByEngine(turbomind::Device& device) {
    std::vector<float> qkv(size_t{kTokens} * 3 * kHeads * dim);
    const size_t row = size_t{kHeads} * dim;
    for (size_t t = 0; t < kTokens; ++t) {
      std::copy_n(key.begin() + t * row, row, qkv.begin() + (3 * t + 1) * row);
      std::copy_n(value.begin() + t * row, row, qkv.begin() + (3 * t + 2) * row);
    }
    int64_t num_nonfinite = 0;
    turbomind::WriteKvParams p;
    p.qkv = qkv.data();
    p.q_heads = kHeads;
    p.rotate = rotated;
    p.search_scales = searched;
    p.k_mean = layer.k_mean;
    p.kv = view;
    p.batch = Batch();
    p.num_nonfinite = &num_nonfinite;
    turbomind::invokeProcessKV_v2(device, p);
  }

  kvx_kv_io_desc_t Io(std::vector<float>& k, std::vector<float>& v) const {
    kvx_kv_io_desc_t io = {};
    io.size = sizeof(io);
    io.num_tokens = kTokens;
    io.num_kv_heads = kHeads;
    io.head_dim = layer.head_dim;
    io.key = RowMajor(k.data(), KVX_DTYPE_F32, KVX_LAYOUT_BLOCK_CUSTOM, {kTokens, kHeads, dim});
    io.value = RowMajor(v.data(), KVX_DTYPE_F32, KVX_LAYOUT_BLOCK_CUSTOM, {kTokens, kHeads, dim});
    return io;
  }

  int dim;
  bool rotated;
  bool searched;
  kvx_tm_layer_t layer = {};
  std::vector<std::byte> data, scales, engine_data, engine_scales;
  std::vector<float> key, value, mean;
  float factors[kHeads + 1] = {0.75f, 1.25f, 0.5f};
  KvLayerView view;
  int32_t table[2] = {2, 1};
  int32_t cu_seqlens[2] = {0, kTokens};
  int32_t context_lens[1] = {kTokens};
  std::vector<int32_t> positions = [] {
    std::vector<int32_t> all(kTokens);
    for (int i = 0; i < kTokens; ++i) {
      all[static_cast<size_t>(i)] = i;
    }
    return all;
  }();
};

void Write(Layer& l) {
  std::vector<int64_t> slots;
  for (int i = 0; i < kTokens; ++i) {
    slots.push_back(l.table[i / kBlockSize] * kBlockSize + i % kBlockSize);
  }
  kvx_write_desc_t write = {};
  write.size = sizeof(write);
  write.io = l.Io(l.key, l.value);
  write.slots = {sizeof(write.slots), KVX_DTYPE_S64, kTokens, -1, slots.data()};
  CHECK(kvx_tm_write_kv(&l.layer, &write, nullptr) == KVX_STATUS_OK);
}

void Gather(Layer& l, std::vector<float>& k, std::vector<float>& v) {
  kvx_gather_desc_t gather = {};
  gather.size = sizeof(gather);
  gather.io = l.Io(k, v);
  gather.block_table = {sizeof(gather.block_table),
                        KVX_BLOCK_TABLE_PACKED,
                        KVX_DTYPE_S32,
                        KVX_DTYPE_INVALID,
                        1,
                        1,
                        2,
                        l.table,
                        nullptr,
                        2,
                        0,
                        0};
  gather.seq_lens = {sizeof(gather.seq_lens), KVX_DTYPE_S32, 1, l.context_lens};
  gather.max_seq_len = kTokens;
  CHECK(kvx_tm_gather_kv(&l.layer, &gather, nullptr) == KVX_STATUS_OK);
}

// Returns the largest difference from FlattenKV, whose K is as stored.
float DifferenceFromFlatten(turbomind::Device& device, Layer& l) {
  const size_t size = size_t{kTokens} * kHeads * l.dim;
  std::vector<float> flat[2] = {std::vector<float>(size), std::vector<float>(size)};
  turbomind::FlattenKVParams f;
  f.k = flat[0].data();
  f.v = flat[1].data();
  f.max_len = kTokens;
  f.kv = l.view;
  f.batch = l.Batch();
  turbomind::invokeFlattenKV_v2(device, f);
  std::vector<float> got[2] = {std::vector<float>(size), std::vector<float>(size)};
  Gather(l, got[0], got[1]);
  const int run = turbomind::RotationSize(l.dim);
  float difference = 0;
  for (int side = 0; side < 2; ++side) {
    for (int t = 0; t < kTokens; ++t) {
      for (int h = 0; h < kHeads; ++h) {
        const float* stored = flat[side].data() + (h * kTokens + t) * l.dim;
        const float* row = got[side].data() + (t * kHeads + h) * l.dim;
        for (int d = 0; d < l.dim; ++d) {
          double want = stored[d];
          if (side == 0 && l.rotated) {  // the normalized Hadamard matrix in double precision
            want = 0;
            for (int i = 0; i < run; ++i) {
              const int sign = __builtin_parity(static_cast<unsigned>(i & (d % run))) ? -1 : 1;
              want += sign * double{stored[d / run * run + i]};
            }
            want = want / std::sqrt(static_cast<double>(run)) +
                   l.mean[static_cast<size_t>(h * l.dim + d)];
          }
          difference = std::max(difference, static_cast<float>(std::fabs(want - row[d])));
        }
      }
    }
  }
  return difference;
}

TEST_CASE("a quantized layer holds the engine's bytes and returns its rows") {
  const std::shared_ptr<turbomind::Device> device = turbomind::MakeCpuDevice(1);
  for (const KvCacheMode mode : turbomind::kAllKvCacheModes) {
    for (const bool changes_k : {false, true}) {
      for (const int dim : {16, 80, 128}) {
        for (const bool search : {false, true}) {
          CAPTURE(std::string(turbomind::ToString(mode)));
          CAPTURE(changes_k);
          CAPTURE(dim);
          Layer l(mode, changes_k, dim, search);
          Write(l);
          l.WriteByEngine(*device);
          CHECK(l.data == l.engine_data);
          CHECK(l.scales == l.engine_scales);
          const float error = DifferenceFromFlatten(*device, l);
          CHECK(error <= (changes_k ? 6 * kRotationError : 0.f));
        }
      }
    }
  }
}

TEST_CASE("a layer of a plain mode is a KVX cache over the same bytes") {
  for (const KvCacheMode mode : turbomind::kAllKvCacheModes) {
    CAPTURE(std::string(turbomind::ToString(mode)));
    Layer l(mode, false, 64, false);
    Write(l);
    kvx_cache_desc_t cache = {};
    cache.size = sizeof(cache);
    const bool is_plain = mode == KvCacheMode::kNone || mode == KvCacheMode::kFp8E4m3 ||
                          mode == KvCacheMode::kFp8E5m2;
    const kvx_status_t status = kvx_tm_as_cache(&l.layer, &cache);
    CHECK(status == (is_plain ? KVX_STATUS_OK : KVX_STATUS_UNSUPPORTED));
    CHECK(cache.num_blocks == (is_plain ? uint32_t{kBlocks} : 0u));
    if (!is_plain) {
      continue;
    }
    const auto* at = static_cast<const std::byte*>(cache.v.data) +
                     (cache.v.stride[0] * 1 + cache.v.stride[1] * 1 + cache.v.stride[2] * 3) *
                         BytesOf(cache.v.dtype);
    CHECK(at == reinterpret_cast<const std::byte*>(
                    l.data.data() + (l.view.Row(turbomind::KvSide::kV, 1, 1, 3).payload -
                                     reinterpret_cast<uint8_t*>(l.engine_data.data()))));
    Layer changed(mode, true, 64, false);
    CHECK(kvx_tm_as_cache(&changed.layer, &cache) == KVX_STATUS_UNSUPPORTED);
  }
}

TEST_CASE("an error of a quantized layer has its status") {
  Layer l(KvCacheMode::kFp4Nv, false, 64, false);
  const auto status_of = [&](auto change, kvx_status_t wanted) {
    kvx_tm_layer_t layer = l.layer;
    change(layer);
    kvx_write_desc_t write = {};
    write.size = sizeof(write);
    write.io = l.Io(l.key, l.value);
    const std::vector<int64_t> slots(kTokens, 3);
    write.slots = {sizeof(write.slots), KVX_DTYPE_S64, kTokens, -1, slots.data()};
    const auto before = l.data;
    CHECK(kvx_tm_write_kv(&layer, &write, nullptr) == wanted);
    CHECK((wanted == KVX_STATUS_OK || l.data == before));
  };
  using Tm = kvx_tm_layer_t;
  const float bad[kHeads] = {1.f, -1.f};
  status_of([](Tm& x) { x.size -= 1; }, KVX_STATUS_INVALID_ARGUMENT);
  status_of([](Tm& x) { x.block_size = 24; }, KVX_STATUS_INVALID_ARGUMENT);
  status_of([](Tm& x) { x.num_blocks = 0; }, KVX_STATUS_INVALID_ARGUMENT);
  status_of([](Tm& x) { x.block_bytes -= 16; }, KVX_STATUS_INVALID_ARGUMENT);
  status_of([](Tm& x) { x.scales = nullptr; }, KVX_STATUS_INVALID_ARGUMENT);
  status_of([](Tm& x) { x.scale_block_bytes += 8; }, KVX_STATUS_INVALID_ARGUMENT);
  status_of([](Tm& x) { x.flags = 4; }, KVX_STATUS_INVALID_ARGUMENT);
  status_of([](Tm& x) { x.dtype = KVX_DTYPE_U8; }, KVX_STATUS_INVALID_ARGUMENT);
  status_of([](Tm& x) { x.head_dim = 1u << 31; }, KVX_STATUS_INVALID_ARGUMENT);
  status_of([](Tm& x) { x.v_mode = KVX_TM_MODE_INT8; }, KVX_STATUS_INVALID_ARGUMENT);
  status_of([&](Tm& x) { x.k_factors = bad; }, KVX_STATUS_INVALID_ARGUMENT);
  status_of([](Tm& x) { x.memory = KVX_MEMORY_DEVICE; }, KVX_STATUS_UNSUPPORTED);
  status_of([](Tm& x) { x.num_blocks = 0; }, KVX_STATUS_INVALID_ARGUMENT);
  status_of([](Tm&) {}, KVX_STATUS_OK);
  CHECK(kvx_tm_describe(nullptr) == KVX_STATUS_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace kvx
