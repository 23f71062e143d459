#include "turbomind/kv/layout.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "turbomind/core/check.h"
#include "turbomind/kv/codec.h"

namespace turbomind {
namespace {

using block::Config;
using block::Layout;

constexpr KvCacheMode kNone = KvCacheMode::kNone;
constexpr KvCacheMode kInt8 = KvCacheMode::kInt8;
constexpr KvCacheMode kInt4 = KvCacheMode::kInt4;
constexpr KvCacheMode kFp8 = KvCacheMode::kFp8E4m3;
constexpr KvCacheMode kFp8E5m2 = KvCacheMode::kFp8E5m2;
constexpr KvCacheMode kMx = KvCacheMode::kFp4Mx;
constexpr KvCacheMode kNv = KvCacheMode::kFp4Nv;

static_assert(Codec<kNone>::kBits == 16 && Codec<kInt8>::kBits == 8 && Codec<kInt4>::kBits == 4);
static_assert(Codec<kFp8>::kBits == 8 && Codec<kMx>::kBits == 4 && Codec<kNv>::kBits == 4);
static_assert(Codec<kMx>::kGroup == 16 && Codec<kNv>::kGroup == 16 && Codec<kInt4>::kGroup == 0);
static_assert(Codec<kInt8>::kHasParams && !Codec<kNv>::kHasParams && !Codec<kFp8>::kHasScales);
static_assert(Codec<kNv>::kHasScales && Codec<kMx>::kHasScales && !Codec<kInt4>::kHasScales);

Config OneLayer(KvCacheMode k, KvCacheMode v, int head_dim) {
  Config config;
  config.layers = {{k, v}};
  config.kv_heads = 3;
  config.head_dim = head_dim;
  return config;
}

TEST_CASE("a rotation's norm is the nearest float") {
  for (int size = 1; size <= kMaxHeadDim; size *= 2) {
    CHECK(RotationNorm(size) == static_cast<float>(1.0 / std::sqrt(static_cast<double>(size))));
    CHECK(RotationSize(3 * size) == size);
  }
}

TEST_CASE("a K or V row has the bytes that the format table gives") {
  struct Row {
    KvCacheMode format;
    int bytes_128;
    int bytes_64;
  };
  for (const Row& row :
       {Row{kNone, 256, 128}, Row{kInt8, 132, 68}, Row{kInt4, 68, 36}, Row{kFp8, 128, 64},
        Row{kFp8E5m2, 128, 64}, Row{kMx, 72, 36}, Row{kNv, 72, 36}}) {
    CAPTURE(ToString(row.format));
    for (const int head_dim : {128, 64}) {
      const int expected = head_dim == 128 ? row.bytes_128 : row.bytes_64;
      CHECK(block::RowBytes(row.format, head_dim, DataType::kBFloat16) +
                block::ParamBytes(row.format, DataType::kBFloat16) +
                block::ScaleBytes(row.format, head_dim) ==
            expected);
      const Layout layout(OneLayer(row.format, row.format, head_dim));
      CHECK(layout.bytes_per_token() == 2.0 * 3 * expected);
      CHECK(layout.scale_block_bytes() ==
            (row.format == kMx || row.format == kNv ? 3 * 64 * 2 * head_dim / 16 : 0));
    }
  }
  CHECK(block::RowBytes(kNone, 64, DataType::kFloat32) == 256);
  CHECK(block::ParamBytes(kInt8, DataType::kFloat32) == 8);
}

TEST_CASE("FP4 stores 3.55 times as many tokens as 16 bits, scales included") {
  for (const int head_dim : {64, 128}) {
    const double ratio = Layout(OneLayer(kNone, kNone, head_dim)).bytes_per_token() /
                         Layout(OneLayer(kNv, kNv, head_dim)).bytes_per_token();
    CHECK(ratio == doctest::Approx(256.0 / 72));
    CHECK(ratio >= 3.5);
  }
}

// Counts the bytes from `begin` up to the next multiple of 64 as padding.
void Pad(std::vector<int>& uses, int64_t begin) {
  const auto size = static_cast<int64_t>(uses.size());
  for (int64_t i = begin; i < size && i % 64 != 0; ++i) {
    ++uses[static_cast<size_t>(i)];
  }
}

// Checks that every byte of two blocks belongs to exactly one payload row, (scale, zero) pair, K
// offset or scale byte. K offsets may be followed by up to 63 bytes of padding.
void CheckTiling(const Config& config) {
  const Layout layout(config);
  const int64_t data_bytes = layout.block_bytes();
  const int64_t scale_bytes = layout.scale_block_bytes();
  std::vector<std::byte> data(static_cast<size_t>(2 * data_bytes));
  std::vector<std::byte> scales(static_cast<size_t>(2 * scale_bytes) + 1);
  std::vector<int> data_uses(data.size(), 0);
  std::vector<int> scale_uses(scales.size() - 1, 0);
  bool aligned = data_bytes % 16 == 0 && scale_bytes % 16 == 0;
  const auto use = [](std::vector<int>& uses, int64_t begin, int64_t n) {
    REQUIRE(begin >= 0);
    REQUIRE(begin + n <= static_cast<int64_t>(uses.size()));
    for (int64_t i = begin; i < begin + n; ++i) {
      ++uses[static_cast<size_t>(i)];
    }
  };
  for (int layer = 0; layer < static_cast<int>(config.layers.size()); ++layer) {
    const KvLayerView view = layout.LayerView(layer, data.data(), scales.data());
    for (int block = 0; block < 2; ++block) {
      for (int head = 0; head < config.kv_heads; ++head) {
        for (const KvSide side : {KvSide::kK, KvSide::kV}) {
          const int s = static_cast<int>(side);
          const int64_t rows = view.Payload(side, block, head) - data.data();
          aligned = aligned && rows % 16 == 0;
          use(data_uses, rows, int64_t{view.row_bytes[s]} * config.block_seq_len);
          if (view.param_bytes[s]) {
            const int64_t params = view.Params(side, block, head) - data.data();
            aligned = aligned && params % 16 == 0;
            use(data_uses, params, int64_t{view.param_bytes[s]} * config.block_seq_len);
          }
          for (int token = 0; view.scale_bytes[s] && token < config.block_seq_len; ++token) {
            use(scale_uses,
                view.Scales(side, block, head) + token * view.ScaleStride() - scales.data(),
                view.scale_bytes[s]);
          }
        }
        for (const KvSide side : {KvSide::kK, KvSide::kV}) {
          CHECK(view.HasOffset(side) ==
                (view.HasKOffset() && (side == KvSide::kV) == view.HasLatents()));
        }
        if (view.HasKOffset()) {
          const KvRow offset = view.KOffset(block, head);
          const auto place = [&](const uint8_t* p) {
            return reinterpret_cast<const std::byte*>(p) - data.data();
          };
          use(data_uses, place(offset.payload), config.head_dim);
          use(data_uses, place(offset.metadata), 2 * SizeOf(config.dtype));
          if (head == 0) {
            aligned = aligned && (place(offset.payload) - block * data_bytes) % 64 == 0;
          }
          if (head + 1 == config.kv_heads) {
            Pad(data_uses, place(offset.metadata) + 2 * SizeOf(config.dtype));
          }
        }
        if (view.ScaleStride()) {
          aligned = aligned && (view.Scales(KvSide::kK, block, head) - scales.data()) % 16 == 0;
        } else {
          aligned = aligned && view.scales == nullptr;
        }
      }
    }
  }
  CHECK(aligned);
  CHECK(std::all_of(data_uses.begin(), data_uses.end(), [](int n) { return n == 1; }));
  CHECK(std::all_of(scale_uses.begin(), scale_uses.end(), [](int n) { return n == 1; }));
}

TEST_CASE("payload, parameters and scales tile a block without gaps, 16-byte aligned") {
  for (const int head_dim : {64, 80, 96, 128, 256}) {
    for (const int block_seq_len : {16, 32, 64, 128}) {
      for (const DataType dtype : {DataType::kBFloat16, DataType::kFloat32}) {
        Config config = OneLayer(kNone, kNone, head_dim);
        config.layers.clear();
        for (const KvCacheMode format : kAllKvCacheModes) {
          config.layers.push_back({format, format});
        }
        config.layers.push_back({kFp8, kNv});
        config.layers.push_back({kInt8, kInt4});
        config.block_seq_len = block_seq_len;
        config.dtype = dtype;
        CheckTiling(config);
        config.k_offset = true;
        CheckTiling(config);
      }
    }
  }
}

TEST_CASE("latents and rotary parts tile a block without gaps, 16-byte aligned") {
  for (const int rank : {64, 272, 512}) {
    Config config = OneLayer(kNone, kNone, rank);
    config.layers.clear();
    for (const KvCacheMode rotary : {kNone, kInt8, kFp8}) {
      for (const KvCacheMode format : kAllKvCacheModes) {
        config.layers.push_back({rotary, format});
      }
    }
    config.kv_heads = 1;
    config.rotary_dim = 64;
    for (const bool k_offset : {false, true}) {
      config.k_offset = k_offset;
      CheckTiling(config);
      const Layout layout(config);
      CHECK_FALSE(layout.LayerView(0, nullptr, nullptr).HasKOffset());  // 16 bits
      CHECK(layout.LayerView(1, nullptr, nullptr).HasKOffset() == k_offset);
    }
  }
}

// The offsets are written out, because readers and writers share the view and would agree on any
// other order.
TEST_CASE("a block's bytes are in the order that the format defines") {
  Config config = OneLayer(kInt8, kInt8, 32);
  config.layers.push_back({kNv, kNv});
  config.kv_heads = 2;
  config.block_seq_len = 16;
  const Layout layout(config);
  CHECK(layout.block_bytes() == 3328);
  CHECK(layout.scale_block_bytes() == 128);
  std::vector<std::byte> data(2 * 3328);
  std::vector<std::byte> scales(2 * 128);
  const KvLayerView int8 = layout.LayerView(0, data.data(), scales.data());
  const KvLayerView fp4 = layout.LayerView(1, data.data(), scales.data());
  struct Row {
    int block, head;
    KvSide side;
    int64_t int8_codes, int8_params, fp4_codes, fp4_scales;
  };
  for (const Row& row :
       {Row{0, 0, KvSide::kK, 0, 2048, 2304, 0}, Row{0, 0, KvSide::kV, 512, 2112, 2560, 2},
        Row{0, 1, KvSide::kK, 1024, 2176, 2816, 64}, Row{0, 1, KvSide::kV, 1536, 2240, 3072, 66},
        Row{1, 0, KvSide::kV, 3840, 5440, 5888, 130}}) {
    CAPTURE(row.block);
    CAPTURE(row.head);
    CAPTURE(static_cast<int>(row.side));
    CHECK(int8.Payload(row.side, row.block, row.head) - data.data() == row.int8_codes);
    CHECK(int8.Params(row.side, row.block, row.head) - data.data() == row.int8_params);
    CHECK(fp4.Payload(row.side, row.block, row.head) - data.data() == row.fp4_codes);
    CHECK(fp4.Scales(row.side, row.block, row.head) - scales.data() == row.fp4_scales);
  }
  CHECK(int8.row_bytes[0] == 32);
  CHECK(int8.param_bytes[0] == 4);
  CHECK(fp4.row_bytes[0] == 16);
  CHECK(fp4.ScaleStride() == 4);
}

TEST_CASE("a view of some heads has the same addresses as the layer") {
  for (const auto& [k, v] : {std::pair{kNone, kNone}, {kInt8, kInt4}, {kInt8, kNv}, {kMx, kMx}}) {
    Config config = OneLayer(k, v, 64);
    config.k_offset = true;
    const Layout layout(config);
    std::vector<std::byte> data(static_cast<size_t>(2 * layout.block_bytes()));
    std::vector<std::byte> scales(static_cast<size_t>(2 * layout.scale_block_bytes()));
    const float global_scales[3] = {1.f, 2.f, 3.f};
    KvLayerView layer = layout.LayerView(0, data.data(), scales.empty() ? nullptr : scales.data());
    layer.global_scale[1] = global_scales;
    const KvLayerView heads = layer.Heads(1, 2);
    CHECK(heads.kv_heads == 2);
    CHECK(heads.global_scale[0] == nullptr);
    CHECK(heads.global_scale[1][1] == 3.f);
    CHECK(heads.HasKOffset() == (k != kNone));
    for (const int head : {0, 1}) {
      if (heads.HasKOffset()) {
        CHECK(heads.KOffset(1, head).payload == layer.KOffset(1, head + 1).payload);
        CHECK(heads.KOffset(1, head).metadata == layer.KOffset(1, head + 1).metadata);
      }
    }
    for (const KvSide side : {KvSide::kK, KvSide::kV}) {
      for (const int head : {0, 1}) {
        CHECK(heads.Payload(side, 1, head) == layer.Payload(side, 1, head + 1));
        CHECK(heads.Params(side, 1, head) == layer.Params(side, 1, head + 1));
        CHECK((scales.empty() || heads.Scales(side, 1, head) == layer.Scales(side, 1, head + 1)));
      }
    }
    CHECK_THROWS_AS(layer.Heads(2, 2), InternalError);
  }
}

TEST_CASE("a mixed pair has the bytes of its K format plus its V format") {
  const Layout fp8_nv(OneLayer(kFp8, kNv, 128));
  CHECK(fp8_nv.block_bytes() == 3 * 64 * (128 + 64));
  CHECK(fp8_nv.scale_block_bytes() == 3 * 64 * 8);
  const KvLayerView view = fp8_nv.LayerView(0, nullptr, nullptr);
  CHECK(view.scale_bytes[0] == 0);
  CHECK(view.scale_bytes[1] == 8);
  CHECK(Layout(OneLayer(kInt8, kInt4, 128)).bytes_per_token() == 3.0 * (132 + 68));
}

TEST_CASE("unlisted pairs, and sizes that a format cannot store, are rejected") {
  for (const KvCacheMode k : kAllKvCacheModes) {
    for (const KvCacheMode v : kAllKvCacheModes) {
      if (IsListedPair(k, v)) {
        CHECK_NOTHROW(Layout(OneLayer(k, v, 64)));
      } else {
        CHECK_THROWS_AS(Layout(OneLayer(k, v, 64)), InvalidArgument);
      }
    }
  }
  // The table may gain pairs, but must not lose one of these.
  for (const KvCacheMode k : {kNone, kInt8, kFp8}) {
    for (const KvCacheMode v : {kInt4, kMx, kNv, k}) {
      CHECK(IsListedPair(k, v));
    }
  }
  CHECK(!IsListedPair(kInt4, kInt8));
  CHECK(!IsListedPair(kNv, kMx));
  CHECK(!IsListedPair(kFp8E5m2, kFp8));
  CHECK(!IsListedPair(kFp8, kNone));
  CHECK_THROWS_WITH_AS(Layout(OneLayer(kNv, kNv, 72)),
                       "head_dim 72 is not supported. It must be a multiple of 16 for quant_policy "
                       "nvfp4. Use another quant_policy.",
                       InvalidArgument);
  CHECK_NOTHROW(Layout(OneLayer(kInt4, kInt4, 72)));
  CHECK_THROWS_AS(Layout(OneLayer(kInt4, kInt4, 71)), InvalidArgument);
  for (const int head_dim : {0, -64, 1 << 30}) {
    CHECK_THROWS_AS(Layout(OneLayer(kNone, kNone, head_dim)), InvalidArgument);
  }
  for (const int block_seq_len : {0, -64, 8, 48, (1 << 20) + 64, 1 << 21}) {
    Config config = OneLayer(kNone, kNone, 64);
    config.block_seq_len = block_seq_len;
    CHECK_THROWS_AS(Layout{config}, InvalidArgument);
  }
  Config config = OneLayer(kNone, kNone, 64);
  config.block_seq_len = 1 << 20;
  CHECK(Layout(config).block_bytes() == (int64_t{1} << 20) * 3 * 2 * 128);
  config.kv_heads = 0;
  CHECK_THROWS_AS(Layout{config}, InvalidArgument);
  config.kv_heads = 1;
  config.layers.clear();
  CHECK_THROWS_AS(Layout{config}, InvalidArgument);
}

}  // namespace
}  // namespace turbomind
