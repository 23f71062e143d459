// Runs WideKernel thread by thread on the CPU (cuda_shim/shim.h). Compares it with FP64 over
// factors that are rounded to BF16, as the kernel rounds them.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "cuda/linear_call.h"
#include "turbomind/backend/cuda/linear/wide_schedule.h"
#include "turbomind/core/ceil_div.h"
#include "turbomind/core/float_convert.h"

namespace turbomind::cuda {
namespace {

// Sums of exact products in FP32, in an unknown order.
constexpr double kBound = 0x1p-20;

constexpr MatrixFormat kFormats[] = {
    MatrixFormat::kBF16,       MatrixFormat::kQ4_0, MatrixFormat::kQ4_1,     MatrixFormat::kQ8_0,
    MatrixFormat::kMxfp4Split, MatrixFormat::kFp8,  MatrixFormat::kFp8Block, MatrixFormat::kNvfp4,
    MatrixFormat::kQ4_K,       MatrixFormat::kQ5_K, MatrixFormat::kQ6_K};

double Rounded(double value) { return BFloat16ToFloat(FloatToBFloat16(static_cast<float>(value))); }

// REQUIRES: HasWarpGroups().
struct WideGpu : Gpu {
  explicit WideGpu(int num_sms = 2) {
    ctx.has_warp_groups = true;
    ctx.gpu.num_sms = num_sms;
  }
  void UseWide(const LinearStack& stack) {
    for (int bucket = 0; bucket < NumRowBuckets(stack); ++bucket) {
      linear.choices().Set(stack, bucket, LinearKernel::kWide);
    }
  }
};

// The tests pass on GPUs without the products, which never run the kernel.
bool HasWarpGroups() {
  Gpu gpu;
  const bool has = ProbeWarpGroups(gpu.stream);
  if (!has) {
    REQUIRE(PropertiesOf(0).sm != 90);
    MESSAGE("skipped: the GPU has no products of warp groups");
  }
  return has;
}

LinearStack StackOf(const std::vector<Part>& parts) {
  LinearStack stack = {.stored = StoredFormat(parts[0].matrix.format),
                       .cols = parts[0].matrix.cols};
  for (size_t i = 0; i < parts.size(); ++i) {
    stack.outputs[i] = parts[i].matrix.rows;
  }
  return stack;
}

// Return whether y is the row's product with the matrix, plus `bias`, which may be empty.
bool IsProduct(const Matrix& m, const float* x, const std::vector<float>& bias, double before,
               const float* y) {
  for (int64_t o = 0; o < m.rows; ++o) {
    double want = before + (bias.empty() ? 0. : bias[static_cast<size_t>(o)]);
    double magnitude = std::abs(want);
    for (int64_t c = 0; c < m.cols; ++c) {
      const double value = m.values[static_cast<size_t>(o * m.cols + c)];
      const double product = Rounded(value / m.factor) * m.factor * Rounded(x[c]);
      want += product;
      magnitude += std::abs(product);
    }
    if (!(std::abs(y[o] - want) <= kBound * magnitude)) {
      MESSAGE("output " << o << ": got " << y[o] << ", want " << want);
      return false;
    }
  }
  return true;
}

void CheckWide(WideGpu& gpu, const std::vector<Part>& parts, Call call) {
  gpu.UseWide(StackOf(parts));
  const int64_t cols = parts[0].matrix.cols;
  const std::vector<float> x = RandomVector(call.num_rows * (cols + call.pad), 7);
  const Outcome got = RunLinear(gpu, parts, x, call);
  for (int row = 0; row < call.num_rows; ++row) {
    const float* y = got.y.data() + row * got.y_stride;
    for (const Part& part : parts) {
      const bool same = IsProduct(part.matrix, x.data() + row * (cols + call.pad),
                                  call.bias ? part.bias : std::vector<float>(),
                                  call.accumulate ? kSentinel : 0, y);
      INFO(InfoOf(part.matrix.format).name << ", " << call.num_rows << " rows, row " << row);
      REQUIRE(same);
      y += part.matrix.rows;
    }
    for (int i = 0; i < call.pad; ++i) {
      REQUIRE(y[i] == kSentinel);
    }
  }
}

TEST_CASE("products of warp groups agree with rounded factors for every format and shape") {
  if (!HasWarpGroups()) {
    return;
  }
  WideGpu gpu;
  for (const MatrixFormat format : kFormats) {
    const int64_t block = SourceBlockCols(format);
    for (const int num_rows : {1, 33, 70}) {  // one of each size of tiles
      const int64_t cols = CeilDiv(416, block) * block;
      CheckWide(gpu, RandomParts({format}, {150}, cols), {num_rows, true, false, 3});
    }
    CheckWide(gpu, RandomParts({format}, {20}, std::max<int64_t>(block, 32)), {17, false, true, 0});
  }
}

TEST_CASE("a tile of warp groups has no rows and outputs but its own") {
  if (!HasWarpGroups()) {
    return;
  }
  WideGpu gpu;
  const std::vector<MatrixFormat> two(2, MatrixFormat::kMxfp4);
  for (const int num_rows : {31, 32, 63, 64, 65, 128, 129}) {
    CheckWide(gpu, RandomParts(two, {129, 16}, 128), {num_rows, true, false, 1});
  }
}

TEST_CASE("warp groups multiply more rows than a group of tiles has") {
  if (!HasWarpGroups()) {
    return;
  }
  WideGpu gpu;
  CheckWide(gpu, RandomParts({MatrixFormat::kBF16}, {260}, 32), {2060, true, false, 0});
}

TEST_CASE("blocks of warp groups that share items compute every step once") {
  for (const int num_blocks : {1, 2, 5, 8, 264}) {
    for (const int num_items : {0, 1, 2, 3, 7, 10, 13, 300}) {
      for (const int steps : {1, 3, 4, 9, 64}) {
        const WideSchedule schedule(num_items, steps, num_blocks);
        INFO(num_blocks << " blocks, " << num_items << " items of " << steps << " steps");
        REQUIRE(schedule.num_whole + schedule.num_split == num_items);
        REQUIRE(schedule.num_split < num_blocks);
        REQUIRE(schedule.workers <= num_blocks);
        const int total = schedule.num_split * steps;
        int next = 0;
        for (int worker = 0; worker < schedule.workers; ++worker) {
          REQUIRE(schedule.Begin(worker) == next);
          next = schedule.Begin(worker + 1);
          for (int step = schedule.Begin(worker); step < next; ++step) {
            REQUIRE(schedule.WorkerOf(step) == worker);
          }
        }
        REQUIRE(next == total);
      }
    }
  }
}

TEST_CASE("blocks of warp groups share the columns of items") {
  if (!HasWarpGroups()) {
    return;
  }
  for (const int num_sms : {1, 2, 3, 7}) {
    WideGpu gpu(num_sms);
    for (const int num_rows : {100, 20}) {  // the second has more blocks
      // Twice, because the first call must leave the counters at zero.
      CheckWide(gpu, RandomParts({MatrixFormat::kQ4_0}, {300}, 1216), {num_rows, true, false, 0});
      CheckWide(gpu, RandomParts({MatrixFormat::kQ4_0}, {300}, 1216), {num_rows, false, true, 0});
    }
  }
}

void CheckWideExperts(MatrixFormat format, const std::vector<int>& sizes, int num_sms) {
  WideGpu gpu(num_sms);
  const Groups groups = MakeGroups(gpu, format, static_cast<int>(sizes.size()), 150, 192);
  gpu.UseWide(StackOfExperts(groups.experts));
  constexpr int kRows = 20;
  const std::vector<float> x = RandomVector(kRows * 192, 17);
  std::vector<int32_t> x_rows;
  for (size_t e = 0; e < sizes.size(); ++e) {
    for (int i = 0; i < sizes[e]; ++i) {
      x_rows.push_back(static_cast<int32_t>(7 * x_rows.size() + 3) % kRows);
    }
  }
  const std::vector<float> y = RunGrouped(gpu, groups, x, sizes, x_rows);
  const float* at = y.data();
  size_t row = 0;
  for (size_t e = 0; e < sizes.size(); ++e) {
    const std::vector<float> bias = e % 2 == 0 ? groups.parts[e].bias : std::vector<float>();
    for (int i = 0; i < sizes[e]; ++i, at += 150, ++row) {
      INFO("expert " << e << " row " << i);
      REQUIRE(IsProduct(groups.parts[e].matrix, x.data() + x_rows[row] * 192, bias, 0, at));
    }
  }
}

TEST_CASE("warp groups multiply the rows of every expert, however they are spread") {
  if (!HasWarpGroups()) {
    return;
  }
  for (const int num_sms : {1, 4}) {
    CheckWideExperts(MatrixFormat::kMxfp4, {3, 0, 40, 1, 33}, num_sms);
    CheckWideExperts(MatrixFormat::kQ8_0, {0, 0, 150, 0}, num_sms);
    CheckWideExperts(MatrixFormat::kNvfp4, {3, 0, 70}, num_sms);
    CheckWideExperts(MatrixFormat::kFp8Block, {100, 200, 1}, num_sms);
  }
  std::vector<int> sizes(70);
  sizes[0] = 3;
  sizes[33] = 35;
  sizes[69] = 5;
  CheckWideExperts(MatrixFormat::kMxfp4, sizes, 2);
}

// Compares activations that the kernel stores with those of the stored products.
void CheckGates(Activation activation, const std::vector<int>& sizes, int num_sms) {
  constexpr int kInner = 75;
  constexpr int kCols = 1216;
  constexpr float kLimit = 3.f;
  WideGpu gpu(num_sms);
  const Groups groups =
      MakeGroups(gpu, MatrixFormat::kMxfp4, static_cast<int>(sizes.size()), 2 * kInner, kCols);
  LinearStack stack = StackOfExperts(groups.experts);
  gpu.UseWide(stack);
  stack.gated = true;
  gpu.UseWide(stack);
  std::vector<int32_t> offsets = {0};
  for (const int size : sizes) {
    offsets.push_back(offsets.back() + size);
  }
  const int num_rows = offsets.back();
  const std::vector<float> x = RandomVector(num_rows * kCols, 5);
  std::vector<int32_t> x_rows(static_cast<size_t>(num_rows));
  std::iota(x_rows.begin(), x_rows.end(), 0);
  const std::vector<float> y = RunGrouped(gpu, groups, x, sizes, x_rows);
  const GpuArray<float> x_gpu(gpu.stream, x);
  const GpuArray<int32_t> offsets_gpu(gpu.stream, offsets);
  const GpuArray<float> out(gpu.stream,
                            std::vector<float>(static_cast<size_t>(num_rows * kInner), kSentinel));
  const GroupedGateParams params = {.linear = {.x = x_gpu.data(),
                                               .x_stride = kCols,
                                               .experts = groups.experts.data(),
                                               .num_experts = static_cast<int>(sizes.size()),
                                               .offsets = offsets_gpu.data(),
                                               .num_rows = num_rows},
                                    .activation = {.out = out.data(),
                                                   .num_rows = num_rows,
                                                   .dim = kInner,
                                                   .activation = activation,
                                                   .interleaved = true,
                                                   .limit = kLimit}};
  gpu.linear.GroupedGate(gpu.ctx, params);
  const std::vector<float> got = out.Read();
  for (size_t i = 0; i < got.size(); ++i) {
    double gate = y[2 * i];
    double up = y[2 * i + 1];
    double slope = 1;
    if (activation == Activation::kClampedSwiglu) {
      gate = std::min(gate, double{kLimit});
      up = std::clamp(up, -double{kLimit}, double{kLimit}) + 1;
      slope = 1.702;
    }
    const double want = gate / (1 + std::exp(-slope * gate)) * up;
    INFO("value " << i);
    REQUIRE(std::abs(got[i] - want) <= 1e-5 * std::abs(want) + 1e-6);
  }
}

TEST_CASE("warp groups store the activation of gates and ups") {
  for (const int num_sms : {1, 3}) {  // with parts of items, or not
    CheckGates(Activation::kClampedSwiglu, {3, 0, 40, 1}, num_sms);
    CheckGates(Activation::kSilu, {70, 150}, num_sms);
  }
}

TEST_CASE("no rows of experts need no products") {
  if (!HasWarpGroups()) {
    return;
  }
  WideGpu gpu;
  const Groups groups = MakeGroups(gpu, MatrixFormat::kMxfp4, 2, 32, 64);
  gpu.UseWide(StackOfExperts(groups.experts));
  CHECK(RunGrouped(gpu, groups, RandomVector(64, 1), {0, 0}, {}).empty());
}

TEST_CASE("deterministic calls do not use warp groups") {
  if (!HasWarpGroups()) {
    return;
  }
  WideGpu gpu;
  const std::vector<Part> parts = RandomParts({MatrixFormat::kQ4_0}, {64}, 416);
  const std::vector<float> x = RandomVector(40 * 416, 7);
  Gpu plain;
  const Outcome want = RunLinear(plain, parts, x, {40, false, false, 0});
  gpu.UseWide(StackOf(parts));
  CHECK_FALSE(testing::SameBits(RunLinear(gpu, parts, x, {40, false, false, 0}).y, want.y));
  gpu.ctx.deterministic = true;
  CHECK(testing::SameBits(RunLinear(gpu, parts, x, {40, false, false, 0}).y, want.y));
}

TEST_CASE("infinite and NaN activations affect only their row") {
  if (!HasWarpGroups()) {
    return;
  }
  WideGpu gpu;
  const std::vector<Part> parts = RandomParts({MatrixFormat::kMxfp4}, {40}, 128);
  gpu.UseWide(StackOf(parts));
  std::vector<float> x = RandomVector(34 * 128, 7);
  const Outcome want = RunLinear(gpu, parts, x, {34, false, false, 0});
  x[5 * 128 + 9] = testing::kNan;
  x[33 * 128] = testing::kInf;
  const Outcome got = RunLinear(gpu, parts, x, {34, false, false, 0});
  for (int row = 0; row < 34; ++row) {
    const auto at = static_cast<size_t>(row * 40);
    if (row == 5 || row == 33) {
      CHECK_FALSE(std::isfinite(got.y[at]));
    } else {
      CHECK(testing::SameBits({got.y.begin() + at, got.y.begin() + at + 40},
                              {want.y.begin() + at, want.y.begin() + at + 40}));
    }
  }
}

}  // namespace
}  // namespace turbomind::cuda
