// Tunes the linear layers of a GPU with injected times, and observes that the choices are used.

#include "turbomind/backend/cuda/linear/linear_tuning.h"

#include <doctest/doctest.h>

#include <cmath>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "cpu/linear_fixture.h"
#include "cuda/gpu_array.h"
#include "cuda/linear_gpu.h"
#include "turbomind/backend/cuda/runtime/event_timer.h"

namespace turbomind::cuda {
namespace {

using testing::RandomMatrix;
using testing::RandomVector;
using testing::SameBits;

// Rounding x and weights to BF16 costs 1.9e-3 of the output's norm each (linear_ops_test.cc).
constexpr double kBoundOfLibrary = 2 * 1.9e-3;

// Packed matrices of one stack.
struct Model {
  Model(Gpu& gpu, MatrixFormat format, const std::vector<int64_t>& rows, int64_t cols,
        bool grouped = false)
      : is_grouped(grouped) {
    for (const int64_t outputs : rows) {
      const auto seed = static_cast<uint32_t>(7 * weights.size() + static_cast<size_t>(cols));
      weights.push_back(CudaPackMatrix(gpu.memory, gpu.uploader,
                                       RandomMatrix(format, outputs, cols, seed).source(), false));
      parts.push_back({.weight = weights.back().get()});
      num_outputs += outputs;
    }
  }
  LayerToTune Layer(int max_rows) const { return {parts, is_grouped, max_rows}; }

  bool is_grouped;
  int64_t num_outputs = 0;
  std::vector<std::unique_ptr<PackedMatrix>> weights;
  std::vector<LinearPart> parts;
};

// Arrays of a call of Linear.
struct Arrays {
  Arrays(Gpu& gpu, const Model& model, int num_rows)
      : x(gpu.stream, RandomVector(num_rows * model.parts[0].weight->cols, 3)),
        y(gpu.stream, std::vector<float>(static_cast<size_t>(num_rows * model.num_outputs))),
        params{.x = x.data(),
               .x_stride = model.parts[0].weight->cols,
               .parts = model.parts.data(),
               .num_parts = static_cast<int>(model.parts.size()),
               .y = y.data(),
               .y_stride = model.num_outputs,
               .num_rows = num_rows} {}
  GpuArray<float> x;
  GpuArray<float> y;
  LinearParams params;
};

std::vector<float> Multiply(Gpu& gpu, const Model& model, int num_rows) {
  const Arrays arrays(gpu, model, num_rows);
  gpu.linear.Linear(gpu.ctx, arrays.params);
  return arrays.y.Read();
}

// Tunes with made-up times: `favorite` takes 1 µs, and other kernels take 2.
struct Tuned {
  Tuned(Gpu& gpu, const TuningParams& params, LinearKernel favorite) {
    const auto time = [&](const std::string& question, const std::string& kernel,
                          FunctionRef<void()> work) {
      work();
      timed[question].insert(kernel);
      order.push_back(question);
      return kernel == NameOf(favorite) ? 1. : 2.;
    };
    const auto seconds = [this] { return ++now; };
    const TunerClock clock = {time, seconds, params.max_seconds};
    Tuner tuner(params.saved, clock, &result);
    TuneLinear(gpu.ctx, gpu.linear, params.layers, tuner);
  }
  TuningResult result;
  std::map<std::string, std::set<std::string>> timed;
  std::vector<std::string> order;
  double now = 0;
};

TuningParams ParamsOf(const Model& model, int max_rows) {
  return {.layers = {model.Layer(max_rows)}, .attention = {}, .saved = {}, .max_seconds = 1e9};
}

double RelativeError(const std::vector<float>& got, const std::vector<float>& want) {
  double error = 0;
  double norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    error += std::pow(double{got[i]} - want[i], 2);
    norm += std::pow(double{want[i]}, 2);
  }
  return std::sqrt(error / norm);
}

TEST_CASE("the tuner's choice of the library is used for the rows of its bucket") {
  std::unique_ptr<CublasLt> library = Library();
  if (library == nullptr) {
    return;
  }
  Gpu gpu(std::move(library));
  Gpu own;
  const Model model(gpu, MatrixFormat::kBF16, {37, 20}, 96);
  const Model same(own, MatrixFormat::kBF16, {37, 20}, 96);
  const Tuned tuned(gpu, ParamsOf(model, 4), LinearKernel::kLibrary);
  CHECK(tuned.result.num_measured == 3);
  CHECK(tuned.result.num_left == 0);
  CHECK(tuned.timed.at("bf16 37+20 x 96, 1 row") ==
        std::set<std::string>{"stream1", "stream2", "library"});
  for (const TunedChoice& choice : tuned.result.choices) {
    CHECK(choice.kernel == "library");
    CHECK(choice.table_kernel == "stream1");
    CHECK(choice.table_us == 2 * choice.us);
  }
  for (const int num_rows : {1, 3, 5}) {
    CAPTURE(num_rows);
    const std::vector<float> want = Multiply(own, same, num_rows);
    const std::vector<float> got = Multiply(gpu, model, num_rows);
    CHECK(SameBits(got, want) == (num_rows == 5));  // the bucket of 8 rows was not tuned
    CHECK(RelativeError(got, want) < kBoundOfLibrary);
  }
  gpu.ctx.deterministic = true;
  CHECK(SameBits(Multiply(gpu, model, 3), Multiply(own, same, 3)));
}

TEST_CASE("a kernel with wrong results is not used, however fast it is") {
  std::unique_ptr<CublasLt> library = Library();
  if (library == nullptr || PropertiesOf(0).workspace_step_bytes > 0) {
    return;  // only the stand-in for the library has wrong results
  }
  Gpu gpu(std::move(library));
  Gpu own;
  const Model model(gpu, MatrixFormat::kBF16, {63}, 96);
  const Model same(own, MatrixFormat::kBF16, {63}, 96);
  const Tuned tuned(gpu, ParamsOf(model, 2), LinearKernel::kLibrary);
  CHECK(tuned.result.wrong == std::vector<std::string>{"library for bf16 63 x 96, 1 row",
                                                       "library for bf16 63 x 96, 2 rows"});
  CHECK(tuned.timed.at("bf16 63 x 96, 1 row") == std::set<std::string>{"stream1", "stream2"});
  CHECK(SameBits(Multiply(gpu, model, 1), Multiply(own, same, 1)));
}

TEST_CASE("products of warp groups are tuned where the GPU has them") {
  Gpu gpu;
  gpu.ctx.has_warp_groups = ProbeWarpGroups(gpu.stream);
  if (!gpu.ctx.has_warp_groups) {
    return;
  }
  Gpu own;
  const Model model(gpu, MatrixFormat::kQ4_0, {37}, 96);
  const Model same(own, MatrixFormat::kQ4_0, {37}, 96);
  const Tuned tuned(gpu, ParamsOf(model, 32), LinearKernel::kWide);
  CHECK(tuned.result.wrong.empty());
  CHECK(tuned.timed.at("q4_0 37 x 96, 32 rows").contains("wide"));
  const std::vector<float> got = Multiply(gpu, model, 32);
  const std::vector<float> want = Multiply(own, same, 32);
  CHECK_FALSE(SameBits(got, want));
  CHECK(RelativeError(got, want) < kBoundOfLibrary);
}

TEST_CASE("the choices between own kernels keep the bits and change the launches") {
  Gpu gpu;
  const bool counts_launches = gpu.ctx.gpu.name == "shim";
  const Model model(gpu, MatrixFormat::kQ4_0, {40}, 128);
  const std::vector<float> want = Multiply(gpu, model, 8);
  const auto launches = [&] {
    const Arrays arrays(gpu, model, 8);
    return EventTimer(gpu.stream).Time([&] { gpu.linear.Linear(gpu.ctx, arrays.params); });
  };
  const double before = launches();
  const Tuned tuned(gpu, ParamsOf(model, 8), LinearKernel::kTile);
  CHECK(tuned.result.choices.back().question == "q4_0 40 x 128, 8 rows");
  CHECK(tuned.result.choices.back().kernel == "tile");
  CHECK(SameBits(Multiply(gpu, model, 8), want));
  CHECK((!counts_launches || (before == 1 && launches() > 1)));  // the tile kernel needs a copy
}

TEST_CASE("equal times keep the table, and so does a tuner without time") {
  Gpu gpu;
  const Model model(gpu, MatrixFormat::kQ8_0, {40}, 64);
  const Tuned equal(gpu, ParamsOf(model, 2), LinearKernel::kLibrary);  // no candidate
  CHECK(equal.result.num_measured == 2);
  for (const TunedChoice& choice : equal.result.choices) {
    CHECK(choice.kernel == choice.table_kernel);
  }
  TuningParams params = ParamsOf(model, 2);
  params.max_seconds = 0;
  const Tuned none(gpu, params, LinearKernel::kStream2);
  CHECK(none.result.choices.empty());
  CHECK(none.result.num_left == 2);
}

TEST_CASE("questions come in the order of their gain: few rows, then many bytes") {
  Gpu gpu;
  const Model small(gpu, MatrixFormat::kQ8_0, {20}, 64);
  const Model large(gpu, MatrixFormat::kQ4_0, {50}, 128);
  const Model exact(gpu, MatrixFormat::kF32, {8}, 8);
  TuningParams params = ParamsOf(small, 2);
  params.layers.push_back(large.Layer(2));
  params.layers.push_back(exact.Layer(2));
  const Tuned tuned(gpu, params, LinearKernel::kStream2);
  std::vector<std::string> questions;
  for (const TunedChoice& choice : tuned.result.choices) {
    questions.push_back(choice.question);
  }
  CHECK(questions == std::vector<std::string>{"q4_0 50 x 128, 1 row", "q8_0 20 x 64, 1 row",
                                              "q4_0 50 x 128, 2 rows", "q8_0 20 x 64, 2 rows"});
  CHECK(tuned.order.front() == questions.front());
  CHECK(tuned.order.back() == questions.back());
}

TEST_CASE("saved choices are used without timing, if they still answer the question") {
  Gpu gpu;
  const Model model(gpu, MatrixFormat::kQ8_0, {40}, 64);
  TuningParams params = ParamsOf(model, 4);
  const Tuned first(gpu, params, LinearKernel::kStream2);
  Gpu fresh;
  params.layers = {model.Layer(4)};
  params.saved = first.result.choices;
  params.saved.push_back({"of another model", "unknown", "unknown"});
  const Tuned second(fresh, params, LinearKernel::kStream1);
  CHECK(second.timed.empty());
  CHECK(second.result.num_measured == 0);
  CHECK(second.result.choices.size() == 3);
  CHECK(fresh.linear.choices().Find(StackOf(model.parts), 3, fresh.linear.machine(fresh.ctx)) ==
        LinearKernel::kStream2);
  params.saved[0].kernel = "library";        // no candidate
  params.saved[1].table_kernel = "stream2";  // the table has changed
  const Tuned third(fresh, params, LinearKernel::kStream1);
  CHECK(third.result.num_measured == 2);
  CHECK(third.timed.size() == 2);
  CHECK(third.timed.contains(params.saved[0].question));
  CHECK(third.timed.contains(params.saved[1].question));
}

TEST_CASE("experts are tuned by the rows of all of them") {
  Gpu gpu;
  const Model model(gpu, MatrixFormat::kMxfp4, {20, 20, 20}, 64, true);
  const int64_t free_bytes = static_cast<int64_t>(GpuMemory().free_bytes);
  const Tuned tuned(gpu, ParamsOf(model, 32), LinearKernel::kTile);
  if (gpu.ctx.gpu.name == "shim") {  // a GPU keeps the kernels that it has loaded
    CHECK(static_cast<int64_t>(GpuMemory().free_bytes) == free_bytes);
  }
  CHECK(tuned.timed.at("3 experts of mxfp4 20 x 64, 32 rows") ==
        std::set<std::string>{"stream2", "tile"});
  CHECK(tuned.result.choices.back().kernel == "tile");
  const LinearStack stack = StackOfExperts(model.parts);
  const LinearMachine machine = gpu.linear.machine(gpu.ctx);
  CHECK(gpu.linear.choices().Find(stack, 17, machine) == LinearKernel::kTile);
  CHECK(gpu.linear.choices().Find(stack, 16, machine) == LinearKernel::kStream2);
}

TEST_CASE("a recorded call has the tuner's choice") {
  std::unique_ptr<CublasLt> library = Library();
  if (library == nullptr) {
    return;
  }
  Gpu gpu(std::move(library));
  const Model model(gpu, MatrixFormat::kBF16, {33}, 64);
  const std::vector<float> table = Multiply(gpu, model, 2);
  const Tuned tuned(gpu, ParamsOf(model, 2), LinearKernel::kLibrary);
  const std::vector<float> want = Multiply(gpu, model, 2);
  CHECK(!SameBits(want, table));
  const Arrays arrays(gpu, model, 2);
  gpu.linear.Linear(gpu.ctx, arrays.params);  // the plan must exist before the recording
  ClearBytes(arrays.y.data(), 66 * sizeof(float), gpu.stream);
  BeginCapture(gpu.stream);
  gpu.linear.Linear(gpu.ctx, arrays.params);
  const Graph graph = EndCapture(gpu.stream);
  LaunchGraph(graph, gpu.stream);
  CHECK(SameBits(arrays.y.Read(), want));
  DestroyGraph(graph);
}

TEST_CASE("a question that needs too much memory keeps the table's kernel") {
  std::unique_ptr<CublasLt> library = Library();
  if (library == nullptr || PropertiesOf(0).name != "shim") {
    return;
  }
  Gpu gpu(std::move(library));
  const Model model(gpu, MatrixFormat::kBF16, {int64_t{1} << 20}, 4);  // y has 4 GiB
  const LinearStack stack = StackOf(model.parts);
  TuningParams params = ParamsOf(model, 1024);
  for (int bucket = 0; bucket < 10; ++bucket) {  // only the last question is open
    const int rows = kRowBuckets[static_cast<size_t>(bucket)];
    const char* kernel = NameOf(TableKernel(stack, rows, gpu.linear.machine(gpu.ctx)));
    params.saved.push_back(
        {.question = stack.name() + ", " + std::to_string(rows) + (rows == 1 ? " row" : " rows"),
         .kernel = kernel,
         .table_kernel = kernel});
  }
  const Tuned tuned(gpu, params, LinearKernel::kTile);
  CHECK(tuned.result.num_measured == 0);
  CHECK(tuned.result.num_left == 1);
  CHECK(tuned.timed.empty());
}

}  // namespace
}  // namespace turbomind::cuda
