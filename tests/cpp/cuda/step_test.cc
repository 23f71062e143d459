// Tests a step's arrays on the GPU and recorded steps.

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "turbomind/backend/cuda/runtime/context.h"
#include "turbomind/backend/cuda/runtime/step_arrays.h"
#include "turbomind/backend/cuda/runtime/step_graphs.h"
#include "turbomind/core/check.h"

namespace turbomind::cuda {
namespace {

struct Step {
  std::vector<int32_t> tokens = {7, 8, 9, 10};
  std::vector<int32_t> positions = {5, 0, 1, 2};
  std::vector<int32_t> cu_seqlens = {0, 1, 4};
  std::vector<int32_t> context_lens = {6, 3};
  std::vector<int32_t> tables[2] = {{1, 2, 3, 4, -1, -1}, {5, -1}};
  std::vector<int32_t> window16 = {9, 8, 7, 6, 5, 4};
  std::vector<PendingQuantization> blocks_to_quantize = {{3, 4}};
  StepGroup groups[2];

  StepParams Params() {
    for (int g = 0; g < 2; ++g) {
      groups[g].batch = {.num_seqs = 2,
                         .num_decode = 1,
                         .num_tokens = 4,
                         .cu_seqlens = cu_seqlens.data(),
                         .context_lens = context_lens.data(),
                         .positions = positions.data(),
                         .block_tables = tables[g].data(),
                         .block_table_stride = static_cast<int64_t>(tables[g].size()) / 2,
                         .window16_tables = g == 0 ? window16.data() : nullptr,
                         .blocks_to_quantize = blocks_to_quantize.data(),
                         .num_to_quantize = g == 0 ? 1 : 0};
    }
    return {.tokens = tokens.data(), .groups = groups, .num_groups = 2, .q_heads = 4};
  }
};

struct TestStream {
  Stream stream = CreateStream();
  ~TestStream() { DestroyStream(stream); }
};

template <class T>
std::vector<T> Read(const T* gpu, int64_t size, Stream stream) {
  std::vector<T> host(static_cast<size_t>(size));
  CopyBytes(host.data(), gpu, host.size() * sizeof(T), stream);
  Synchronize(stream);
  return host;
}

TEST_CASE("slots and saves of states are copied to the GPU") {
  TestStream s;
  StepArrays arrays(s.stream);
  Step step;
  StepParams params = step.Params();
  const std::vector<int32_t> slots = {4, 2};
  const std::vector<StateSave> saves = {{1, 2, 7}, {1, 3, 5}};
  const StateBatch states = {slots.data(), saves.data(), 2};
  params.states = &states;
  arrays.Upload(params);
  CHECK(arrays.shape().has_states);
  const StateBatch on_gpu = arrays.OnGpu(states);
  CHECK(Read(on_gpu.slots, 2, s.stream) == slots);
  REQUIRE(on_gpu.num_saves == 2);
  const std::vector<StateSave> found = Read(on_gpu.saves, 2, s.stream);
  CHECK(found[1].sequence == 1);
  CHECK(found[1].num_tokens == 3);
  CHECK(found[1].slot == 5);
  params.states = nullptr;
  arrays.Upload(params);
  CHECK(!arrays.shape().has_states);
  CHECK_THROWS_AS(arrays.OnGpu(states), InternalError);
}

TEST_CASE("a step's arrays are copied to the GPU with tables padded by -1") {
  TestStream s;
  StepArrays arrays(s.stream);
  Step step;
  const StepParams params = step.Params();
  arrays.Upload(params);
  const BatchView& first = arrays.OnGpu(step.groups[0].batch);
  const BatchView& second = arrays.OnGpu(step.groups[1].batch);
  CHECK(Read(arrays.OnGpu(step.tokens.data()), 4, s.stream) == step.tokens);
  CHECK(Read(arrays.OnGpu(step.positions.data()), 4, s.stream) == step.positions);
  CHECK(Read(first.cu_seqlens, 3, s.stream) == step.cu_seqlens);
  CHECK(Read(first.context_lens, 2, s.stream) == step.context_lens);
  CHECK(first.block_table_stride == 8);
  CHECK(Read(first.block_tables, 16, s.stream) ==
        std::vector<int32_t>{1, 2, 3, -1, -1, -1, -1, -1, 4, -1, -1, -1, -1, -1, -1, -1});
  CHECK(Read(first.window16_tables, 8, s.stream) ==
        std::vector<int32_t>{9, 8, 7, -1, -1, -1, -1, -1});
  CHECK(second.window16_tables == nullptr);
  CHECK(Read(second.block_tables, 1, s.stream) == std::vector<int32_t>{5});
  const std::span<const PendingQuantization> on_gpu = arrays.OnGpu(step.blocks_to_quantize.data());
  REQUIRE(on_gpu.size() == 4);
  CHECK(first.num_to_quantize == 4);
  CHECK(second.num_to_quantize == 0);
  const std::vector<PendingQuantization> blocks_to_quantize = Read(on_gpu.data(), 4, s.stream);
  CHECK(blocks_to_quantize[0].window16 == 3);
  CHECK(blocks_to_quantize[0].quantized == 4);
  for (size_t i = 1; i < blocks_to_quantize.size(); ++i) {
    CHECK(blocks_to_quantize[i].window16 == -1);
    CHECK(blocks_to_quantize[i].quantized == -1);
  }
}

TEST_CASE("steps with few blocks to quantize share one shape") {
  TestStream s;
  StepArrays arrays(s.stream);
  const auto shape = [&](size_t num_to_quantize) {
    Step step;
    step.blocks_to_quantize.assign(num_to_quantize, {3, 4});
    const StepParams params = step.Params();
    step.groups[0].batch.num_to_quantize = static_cast<int>(num_to_quantize);
    arrays.Upload(params);
    return arrays.shape();
  };
  CHECK(shape(1) == shape(4));
  CHECK(shape(5) == shape(8));
  CHECK_FALSE(shape(0) == shape(1));
  CHECK_FALSE(shape(4) == shape(5));
}

TEST_CASE("steps of one shape have their arrays at the same addresses") {
  TestStream s;
  StepArrays arrays(s.stream);
  Step a;
  Step b;
  b.tokens = {1, 2, 3, 4};
  arrays.Upload(a.Params());
  const StepShape shape = arrays.shape();
  const int32_t* tokens = arrays.OnGpu(a.tokens.data());
  const int32_t* tables = arrays.OnGpu(a.groups[1].batch).block_tables;
  arrays.Upload(b.Params());
  CHECK(arrays.shape() == shape);
  CHECK(arrays.OnGpu(b.tokens.data()) == tokens);
  CHECK(arrays.OnGpu(b.groups[1].batch).block_tables == tables);
  CHECK(Read(tokens, 4, s.stream) == b.tokens);
  b.blocks_to_quantize.clear();
  StepParams params = b.Params();
  b.groups[0].batch.num_to_quantize = 0;
  arrays.Upload(params);
  CHECK_FALSE(arrays.shape() == shape);
}

TEST_CASE("arrays that do not belong to the step throw InternalError") {
  TestStream s;
  StepArrays arrays(s.stream);
  Step step;
  arrays.Upload(step.Params());
  const std::vector<int32_t> other(4);
  CHECK_THROWS_AS(arrays.OnGpu(other.data()), InternalError);
  CHECK_THROWS_AS(arrays.OnGpu(BatchView{.block_tables = other.data()}), InternalError);
  const PendingQuantization pending;
  CHECK_THROWS_AS(arrays.OnGpu(&pending), InternalError);
}

// Copies the step's tokens, as an op would.
struct Recorder {
  explicit Recorder(Stream s) : stream(s), out(AllocateGpu(16)) {}
  ~Recorder() { FreeGpu(out); }
  void Run() {
    ++num_runs;
    CopyBytes(out, from, 16, stream);
  }
  Stream stream;
  void* out;
  const int32_t* from = nullptr;
  int num_runs = 0;
};

TEST_CASE("the second step of a shape is recorded and later ones are replayed with new contents") {
  TestStream s;
  StepArrays arrays(s.stream);
  StepGraphs graphs(s.stream);
  Recorder recorder(s.stream);
  int64_t generation = 1;
  const auto run = [&](Step& step) {
    arrays.Upload(step.Params());
    recorder.from = arrays.OnGpu(step.tokens.data());
    graphs.Run(
        arrays.shape(), [&] { return generation; }, [&] { recorder.Run(); });
    return Read(static_cast<const int32_t*>(recorder.out), 4, s.stream);
  };
  for (int32_t i = 0; i < 6; ++i) {
    Step step;
    step.tokens = {i, 2 * i, 3, 4};
    CHECK(run(step) == step.tokens);
  }
  CHECK(recorder.num_runs == 2);
  CHECK(graphs.num_recorded() == 1);
  CHECK(graphs.num_replayed() == 4);
  generation = 2;  // an address changed, so everything is recorded again
  for (int32_t i = 0; i < 3; ++i) {
    Step step;
    step.tokens = {i, 5, 6, 7};
    CHECK(run(step) == step.tokens);
  }
  CHECK(recorder.num_runs == 4);
  CHECK(graphs.num_recorded() == 2);
}

TEST_CASE("an op that throws during a recording leaves a working stream") {
  TestStream s;
  StepGraphs graphs(s.stream);
  const StepShape shape = {.num_seqs = 1};
  const auto generations = [] { return int64_t{1}; };
  graphs.Run(shape, generations, [] {});
  CHECK_THROWS_AS(graphs.Run(shape, generations, [] { throw std::runtime_error("an op"); }),
                  std::runtime_error);
  Synchronize(s.stream);
  int runs = 0;
  graphs.Run(shape, generations, [&] { ++runs; });
  CHECK(runs == 1);
  CHECK(graphs.num_recorded() == 1);
}

TEST_CASE("without memory for a graph, the ops run and fewer graphs are kept") {
  TestStream s;
  StepGraphs graphs(s.stream);
  int64_t generation = 1;
  const auto run = [&](int num_seqs, const FunctionRef<void()> ops) {
    graphs.Run(
        {.num_seqs = num_seqs}, [&] { return generation; }, ops);
  };
  const auto nothing = [] {};
  const auto fill = [&] {
    for (int i = 0; i < 8; ++i) {
      run(i, nothing);
    }
  };
  fill();
  for (int i = 0; i < 5; ++i) {
    run(i, nothing);
  }
  CHECK(graphs.num_recorded() == 5);
  int runs = 0;
  run(7, [&] {
    if (++runs == 1) {
      throw OutOfMemory("a record");
    }
  });
  CHECK(runs == 2);
  CHECK(graphs.num_recorded() == 5);
  CHECK(graphs.num_shapes() == 0);
  fill();
  CHECK(graphs.num_shapes() == 2);  // five shapes had a graph
  run(7, nothing);
  CHECK(graphs.num_recorded() == 6);
  CHECK_THROWS_AS(run(6, [] { throw OutOfMemory("an op"); }), OutOfMemory);
  fill();
  CHECK(graphs.num_shapes() == 1);
  generation = 2;  // the memory may be free again
  fill();
  CHECK(graphs.num_shapes() == 8);
}

TEST_CASE("an error that breaks a recording is reported") {
  TestStream s;
  StepGraphs graphs(s.stream);
  const StepShape shape = {.num_seqs = 1};
  const auto generations = [] { return int64_t{1}; };
  graphs.Run(shape, generations, [] {});
  std::string first;
  std::string told;
  const auto wait = [&] {
    try {
      Synchronize(s.stream);
    } catch (const InternalError& error) {
      first = error.what();
      throw;
    }
  };
  try {
    graphs.Run(shape, generations, wait);
  } catch (const InternalError& error) {
    told = error.what();
  }
  CHECK(first != "");
  CHECK(told == first);
  int runs = 0;
  graphs.Run(shape, generations, [&] { ++runs; });
  CHECK(runs == 1);
}

TEST_CASE("a new shape replaces the least recently used one") {
  TestStream s;
  StepGraphs graphs(s.stream);
  int runs = 0;
  const auto run = [&](size_t num_seqs) {
    graphs.Run(
        {.num_seqs = static_cast<int>(num_seqs)}, [] { return int64_t{1}; }, [&] { ++runs; });
  };
  for (size_t i = 0; i < StepGraphs::kMaxGraphs; ++i) {
    run(i);
    run(i);
  }
  runs = 0;
  run(0);
  run(StepGraphs::kMaxGraphs);  // replaces 1
  CHECK(runs == 1);
  CHECK(graphs.num_shapes() == StepGraphs::kMaxGraphs);
  run(0);
  run(2);
  CHECK(runs == 1);
  run(1);
  CHECK(runs == 2);
}

TEST_CASE("the workspace keeps its address until it must grow") {
  TestStream s;
  Workspace workspace(s.stream);
  void* first = workspace.Get(1000);
  CHECK(workspace.Get(10) == first);
  CHECK(workspace.generation() == 1);
  workspace.Get(5000);
  CHECK(workspace.generation() == 2);
}

TEST_CASE("a workspace grows in whole steps") {
  TestStream s;
  Workspace workspace(s.stream, 4096);
  void* first = workspace.Get(10);
  CHECK(workspace.Get(4096) == first);
  CHECK(workspace.generation() == 1);
  first = workspace.Get(4097);
  CHECK(workspace.Get(8192) == first);
  CHECK(workspace.generation() == 2);
}

}  // namespace
}  // namespace turbomind::cuda
