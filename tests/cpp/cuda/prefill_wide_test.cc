// Runs prefill attention by products of warp groups thread by thread on the CPU
// (cuda_shim/shim.h). prefill_ops_test.cc compares both kernels with FP64 attention; these tests
// are about what only this kernel promises.

#include "turbomind/backend/cuda/prefill/prefill_wide.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "cuda/prefill_fixture.h"
#include "turbomind/backend/cuda/prefill/prefill_launch.h"

namespace turbomind::cuda::prefill_step {

constexpr int kWideDims[] = {64, 96, 128, 256};

// Queries of positions from `begin` on see many tiles, so that slots are used again and again.
Case LongCase(int head_dim, DataType dtype) {
  Case c = MakeCase({kNone, kNone}, head_dim, dtype);
  c.shape.context = head_dim == 256 ? 460 : 760;
  c.shape.kv_heads = 1;
  return c;
}

Batch WideBatch(std::vector<Chunk> chunks) {
  return {.chunks = std::move(chunks), .products = PrefillProducts::kWarpGroups};
}

TEST_CASE("slots of the ring are used again at every head_dim, in any order of the threads") {
  for (int dim : kWideDims) {
    for (DataType dtype : {DataType::kFloat16, DataType::kBFloat16}) {
      const Case c = LongCase(dim, dtype);
      for (int i = 0; i < 2; ++i) {  // every launch has another order
        CheckKernel(c, WideBatch({{c.shape.context - 70 - i, c.shape.context}}));
      }
    }
  }
}

TEST_CASE("many sequences of 1 to 300 tokens share a launch of warp groups") {
  for (int group : {1, 4, 5, 7, 8, 16}) {
    const int dim = kWideDims[group % 4];
    Case c =
        MakeCase({kNone, kNone}, dim, group % 2 == 0 ? DataType::kBFloat16 : DataType::kFloat16);
    c.group = group;
    c.shape.kv_heads = 1;
    c.shape.context = 300;
    c.sinks = group != 4;
    CheckKernel(c, WideBatch({{0, group < 7 ? 300 : 40}, {5, 6}, {120, 137}, {0, 1}, {190, 255}}));
  }
}

TEST_CASE("windows, caps and ranges hide the same positions in warp groups") {
  int i = 0;
  for (int window : {0, 1, 100, 129, -128}) {
    for (int recent : {-1, 0, 64}) {
      Case c = MakeCase(i % 2 == 0 ? FormatPair{kFp4Nv, kFp4Nv} : FormatPair{kFp8E4m3, kInt4},
                        kWideDims[i % 4]);
      c.shape.context = 330;
      c.window = window;
      c.window16 = {recent < 0 ? 0 : 64, recent};
      c.sinks = i % 3 == 0;
      c.mean = i % 3 != 1;
      c.score_cap = i % 3 == 2 ? 0.5f : 0.f;
      CheckKernel(c, WideBatch({{290, 330}, {0, 33}}));
      ++i;
    }
  }
}

TEST_CASE("a row has the same bits for every chunk in warp groups") {
  for (int dim : kWideDims) {
    Case c = MakeCase({kFp4Mx, kFp4Mx}, dim);
    c.shape.context = 280;
    c.shape.kv_heads = 1;
    c.window = 150;
    c.window16 = {64, 64};
    const std::vector<float> want = CheckKernel(c, WideBatch({{0, 280}}));
    for (int size : {1, 33, 128}) {
      Batch cut = WideBatch({});
      for (int begin = size == 1 ? 270 : 0; begin < 280; begin += size) {
        cut.chunks.push_back({begin, std::min(begin + size, 280)});
      }
      const std::vector<float> got = CheckKernel(c, cut);
      CHECK(std::memcmp(want.data() + want.size() - got.size(), got.data(),
                        got.size() * sizeof(float)) == 0);
    }
  }
}

Context ContextOf(int num_sms) {
  Context context;
  context.gpu.num_sms = num_sms;
  context.gpu.shared_bytes_per_block = 227 << 10;
  context.has_warp_groups = true;
  return context;
}

PrefillParams ParamsOf(int num_tokens) {
  PrefillParams params;
  params.group = 4;
  params.num_heads = 2;
  params.num_sequences = 1;
  params.sequences[0].num_tokens = num_tokens;
  return params;
}

TEST_CASE("warp groups need a choice, enough blocks, and a GPU that has their products") {
  const PrefillParams params = ParamsOf(320);  // 10 tiles of 128 rows, for 2 heads
  const auto use = [&](const Context& context, int head_dim, const PrefillParams& p) {
    return FindPrefillUse(context, DataType::kFloat16, head_dim, p);
  };
  CHECK(use(ContextOf(20), 128, params).has_choice);
  CHECK(use(ContextOf(20), 128, params).question == PrefillQuestion{DataType::kFloat16, 128, true});
  CHECK_FALSE(use(ContextOf(21), 128, params).question.fills_gpu);
  CHECK(use(ContextOf(80), 128, params).has_choice);
  CHECK_FALSE(use(ContextOf(81), 128, params).has_choice);
  CHECK_FALSE(use(ContextOf(20), 80, params).has_choice);
  Context context = ContextOf(20);
  context.has_warp_groups = false;
  CHECK_FALSE(use(context, 128, params).has_choice);
  context = ContextOf(20);
  context.gpu.shared_bytes_per_block = 100 << 10;
  CHECK_FALSE(use(context, 128, params).has_choice);
  PrefillParams split = params;
  split.num_splits = 2;
  CHECK_FALSE(use(ContextOf(20), 128, split).has_choice);
  CHECK(PrefillChoices().Get({DataType::kFloat16, 128, true}) == PrefillProducts::kMma);
}

TEST_CASE("warp groups are never used where rows must have the same bits") {
  Context context = ContextOf(20);
  context.deterministic = true;
  CHECK_FALSE(FindPrefillUse(context, DataType::kBFloat16, 64, ParamsOf(320)).has_choice);
  // Scores that make the reference maximum rise from tile to tile show which kernel has run.
  Case c = MakeCase({kNone, kNone}, 128);
  c.shape.context = 300;
  c.shape.kv_heads = 1;
  Caches caches(c);
  const Inputs in = MakeInputs(c);
  Batch b = WideBatch({{0, 300}});
  b.softmax_factor = 40.f;
  GpuRun run(c, caches, in, b);
  const std::vector<float> wide = run.Run(b);
  b.deterministic = true;
  const std::vector<float> deterministic = run.Run(b);
  b.deterministic = false;
  b.products = PrefillProducts::kMma;
  const std::vector<float> mma = run.Run(b);
  CHECK(SameBits(deterministic, mma));
  CHECK(SameBits(wide, mma) != ProbeWarpGroups(run.stream));
}

}  // namespace turbomind::cuda::prefill_step
