// Tests the shim itself: correct kernels run, and every kind of mistake that it detects is
// reported.

#include "cuda_shim/shim.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "turbomind/backend/cuda/runtime/intrinsics.cuh"

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

}  // namespace
}  // namespace turbomind::cuda
