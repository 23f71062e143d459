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
    VerdictOfGroup({.syncs = false, .sums_of_first = &sums}, seed);
    unsynced += sums.size() != 16 || sums[0] != 18 * 2 + 8;
  }
  CHECK(wrong > 0);
  CHECK(unsynced > 0);
}

}  // namespace
}  // namespace turbomind::cuda
