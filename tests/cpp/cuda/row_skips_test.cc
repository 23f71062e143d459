// Transfers of libkvx in GPU memory leave rows with bad tables and scales as they were, wait for
// nothing, and reach every place.

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <thread>
#include <vector>

#include "cuda/gpu_array.h"
#include "cuda/test_stream.h"
#include "turbomind/backend/cuda/runtime/runtime.h"
#include "turbomind/backend/cuda/transfer/row_transfer.h"

namespace turbomind::cuda {
namespace {

// A cache of F32 with one head and four values per row, in NHD order, and rows for it.
struct Small {
  static constexpr int64_t kBlocks = 3;
  static constexpr int64_t kBlockSize = 4;
  static constexpr int64_t kDim = 4;

  Small(Stream stream_of_test, int64_t num_rows)
      : stream(stream_of_test),
        cache{GpuArray<float>(stream, Numbers(kBlocks * kBlockSize * kDim, 1000)),
              GpuArray<float>(stream, Numbers(kBlocks * kBlockSize * kDim, 2000))},
        rows{GpuArray<float>(stream, Numbers(num_rows * kDim, 1)),
             GpuArray<float>(stream, Numbers(num_rows * kDim, 501))} {}

  static std::vector<float> Numbers(int64_t count, int first) {
    std::vector<float> numbers;
    for (int64_t i = 0; i < count; ++i) {
      numbers.push_back(static_cast<float>(first + i));
    }
    return numbers;
  }

  template <class Job>
  void Fill(Job& job) const {
    job.shape = {kBlocks, kBlockSize, 1, kDim};
    for (int i = 0; i < 2; ++i) {
      job.sides[i].cache = {.base = reinterpret_cast<std::byte*>(cache[i].data()),
                            .block = kBlockSize * kDim * 4,
                            .token = kDim * 4,
                            .value = 4,
                            .pack = kDim};
      job.sides[i].rows = reinterpret_cast<std::byte*>(rows[i].data());
    }
  }
  // Returns the first value of every row of side `side` of the cache or of the rows.
  std::vector<float> First(const GpuArray<float> (&arrays)[2], int side) const {
    const std::vector<float> all = arrays[side].Read();
    std::vector<float> first;
    for (size_t i = 0; i < all.size(); i += kDim) {
      first.push_back(all[i]);
    }
    return first;
  }

  Stream stream;
  GpuArray<float> cache[2];
  GpuArray<float> rows[2];
};

TEST_SUITE_BEGIN("small");

TEST_CASE("a bad slot in GPU memory stores nothing") {
  const TestStream stream;
  const std::vector<int64_t> slots = {12, 1, INT64_MAX, -5, int64_t{1} << 32, 11, 7};
  const GpuArray<int64_t> on_gpu(stream, slots);
  const Small small(stream, 7);
  std::vector<float> wanted = small.First(small.cache, 1);
  RowWrite write;
  small.Fill(write);
  write.num_rows = 7;
  write.slots = {{on_gpu.data(), true}, 7};  // slot 7 is the invalid one
  CHECK(QueueWrite(write, stream) == TransferResult::kQueued);
  wanted[1] = 501 + 1 * 4;
  wanted[11] = 501 + 5 * 4;
  CHECK(small.First(small.cache, 1) == wanted);
}

TEST_CASE("bad lengths and entries in GPU memory leave rows as they were") {
  const TestStream stream;
  // Sequences: a negative block, a block beyond the cache, a length beyond the table, a negative
  // length, and a good one.
  const std::vector<int64_t> table = {-1, 1, 3, 2, 0, 1, 0, 0, 2, INT64_MIN};
  const std::vector<int64_t> lengths = {6, 6, INT64_MAX, -3, 2};
  const GpuArray<int64_t> tables(stream, table);
  const GpuArray<int64_t> lens(stream, lengths);
  constexpr int64_t kMost = 10;  // more than the two blocks of a sequence
  const Small small(stream, 5 * kMost);
  std::vector<float> wanted = small.First(small.rows, 0);
  RowGather gather;
  small.Fill(gather);
  gather.table.indices = {tables.data(), true};
  gather.table.lengths = {lens.data(), true};
  gather.table.num_seqs = 5;
  gather.table.max_seq_len = kMost;
  gather.table.max_blocks_per_seq = 2;
  gather.table.num_indices = 10;
  CHECK(QueueGather(gather, stream) == TransferResult::kQueued);
  const auto take = [&](int64_t seq, int64_t token, int64_t block) {
    wanted[static_cast<size_t>(seq * kMost + token)] =
        static_cast<float>(1000 + (block * Small::kBlockSize + token % 4) * Small::kDim);
  };
  take(0, 4, 1), take(0, 5, 1);
  take(1, 4, 2), take(1, 5, 2);
  for (int64_t token = 0; token < 8; ++token) {
    take(2, token, token / 4);
  }
  take(4, 0, 2), take(4, 1, 2);
  CHECK(small.First(small.rows, 0) == wanted);
}

TEST_CASE("bad prefix sums in GPU memory leave rows as they were") {
  const TestStream stream;
  const GpuArray<int32_t> blocks(stream, {0, 1, 2, 0});
  // Falling, beyond the table, negative, and right but shorter than the length.
  const GpuArray<int64_t> indptr(stream, {3, 1, INT64_MAX, INT64_MIN, -2, 1, 3});
  const GpuArray<int32_t> lens(stream, {2, 2, 2, 2, 2, 3});
  const Small small(stream, 6 * 3);
  std::vector<float> wanted = small.First(small.rows, 0);
  RowGather gather;
  small.Fill(gather);
  gather.table.format = TableFormat::kRagged;
  gather.table.indices = {blocks.data(), false};
  gather.table.indptr = {indptr.data(), true};
  gather.table.lengths = {lens.data(), false};
  gather.table.num_seqs = 6;
  gather.table.max_seq_len = 3;
  gather.table.num_indices = 4;
  CHECK(QueueGather(gather, stream) == TransferResult::kQueued);
  wanted[5 * 3] = 1000 + (1 * 4 + 0) * 4;
  wanted[5 * 3 + 1] = 1000 + (2 * 4 + 1) * 4;
  CHECK(small.First(small.rows, 0) == wanted);
}

TEST_CASE("offsets choose the pool, and bad ones leave rows as they were") {
  const TestStream stream;
  constexpr auto kSecond = static_cast<int32_t>(1u << 31);
  // [sequence, K and V, blocks]: K of the first sequence lies in block 2 of the primary pool.
  const std::vector<int32_t> offsets = {2, kSecond | 1, 0, 3};
  const GpuArray<int32_t> tables(stream, offsets);
  const GpuArray<int32_t> lens(stream, {1, 1});
  for (const bool has_secondary : {true, false}) {
    const Small small(stream, 2);
    RowGather gather;
    small.Fill(gather);
    gather.table.format = TableFormat::kOffsets;
    gather.table.indices = {tables.data(), false};
    gather.table.lengths = {lens.data(), false};
    gather.table.num_seqs = 2;
    gather.table.max_seq_len = 1;
    gather.table.max_blocks_per_seq = 1;
    gather.table.num_indices = 4;
    gather.pools.primary = gather.sides[0].cache.base;
    gather.pools.secondary = has_secondary ? gather.sides[1].cache.base : nullptr;
    gather.pools.bytes_per_block = Small::kBlockSize * Small::kDim * 4;
    std::vector<float> key = small.First(small.rows, 0);
    std::vector<float> value = small.First(small.rows, 1);
    CHECK(QueueGather(gather, stream) == TransferResult::kQueued);
    key = {1000 + 2 * 16, 1000};
    value[0] = has_secondary ? 2000 + 16 : value[0];  // block 3 does not exist
    CHECK(small.First(small.rows, 0) == key);
    CHECK(small.First(small.rows, 1) == value);
  }
}

TEST_CASE("a scale in GPU memory that is not positive and finite stores nothing") {
  const TestStream stream;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<float> scales = {0.f, -1.f, kInfinity, std::nanf(""), 2.f};
  const auto heads = static_cast<int64_t>(scales.size());
  const GpuArray<float> on_gpu(stream, scales);
  const GpuArray<int32_t> slots(stream, {0});
  const GpuArray<uint8_t> codes(stream, std::vector<uint8_t>(scales.size(), 0x55));
  const GpuArray<float> rows(stream, std::vector<float>(scales.size(), 6.f));
  RowWrite write;
  write.shape = {1, 1, heads, 1};
  for (TransferSide& side : write.sides) {
    side.cache = {.base = reinterpret_cast<std::byte*>(codes.data()), .head = 1, .value = 1};
    side.cache_type = RowType::kE4M3;
    side.rows = reinterpret_cast<std::byte*>(rows.data());
    side.scales = {.data = reinterpret_cast<const std::byte*>(on_gpu.data()), .head = 4};
  }
  write.slots = {{slots.data(), false}, -1};
  write.num_rows = 1;
  CHECK(QueueWrite(write, stream) == TransferResult::kQueued);
  CHECK(codes.Read() == std::vector<uint8_t>{0x55, 0x55, 0x55, 0x55, FloatToE4M3(3.f)});
}

TEST_CASE("NaN and values that are too large become codes of FP8") {
  const TestStream stream;
  const std::vector<float> values = {std::nanf(""), -std::nanf(""), 1e9f, -1e9f};
  const GpuArray<int32_t> slots(stream, {0});
  for (const RowType type : {RowType::kE4M3, RowType::kE5M2}) {
    for (const int64_t dim : {4, 1}) {  // four values at once, and one
      const GpuArray<uint8_t> codes(stream, std::vector<uint8_t>(4, 0));
      const GpuArray<float> rows(stream, values);
      RowWrite write;
      write.shape = {1, 1, 4 / dim, dim};
      for (TransferSide& side : write.sides) {
        side.cache = {.base = reinterpret_cast<std::byte*>(codes.data()),
                      .head = dim,
                      .value = 1,
                      .pack = static_cast<uint32_t>(dim)};
        side.cache_type = type;
        side.rows = reinterpret_cast<std::byte*>(rows.data());
      }
      write.slots = {{slots.data(), false}, -1};
      write.num_rows = 1;
      CHECK(QueueWrite(write, stream) == TransferResult::kQueued);
      std::vector<uint8_t> wanted;
      for (const float value : values) {
        wanted.push_back(type == RowType::kE4M3 ? FloatToE4M3(value) : FloatToE5M2(value));
      }
      CHECK(codes.Read() == wanted);
    }
  }
}

TEST_CASE("a transfer without rows changes nothing") {
  const TestStream stream;
  const Small small(stream, 0);
  RowWrite write;
  small.Fill(write);
  CHECK(QueueWrite(write, stream) == TransferResult::kQueued);
  CHECK(small.First(small.cache, 0).front() == 1000);
}

TEST_CASE("a transfer can be recorded, because it waits for nothing") {
  const TestStream stream;
  const GpuArray<int32_t> slots(stream, {5, 2});
  const Small small(stream, 2);
  RowWrite write;
  small.Fill(write);
  write.slots = {{slots.data(), false}, -1};
  write.num_rows = 2;
  BeginCapture(stream);
  CHECK(QueueWrite(write, stream) == TransferResult::kQueued);
  const Graph graph = EndCapture(stream);
  CHECK(small.First(small.cache, 0)[5] == 1000 + 5 * 4);  // it has not run
  LaunchGraph(graph, stream);
  CHECK(small.First(small.cache, 0)[5] == 1);
  DestroyGraph(graph);
}

TEST_CASE("the null stream is the default stream") {
  const TestStream stream;
  const GpuArray<int32_t> slots(stream, {5});
  const Small small(stream, 1);
  RowWrite write;
  small.Fill(write);
  write.slots = {{slots.data(), false}, -1};
  write.num_rows = 1;
  CHECK(QueueWrite(write, nullptr) == TransferResult::kQueued);
  WaitForStream(stream, nullptr);
  CHECK(small.First(small.cache, 0)[5] == 1);
}

TEST_CASE("a transfer leaves the current GPU of its thread") {
  const TestStream stream;
  const GpuArray<int32_t> slots(stream, {5});
  const Small small(stream, 1);
  RowWrite write;
  small.Fill(write);
  write.slots = {{slots.data(), false}, -1};
  write.num_rows = 1;
  std::thread([&] {
    const int before = CurrentGpu();
    CHECK(QueueWrite(write, stream) == TransferResult::kQueued);
    CHECK(CurrentGpu() == before);
  }).join();
}

TEST_CASE("memory that no GPU can access is refused") {
  const TestStream stream;
  const GpuArray<int32_t> slots(stream, {5});
  const Small small(stream, 1);
  const std::vector<int32_t> on_host = {5};
  RowWrite write;
  small.Fill(write);
  write.slots = {{on_host.data(), false}, -1};
  write.num_rows = 1;
  CHECK(QueueWrite(write, stream) == TransferResult::kNotGpuMemory);
  write.slots.slots.data = slots.data();
  const RowWrite right = write;
  std::vector<float> rows(4);
  write.sides[1].rows = reinterpret_cast<std::byte*>(rows.data());
  CHECK(QueueWrite(write, stream) == TransferResult::kNotGpuMemory);
  CHECK(small.First(small.cache, 0)[5] == 1000 + 5 * 4);
  CHECK(QueueWrite(right, stream) == TransferResult::kQueued);
}

TEST_SUITE_END();

TEST_CASE("memory of two GPUs in one transfer is refused") {
  if (PropertiesOf(0).name != "shim") {
    return;  // the machine may have one GPU only
  }
  const TestStream stream;
  const Small small(stream, 1);
  RowWrite write;
  small.Fill(write);
  write.num_rows = 1;
  setenv("CUDA_SHIM_FAULT", "second", 1);
  const GpuArray<int32_t> slots(stream, {5});
  unsetenv("CUDA_SHIM_FAULT");
  write.slots = {{slots.data(), false}, -1};
  CHECK(QueueWrite(write, stream) == TransferResult::kOtherGpu);
  CHECK(small.First(small.cache, 0)[5] == 1000 + 5 * 4);
}

TEST_CASE("a grid has fewer blocks than a transfer has rows") {
  constexpr int64_t kRows = 8192 + 3;
  const TestStream stream;
  std::vector<int32_t> slots(kRows, -1);
  slots[0] = 0;
  slots[8191] = 1;
  slots[8192] = 2;
  slots[kRows - 1] = 11;
  const GpuArray<int32_t> on_gpu(stream, slots);
  const Small small(stream, kRows);
  RowWrite write;
  small.Fill(write);
  write.slots = {{on_gpu.data(), false}, -1};
  write.num_rows = kRows;
  CHECK(QueueWrite(write, stream) == TransferResult::kQueued);
  const std::vector<float> got = small.First(small.cache, 0);
  CHECK(got[0] == 1);
  CHECK(got[1] == 1 + 8191 * 4);
  CHECK(got[2] == 1 + 8192 * 4);
  CHECK(got[11] == 1 + (kRows - 1) * 4);
  CHECK(got[3] == 1000 + 3 * 4);
}

TEST_CASE("places beyond 4 GiB and slots beyond 32 bits") {
  setenv("CUDA_SHIM_FAULT", "memory=34359738368", 1);  // without effect on a GPU
  constexpr int64_t kBlockBytes = int64_t{1} << 31;
  constexpr int64_t kBlockSize = int64_t{1} << 31;  // tokens, of which only two have memory
  const TestStream stream;
  auto* const memory = static_cast<std::byte*>(AllocateGpu(2 * kBlockBytes + 32));
  const GpuArray<float> rows(stream, {1, 2, 3, 4});
  const GpuArray<int64_t> slots(stream, {2 * kBlockSize + 1});
  RowWrite write;
  write.shape = {3, kBlockSize, 1, 4};
  for (TransferSide& side : write.sides) {
    side.cache = {.base = memory, .block = kBlockBytes, .token = 16, .value = 4, .pack = 4};
    side.rows = reinterpret_cast<std::byte*>(rows.data());
  }
  write.slots = {{slots.data(), true}, -1};
  write.num_rows = 1;
  CHECK(QueueWrite(write, stream) == TransferResult::kQueued);
  std::vector<float> got(4);
  CopyBytes(got.data(), memory + 2 * kBlockBytes + 16, 16, stream);
  Synchronize(stream);
  CHECK(got == std::vector<float>{1, 2, 3, 4});
  FreeGpu(memory);
  unsetenv("CUDA_SHIM_FAULT");
}

}  // namespace
}  // namespace turbomind::cuda
