#include "turbomind/kv/kv_cache.h"

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "kv/memory_device.h"
#include "turbomind/core/check.h"

namespace turbomind {
namespace {

KvCacheConfig Config(std::vector<int> windows, KvCacheMode format = KvCacheMode::kFp4Nv) {
  return MakeKvCacheConfig(windows, format, 2, 32, 16, DataType::kBFloat16);
}

TEST_CASE("pools have the planned sizes and addresses and are released") {
  MemoryDevice device;
  {
    KvCache cache(device, Config({40, 0, 40}), {3, 5});
    CHECK(cache.GroupOf(0) == 1);
    CHECK(cache.GroupOf(1) == 0);
    CHECK(cache.reserved_bytes() == static_cast<int64_t>(device.reserved_bytes));
    CHECK(cache.data_bytes(1) == 5 * cache.groups()[1].layout.block_bytes());
    CHECK(cache.LayerView(0).Payload(KvSide::kK, 4, 0) == cache.GetBlockPtr(1, 4));
    CHECK(cache.LayerView(0).Scales(KvSide::kK, 4, 0) == cache.GetScaleBlockPtr(1, 4));
    CHECK(cache.LayerView(2).data - cache.LayerView(0).data ==
          cache.groups()[1].layout.block_bytes() / 2);
    CHECK(cache.LayerView(2).global_scale[0] == nullptr);

    const auto data_bytes = static_cast<size_t>(cache.groups()[1].layout.block_bytes());
    const auto scale_bytes = static_cast<size_t>(cache.groups()[1].layout.scale_block_bytes());
    std::memset(cache.GetBlockPtr(1, 3), 1, data_bytes);
    std::memset(cache.GetScaleBlockPtr(1, 3), 2, scale_bytes);
    CHECK(static_cast<unsigned char>(*cache.GetBlockPtr(1, 4)) == MemoryDevice::kSentinel);
    CHECK(static_cast<unsigned char>(*cache.GetScaleBlockPtr(1, 4)) == MemoryDevice::kSentinel);

    CHECK_THROWS_AS(cache.GetBlockPtr(1, 5), InternalError);
    CHECK_THROWS_AS(cache.GetBlockPtr(0, -1), InternalError);
    CHECK_THROWS_AS(cache.GetBlockPtr(2, 0), InternalError);
  }
  CHECK(device.reserved_bytes == 0);
}

TEST_CASE("16-bit pools follow the quantized pools") {
  MemoryDevice device;
  {
    KvCacheConfig config = Config({40, 0, 40});
    config.window16 = {64, 64};
    KvCache cache(device, config, {3, 5, 4, 6});
    CHECK(cache.has_window16_pools());
    CHECK(cache.num_groups() == 2);
    CHECK(cache.num_pools() == 4);
    CHECK(cache.Window16Pool(1) == 3);
    CHECK(cache.rule(0).recent_blocks == 4);
    CHECK(cache.bytes_per_block(3) == 2 * 16 * 2 * 2 * 64);  // layers, tokens, heads, K and V
    CHECK(cache.data_bytes(3) == 6 * cache.bytes_per_block(3));
    CHECK(cache.scale_bytes(3) == 0);
    CHECK(cache.GetScaleBlockPtr(3, 0) == nullptr);
    CHECK(cache.reserved_bytes() == static_cast<int64_t>(device.reserved_bytes));
    CHECK(cache.Window16LayerView(0).Payload(KvSide::kK, 5, 0) == cache.GetBlockPtr(3, 5));
    CHECK(cache.Window16LayerView(1).Payload(KvSide::kK, 3, 0) == cache.GetBlockPtr(2, 3));
    CHECK(cache.Window16LayerView(0).format[0] == KvCacheMode::kNone);
    std::memset(cache.GetBlockPtr(3, 2), 7, static_cast<size_t>(cache.bytes_per_block(3)));
    CHECK(static_cast<unsigned char>(*cache.GetBlockPtr(3, 3)) == MemoryDevice::kSentinel);
    CHECK_NOTHROW(cache.CheckScaleBytes(3, 3));
    CHECK_THROWS_AS(cache.GetBlockPtr(2, 4), InternalError);
    CHECK_THROWS_AS(KvCache(device, config, {3, 5}), InternalError);
    CHECK_THROWS_AS(KvCache(device, config, {3, 5, 4, 0}), InvalidArgument);
    CHECK(KvCache(device, Config({0}), {3}).Window16LayerView(0).data == nullptr);
  }
  CHECK(device.reserved_bytes == 0);
}

TEST_CASE("pools of states follow the KV pools") {
  MemoryDevice device;
  {
    KvCacheConfig config = Config({kNoAttention, 40, 0, kNoAttention});
    config.state_bytes = 192;
    config.checkpoint_bytes = 128;
    for (const bool window16 : {false, true}) {
      config.window16 = window16 ? PrecisionWindowTokens{64, 64} : PrecisionWindowTokens{};
      std::vector<int64_t> num_blocks(window16 ? 4 : 2, 3);
      CHECK_THROWS_AS(KvCache(device, config, num_blocks), InternalError);
      num_blocks.insert(num_blocks.end(), {5, 7});
      KvCache cache(device, config, num_blocks);
      CHECK(cache.has_window16_pools() == window16);
      CHECK(cache.num_groups() == 2);
      CHECK(cache.num_kv_pools() == (window16 ? 4 : 2));
      CHECK(cache.num_pools() == cache.num_kv_pools() + 2);
      CHECK(cache.GroupOf(0) == -1);
      CHECK(cache.GroupOf(1) == 1);
      CHECK(cache.GroupOf(2) == 0);
      CHECK(cache.GroupOf(3) == -1);
      REQUIRE(cache.has_states());
      CHECK(cache.bytes_per_block(cache.StatePool()) == 192);
      CHECK(cache.data_bytes(cache.StatePool()) == 5 * 192);
      CHECK(cache.scale_bytes(cache.CheckpointPool()) == 0);
      CHECK(cache.GetScaleBlockPtr(cache.CheckpointPool(), 6) == nullptr);
      CHECK(cache.states().slot_bytes == 192);
      CHECK(reinterpret_cast<std::byte*>(cache.states().At(4)) ==
            cache.GetBlockPtr(cache.StatePool(), 4));
      CHECK(reinterpret_cast<std::byte*>(cache.checkpoints().At(6)) ==
            cache.GetBlockPtr(cache.CheckpointPool(), 6));
      CHECK_THROWS_AS(cache.GetBlockPtr(cache.StatePool(), 5), InternalError);
      CHECK(cache.reserved_bytes() == static_cast<int64_t>(device.reserved_bytes));
      CHECK(cache.checkpoints().slot_bytes == 128);
      const BlockCopy copy(128, std::byte{3});
      cache.WriteBlock(cache.CheckpointPool(), 6, copy);
      CHECK(cache.ReadBlock(cache.CheckpointPool(), 6) == copy);
      CHECK(cache.ReadBlock(cache.CheckpointPool(), 5) != copy);
      CHECK_NOTHROW(cache.CheckScaleBytes(cache.CheckpointPool(), 5));
    }
    CHECK_NOTHROW(KvCache(device, config, {3, 3, 3, 3, 1, 0}));
    CHECK_THROWS_AS(KvCache(device, config, {3, 3, 3, 3, 0, 1}), InvalidArgument);
    config.state_bytes = 100;
    CHECK_THROWS_AS(KvCache(device, config, {3, 3, 3, 3, 1, 1}), InternalError);
    config.state_bytes = 192;
    config.checkpoint_bytes = 0;
    CHECK_THROWS_AS(KvCache(device, config, {3, 3, 3, 3, 1, 1}), InternalError);
    KvCache plain(device, Config({0}), {3});
    CHECK(!plain.has_states());
    CHECK(plain.states().data == nullptr);
    CHECK(plain.checkpoints().data == nullptr);
  }
  CHECK(device.reserved_bytes == 0);
}

TEST_CASE("formats other than FP4 have no scale pool; a failed reservation releases all memory") {
  MemoryDevice device;
  KvCache cache(device, Config({0}, KvCacheMode::kInt8), {4});
  CHECK(cache.scale_bytes(0) == 0);
  CHECK(cache.GetScaleBlockPtr(0, 0) == nullptr);
  CHECK(cache.LayerView(0).scales == nullptr);
  CHECK_NOTHROW(cache.CheckScaleBytes(0, 0));

  MemoryDevice small;
  small.limit_bytes = static_cast<size_t>(4 * cache.groups()[0].layout.block_bytes());
  CHECK_THROWS_AS(KvCache(small, Config({0, 8}, KvCacheMode::kInt8), {4, 4}), std::bad_alloc);
  CHECK(small.reserved_bytes == 0);
  CHECK_THROWS_AS(KvCache(device, Config({0}), {0}), InvalidArgument);
  CHECK_THROWS_AS(KvCache(device, Config({0}), {int64_t{1} << 31}), InvalidArgument);
}

TEST_CASE("SetGlobalScales checks its values and passes them to kernels") {
  MemoryDevice device;
  KvCache cache(device, Config({0, 0}), {2});
  cache.SetGlobalScales(1, KvSide::kV, {0.5f, 2.f});
  CHECK(cache.LayerView(1).global_scale[1][1] == 2.f);
  CHECK(cache.LayerView(1).global_scale[0] == nullptr);
  CHECK(cache.LayerView(0).global_scale[1] == nullptr);
  cache.SetGlobalScales(1, KvSide::kV, {1.f, 4.f});
  CHECK(cache.LayerView(1).global_scale[1][1] == 4.f);
  for (const float bad : {0.f, -1.f, std::nanf(""), std::numeric_limits<float>::infinity()}) {
    CHECK_THROWS_AS(cache.SetGlobalScales(0, KvSide::kK, {1.f, bad}), InvalidArgument);
  }
  CHECK_THROWS_AS(cache.SetGlobalScales(0, KvSide::kK, {1.f}), InvalidArgument);
  CHECK_THROWS_AS(cache.SetGlobalScales(2, KvSide::kK, {1.f, 1.f}), InvalidArgument);
}

TEST_CASE("CheckScaleBytes finds an invalid scale byte at every position") {
  struct Case {
    KvCacheMode format;
    int good;
    std::vector<int> bad;
  };
  for (const Case& one : {Case{KvCacheMode::kFp4Nv, 0x7E, {0x7F, 0x80, 0xFF}},
                          Case{KvCacheMode::kFp4Mx, 112, {0, 111, 137, 255}}}) {
    MemoryDevice device;
    KvCache cache(device, Config({0, 0}, one.format), {2});
    const auto num_bytes = static_cast<size_t>(cache.groups()[0].layout.scale_block_bytes());
    std::byte* scales = cache.GetScaleBlockPtr(0, 1);
    CHECK_THROWS_AS(cache.CheckScaleBytes(0, 1), InternalError);  // the sentinel
    std::memset(scales, one.good, num_bytes);
    CHECK_NOTHROW(cache.CheckScaleBytes(0, 1));
    for (const int bad : one.bad) {
      for (size_t i = 0; i < num_bytes; ++i) {
        scales[i] = static_cast<std::byte>(bad);
        CHECK_THROWS_AS(cache.CheckScaleBytes(0, 1), InternalError);
        scales[i] = static_cast<std::byte>(one.good);
      }
    }
  }
}

}  // namespace
}  // namespace turbomind
