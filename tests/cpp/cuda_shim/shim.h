#pragma once

// Runs CUDA kernels on the CPU: one fibre per thread, one block after another, in a random order of
// the threads that the seed decides. What it finds: addresses outside the memory that the kernel
// was given, misaligned vector accesses, shared memory read before it was written or before its
// copy was waited for, a copy into a stage that others still read, warps whose lanes do not meet,
// barriers that some threads never reach. What it cannot find: missing memory fences, races inside
// one word, the rounding of the tensor cores, speed.
//
// A kernel runs as it is compiled for a GPU: backend/cuda/runtime/intrinsics.cuh is the only file
// that differs. x86-64 only; one launch at a time.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace turbomind::cuda_shim {

struct Dim3 {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
};

// What a kernel did wrong, and where: block, thread.
class KernelError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Memory that kernels may read, or read and write. Alive: registered.
class Buffer {
 public:
  enum Access { kRead, kReadWrite };
  Buffer(const void* data, size_t bytes, Access access);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

 private:
  const void* data_;
};

struct LaunchShape {
  Dim3 grid;
  Dim3 block;
  size_t shared_bytes = 0;
  uint64_t seed = 0;
};

// Throws KernelError.
void Launch(const LaunchShape& shape, const std::function<void()>& kernel);

// --- What the stand-ins of intrinsics are made of; called from inside a kernel. ------------------

inline constexpr int kWarp = 32;
inline constexpr int kMaxWords = 12;

struct LaneWords {
  uint32_t in[kWarp][kMaxWords];
  uint32_t out[kWarp][kMaxWords];
};

Dim3 ThreadIndex();
Dim3 BlockIndex();
char* SharedMemory();

// Checks an access of `bytes` at `address`, aligned to `alignment`.
enum class Space { kGlobalRead, kGlobalWrite, kShared };
void CheckAccess(Space space, const void* address, size_t bytes, size_t alignment);

// All 32 lanes of a warp meet: `in` of each goes to `run`, which fills `out`. `what` names the
// instruction: lanes that meet with different ones are an error.
struct Meeting {
  const char* what;
  const uint32_t* in;
  int num_in;
  uint32_t* out;
  int num_out;
};
void MeetWarp(const Meeting& meeting, void (*run)(LaneWords&));
void MeetBlock();

// cp.async: 16 bytes of which the first `valid` are copied and the rest is zero. The copy happens
// at some time before the wait.
void CopyAsync(void* shared, const void* global, int valid);
void CommitCopies();
void WaitForCopies(int newest);

}  // namespace turbomind::cuda_shim
