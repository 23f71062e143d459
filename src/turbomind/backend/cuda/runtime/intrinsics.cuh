#pragma once

// Everything a kernel needs from the GPU beyond C++: instructions, memory spaces and thread
// indices. Only this file and warp_group.cuh have inline assembly. When kernels are compiled for
// the host, the tests' stand-ins (tests/cpp/cuda_shim) replace it: they run kernels thread by
// thread and check every access.
//
// A register with two FP16 (or BF16) values is a uint32_t with the first value in the low half.

#include <cstdint>

#if !defined(__CUDACC__)
#include "cuda_shim/intrinsics.h"
#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "turbomind/core/float_convert.h"

#define TM_DEVICE __device__ __forceinline__

namespace turbomind::cuda {

TM_DEVICE int ThreadIndexX() { return static_cast<int>(threadIdx.x); }
// The index in the block. The shuffle lets the compiler see that all lanes have the same value. As
// for every shuffle, all lanes must take part.
TM_DEVICE int WarpIndex() { return __shfl_sync(~0u, static_cast<int>(threadIdx.x) >> 5, 0); }
TM_DEVICE int BlockIndexX() { return static_cast<int>(blockIdx.x); }
TM_DEVICE int BlockIndexY() { return static_cast<int>(blockIdx.y); }
TM_DEVICE char* SharedMemory() {
  extern __shared__ __align__(1024) char memory[];
  return memory;
}

// A launch may begin before the work before it has ended (OverlapLaunches in runtime.h). Until
// WaitForPrevious a kernel must not use global memory, except for copies of arrays that never
// change. Every thread calls it, also before it returns early.
TM_DEVICE void WaitForPrevious() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Allow the next launch to begin, once every block has called this.
TM_DEVICE void LetNextBegin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// The first statement of a kernel, unless it calls both of these functions itself.
TM_DEVICE void BeginKernel() {
  LetNextBegin();
  WaitForPrevious();
}

template <class T>
TM_DEVICE T LoadGlobal(const T* p) {
  return *p;
}
// Load 4, 8 or 16 bytes that nobody writes in the meantime and that will not be read again soon.
template <class T>
TM_DEVICE T LoadGlobalOnce(const T* p) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
  constexpr int kWords = sizeof(T) / 4;
  uint32_t v[4];
  if constexpr (kWords == 4) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "l"(p));
  } else if constexpr (kWords == 2) {
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];"
                 : "=r"(v[0]), "=r"(v[1])
                 : "l"(p));
  } else {
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v[0]) : "l"(p));
  }
  T value;
  memcpy(&value, v, sizeof(T));
  return value;
}
template <class T>
TM_DEVICE void StoreGlobal(T* p, const T& value) {
  *p = value;
}
// Add to global memory and return the previous value.
TM_DEVICE int AddGlobal(int* p, int value) { return atomicAdd(p, value); }
// Order the thread's accesses to global memory before those that follow.
TM_DEVICE void FenceGlobal() { __threadfence(); }
// End the kernel with an error.
TM_DEVICE void Trap() { __trap(); }
TM_DEVICE void AddGlobal(int64_t* p, int64_t value) {
  static_assert(sizeof(unsigned long long) == sizeof(int64_t));
  atomicAdd(reinterpret_cast<unsigned long long*>(p), static_cast<unsigned long long>(value));
}
template <class T>
TM_DEVICE T LoadShared(const void* p) {
  return *static_cast<const T*>(p);
}
template <class T>
TM_DEVICE void StoreShared(void* p, const T& value) {
  *static_cast<T*>(p) = value;
}

// Add to shared memory and return the previous value.
TM_DEVICE int AddShared(void* p, int value) { return atomicAdd(static_cast<int*>(p), value); }

// Copy `valid` of 16 bytes to shared memory and fill the rest with zeros. The copying thread sees
// the data after WaitForCopies.
TM_DEVICE void CopyAsync(void* shared, const void* global, int valid) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(valid)
               : "memory");
}
// Copy 4 bytes in the same way, through L1.
TM_DEVICE void CopyWordAsync(void* shared, const void* global) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(global) : "memory");
}
TM_DEVICE void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait for all committed groups except the newest kNewest.
template <int kNewest>
TM_DEVICE void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewest) : "memory");
}

TM_DEVICE void SyncWarp() { __syncwarp(); }
TM_DEVICE void SyncBlock() { __syncthreads(); }
// Wait until `num_threads` threads, whole warps, have called SyncSome or ArriveSome with this
// barrier, a number from 1 to 15. ArriveSome does not wait.
TM_DEVICE void SyncSome(int barrier, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}
TM_DEVICE void ArriveSome(int barrier, int num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}

// A barrier of 8 bytes in shared memory (mbarrier). It has phases: 0, 1, 0, 1, ... A phase ends
// with the last of `num_arrivals` arrivals. What threads did before they arrived is visible to
// those that have waited for the end of the phase. All threads need a SyncBlock after the
// initialization.
TM_DEVICE void InitMbarrier(void* barrier, int num_arrivals) {
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(num_arrivals) : "memory");
}
TM_DEVICE void ArriveMbarrier(void* barrier) {
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(at) : "memory");
}
// Wait for the end of a phase. The one before the first counts as a phase 1 that has ended.
// REQUIRES: compute capability 9.0.
TM_DEVICE void WaitMbarrier(void* barrier, int phase) {
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  uint32_t has_ended;
  do {
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
        : "=r"(has_ended)
        : "r"(at), "r"(phase)
        : "memory");
  } while (has_ended == 0);
}

TM_DEVICE float ShuffleXor(float value, int mask) { return __shfl_xor_sync(~0u, value, mask); }
// Return the value of lane `lane`.
template <class T>
TM_DEVICE T ShuffleTo(T value, int lane) {
  return __shfl_sync(~0u, value, lane);
}
TM_DEVICE bool AnyInWarp(bool flag) { return __any_sync(~0u, flag); }
// Bit i of the result is the flag of lane i.
TM_DEVICE uint32_t BallotInWarp(bool flag) { return __ballot_sync(~0u, flag); }
TM_DEVICE uint32_t MaxInWarp(uint32_t value) { return __reduce_max_sync(~0u, value); }
TM_DEVICE int SumInWarp(int value) { return __reduce_add_sync(~0u, value); }
TM_DEVICE int CountInWarp(bool flag) { return __popc(__ballot_sync(~0u, flag)); }

// c += a · b with a [16, 16] row-major and b [16, 8] column-major, in the fragment layout of
// mma.m16n8k16.
TM_DEVICE void MmaHalf(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
TM_DEVICE void MmaBFloat(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// c += a · b with a [16, 8] row-major and b [8, 8] column-major, in the fragment layout of
// mma.m16n8k8. Factors are FP32, of which the product uses the upper 19 bits.
TM_DEVICE void MmaTf32(float (&c)[4], const float (&a)[4], float b0, float b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
        "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}
// Transpose an 8 x 8 matrix of 16-bit values. Each lane holds two values of row lane / 4.
TM_DEVICE uint32_t TransposeMatrix(uint32_t a) {
  uint32_t out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(a));
  return out;
}

// Keep p, an address in shared memory, in its own register, so that the compiler does not compute
// it again at every use.
TM_DEVICE char* KeepShared(char* p) {
  auto at = static_cast<uint32_t>(__cvta_generic_to_shared(p));
  asm volatile("" : "+r"(at));
  return static_cast<char*>(__cvta_shared_to_generic(at));
}
// The same for an address in global memory, and for a number.
template <class T>
TM_DEVICE const T* KeepGlobal(const T* p) {
  auto at = __cvta_generic_to_global(p);
  asm volatile("" : "+l"(at));
  return static_cast<const T*>(__cvta_global_to_generic(at));
}
// Return base + count * bytes in one instruction.
TM_DEVICE const char* AddProduct(const char* base, int32_t count, int32_t bytes) {
  const char* out;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(out) : "r"(count), "r"(bytes), "l"(base));
  return out;
}
// Load four 8 x 8 matrices of 16-bit values from shared memory. Lane 8 i + r passes the address of
// row r of matrix i. Lane 4 r + c receives the values 2 c and 2 c + 1 of that row in out[i].
TM_DEVICE void LoadMatrices(uint32_t (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}
// The same with each matrix transposed: lane 4 c + r receives column c of the rows 2 r and 2 r + 1.
TM_DEVICE void LoadMatricesTransposed(uint32_t (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}

// Count the zero bits at the low end. For a power of two this is its log2.
TM_DEVICE int CountZeros(int x) { return __ffs(x) - 1; }
TM_DEVICE int CountOnes(uint32_t x) { return __popc(x); }

// Byte i of the result is byte (selector >> 4 i) & 7 of b:a.
TM_DEVICE uint32_t SelectBytes(uint32_t a, uint32_t b, uint32_t selector) {
  return __byte_perm(a, b, selector);
}
TM_DEVICE uint32_t AndOr(uint32_t a, uint32_t mask, uint32_t b) {
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(a), "r"(mask), "r"(b));
  return out;
}
TM_DEVICE uint32_t MulHalf2(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
// Duplicate the low or the high half of a pair into both halves.
TM_DEVICE uint32_t LowTwice(uint32_t pair) {
  uint32_t out;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low};}"
      : "=r"(out)
      : "r"(pair));
  return out;
}
TM_DEVICE uint32_t HighTwice(uint32_t pair) {
  uint32_t out;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high};}"
      : "=r"(out)
      : "r"(pair));
  return out;
}
// a * b + c, rounded once.
TM_DEVICE uint32_t FmaHalf2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t out;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}
TM_DEVICE uint32_t PackHalf2(float low, float high) {
  uint32_t out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
TM_DEVICE uint32_t PackBFloat2(float low, float high) {
  uint32_t out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
TM_DEVICE uint32_t FmaBFloat2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t out;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}
// Convert the FP16 value in the low half.
TM_DEVICE float ConvertHalf(uint32_t bits) {
  float out;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low;}"
      : "=f"(out)
      : "r"(bits));
  return out;
}
// Convert two E4M3 codes in the low half, which must not be NaN, to two FP16 values.
TM_DEVICE uint32_t E4m3PairToHalf2(uint32_t codes) {
#if __CUDA_ARCH__ >= 890
  uint32_t out;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low;}"
      : "=r"(out)
      : "r"(codes));
  return out;
#else
  const uint32_t high = __byte_perm(codes, 0, 0x1404);  // each code in the high byte of a half
  return MulHalf2(((high & 0x7f007f00u) >> 1) | (high & 0x80008000u), 0x5c005c00u);  // times 2^8
#endif
}
// Whether E2m1ToHalf2 and PackE2m1 exist, with one instruction per pair. They need compute
// capability 10.0 or newer and code built for one GPU or its family.
#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1000
inline constexpr bool kHasE2m1 = true;
#else
inline constexpr bool kHasE2m1 = false;
#endif
// Convert eight E2M1 codes to four FP16 pairs, one pair per byte. REQUIRES: kHasE2m1.
TM_DEVICE void E2m1ToHalf2(uint32_t codes, uint32_t (&out)[4]) {
  asm("{.reg .b8 a, b, c, d; mov.b32 {a, b, c, d}, %4; cvt.rn.f16x2.e2m1x2 %0, a;"
      "cvt.rn.f16x2.e2m1x2 %1, b; cvt.rn.f16x2.e2m1x2 %2, c; cvt.rn.f16x2.e2m1x2 %3, d;}"
      : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
      : "r"(codes));
}
// Multiply and round, so that the compiler does not fuse the product and a following sum into an
// FMA.
TM_DEVICE float MulRounded(float a, float b) { return __fmul_rn(a, b); }
TM_DEVICE float LowHalf(uint32_t pair) {
  return __half2float(__ushort_as_half(static_cast<uint16_t>(pair)));
}
TM_DEVICE float HighHalf(uint32_t pair) {
  return __half2float(__ushort_as_half(static_cast<uint16_t>(pair >> 16)));
}
// Return two codes in the low half, rounded to nearest even and saturated. Not for NaN.
TM_DEVICE uint32_t PackE4m3(float low, float high) {
#if __CUDA_ARCH__ >= 890
  uint16_t out;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
  return out;
#else
  return static_cast<uint32_t>(FloatToE4M3(low) | FloatToE4M3(high) << 8);
#endif
}
TM_DEVICE uint32_t PackE5m2(float low, float high) {
#if __CUDA_ARCH__ >= 890
  uint16_t out;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
  return out;
#else
  return static_cast<uint32_t>(FloatToE5M2(low) | FloatToE5M2(high) << 8);
#endif
}
// Return one byte with two codes, rounded to nearest even and saturated. Not for NaN. REQUIRES:
// kHasE2m1.
TM_DEVICE uint32_t PackE2m1(float low, float high) {
  uint16_t out;
  asm("{.reg .b8 codes; cvt.rn.satfinite.e2m1x2.f32 codes, %1, %2; mov.b16 %0, {codes, 0};}"
      : "=h"(out)
      : "f"(high), "f"(low));
  return out;
}
// 2^x with an error of 2^-22; 0 for -infinity.
TM_DEVICE float Exp2Approx(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}
// 1 / x with an error of 2^-23.
TM_DEVICE float InverseApprox(float x) {
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

}  // namespace turbomind::cuda

#include "turbomind/backend/cuda/runtime/warp_group.cuh"

#endif
