#pragma once

// Matrix products of a warp group: four warps whose first one has an index divisible by four (wgmma
// of compute capability 9.0, code built for sm_90a). intrinsics.cuh includes this file.
//
// A product runs asynchronously. It reads its factors in registers and in shared memory, and adds
// to its sums in registers. None of them may be touched until WaitForProducts. Several products may
// add to the same sums, in their order.

#include <cstdint>

namespace turbomind::cuda {

// Whether these products exist. They need code built for one architecture.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
inline constexpr bool kHasWarpGroups = true;
#else
inline constexpr bool kHasWarpGroups = false;
#endif

// Order the thread's writes to shared memory before later products. The products of other threads
// also need a barrier after it.
TM_DEVICE void FenceSharedForProducts() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Order writes to registers before the next products that read them or add to them.
TM_DEVICE void FenceRegisters() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Keep the compiler from moving other uses of sums across this place.
template <int kCount>
TM_DEVICE void KeepSums(float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("" : "+f"(sums[i])::"memory");
  }
}
// Make a group of the products since the last one.
TM_DEVICE void CommitProducts() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Wait for all groups except the newest kNewest.
template <int kNewest>
TM_DEVICE void WaitForProducts() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kNewest) : "memory");
}

// Describe a tile in shared memory: rows of 128 bytes, swizzled (MultiplyGroup).
TM_DEVICE uint64_t DescribeRows(const void* rows) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = uint64_t{1024 / 16} << 32;  // bytes from 8 rows to the next 8
  constexpr uint64_t kUnused = uint64_t{1} << 16;  // the other distance, which a swizzle implies
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(rows));
  return kSwizzle128 | kEightRows | kUnused | (at & 0x3ffff) >> 4;
}

#define TM_SUMS_4(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define TM_SUMS_16(i) TM_SUMS_4(i), TM_SUMS_4(i + 4), TM_SUMS_4(i + 8), TM_SUMS_4(i + 12)

// sums += a · bᵀ with a [64, 16] and b [kRows, 16], both BF16.
//
// Warp w of the group has the rows 16 w .. 16 w + 15 of a and of the sums. Lane 4 g + t holds a as
// in mma.m16n8k16, and sums[4 n + i] is that of row g + i / 2 * 8 of a and row 8 n + 2 t + i % 2 of
// b. Rows of b are 128 bytes long. Piece p of 16 bytes of row r is at piece p ^ r % 8. The first
// row is at a multiple of 1024 bytes; `b` points 32 k bytes behind it for the columns from 16 k on.
// A product takes all warps of a group at once.
template <int kRows>
TM_DEVICE void MultiplyGroup(float (&sums)[kRows / 2], const uint32_t (&a)[4], const void* b) {
  static_assert(kRows == 32 || kRows == 64 || kRows == 128);
  const uint64_t rows = DescribeRows(b);
  if constexpr (kRows == 32) {
    asm volatile(
        "{.reg .pred p; setp.eq.b32 p, 0, 0;"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15},"
        "{%16,%17,%18,%19}, %20, p, 1, 1, 0;}"
        : TM_SUMS_16(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows));
  } else if constexpr (kRows == 64) {
    asm volatile(
        "{.reg .pred p; setp.eq.b32 p, 0, 0;"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,"
        "%23,%24,%25,%26,%27,%28,%29,%30,%31},"
        "{%32,%33,%34,%35}, %36, p, 1, 1, 0;}"
        : TM_SUMS_16(0), TM_SUMS_16(16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows));
  } else {
    asm volatile(
        "{.reg .pred p; setp.eq.b32 p, 0, 0;"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,"
        "%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,"
        "%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},"
        "{%64,%65,%66,%67}, %68, p, 1, 1, 0;}"
        : TM_SUMS_16(0), TM_SUMS_16(16), TM_SUMS_16(32), TM_SUMS_16(48)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows));
  }
}

#undef TM_SUMS_16
#undef TM_SUMS_4

}  // namespace turbomind::cuda
