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

// Change how many registers each thread of the group has: a multiple of 8. All warps of a group do
// this, and the block has as many registers as at its launch. The kernel needs launch bounds.
template <int kCount>
TM_DEVICE void AddRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
TM_DEVICE void GiveBackRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Describe a tile in shared memory: swizzled rows of kRowBytes (MultiplyGroup). Only columns that
// are operand b need slab_bytes (MultiplyColumns).
template <int kRowBytes = 128>
TM_DEVICE uint64_t DescribeRows(const void* rows, int slab_bytes = 16) {
  static_assert(kRowBytes == 128 || kRowBytes == 64);
  constexpr uint64_t kSwizzle = uint64_t{kRowBytes == 128 ? 1 : 2} << 62;
  constexpr uint64_t kEightRows = uint64_t{8 * kRowBytes / 16} << 32;  // from 8 rows to the next 8
  const auto slab = static_cast<uint64_t>(slab_bytes >> 4) << 16;
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(rows));
  return kSwizzle | kEightRows | slab | (at & 0x3ffff) >> 4;
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

// A tile `offset` bytes behind `base`. With constant offsets from one base, the compiler computes
// one description.
struct SharedTile {
  const void* base;
  uint32_t offset;
};

#define TM_TEXT_32                                                                             \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24," \
  "%25,%26,%27,%28,%29,%30,%31"
#define TM_TEXT_48 TM_TEXT_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define TM_TEXT_64 TM_TEXT_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define TM_SUMS_32(i) TM_SUMS_16(i), TM_SUMS_16(i + 16)
#define TM_SUMS_48(i) TM_SUMS_32(i), TM_SUMS_16(i + 32)
#define TM_SUMS_64(i) TM_SUMS_32(i), TM_SUMS_32(i + 32)

// A product with a in shared memory, for one type and number of rows of b.
#define TM_MULTIPLY_ROWS(type, rows, text, results, a_at, b_at, adds_at)                      \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %" #adds_at                                     \
               ", 0;"                                                                         \
               "wgmma.mma_async.sync.aligned.m64n" #rows "k16.f32." #type "." #type " {" text \
               "}, %" #a_at ", %" #b_at ", p, 1, 1, 0, 0;}"                                   \
               : results(0)                                                                   \
               : "l"(rows_of_a), "l"(rows_of_b), "r"(static_cast<int>(adds)))

// sums = a · bᵀ with a [64, 16] and b [kRows, 16], both BF16 or both FP16, or sums += if `adds`.
//
// Both are in shared memory, in rows of kRowBytes. Warp w of the group reads the rows
// 16 w .. 16 w + 15 of a. The sums are those of MultiplyGroup, and so are the rows, if they have
// 128 bytes. Of 64 bytes, piece p of row r is at piece p ^ r / 2 % 4, and the first row is at a
// multiple of 512 bytes.
template <bool kBFloat, int kRows, int kRowBytes>
TM_DEVICE void MultiplySharedRows(float* sums, const SharedTile& a, const SharedTile& b,
                                  bool adds) {
  static_assert(kRows == 64 || kRows == 128);
  const uint64_t rows_of_a = DescribeRows<kRowBytes>(a.base) + (a.offset >> 4);
  const uint64_t rows_of_b = DescribeRows<kRowBytes>(b.base) + (b.offset >> 4);
  if constexpr (kRows == 64 && kBFloat) {
    TM_MULTIPLY_ROWS(bf16, 64, TM_TEXT_32, TM_SUMS_32, 32, 33, 34);
  } else if constexpr (kRows == 64) {
    TM_MULTIPLY_ROWS(f16, 64, TM_TEXT_32, TM_SUMS_32, 32, 33, 34);
  } else if constexpr (kBFloat) {
    TM_MULTIPLY_ROWS(bf16, 128, TM_TEXT_64, TM_SUMS_64, 64, 65, 66);
  } else {
    TM_MULTIPLY_ROWS(f16, 128, TM_TEXT_64, TM_SUMS_64, 64, 65, 66);
  }
}

// A product with a in registers and b transposed, for one type and number of columns of b.
#define TM_MULTIPLY_COLUMNS(type, columns, text, results, a0, a1, a2, a3, b_at)         \
  asm volatile(                                                                         \
      "{.reg .pred p; setp.eq.b32 p, 0, 0;"                                             \
      "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." #type "." #type " {" text \
      "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #b_at ", p, 1, 1, 1;}"              \
      : results(0)                                                                      \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns_of_b))

// sums += a · b with a [64, 16] in registers and b [16, kColumns], both BF16 or both FP16.
//
// a and the sums are those of MultiplyGroup, with a column of b instead of each row. `b` points at
// 16 rows of kRowBytes, swizzled as in MultiplySharedRows, the first of which has a number
// divisible by 8. The columns behind those of a row are `slab_bytes` further.
template <bool kBFloat, int kColumns, int kRowBytes>
TM_DEVICE void MultiplyColumns(float* sums, const uint32_t (&a)[4], const SharedTile& b,
                               int slab_bytes) {
  static_assert(kColumns == 64 || kColumns == 96 || kColumns == 128);
  static_assert(kColumns * 2 % kRowBytes == 0);
  const uint64_t columns_of_b = DescribeRows<kRowBytes>(b.base, slab_bytes) + (b.offset >> 4);
  if constexpr (kColumns == 64 && kBFloat) {
    TM_MULTIPLY_COLUMNS(bf16, 64, TM_TEXT_32, TM_SUMS_32, 32, 33, 34, 35, 36);
  } else if constexpr (kColumns == 64) {
    TM_MULTIPLY_COLUMNS(f16, 64, TM_TEXT_32, TM_SUMS_32, 32, 33, 34, 35, 36);
  } else if constexpr (kColumns == 96 && kBFloat) {
    TM_MULTIPLY_COLUMNS(bf16, 96, TM_TEXT_48, TM_SUMS_48, 48, 49, 50, 51, 52);
  } else if constexpr (kColumns == 96) {
    TM_MULTIPLY_COLUMNS(f16, 96, TM_TEXT_48, TM_SUMS_48, 48, 49, 50, 51, 52);
  } else if constexpr (kBFloat) {
    TM_MULTIPLY_COLUMNS(bf16, 128, TM_TEXT_64, TM_SUMS_64, 64, 65, 66, 67, 68);
  } else {
    TM_MULTIPLY_COLUMNS(f16, 128, TM_TEXT_64, TM_SUMS_64, 64, 65, 66, 67, 68);
  }
}

#undef TM_MULTIPLY_COLUMNS
#undef TM_MULTIPLY_ROWS
#undef TM_SUMS_64
#undef TM_SUMS_48
#undef TM_SUMS_32
#undef TM_TEXT_64
#undef TM_TEXT_48
#undef TM_TEXT_32
#undef TM_SUMS_16
#undef TM_SUMS_4

}  // namespace turbomind::cuda
