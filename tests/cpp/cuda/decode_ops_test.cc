// Decode attention of whole steps on the simulated GPU, compared with the CPU backend.

#include "turbomind/backend/cuda/decode/decode_ops.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/decode_fixture.h"
#include "turbomind/backend/cuda/decode/decode_variants.h"
#include "turbomind/core/check.h"
#include "turbomind/kv/layout.h"

namespace turbomind::cuda::decode_step {
namespace {

void CheckCase(const Case& c, const std::vector<int32_t>& context_lens, int num_sms = 1) {
  const Layer layer(c);
  TestGpu gpu(layer, num_sms);
  const Step step(layer, context_lens, FirstSequences(context_lens.size()));
  CheckClose(layer, step, gpu.Run(step));
}

using enum KvCacheMode;

constexpr int kHeadDims[] = {64, 128, 80, 96, 256};
constexpr int kBlockLens[] = {64, 32, 16, 128};

TEST_CASE("decode matches the CPU for every listed pair at every head_dim") {
  size_t i = 0;
  for (KvCacheMode k : kAllKvCacheModes) {
    for (KvCacheMode v : kAllKvCacheModes) {
      for (int head_dim : kHeadDims) {
        if (!IsListedPair(k, v)) {
          continue;
        }
        Case c = {.k = k, .v = v, .head_dim = head_dim};
        c.block_seq_len = kBlockLens[i % 4];
        c.dtype = i % 2 == 0 ? DataType::kFloat16 : DataType::kBFloat16;
        c.group = static_cast<int>(1 + i % 3);
        c.sinks = i % 3 == 0;
        c.max_seqs = 2;
        c.max_context = 90;
        CheckCase(c, {90, 33});
        ++i;
      }
    }
  }
}

TEST_CASE("decode matches the CPU at every head_dim and block length") {
  for (int head_dim : kHeadDims) {
    for (int block_seq_len : kBlockLens) {
      for (KvCacheMode format : {kFp4Nv, kNone}) {
        Case c = {.k = format, .v = format, .dtype = DataType::kBFloat16, .head_dim = head_dim};
        c.block_seq_len = block_seq_len;
        c.max_seqs = 1;
        c.max_context = 140;
        CheckCase(c, {140});
      }
    }
  }
}

TEST_CASE("sequences split across SMs count sinks and means once" * doctest::test_suite("small")) {
  Case c = {.kv_heads = 2, .group = 9, .sinks = true, .mean = true};
  c.max_seqs = 2;
  c.max_context = 1100;
  CheckCase(c, {1100, 3}, 4);
  c.kv_heads = 1;
  c.window = 700;
  c.group = 2;
  CheckCase(c, {1100, 650}, 8);
}

TEST_CASE("sinks and recent positions are read from the 16-bit window") {
  const PrecisionWindowTokens kWindow16[] = {{64, 64}, {0, 0}, {64, 0}, {0, 128}};
  size_t i = 0;
  for (const PrecisionWindowTokens& window16 : kWindow16) {
    for (int window : {0, 100, 150, -90, -128}) {
      Case c = {.k = kFp4Nv, .v = kFp4Nv, .window = window, .window16 = window16};
      c.k = i % 3 == 0 ? kInt8 : i % 3 == 1 ? kFp8E4m3 : kFp4Nv;
      c.block_seq_len = kBlockLens[i % 4];
      c.dtype = i % 2 == 0 ? DataType::kFloat16 : DataType::kBFloat16;
      c.sinks = c.mean = i % 2 == 0;
      c.group = 2;
      const auto context = static_cast<int32_t>(200 + 13 * i);
      c.max_context = context;
      CheckCase(c, {context, 64, static_cast<int32_t>(1 + 17 * i)});
      ++i;
    }
  }
}

TEST_CASE("decode adds the K offset of every block for every format and head_dim") {
  size_t i = 0;
  for (KvCacheMode k : kAllKvCacheModes) {
    for (KvCacheMode v : kAllKvCacheModes) {
      for (int head_dim : kHeadDims) {
        if (!IsListedPair(k, v) || k == kNone) {
          continue;
        }
        Case c = {.k = k, .v = v, .head_dim = head_dim};
        c.k_offset = true;
        c.score_cap = i % 5 == 4 ? 5.f : 0.f;
        c.block_seq_len = kBlockLens[i % 4];
        c.dtype = i % 2 == 0 ? DataType::kFloat16 : DataType::kBFloat16;
        c.group = static_cast<int>(1 + i % 3);
        c.max_seqs = 2;
        c.max_context = 90;
        CheckCase(c, {90, 33});
        ++i;
      }
    }
  }
}

TEST_CASE("decode reads an int8 window, with and without K offsets") {
  size_t i = 0;
  for (KvCacheMode format : {kFp4Nv, kInt8, kFp8E4m3, kInt4, kFp4Mx}) {
    for (int window : {0, 100, -90}) {
      Case c = {.k = format, .v = format, .window = window, .window16 = {64, 64}};
      c.window_format = kInt8;
      c.k_offset = i % 3 != 0;
      c.head_dim = kHeadDims[i % 5];
      c.block_seq_len = kBlockLens[i % 4];
      c.dtype = i % 2 == 0 ? DataType::kFloat16 : DataType::kBFloat16;
      c.sinks = i % 2 == 0;
      c.group = 2;
      c.max_context = 330;
      CheckCase(c, {330, 64, static_cast<int32_t>(1 + 17 * i)});
      ++i;
    }
  }
}

TEST_CASE(
    "decode adds the fast bias in both pools, for every format of K and any number of heads") {
  size_t i = 0;
  for (KvCacheMode k : {kFp4Nv, kFp4Mx, kInt4, kInt8, kFp8E4m3, kFp8E5m2}) {
    for (int group : {1, 3, 12}) {
      Case c = {.k = k, .v = i % 2 == 0 ? k : kFp4Nv, .kv_heads = 2, .group = group};
      c.v = IsListedPair(c.k, c.v) ? c.v : k;
      c.head_dim = kHeadDims[i % 5];
      c.window16 = i % 3 == 0 ? PrecisionWindowTokens{} : PrecisionWindowTokens{64, 64};
      c.window_format = i % 4 < 2 ? kInt8 : kNone;
      c.k_offset = i % 4 != 1;
      c.fast_pairs = static_cast<int>(1 + i % 4);
      c.score_cap = i % 5 == 4 ? 5.f : 0.f;
      c.max_context = 330;
      CheckCase(c, {330, 64, static_cast<int32_t>(1 + 17 * i)});
      ++i;
    }
  }
}

TEST_CASE("long ranges of both pools are split" * doctest::test_suite("small")) {
  Case c = {.k = kInt4, .v = kInt4, .group = 1, .window16 = {576, 640}};
  c.max_seqs = 1;
  c.max_context = 2000;
  CheckCase(c, {2000}, 4);
  c.k_offset = true;
  c.window_format = kInt8;
  CheckCase(c, {2000}, 4);
}

TEST_CASE("a recorded step stays correct for other contexts and tables" *
          doctest::test_suite("small")) {
  Case c = {.k = kFp8E4m3, .v = kInt4, .group = 1, .block_seq_len = 32, .window16 = {64, 64}};
  c.sinks = true;
  c.max_context = 700;
  const Layer layer(c);
  TestGpu gpu(layer, 3);
  const std::vector<std::pair<std::vector<int32_t>, std::vector<int>>> steps = {
      {{100, 600}, {0, 1}}, {{101, 601}, {0, 1}}, {{102, 602}, {0, 1}}, {{700, 1}, {2, 0}},
      {{30, 31}, {1, 2}},   {{5}, {0}},           {{6}, {1}},           {{650, 64}, {1, 2}}};
  for (const auto& [lens, sequences] : steps) {
    const Step step(layer, lens, sequences);
    CheckClose(layer, step, gpu.RunRecorded(step));
  }
  CHECK(gpu.graphs().num_recorded() == 2);
  CHECK(gpu.graphs().num_replayed() == 3);
  CHECK(gpu.num_ops() == 5);  // the first step grew buffers that the graphs' addresses depend on
}

TEST_CASE("the block that ends last merges one or both pools, also in recorded steps" *
          doctest::test_suite("small")) {
  for (const bool has_window16 : {false, true}) {
    Case c = {.k = kFp4Nv, .v = kFp4Nv, .head_dim = 128, .kv_heads = 2, .group = 9};
    c.window16 = has_window16 ? PrecisionWindowTokens{64, 64} : PrecisionWindowTokens{};
    c.block_seq_len = 32;
    c.sinks = c.mean = true;
    c.max_context = 1500;
    const Layer layer(c);
    TestGpu gpu(layer, 3);
    const LayerRule rule = LayerRule::Of(0, layer.rule);
    gpu.planner().Use({rule, layer.q_heads(), c.kv_heads, 1}, {.slots_per_sm = 5, .waves = 2});
    gpu.planner().Use({rule, layer.q_heads(), c.kv_heads, 2},
                      {.slots_per_sm = 5, .waves = 2, .last_merges = true});
    const int num_pools = has_window16 ? 2 : 1;
    for (const std::vector<int32_t>& lens :
         {std::vector<int32_t>{1400, 600}, {1401, 601}, {1402, 1}, {1403, 1500}}) {
      const Step step(layer, lens, {0, 1});
      CheckClose(layer, step, gpu.RunRecorded(step));
      CHECK(gpu.num_launches().value_or(num_pools) == num_pools);
    }
    CHECK(gpu.graphs().num_replayed() > 0);
    const Step one(layer, {1400}, {2});
    CheckClose(layer, one, gpu.RunRecorded(one));
    CHECK(gpu.num_launches().value_or(num_pools + 1) == num_pools + 1);
  }
}

TEST_CASE("every schedule gives the same results up to rounding") {
  Case c = {.k = kInt8, .v = kInt4, .kv_heads = 1, .group = 5, .window = 900};
  c.max_context = 1200;
  const Layer layer(c);
  TestGpu gpu(layer, 2);
  const Step step(layer, {1200, 77, 1}, {0, 1, 2});
  for (const int slots : {1, 4, 7}) {
    for (const int waves : {1, 2, 4}) {
      for (const bool last_merges : {false, true}) {
        const int before = gpu.planner().generation();
        gpu.planner().Use({{.window = 900}, 5, 1, 1}, {slots, waves, last_merges});
        CHECK(gpu.planner().generation() > before);
        CheckClose(layer, step, gpu.Run(step));
      }
    }
  }
}

TEST_CASE("plans keep their addresses until they must grow") {
  Case c = {.group = 1};
  c.max_seqs = 40;
  c.max_context = 20;
  const Layer layer(c);
  TestGpu gpu(layer, 2);
  const auto upload = [&](size_t num_seqs) {
    Step step(layer, std::vector<int32_t>(num_seqs, 20), FirstSequences(num_seqs));
    gpu.Upload(&step);
    AttentionParams p = layer.Params();
    p.batch = step.group.batch;
    return gpu.planner().Find(p);
  };
  const DecodePlanner::Plan first = upload(3);
  const int generation = gpu.planner().generation();
  const DecodePlanner::Plan second = upload(3);
  CHECK(second.quantized == first.quantized);
  CHECK(second.num_quantized == first.num_quantized);
  CHECK(second.first_partial == first.first_partial);
  CHECK(gpu.planner().generation() == generation);
  upload(40);
  CHECK(gpu.planner().generation() == generation + 1);
  CHECK(upload(3).num_quantized == first.num_quantized);
}

TEST_CASE("layers with different windows in one step have separate plans") {
  Case c;
  c.group = 1;
  Case windowed = c;
  windowed.window = 100;
  const Layer full(c, 1);
  const Layer sliding(windowed, 1);
  Step step(full, {300, 200}, {0, 1});
  const Step other(sliding, {300, 200}, {0, 1});
  const StepGroup groups[] = {step.group, other.group};
  TestGpu gpu(full, 2);
  DecodePlanner planner(gpu.context());
  planner.Upload({.groups = groups, .num_groups = 2, .q_heads = 1});
  AttentionParams p = full.Params();
  p.batch = step.group.batch;
  CHECK(planner.Find(p).rule.window == 0);
  p.window = 100;
  CHECK(planner.Find(p).rule.window == 100);
  CHECK(planner.Find(p).num_quantized == 2);
  p.window = 99;
  CHECK_THROWS_AS(planner.Find(p), InternalError);
  p.window = 100;
  p.batch.num_decode = 1;
  CHECK_THROWS_AS(planner.Find(p), InternalError);
}

TEST_CASE("decode handles steps without sequences and empty contexts") {
  const Layer layer(Case{.group = 1});
  TestGpu gpu(layer, 1);
  Step none(layer, {}, {});
  gpu.Upload(&none);
  gpu.RunOp(none);
  // A row that only pads a batch is zero.
  const std::vector<float> out = gpu.Run(Step(layer, {0, 40}, {0, 1}));
  CHECK(std::all_of(out.begin(), out.begin() + 64, [](float x) { return x == 0.f; }));
  CHECK_FALSE(std::isnan(out[64]));
}

std::string Refusal(const KvLayerView& view, const GpuProperties& gpu) {
  try {
    FindDecodeVariant(view, 1, gpu);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

TEST_CASE("layers without a kernel are rejected with a clear message") {
  GpuProperties gpu = PropertiesOf(0);
  const auto view = [](const Case& c) {
    return block::Layout(ConfigOf(c, c.k, c.v)).LayerView(0, nullptr, nullptr);
  };
  CHECK(Refusal(view({}), gpu) == "");
  CHECK(Refusal(view({.head_dim = 112}), gpu).find("head_dim 112 is not supported") == 0);
  CHECK(Refusal(view({.dtype = DataType::kFloat32}), gpu).find("dtype float32 is not supported") !=
        std::string::npos);
  gpu.shared_bytes_per_block = 64 << 10;  // the limit of SM 75
  const Case wide = {.k = kNone, .v = kNone, .head_dim = 256};
  CHECK(Refusal(view(wide), gpu)
            .find("which has 65536 bytes of shared memory per block. It needs 98304. "
                  "Use --device cpu.") != std::string::npos);
}

TEST_CASE("head_dim 256 runs with 99 KiB of shared memory, also with a 16-bit window") {
  for (KvCacheMode format : {kFp4Nv, kFp4Mx, kNone}) {
    Case c = {.k = format, .v = format, .dtype = DataType::kBFloat16, .head_dim = 256};
    c.group = 2;
    c.window16 = format == kFp4Mx ? PrecisionWindowTokens{64, 64} : PrecisionWindowTokens{};
    c.max_seqs = 2;
    c.max_context = 330;
    const Layer layer(c);
    TestGpu gpu(layer, 2);
    gpu.context().gpu.shared_bytes_per_block = kMaxShared;
    const Step step(layer, {330, 70}, FirstSequences(2));
    CheckClose(layer, step, gpu.Run(step));
  }
}

TEST_CASE("one block reads two head tiles of 4-bit values") {
  for (KvCacheMode format : {kFp4Mx, kFp4Nv, kInt4, kInt8}) {
    for (int head_dim : {64, 128}) {
      Case c = {.k = format, .v = format, .head_dim = head_dim};
      c.group = head_dim == 64 ? 16 : 19;
      c.block_seq_len = head_dim == 64 ? 64 : 16;
      c.window16 = format == kFp4Nv ? PrecisionWindowTokens{64, 64} : PrecisionWindowTokens{};
      c.k_offset = head_dim == 64;
      c.sinks = true;
      c.max_seqs = 2;
      c.max_context = 280;
      const Layer layer(c);
      CHECK(FindDecodeVariant(layer.quantized.view, c.group, PropertiesOf(0)).heads ==
            (format == kInt8 ? 8 : 16));
      TestGpu gpu(layer, 2);
      const Step step(layer, {280, 70}, FirstSequences(2));
      CheckClose(layer, step, gpu.Run(step));
    }
  }
}

// SM 86 has 99 KiB of shared memory per block.
TEST_CASE("every listed pair, dtype, head_dim and block length has a kernel") {
  GpuProperties gpu = PropertiesOf(0);
  gpu.shared_bytes_per_block = 99 << 10;
  for (KvCacheMode k : kAllKvCacheModes) {
    for (KvCacheMode v : kAllKvCacheModes) {
      for (int head_dim : kHeadDims) {
        for (int block_seq_len : kBlockLens) {
          for (DataType dtype : {DataType::kFloat16, DataType::kBFloat16}) {
            if (IsListedPair(k, v)) {
              Case c = {.k = k, .v = v, .dtype = dtype, .head_dim = head_dim};
              c.block_seq_len = block_seq_len;
              const block::Layout layout(ConfigOf(c, k, v));
              const KvLayerView view = layout.LayerView(0, nullptr, nullptr);
              for (int group : {8, 9}) {
                CHECK(FindDecodeVariant(view, group, gpu).shared_bytes > 0);
              }
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace turbomind::cuda::decode_step
