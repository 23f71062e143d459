// Tests which kernel computes a linear layer.

#include "turbomind/backend/cuda/linear/linear_choice.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <set>
#include <vector>

namespace turbomind::cuda {
namespace {

using enum LinearKernel;

constexpr LinearMachine kOwn = {.sm = 90};
constexpr LinearMachine kH100 = {.sm = 90, .has_library = true};
constexpr LinearMachine kH100Fp8 = {.sm = 90, .has_library = true, .fp8_activations = true};
constexpr LinearMachine kL40S = {.sm = 89, .has_library = true};

LinearStack Stack(MatrixFormat format, int64_t outputs, int64_t cols) {
  return {.stored = format, .cols = cols, .outputs = {outputs}};
}
LinearStack Experts(int num_experts, int64_t outputs, int64_t cols) {
  LinearStack stack = Stack(MatrixFormat::kMxfp4, outputs, cols);
  stack.num_experts = num_experts;
  return stack;
}

// A matrix without memory.
struct Shape final : PackedMatrix {
  Shape(MatrixFormat stored, int64_t num_rows, int64_t num_cols) {
    format = stored;
    rows = num_rows;
    cols = num_cols;
  }
  int64_t num_bytes() const override { return 0; }
};

TEST_CASE("every number of rows has one bucket") {
  const LinearStack stack = Stack(MatrixFormat::kBF16, 64, 64);
  const LinearStack experts = Experts(4, 64, 64);
  for (const auto& [rows, bucket] : {std::pair(1, 0),
                                     {2, 1},
                                     {3, 2},
                                     {4, 2},
                                     {5, 3},
                                     {8, 3},
                                     {9, 4},
                                     {512, 9},
                                     {513, 10},
                                     {1024, 10}}) {
    CAPTURE(rows);
    CHECK(RowBucketOf(stack, rows) == bucket);
    CHECK(RowBucketOf(experts, rows) == bucket);
  }
  CHECK(RowBucketOf(stack, 1025) == 10);
  CHECK(RowBucketOf(stack, 1 << 20) == 10);
  CHECK(RowBucketOf(experts, 1025) == 11);
  CHECK(RowBucketOf(experts, 8192) == 13);
  CHECK(RowBucketOf(experts, 8193) == kNoBucket);
  CHECK(NumRowBuckets(stack) == 11);
  CHECK(NumRowBuckets(experts) == 14);
}

TEST_CASE("the table chooses by rows, format and GPU") {
  struct Case {
    LinearStack stack;
    int rows;
    LinearMachine machine;
    LinearKernel kernel;
  };
  const LinearStack small = Stack(MatrixFormat::kBF16, 4096, 4096);
  const LinearStack large = Stack(MatrixFormat::kBF16, 28672, 4096);
  LinearStack stacked = large;
  stacked.outputs[1] = 1024;
  const LinearStack q4 = Stack(MatrixFormat::kQ4_0, 4096, 4096);
  const LinearStack fp8 = Stack(MatrixFormat::kFp8, 4096, 4096);
  const LinearStack experts = Experts(32, 5760, 2880);
  for (const Case& c : {Case{small, 1, kH100, kStream1},
                        {small, 64, kH100, kTile},
                        {small, 65, kH100, kLibrary},
                        {small, 65, kOwn, kTile},
                        {large, 1, kH100, kLibrary},  // measured
                        {large, 1, kL40S, kLibrary},
                        {large, 1, kOwn, kStream1},
                        {large, 3, kOwn, kStream2},
                        {stacked, 1, kH100, kStream1},  // the second matrix is small
                        {q4, 1, kH100, kStream1},
                        {q4, 16, kH100, kStream2},
                        {Stack(MatrixFormat::kQ4_0, 8192, 4096), 1, kH100, kStream1},
                        {Stack(MatrixFormat::kQ4_K, 8192, 4096), 1, kH100, kStream2},
                        {Stack(MatrixFormat::kQ4_K, 4096, 4096), 1, kH100, kStream1},
                        {q4, 17, kH100, kTile},
                        {q4, 511, kH100, kTile},
                        {q4, 512, kH100, kLibrary},
                        {q4, 512, kL40S, kTile},
                        {q4, 2048, kL40S, kLibrary},
                        {fp8, 511, kH100, kTile},
                        {fp8, 512, kH100, kLibrary},
                        {fp8, 63, kH100Fp8, kTile},
                        {fp8, 64, kH100Fp8, kLibrary},
                        {fp8, 64, kOwn, kTile},
                        {fp8, 2047, kL40S, kTile},
                        {fp8, 2048, kL40S, kLibrary},
                        {experts, 4, kH100, kStream2},
                        {experts, 16 * 32, kH100, kStream2},
                        {experts, 16 * 32 + 1, kH100, kTile},
                        {experts, 1 << 16, kH100, kTile}}) {
    CAPTURE(c.stack.name());
    CAPTURE(c.rows);
    CHECK(TableKernel(c.stack, c.rows, c.machine) == c.kernel);
  }
}

TEST_CASE("the candidates begin with the table's kernel and leave out what cannot win") {
  const LinearStack bf16 = Stack(MatrixFormat::kBF16, 28672, 4096);
  const LinearStack q4 = Stack(MatrixFormat::kQ4_0, 4096, 4096);
  using Kernels = std::vector<LinearKernel>;
  CHECK(CandidatesOf(bf16, 0, kH100) == Kernels{kLibrary, kStream1, kStream2});
  CHECK(CandidatesOf(bf16, 0, kOwn) == Kernels{kStream1, kStream2});
  CHECK(CandidatesOf(bf16, 6, kH100) == Kernels{kLibrary, kTile});
  CHECK(CandidatesOf(q4, 3, kH100) == Kernels{kStream1, kStream2, kTile});
  CHECK(CandidatesOf(q4, 5, kH100) == Kernels{kTile, kStream2});
  CHECK(CandidatesOf(q4, 6, kH100) == Kernels{kTile});
  CHECK(CandidatesOf(q4, 7, kH100) == Kernels{kTile, kLibrary});
  CHECK(CandidatesOf(q4, 7, kOwn) == Kernels{kTile});
  CHECK(CandidatesOf(Experts(32, 5760, 2880), 8, kH100) == Kernels{kStream2, kTile});
  LinearMachine with_groups = kH100;
  with_groups.has_warp_groups = true;
  CHECK(CandidatesOf(q4, 3, with_groups) == CandidatesOf(q4, 3, kH100));
  CHECK(CandidatesOf(q4, 5, with_groups) == Kernels{kTile, kStream2, kWide});
  CHECK(CandidatesOf(q4, 7, with_groups) == Kernels{kTile, kWide, kLibrary});
  CHECK(CandidatesOf(Experts(32, 5760, 2880), 3, with_groups) ==
        Kernels{kStream2, kStream1, kWide});
  for (const LinearStack& stack : {bf16, q4, Experts(4, 64, 64), Experts(128, 64, 64)}) {
    for (int bucket = 0; bucket < NumRowBuckets(stack); ++bucket) {
      const Kernels kernels = CandidatesOf(stack, bucket, kH100);
      CHECK(kernels[0] == TableKernel(stack, kRowBuckets[static_cast<size_t>(bucket)], kH100));
      CHECK(std::set<LinearKernel>(kernels.begin(), kernels.end()).size() == kernels.size());
      CHECK((stack.num_experts == 0 || std::ranges::count(kernels, kLibrary) == 0));
    }
  }
}

TEST_CASE("a choice is for the rows of its bucket and for its stack") {
  const LinearStack stack = Stack(MatrixFormat::kQ4_0, 4096, 4096);
  LinearStack other = stack;
  other.outputs = {2048, 2048};
  LinearChoices choices;
  choices.Set(stack, 7, kLibrary);  // 65 to 128 rows
  CHECK(choices.Find(stack, 64, kH100) == kTile);
  CHECK(choices.Find(stack, 65, kH100) == kLibrary);
  CHECK(choices.Find(stack, 128, kH100) == kLibrary);
  CHECK(choices.Find(stack, 129, kH100) == kTile);
  CHECK(choices.Find(other, 128, kH100) == kTile);
  choices.Set(stack, 10, kTile);
  CHECK(choices.Find(stack, 1 << 20, kH100) == kTile);
  choices.Clear(stack, 10);
  CHECK(choices.Find(stack, 1 << 20, kH100) == kLibrary);
  CHECK(choices.Find(stack, 128, kH100) == kLibrary);
  const LinearStack experts = Experts(2, 64, 64);
  choices.Set(experts, 13, kStream2);
  CHECK(choices.Find(experts, 8192, kH100) == kStream2);
  CHECK(choices.Find(experts, 8193, kH100) == kTile);
}

TEST_CASE("adjacent parts of one format form a stack") {
  using enum MatrixFormat;
  const Shape a(kQ4_0, 32, 64), b(kQ4_0, 16, 64), c(kMxfp4Split, 8, 64), d(kMxfp4, 8, 64);
  const std::vector<LinearPart> parts = {{&a}, {&b}, {&c}, {&d}, {&d}, {&d}, {&d}, {&d}};
  const std::span<const LinearPart> all = parts;
  CHECK(CountStacked(all) == 2);
  CHECK(CountStacked(all.subspan(2)) == 1);  // another form of MXFP4
  CHECK(CountStacked(all.subspan(3)) == kMaxSegments);
  CHECK(CountStacked(all.subspan(7)) == 1);
  CHECK(StackOf(all.first(2)).name() == "q4_0 32+16 x 64");
  CHECK(StackOf(all.first(2)).num_bytes() == 3 * (512 + 16 * 4));
  CHECK(StackOf(all.subspan(2, 1)) == StackOf(all.subspan(3, 1)));
  CHECK(StackOfExperts(all.subspan(3)).name() == "5 experts of mxfp4 8 x 64");
  CHECK(StackOfExperts(all.subspan(3)) != StackOf(all.subspan(3, 1)));
}

}  // namespace
}  // namespace turbomind::cuda
