// Tests the shim itself: correct kernels run, and every kind of mistake that it detects is
// reported.

#include "cuda_shim/shim.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "turbomind/backend/cuda/cuda_device.h"
#include "turbomind/backend/cuda/runtime/intrinsics.cuh"
#include "turbomind/backend/cuda/runtime/runtime.h"

namespace turbomind::cuda {
namespace {

using cuda_shim::Buffer;
using cuda_shim::KernelError;
using cuda_shim::Launch;
using cuda_shim::LaunchShape;

constexpr int kThreads = 64;

// Return the message of Launch for a kernel over one block, or "" if the kernel is correct.
std::string Verdict(const std::function<void()>& kernel, uint64_t seed = 1) {
  try {
    Launch({{}, {kThreads}, 4096, seed}, kernel);
  } catch (const KernelError& error) {
    return error.what();
  }
  return "";
}

bool Contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

TEST_CASE("a lost GPU does nothing, and reports that from the first call that waits") {
  auto device = MakeDevice(0, {});
  void* memory = device->Reserve(kThreads);
  device->Synchronize();
  setenv("CUDA_SHIM_FAULT", "lost=/", 1);
  uint8_t value = 7;
  CHECK_NOTHROW(device->Copy(memory, &value, 1));  // queued
  CHECK(*static_cast<uint8_t*>(memory) == 0);
  CHECK_THROWS_WITH(device->Synchronize(),
                    "CUDA: waiting for kernels and copies: unspecified launch failure");
  CHECK_THROWS_WITH(device->Copy(memory, &value, 1),
                    "CUDA: cudaSetDevice: unspecified launch failure");
  CHECK_THROWS(device->Reserve(kThreads));
  CHECK_THROWS(device->free_bytes());
  CHECK_NOTHROW(device->Release(memory, kThreads));
  CHECK_NOTHROW(device.reset());
  unsetenv("CUDA_SHIM_FAULT");
  MakeDevice(0, {})->Synchronize();  // another GPU
}

TEST_CASE("a correct kernel gives the same result in every order of its threads") {
  std::vector<float> in(kThreads * 4);
  for (size_t i = 0; i < in.size(); ++i) {
    in[i] = static_cast<float>(i);
  }
  std::vector<float> out(kThreads);
  const Buffer read(in.data(), in.size() * sizeof(float), Buffer::kRead);
  const Buffer write(out.data(), out.size() * sizeof(float), Buffer::kReadWrite);
  for (uint64_t seed = 0; seed < 20; ++seed) {
    std::fill(out.begin(), out.end(), NAN);
    const auto kernel = [&] {
      const int thread = ThreadIndexX();
      CopyAsync(SharedMemory() + 16 * thread, in.data() + 4 * thread, 12);
      CommitCopies();
      WaitForCopies<0>();
      SyncBlock();
      const int other = (thread + 7) % kThreads;  // also of another warp
      const auto* row = reinterpret_cast<const float*>(SharedMemory() + 16 * other);
      const float sum = LoadShared<float>(row) + LoadShared<float>(row + 2);
      const float last = LoadShared<float>(row + 3);  // past the valid bytes: zero
      StoreGlobal(out.data() + thread, ShuffleXor(sum + last, 1));
    };
    CHECK(Verdict(kernel, seed) == "");
    for (int i = 0; i < kThreads; ++i) {
      const int other = ((i ^ 1) + 7) % kThreads;
      CHECK(out[static_cast<size_t>(i)] ==
            in[static_cast<size_t>(4 * other)] + in[static_cast<size_t>(4 * other + 2)]);
    }
  }
}

TEST_CASE("accesses outside buffers and shared memory are detected") {
  std::vector<float> data(8);
  const Buffer buffer(data.data(), 7 * sizeof(float), Buffer::kRead);
  CHECK(Contains(Verdict([&] { LoadGlobal(data.data() + 7); }), "outside its buffer by 4"));
  CHECK(Contains(Verdict([&] { LoadGlobal(data.data() - 1); }), "in no buffer"));
  CHECK(Contains(Verdict([&] { StoreGlobal(data.data(), 1.f); }), "read-only"));
  CHECK(Contains(Verdict([] { LoadShared<float>(SharedMemory() + 4096); }), "outside shared"));
  CHECK(Contains(Verdict([] { LoadShared<float>(SharedMemory() + 2); }), "not aligned"));
  CHECK(Contains(Verdict([&] {
                   CopyAsync(SharedMemory(), data.data() + 4, 16);
                   CommitCopies();
                   WaitForCopies<0>();
                 }),
                 "outside its buffer"));
}

TEST_CASE("lanes that do not meet and threads that wait forever are detected") {
  CHECK(Contains(Verdict([] {
                   if (ThreadIndexX() % 2 == 0) {
                     SyncWarp();
                   } else {
                     AnyInWarp(true);
                   }
                 }),
                 "lanes of a warp meet at"));
  CHECK(Contains(Verdict([] {
                   if (ThreadIndexX() != 5) {
                     SyncWarp();
                   }
                 }),
                 "ended"));
  CHECK(Contains(Verdict([] {
                   if (ThreadIndexX() < 32) {
                     SyncBlock();
                   } else if (ThreadIndexX() == 40) {
                     SyncWarp();
                   } else {
                     SyncBlock();
                   }
                 }),
                 "hangs"));
}

TEST_CASE("memory that is used before the launch before has ended is detected") {
  std::vector<float> values(kThreads * 4);
  const Buffer buffer(values.data(), values.size() * sizeof(float), Buffer::kReadWrite);
  const auto verdict = [](const std::function<void()>& kernel) -> std::string {
    try {
      Launch({{}, {kThreads}, 4096, 1, true}, kernel);
    } catch (const KernelError& error) {
      return error.what();
    }
    return "";
  };
  const auto copy = [&] {
    CopyAsync(SharedMemory() + 16 * ThreadIndexX(), values.data() + 4 * ThreadIndexX(), 16);
    CommitCopies();
    WaitForCopies<0>();
  };
  CHECK(verdict([&] {
          BeginKernel();
          StoreGlobal(values.data() + ThreadIndexX(), 1.f);
          copy();
        }) == "");
  CHECK(verdict([&] {
          LetNextBegin();
          copy();  // of an array that never changes
          WaitForPrevious();
          StoreGlobal(values.data() + ThreadIndexX(), 1.f);
        }) == "");
  for (const auto& early :
       std::vector<std::function<void()>>{[&] { StoreGlobal(values.data() + ThreadIndexX(), 1.f); },
                                          [&] { LoadGlobal(values.data()); }, copy}) {
    CHECK(Contains(verdict([&] {
                     early();
                     BeginKernel();
                   }),
                   "before WaitForPrevious"));
  }
  CHECK(Contains(verdict([&] {
                   LetNextBegin();
                   LoadGlobal(values.data());
                   WaitForPrevious();
                 }),
                 "before WaitForPrevious"));
  CHECK(Contains(verdict([&] {
                   if (ThreadIndexX() != 3) {
                     BeginKernel();
                   }
                 }),
                 "ended without"));
}

TEST_CASE("a copy without a wait is detected or gives poison") {
  std::vector<float> data(4, 1.f);
  const Buffer buffer(data.data(), 16, Buffer::kRead);
  int poisoned = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    float seen = 0.f;
    const std::string verdict = Verdict(
        [&] {
          if (ThreadIndexX() == 0) {
            CopyAsync(SharedMemory(), data.data(), 16);
            CommitCopies();
            seen = LoadShared<float>(SharedMemory());
            WaitForCopies<0>();
          }
        },
        seed);
    CHECK(verdict == "");
    poisoned += std::isnan(seen);
  }
  CHECK(poisoned > 0);
  CHECK(Contains(Verdict([&] {
                   CopyAsync(SharedMemory() + 16 * ThreadIndexX(), data.data(), 16);
                   CommitCopies();
                 }),
                 "never waited for"));
}

// A product of a warp group, and what a mistaken kernel leaves out or adds.
struct GroupKernel {
  bool fences_shared = true;
  bool fences_registers = true;
  bool waits = true;
  bool syncs = true;
  bool changes_sums = false;
  bool overwrites_rows = false;
  int offset = 0;
  int num_warps = 4;
  std::vector<float>* sums_of_first = nullptr;

  // Rows of b: the number of the row in column 0, and 1 in the other columns of the first 16.
  void FillRows() const {
    for (int i = ThreadIndexX(); i < 32 * 32; i += 128) {
      const int row = i / 32;
      const int column = i % 32 * 2;
      const uint32_t pair =
          column >= 16 ? 0 : PackBFloat2(column == 0 ? static_cast<float>(row) : 1.f, 1.f);
      const int piece = column / 8 ^ row % 8;
      StoreShared(SharedMemory() + row * 128 + piece * 16 + column % 8 * 2, pair);
    }
  }
  void operator()() const {
    for (int i = 0; i < 50 && !syncs && ThreadIndexX() / 32 == 2; ++i) {
      SyncWarp();  // this warp is late
    }
    FillRows();
    if (fences_shared) {
      FenceSharedForProducts();
    }
    if (syncs) {
      SyncBlock();
    }
    if (ThreadIndexX() / 32 >= num_warps) {
      return;
    }
    // Row r of a has r + 1 in column 0 and 1 in columns 8 to 15.
    const int lane = ThreadIndexX() % 32;
    const auto row = static_cast<float>(ThreadIndexX() / 32 * 16 + lane / 4 + 1);
    const bool is_first = lane % 4 == 0;
    const uint32_t ones = PackBFloat2(1.f, 1.f);
    const uint32_t a[4] = {is_first ? PackBFloat2(row, 0.f) : 0,
                           is_first ? PackBFloat2(row + 8, 0.f) : 0, ones, ones};
    float sums[16] = {};
    if (fences_registers) {
      FenceRegisters();
    }
    MultiplyGroup<32>(sums, a, SharedMemory() + offset);
    CommitProducts();
    if (overwrites_rows) {
      StoreShared(SharedMemory() + ThreadIndexX() * 4, 0u);
    }
    if (changes_sums) {
      sums[3] = 0.f;
    }
    if (waits) {
      WaitForProducts<0>();
    }
    if (ThreadIndexX() == 37 && sums_of_first != nullptr) {
      sums_of_first->assign(sums, sums + 16);
    }
  }
};

std::string VerdictOfGroup(const GroupKernel& kernel, uint64_t seed = 1) {
  try {
    Launch({{}, {128}, 8192, seed}, kernel);
  } catch (const KernelError& error) {
    return error.what();
  }
  return "";
}

TEST_CASE("a product of a warp group is that of its rows and of swizzled rows") {
  for (uint64_t seed = 0; seed < 10; ++seed) {
    std::vector<float> sums;
    CHECK(VerdictOfGroup({.sums_of_first = &sums}, seed) == "");
    REQUIRE(sums.size() == 16);
    for (int n = 0; n < 4; ++n) {
      for (int i = 0; i < 4; ++i) {  // lane 5 of warp 1
        const int row_of_a = 16 + 1 + i / 2 * 8;
        const int row_of_b = 8 * n + 2 + i % 2;
        CHECK(sums[static_cast<size_t>(4 * n + i)] ==
              static_cast<float>((row_of_a + 1) * row_of_b + 8));
      }
    }
  }
}

TEST_CASE("mistakes with products of warp groups are detected") {
  CHECK(Contains(VerdictOfGroup({.fences_shared = false}), "without a fence after it"));
  CHECK(Contains(VerdictOfGroup({.fences_registers = false}), "without a fence of the registers"));
  CHECK(Contains(VerdictOfGroup({.waits = false}), "products that it never waited for"));
  CHECK(Contains(VerdictOfGroup({.changes_sums = true}), "sums were changed"));
  CHECK(Contains(VerdictOfGroup({.offset = 16}), "not aligned"));
  CHECK(Contains(VerdictOfGroup({.offset = 128}), "not aligned"));
  CHECK(Contains(VerdictOfGroup({.offset = 5 * 1024}), "outside shared memory"));
  CHECK(Contains(VerdictOfGroup({.num_warps = 3}), "different products"));
  int wrong = 0;
  int unsynced = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    std::vector<float> sums;
    VerdictOfGroup({.overwrites_rows = true, .sums_of_first = &sums}, seed);
    wrong += sums.size() != 16 || sums[0] != 18 * 2 + 8;
    sums.clear();
    const std::string verdict = VerdictOfGroup({.syncs = false, .sums_of_first = &sums}, seed);
    unsynced += Contains(verdict, "without a barrier after it") ||
                Contains(verdict, "without a fence after it");
  }
  CHECK(wrong > 0);
  CHECK(unsynced == 20);
}

std::string VerdictOfThreads(unsigned num_threads, const std::function<void()>& kernel,
                             uint64_t seed = 1) {
  try {
    Launch({{}, {num_threads}, 64 << 10, seed}, kernel);
  } catch (const KernelError& error) {
    return error.what();
  }
  return "";
}

TEST_CASE("mistakes with barriers of some threads are detected") {
  const auto verdict = [](const std::function<void(bool is_first)>& kernel) {
    return VerdictOfThreads(64, [&] { kernel(ThreadIndexX() < 32); });
  };
  CHECK(verdict([](bool) { SyncSome(1, 64); }) == "");
  CHECK(verdict([](bool is_first) {
          is_first ? ArriveSome(15, 64) : SyncSome(15, 64);
          is_first ? SyncSome(3, 32) : SyncSome(2, 32);
        }) == "");
  CHECK(Contains(verdict([](bool) { SyncSome(1, 96); }), "hangs"));
  CHECK(Contains(verdict([](bool is_first) { is_first ? SyncSome(1, 96) : SyncSome(1, 64); }),
                 "different counts"));
  CHECK(Contains(verdict([](bool is_first) { is_first ? SyncSome(1, 64) : SyncSome(2, 64); }),
                 "hangs"));
  CHECK(Contains(verdict([](bool is_first) {
                   if (is_first) {
                     ArriveSome(1, 64);
                   }
                 }),
                 "nobody waits"));
  CHECK(Contains(verdict([](bool) { SyncSome(0, 64); }), "cannot be for"));
  CHECK(Contains(verdict([](bool) { SyncSome(16, 64); }), "cannot be for"));
  CHECK(Contains(verdict([](bool) { SyncSome(1, 60); }), "cannot be for"));
}

// One warp copies 8 values to two slots in turn, and another one adds them.
struct MbarrierKernel {
  const float* values;
  float* sum;
  bool waits_for_full = true;
  bool waits_for_empty = true;
  bool syncs = true;
  bool overwrites = false;
  int num_arrivals = 1;

  void operator()() const {
    char* barriers = SharedMemory() + 1024;  // full 0, full 1, empty 0, empty 1
    const bool is_first = ThreadIndexX() % 32 == 0;
    if (ThreadIndexX() == 0) {
      for (int i = 0; i < 4; ++i) {
        InitMbarrier(barriers + 8 * i, num_arrivals);
      }
    }
    if (syncs) {
      SyncBlock();
    }
    float total = 0.f;
    for (int i = 0; i < 8; ++i) {
      char* full = barriers + i % 2 * 8;
      char* slot = SharedMemory() + i % 2 * 16;
      if (ThreadIndexX() < 32) {
        if (waits_for_empty) {
          WaitMbarrier(full + 16, i / 2 % 2 ^ 1);
        }
        if (is_first) {
          StoreShared(slot, LoadGlobal(values + i));
        }
        SyncWarp();
        if (is_first) {
          ArriveMbarrier(full);
        }
      } else {
        if (waits_for_full) {
          WaitMbarrier(full, i / 2 % 2);
        }
        total += LoadShared<float>(slot);
        SyncWarp();
        if (is_first) {
          ArriveMbarrier(full + 16);
        }
      }
    }
    if (overwrites) {
      StoreShared(barriers, 0u);
    }
    if (ThreadIndexX() == 32) {
      StoreGlobal(sum, total);
    }
  }
};

TEST_CASE("mistakes with mbarriers are detected") {
  const std::vector<float> values = {1, 2, 4, 8, 16, 32, 64, 128};
  float sum = 0.f;
  const Buffer read(values.data(), values.size() * sizeof(float), Buffer::kRead);
  const Buffer write(&sum, sizeof(sum), Buffer::kReadWrite);
  const MbarrierKernel right = {values.data(), &sum};
  int num_early = 0;
  int num_late = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    sum = 0.f;
    CHECK(VerdictOfThreads(64, right, seed) == "");
    CHECK(sum == 255);
    MbarrierKernel wrong = right;
    wrong.waits_for_full = false;
    VerdictOfThreads(64, wrong, seed);
    num_early += sum != 255;
    wrong = right;
    wrong.waits_for_empty = false;
    num_late += VerdictOfThreads(64, wrong, seed) != "" || sum != 255;
  }
  CHECK(num_early > 0);
  CHECK(num_late > 0);
  MbarrierKernel wrong = right;
  wrong.num_arrivals = 2;
  CHECK(Contains(VerdictOfThreads(64, wrong), "hangs"));
  wrong = right;
  wrong.syncs = false;
  int num_unsynced = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const std::string verdict = VerdictOfThreads(64, wrong, seed);
    num_unsynced += Contains(verdict, "not initialized") || Contains(verdict, "before a barrier");
  }
  CHECK(num_unsynced == 20);
  wrong = right;
  wrong.overwrites = true;
  CHECK(Contains(VerdictOfThreads(64, wrong), "a write to an mbarrier"));
}

TEST_CASE("registers that a group cannot have are detected") {
  const auto verdict = [](const std::function<void(int warp)>& kernel) {
    return VerdictOfThreads(384, [&] { kernel(ThreadIndexX() / 32); });
  };
  CHECK(verdict([](int warp) { warp < 8 ? AddRegisters<232>() : GiveBackRegisters<40>(); }) == "");
  CHECK(Contains(verdict([](int warp) { warp < 8 ? AddRegisters<240>() : AddRegisters<40>(); }),
                 "more registers than an SM"));
  CHECK(Contains(verdict([](int warp) {
                   if (warp < 7) {
                     AddRegisters<64>();
                   }
                 }),
                 "different numbers of registers"));
  CHECK(Contains(verdict([](int) { AddRegisters<20>(); }), "cannot have"));
}

// Products with tiles of 64 rows of a and of 16 or more rows of b, of 64 or 128 bytes.
template <bool kBFloat, int kRowBytes>
struct TileKernel {
  static constexpr int kColumns = kRowBytes == 64 ? 96 : 128;
  static constexpr int kSlabColumns = kRowBytes / 2;
  static constexpr int kSlab = 128 * kRowBytes;  // bytes of 128 rows
  static constexpr int kTileB = 2 * kSlab;
  std::vector<float>* rows_result;     // [64, 128] of a · bᵀ, over 32 columns
  std::vector<float>* columns_result;  // [64, kColumns] of a · b, over 16 rows of b
  bool changes_factors = false;

  // Small integers, exact in both types.
  static float A(int row, int column) { return static_cast<float>((row * 5 + column * 3) % 7 - 3); }
  static float B(int row, int column) { return static_cast<float>((row * 3 + column * 7) % 5 - 2); }
  static uint32_t Pack(float low, float high) {
    return kBFloat ? PackBFloat2(low, high) : PackHalf2(low, high);
  }
  static void Store(char* tile, int row, int column, uint32_t pair) {
    const int swizzle = kRowBytes == 128 ? row % 8 : row / 2 % 4;
    const int in_slab = column % kSlabColumns;
    StoreShared(tile + column / kSlabColumns * kSlab + row * kRowBytes +
                    ((in_slab / 8) ^ swizzle) * 16 + in_slab % 8 * 2,
                pair);
  }
  void operator()() const {
    char* a = SharedMemory();
    char* b = SharedMemory() + kTileB;
    for (int i = ThreadIndexX(); i < 64 * 16; i += 128) {
      Store(a, i / 16, i % 16 * 2, Pack(A(i / 16, i % 16 * 2), A(i / 16, i % 16 * 2 + 1)));
    }
    for (int i = ThreadIndexX(); i < 128 * 48; i += 128) {
      const int row = i / 48;
      const int column = i % 48 * 2;
      if (column < 3 * kSlabColumns) {
        Store(b, row, column, Pack(B(row, column), B(row, column + 1)));
      }
    }
    for (int i = ThreadIndexX(); kRowBytes == 128 && i < 128 * 16; i += 128) {  // columns 96 to 127
      Store(b, i / 16, 96 + i % 16 * 2,
            Pack(B(i / 16, 96 + i % 16 * 2), B(i / 16, 97 + i % 16 * 2)));
    }
    FenceSharedForProducts();
    SyncBlock();
    float scores[64];
    float sums[kColumns / 2] = {};
    const int lane = ThreadIndexX() % 32;
    const int row = ThreadIndexX() / 32 * 16 + lane / 4;
    uint32_t factors[4];
    for (int i = 0; i < 4; ++i) {
      const int column = lane % 4 * 2 + i / 2 * 8;
      factors[i] = Pack(A(row + i % 2 * 8, column), A(row + i % 2 * 8, column + 1));
    }
    FenceRegisters();
    MultiplySharedRows<kBFloat, 128, kRowBytes>(scores, {a, 0}, {b, 0}, false);
    MultiplySharedRows<kBFloat, 128, kRowBytes>(scores, {a, 32}, {b, 32}, true);
    MultiplyColumns<kBFloat, kColumns, kRowBytes>(sums, factors, {b, 16 * kRowBytes}, kSlab);
    CommitProducts();
    if (changes_factors) {
      factors[1] = 0;
    }
    WaitForProducts<0>();
    for (int i = 0; i < 64; ++i) {
      (*rows_result)[static_cast<size_t>((row + i / 2 % 2 * 8) * 128 + i / 4 * 8 + lane % 4 * 2 +
                                         i % 2)] = scores[i];
    }
    for (int i = 0; i < kColumns / 2; ++i) {
      (*columns_result)[static_cast<size_t>((row + i / 2 % 2 * 8) * kColumns + i / 4 * 8 +
                                            lane % 4 * 2 + i % 2)] = sums[i];
    }
  }
};

template <bool kBFloat, int kRowBytes>
void CheckTiles() {
  using Kernel = TileKernel<kBFloat, kRowBytes>;
  std::vector<float> rows(64 * 128);
  std::vector<float> columns(64 * Kernel::kColumns);
  for (uint64_t seed = 0; seed < 3; ++seed) {
    REQUIRE(VerdictOfThreads(128, Kernel{&rows, &columns}, seed) == "");
    for (int row = 0; row < 64; ++row) {
      for (int n = 0; n < 128; ++n) {
        float want = 0.f;
        for (int k = 0; k < 32; ++k) {
          want += Kernel::A(row, k) * Kernel::B(n, k);
        }
        REQUIRE(rows[static_cast<size_t>(row * 128 + n)] == want);
      }
      for (int n = 0; n < Kernel::kColumns; ++n) {
        float want = 0.f;
        for (int k = 0; k < 16; ++k) {
          want += Kernel::A(row, k) * Kernel::B(16 + k, n);
        }
        REQUIRE(columns[static_cast<size_t>(row * Kernel::kColumns + n)] == want);
      }
    }
  }
  CHECK(Contains(VerdictOfThreads(128, Kernel{&rows, &columns, true}), "factors were changed"));
}

TEST_CASE("products read rows and columns of swizzled tiles of both types and widths") {
  CheckTiles<true, 128>();
  CheckTiles<false, 128>();
  CheckTiles<true, 64>();
  CheckTiles<false, 64>();
}

}  // namespace
}  // namespace turbomind::cuda
