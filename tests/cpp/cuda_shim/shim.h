#pragma once

// Runs CUDA kernels on the CPU: one fiber per thread, one block after another. The seed determines
// a random order of the threads.
//
// It detects accesses outside the memory given to the kernel, misaligned vector accesses, and
// shared memory that is read before it was written or before its copy was waited for. It also
// detects a copy into a stage that other threads still read, warps whose lanes do not meet, and
// barriers that some threads never reach. Of the products of warp groups it detects sums that are
// used before they were waited for, factors that change before that, missing fences, rows that
// another warp wrote without a barrier after it, and warps of a group that differ in their
// products. Of barriers that only some threads meet at it detects counts that differ, arrivals that
// nobody waits for, and a use before all threads know the barrier. Of overlapping launches it
// detects a use of global memory before WaitForPrevious. It cannot detect missing fences of global
// memory, races inside one word, the rounding of the tensor cores, or speed.
//
// A kernel runs as it is compiled for a GPU; only backend/cuda/runtime/intrinsics.cuh is replaced.
// x86-64 only; one launch at a time.

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

// A kernel's mistake, with its block and thread.
class KernelError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Memory that kernels may read, or read and write. It is registered while this object lives.
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
  bool overlaps = false;  // the launch before may still run: see WaitForPrevious
};

// Run a kernel. Throws KernelError if it makes a mistake.
void Launch(const LaunchShape& shape, const std::function<void()>& kernel);

// Building blocks of the stand-ins for intrinsics, called from inside a kernel.

inline constexpr int kWarp = 32;
inline constexpr int kMaxWords = 20;

struct LaneWords {
  uint32_t in[kWarp][kMaxWords];
  uint32_t out[kWarp][kMaxWords];
};

// End the launch with a mistake of the current thread.
[[noreturn]] void Fail(const std::string& what);

Dim3 ThreadIndex();
Dim3 BlockIndex();
char* SharedMemory();

// Kinds of access that CheckAccess distinguishes. It checks the bounds and the alignment of an
// access of `bytes` at `address`.
enum class Space { kGlobalRead, kGlobalCopy, kGlobalWrite, kShared };
void CheckAccess(Space space, const void* address, size_t bytes, size_t alignment);

// A meeting of all 32 lanes of a warp: `run` gets the `in` of every lane and fills every `out`.
// `what` names the instruction. Lanes that meet with different instructions are an error.
struct Meeting {
  const char* what;
  const uint32_t* in;
  int num_in;
  uint32_t* out;
  int num_out;
};
void MeetWarp(const Meeting& meeting, void (*run)(LaneWords&));
void MeetBlock();

// bar.sync and bar.arrive: `num_threads` threads meet at a barrier of a number from 1 to 15.
void MeetSome(int barrier, int num_threads);
void ArriveSome(int barrier, int num_threads);

// mbarrier: 8 bytes of shared memory. Its phase ends with the last of `num_arrivals` arrivals, and
// then the next one begins. The wait is for the end of a phase of this parity.
void InitMbarrier(void* barrier, int num_arrivals);
void ArriveMbarrier(void* barrier);
void WaitMbarrier(void* barrier, int parity);

void SetRegisters(int count);  // setmaxnreg

// Note a write to shared memory, which products do not see before the thread's FenceShared.
void NoteWrite(const void* shared, size_t bytes);

// Before LetNextBegin and WaitForPrevious, a thread of an overlapping launch must not use global
// memory. Between them it may make copies, whose sources must be arrays that never change.
void LetNextBegin();
void WaitForPrevious();

// cp.async: copy the first `valid` of 4 or 16 bytes and set the rest to zero. The copy happens at
// some time before the wait.
void CopyAsync(void* shared, const void* global, int bytes, int valid);
void CommitCopies();
void WaitForCopies(int newest);

// wgmma: a lane's part of a product with 16 columns of a. Tiles in shared memory have rows of
// `row_bytes` swizzled bytes. The product happens at some time before the wait; until then `sums`
// and the lane's own `factors` must not be used.
struct Product {
  float* sums;
  // The lane's two rows of a, in registers, if `a` is null. Otherwise `a` points at 16 columns of
  // 64 rows.
  uint32_t factors[2][8] = {};
  const uint32_t* own_factors = nullptr;  // [4]
  const char* a = nullptr;
  // Points at 16 columns of `num_columns` rows, which are the columns of the sums. If it is
  // transposed, it points at 16 rows of row_bytes / 2 columns, and the next columns lie slab_bytes
  // behind them.
  const char* b;
  int num_columns;
  int row_bytes = 128;
  bool is_transposed = false;
  int slab_bytes = 0;
  bool is_bfloat = true;
  bool adds = true;  // otherwise it overwrites the sums
};
void StartProduct(const Product& product);
void CommitProducts();
void WaitForProducts(int newest);
void FenceShared();     // fence.proxy.async
void FenceRegisters();  // wgmma.fence

}  // namespace turbomind::cuda_shim
