// Runs linear layers, grouped linear layers and embedding of backend/cuda thread by thread on the
// CPU (cuda_shim/shim.h). Compares them with FP64 over the values that a checkpoint's bytes
// represent.

#include "turbomind/backend/cuda/linear/linear_ops.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cpu/linear_fixture.h"
#include "cpu/linear_suite.h"
#include "cuda/gpu_array.h"
#include "cuda/linear_call.h"
#include "cuda/linear_gpu.h"
#include "turbomind/backend/cuda/cuda_device.h"
#include "turbomind/backend/cuda/linear/cuda_matrix.h"
#include "turbomind/core/check.h"
#include "turbomind/ops/forwarding_device.h"

namespace turbomind::cuda {
namespace {

using testing::SameBits;

constexpr MatrixFormat kFormats[] = {
    MatrixFormat::kF32,     MatrixFormat::kBF16,  MatrixFormat::kQ4_0,       MatrixFormat::kQ4_1,
    MatrixFormat::kQ8_0,    MatrixFormat::kMxfp4, MatrixFormat::kMxfp4Split, MatrixFormat::kQ4_K,
    MatrixFormat::kQ5_K,    MatrixFormat::kQ6_K,  MatrixFormat::kNvfp4,      MatrixFormat::kFp8,
    MatrixFormat::kFp8Block};
static_assert(std::size(kFormats) == kNumMatrixFormats);

// The error from rounding x, relative to the output's norm. It is 2^-7 / sqrt(12) of the power of
// two at or below x, and x is 1.35 times that power on average. The margin covers the small number
// of measured outputs.
constexpr double kDocumentedError = 1.9e-3;

// The kernels of a Gpu behind the interface that linear_suite.h tests.
class SmallGpu final : public ForwardingDevice {
 public:
  SmallGpu() : ForwardingDevice(MakeDevice(0, {})) {}
  void Synchronize() override {
    ForwardingDevice::Synchronize();
    cuda::Synchronize(gpu_.stream);
  }
  std::unique_ptr<PackedMatrix> PackMatrix(const MatrixSource& source, bool exact) override {
    return CudaPackMatrix(gpu_.memory, gpu_.uploader, source, exact);
  }
  void Linear(const LinearParams& params) override { gpu_.linear.Linear(gpu_.ctx, params); }
  void GroupedLinear(const GroupedLinearParams& params) override {
    gpu_.linear.GroupedLinear(gpu_.ctx, params);
  }
  void Embed(const EmbedParams& params) override { gpu_.linear.Embed(gpu_.ctx, params); }

 private:
  Gpu gpu_;
};

testing::Arithmetic OnGpu() {
  const std::vector<MatrixFormat> formats(std::begin(kFormats), std::end(kFormats));
  return {.name = "CUDA",
          .formats = formats,
          .neighbors = formats,
          .devices = {{"gpu", [](int) { return std::make_unique<SmallGpu>(); }, true}},
          .bound = BoundOf,
          .embeds_same_bits = false,
          .threads = {1},
          .group_threads = {1},
          .calls = {{1, true, false, 0},
                    {7, true, true, 3},
                    {8, false, false, 4},
                    {9, true, false, 3},
                    {33, false, true, 0}},
          .outputs = {1, 37},
          .odd_cols = {1, 77, 320},
          .long_cols = {352},
          .batches = {1, 8, 9, 17, 35, 130},
          .panel_outputs = 40,
          .panel_cols = 704,
          .group_outputs = 37,
          .group_rows = 50,
          .part_rows = {1, 12}};
}

TEST_CASE("products agree with a double reference for every shape") {
  testing::ForSubjects({OnGpu()}, testing::AgreesWithDouble);
}
TEST_CASE("a row has the same bits in every batch, thread and instruction set") {
  testing::ForSubjects({OnGpu()}, testing::SameBitsInEveryBatch);
}
TEST_CASE("rows grouped by weight have the same bits as alone") {
  testing::ForSubjects({OnGpu()}, testing::GroupedRowsEqualOneRow);
}
TEST_CASE("matrices of several formats share a layer") {
  testing::ForSubjects({OnGpu()}, testing::PartsShareALayer);
}
TEST_CASE("NaN and infinite activations affect only the outputs of their row") {
  testing::ForSubjects({OnGpu()}, testing::PoisonStaysInItsRow);
}
TEST_CASE("a scale that is NaN or infinite affects only its output") {
  testing::ForSubjects({OnGpu()}, testing::BadScaleStaysInItsOutput);
}
TEST_CASE("a packed matrix returns exact embedding rows") {
  testing::ForSubjects({OnGpu()}, testing::EmbedsExactly);
}
TEST_CASE("matrices that cannot be packed are rejected") {
  testing::ForSubjects({OnGpu()}, testing::RejectsBadSources);
}

TEST_CASE("the columns of a matrix are cut into slices") {
  for (MatrixFormat format : kFormats) {
    CHECK(NumSlices(StoredFormat(format), OnGpu().panel_outputs, OnGpu().panel_cols) >= 2);
  }
}

TEST_CASE("stacked parts may have different formats" * doctest::test_suite("small")) {
  Gpu gpu;
  using enum MatrixFormat;
  for (const std::vector<MatrixFormat>& formats : std::vector<std::vector<MatrixFormat>>{
           {kQ4_0, kQ4_0, kQ8_0}, {kBF16, kF32, kF32}, {kQ8_0, kQ8_0, kQ8_0, kQ8_0, kQ8_0}}) {
    std::vector<int64_t> rows;
    for (size_t i = 0; i < formats.size(); ++i) {
      rows.push_back(17 + 24 * static_cast<int64_t>(i));
    }
    const std::vector<Part> parts = RandomParts(formats, rows, 160);
    for (Call call : {Call{1, true, true}, Call{12, true, false}}) {
      const std::vector<float> x = RandomVector(call.num_rows * (160 + call.pad), 3);
      CheckLinear(parts, x, RunLinear(gpu, parts, x, call), call);
    }
  }
}

TEST_CASE("rounding x costs no more than documented" * doctest::test_suite("small")) {
  Gpu gpu;
  for (MatrixFormat format : {MatrixFormat::kBF16, MatrixFormat::kQ8_0, MatrixFormat::kMxfp4}) {
    const std::vector<Part> parts = RandomParts({format}, {64}, 1024);
    const std::vector<float> x = RandomVector(4 * 1024, 9);
    const Outcome got = RunLinear(gpu, parts, x, {4, false, false, 0});
    double error = 0;
    double norm = 0;
    for (int64_t r = 0; r < 4; ++r) {
      for (int64_t o = 0; o < 64; ++o) {
        const double want = ExactAt(parts[0].matrix, x.data() + r * 1024, o).product;
        error += std::pow(got.y[static_cast<size_t>(r * 64 + o)] - want, 2);
        norm += want * want;
      }
    }
    CHECK(std::sqrt(error / norm) < kDocumentedError);
  }
}

TEST_CASE("products by the library agree with FP64") {
  std::string why;
  Gpu gpu(CublasLt::Load({"no/such/library.so", TM_CUBLAS_LT}, &why));
  CHECK(why.find("no/such/library.so") != std::string::npos);
  for (MatrixFormat format : kFormats) {
    CAPTURE(static_cast<int>(format));
    // The library has no algorithm for 65 outputs.
    const int64_t cols = std::max(64, SourceBlockCols(format));
    const std::vector<Part> parts = RandomParts({format, format}, {37, 65}, cols);
    const Call call = {512, true, true, 3};
    const std::vector<float> x = RandomVector(call.num_rows * (cols + call.pad), 7);
    // Weights with scales are rounded as well as x. Those of NVFP4 have few bits.
    CheckLinear(parts, x, RunLinear(gpu, parts, x, call), call,
                format == MatrixFormat::kNvfp4 ? 1 : 2);
  }
  const std::vector<Part> parts = RandomParts({MatrixFormat::kBF16}, {40}, 77);
  const std::vector<float> x = RandomVector(70 * (77 + 3), 7);
  CheckLinear(parts, x, RunLinear(gpu, parts, x, {70, true, true}), {70, true, true});
}

TEST_CASE("matrices that share a piece of memory give the same results") {
  Gpu apart;
  Gpu together(nullptr, size_t{1} << 20);
  for (const MatrixFormat format : {MatrixFormat::kQ4_0, MatrixFormat::kMxfp4}) {
    const std::vector<Part> parts = RandomParts({format, MatrixFormat::kQ8_0}, {20, 33}, 96);
    const std::vector<float> x = RandomVector(5 * (96 + 3), 7);
    const Outcome want = RunLinear(apart, parts, x, {5, true, false});
    CHECK(SameBits(RunLinear(together, parts, x, {5, true, false}).y, want.y));
  }
}

TEST_CASE("the library is used only where it is faster") {
  using enum MatrixFormat;
  struct Case {
    MatrixFormat format;
    int num_rows;
    int sm;
    bool by_library;
  };
  std::unique_ptr<CublasLt> library = Library();
  if (library == nullptr) {
    return;
  }
  Gpu with(std::move(library));
  Gpu without;
  for (const Case& c : {Case{kBF16, 64, 90, false},
                        {kBF16, 65, 80, true},
                        {kBF16, 65, 90, true},
                        {kQ8_0, 511, 90, false},
                        {kQ8_0, 512, 90, true},
                        {kMxfp4, 512, 100, true},
                        {kMxfp4, 512, 89, false},
                        {kMxfp4, 512, 120, false}}) {
    CAPTURE(c.num_rows);
    CAPTURE(c.sm);
    with.ctx.gpu.sm = without.ctx.gpu.sm = c.sm;
    const std::vector<Part> parts = RandomParts({c.format}, {20}, 96);
    const std::vector<float> x = RandomVector(c.num_rows * (96 + 3), 7);
    const Outcome want = RunLinear(without, parts, x, {c.num_rows, true, false});
    const Outcome got = RunLinear(with, parts, x, {c.num_rows, true, false});
    CHECK(SameBits(got.y, want.y) != c.by_library);
  }
}

TEST_CASE("deterministic calls do not use the library") {
  std::unique_ptr<CublasLt> library = Library();
  if (library == nullptr) {
    return;
  }
  Gpu with(std::move(library));
  Gpu without;
  with.ctx.deterministic = true;
  const std::vector<Part> parts = RandomParts({MatrixFormat::kBF16}, {40}, 96);
  const std::vector<float> x = RandomVector(70 * (96 + 3), 7);
  const Outcome want = RunLinear(without, parts, x, {70, true, true});
  CHECK(SameBits(RunLinear(with, parts, x, {70, true, true}).y, want.y));
  with.ctx.deterministic = false;
  CHECK(!SameBits(RunLinear(with, parts, x, {70, true, true}).y, want.y));
}

TEST_CASE("Load reports why no library was loaded") {
  std::string why;
  CHECK(CublasLt::Load({}, &why) == nullptr);
  CHECK(why == "no library was given");
  CHECK(CublasLt::Load({"libm.so.6"}, &why) == nullptr);
  CHECK(why.find("libm.so.6 does not export cublasLt") != std::string::npos);
  CHECK(CublasLt::Load({"libof_nobody.so.1", "/no/file"}, &why) == nullptr);
  CHECK(why == "cannot find libof_nobody.so.1; cannot find /no/file");
  if (const auto library = Library(); library != nullptr) {
    CHECK(library->name().starts_with("cuBLASLt 1"));
  }
}

TEST_CASE("the default places are the loader's names, then toolkits from newest to oldest") {
  namespace fs = std::filesystem;
  const fs::path root = fs::temp_directory_path() / ("cublas_lt_test." + std::to_string(getpid()));
  const auto make = [&](const char* folder, const char* name) {
    fs::create_directories(root / folder / "lib64");
    std::ofstream(root / folder / "lib64" / name) << "a library";
    return (root / folder / "lib64" / name).string();
  };
  const std::string old = make("cuda-12.9", "libcublasLt.so.12");
  const std::string newer = make("cuda-13.0", "libcublasLt.so.13");
  make("cuda-11.8", "libcublasLt.so.11");
  make("other", "libcublasLt.so.13");
  const std::vector<std::string> names = {"libcublasLt.so.13", "libcublasLt.so.12"};
  CHECK(CublasLt::UsualPlaces(root.string()) ==
        std::vector<std::string>{names[0], names[1], newer, old});
  fs::remove_all(root);
  CHECK(CublasLt::UsualPlaces(root.string()) == names);
}

// Check that every row of y has the same bits as Linear with its row of x and its expert.
void CheckGrouped(Gpu& gpu, const Groups& groups, const std::vector<int>& sizes, bool gathered) {
  const Matrix& first = groups.parts[0].matrix;
  const std::vector<float> x = RandomVector(20 * first.cols, 17);
  std::vector<int32_t> x_rows;
  int expected_rows = 0;
  for (int size : sizes) {
    expected_rows += size;
  }
  for (int i = 0; i < expected_rows && gathered; ++i) {
    x_rows.push_back((7 * i + 3) % 20);
  }
  const std::vector<float> y = RunGrouped(gpu, groups, x, sizes, x_rows);
  int at = 0;
  for (size_t e = 0; e < sizes.size(); ++e) {
    for (int i = 0; i < sizes[e]; ++i, ++at) {
      const int64_t row = gathered ? x_rows[static_cast<size_t>(at)] : at;
      const std::vector<float> one(x.begin() + row * first.cols,
                                   x.begin() + (row + 1) * first.cols);
      const Call call = {1, e % 2 == 0, false, 0};
      const std::vector<Part> part = {groups.parts[e]};
      const Outcome want = RunLinear(gpu, part, one, call);
      const auto begin = y.begin() + at * first.rows;
      if (!SameBits({begin, begin + first.rows}, want.y)) {
        FAIL_CHECK("expert " << e << " row " << i);
        return;
      }
      if (i == 0) {
        CheckLinear(part, one, want, call);
      }
    }
  }
}

TEST_CASE("many rows grouped by expert have the same bits as single rows" *
          doctest::test_suite("small")) {
  Gpu gpu;
  for (MatrixFormat format :
       {MatrixFormat::kQ8_0, MatrixFormat::kMxfp4, MatrixFormat::kQ4_K, MatrixFormat::kQ6_K,
        MatrixFormat::kNvfp4, MatrixFormat::kFp8, MatrixFormat::kFp8Block}) {
    const Groups groups = MakeGroups(gpu, format, 3, 37, 768);
    CheckGrouped(gpu, groups, {40, 0, 11}, true);
    CheckGrouped(gpu, groups, {3, 67, 40}, true);
  }
}

TEST_CASE("GroupedLinear handles more experts than a warp has lanes" *
          doctest::test_suite("small")) {
  Gpu gpu;
  const Groups groups = MakeGroups(gpu, MatrixFormat::kMxfp4, 70, 17, 64);
  std::vector<int> sizes(70);
  sizes[0] = 3;
  sizes[33] = 10;
  sizes[69] = 5;
  CheckGrouped(gpu, groups, sizes, true);
  std::fill(sizes.begin(), sizes.end(), 1);
  sizes[40] = 0;
  CheckGrouped(gpu, groups, sizes, true);
}

TEST_CASE("an array of experts may change its weights") {
  Gpu gpu;
  Groups groups = MakeGroups(gpu, MatrixFormat::kQ8_0, 3, 20, 32);
  CheckGrouped(gpu, groups, {1, 1, 1}, false);
  Groups others = MakeGroups(gpu, MatrixFormat::kQ8_0, 5, 20, 32);
  std::swap(groups.experts[0].weight, groups.experts[2].weight);
  std::swap(groups.parts[0].matrix, groups.parts[2].matrix);
  CheckGrouped(gpu, groups, {1, 1, 1}, false);
}

TEST_CASE("a packed matrix has whole tiles, which are not packed again") {
  Gpu gpu;
  const Matrix m = RandomMatrix(MatrixFormat::kQ4_0, 4, 32, 1);
  const auto packed = CudaPackMatrix(gpu.memory, gpu.uploader, m.source(), false);
  CHECK(packed->num_bytes() == 512 + 64);
  CHECK(packed->packed_data() == nullptr);
  MatrixSource source = m.source();
  source.packed = true;
  CHECK_THROWS_AS(CudaPackMatrix(gpu.memory, gpu.uploader, source, false), InvalidArgument);
}

TEST_CASE("an upload of many chunks arrives complete") {
  Gpu gpu;
  constexpr int64_t kItems = 40;
  constexpr int64_t kItemBytes = 1 << 20;
  std::vector<uint8_t> got(kItems * kItemBytes);
  void* memory = AllocateGpu(got.size());
  gpu.uploader.Upload(memory, kItems, kItemBytes, [](int64_t item, uint8_t* out) {
    std::fill(out, out + kItemBytes, static_cast<uint8_t>(item));
  });
  CopyBytes(got.data(), memory, got.size(), gpu.stream);
  Synchronize(gpu.stream);
  FreeGpu(memory);
  for (int64_t i = 0; i < kItems; ++i) {
    CHECK(got[static_cast<size_t>(i * kItemBytes)] == i);
    CHECK(got[static_cast<size_t>((i + 1) * kItemBytes - 1)] == i);
  }
}

}  // namespace
}  // namespace turbomind::cuda
