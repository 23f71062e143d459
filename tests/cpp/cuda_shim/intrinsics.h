#pragma once

// backend/cuda/runtime/intrinsics.cuh for the CPU: the same functions, implemented as the PTX
// manual defines them.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cuda_shim/shim.h"
#include "turbomind/core/float_convert.h"

#define TM_DEVICE inline
#define __global__
#define __launch_bounds__(...)

namespace turbomind::cuda {

namespace shim = ::turbomind::cuda_shim;

inline int ThreadIndexX() { return static_cast<int>(shim::ThreadIndex().x); }
inline int BlockIndexX() { return static_cast<int>(shim::BlockIndex().x); }
inline int BlockIndexY() { return static_cast<int>(shim::BlockIndex().y); }
inline char* SharedMemory() { return shim::SharedMemory(); }

inline void LetNextBegin() { shim::LetNextBegin(); }
inline void WaitForPrevious() { shim::WaitForPrevious(); }
inline void BeginKernel() {
  LetNextBegin();
  WaitForPrevious();
}

template <class T>
T LoadGlobal(const T* p) {
  shim::CheckAccess(shim::Space::kGlobalRead, p, sizeof(T), alignof(T));
  return *p;
}
template <class T>
T LoadGlobalOnce(const T* p) {
  return LoadGlobal(p);
}
template <class T>
void StoreGlobal(T* p, const T& value) {
  shim::CheckAccess(shim::Space::kGlobalWrite, p, sizeof(T), alignof(T));
  *p = value;
}
inline int AddGlobal(int* p, int value) {
  const int before = LoadGlobal(p);
  StoreGlobal(p, before + value);
  return before;
}
inline void FenceGlobal() {}
inline void Trap() { shim::Fail("a trap"); }
inline void AddGlobal(int64_t* p, int64_t value) { StoreGlobal(p, LoadGlobal(p) + value); }
template <class T>
T LoadShared(const void* p) {
  shim::CheckAccess(shim::Space::kShared, p, sizeof(T), alignof(T));
  T value;
  std::memcpy(&value, p, sizeof(T));
  return value;
}
template <class T>
void StoreShared(void* p, const T& value) {
  shim::CheckAccess(shim::Space::kShared, p, sizeof(T), alignof(T));
  std::memcpy(p, &value, sizeof(T));
  shim::NoteWrite(p, sizeof(T));
}

inline int AddShared(void* p, int value) {
  const int before = LoadShared<int>(p);
  StoreShared(p, before + value);
  return before;
}

inline void CopyAsync(void* shared, const void* global, int valid) {
  shim::CopyAsync(shared, global, 16, valid);
}
inline void CopyWordAsync(void* shared, const void* global) {
  shim::CopyAsync(shared, global, 4, 4);
}
inline void CommitCopies() { shim::CommitCopies(); }
template <int kNewest>
void WaitForCopies() {
  shim::WaitForCopies(kNewest);
}

inline void SyncWarp() {
  shim::MeetWarp({"syncwarp", nullptr, 0, nullptr, 0}, [](shim::LaneWords&) {});
}
inline void SyncBlock() { shim::MeetBlock(); }

// The lanes of a warp call these together.
inline void SyncSome(int barrier, int num_threads) {
  SyncWarp();
  shim::MeetSome(barrier, num_threads);
}
inline void ArriveSome(int barrier, int num_threads) {
  SyncWarp();
  shim::ArriveSome(barrier, num_threads);
}
inline void InitMbarrier(void* barrier, int num_arrivals) {
  shim::InitMbarrier(barrier, num_arrivals);
}
inline void ArriveMbarrier(void* barrier) { shim::ArriveMbarrier(barrier); }
inline void WaitMbarrier(void* barrier, int parity) { shim::WaitMbarrier(barrier, parity); }
template <int kCount>
void AddRegisters() {
  SyncWarp();
  shim::SetRegisters(kCount);
}
template <int kCount>
void GiveBackRegisters() {
  SyncWarp();
  shim::SetRegisters(kCount);
}

inline float ShuffleXor(float value, int mask) {
  const uint32_t in[2] = {FloatBits(value), static_cast<uint32_t>(mask)};
  uint32_t out;
  shim::MeetWarp({"shfl.xor", in, 2, &out, 1}, [](shim::LaneWords& words) {
    for (int lane = 0; lane < shim::kWarp; ++lane) {
      words.out[lane][0] = words.in[lane ^ static_cast<int>(words.in[lane][1])][0];
    }
  });
  return BitsFloat(out);
}

// A shuffle of all lanes, as on a GPU, so all lanes must take part.
inline int WarpIndex() {
  const uint32_t in = static_cast<uint32_t>(ThreadIndexX() / shim::kWarp);
  uint32_t out;
  shim::MeetWarp({"shfl.idx", &in, 1, &out, 1}, [](shim::LaneWords& words) {
    for (auto& lane : words.out) {
      lane[0] = words.in[0][0];
    }
  });
  return static_cast<int>(out);
}

template <class T>
T ShuffleTo(T value, int lane) {
  static_assert(sizeof(T) == 4);
  uint32_t in[2] = {0, static_cast<uint32_t>(lane)};
  std::memcpy(in, &value, 4);
  uint32_t out;
  shim::MeetWarp({"shfl.idx", in, 2, &out, 1}, [](shim::LaneWords& words) {
    for (auto i = 0; i < shim::kWarp; ++i) {
      words.out[i][0] = words.in[words.in[i][1] % shim::kWarp][0];
    }
  });
  std::memcpy(&value, &out, 4);
  return value;
}

inline bool AnyInWarp(bool flag) {
  const uint32_t in = flag;
  uint32_t out;
  shim::MeetWarp({"vote.any", &in, 1, &out, 1}, [](shim::LaneWords& words) {
    uint32_t any = 0;
    for (const auto& lane : words.in) {
      any |= lane[0];
    }
    for (auto& lane : words.out) {
      lane[0] = any;
    }
  });
  return out != 0;
}
inline uint32_t BallotInWarp(bool flag) {
  const uint32_t in = flag;
  uint32_t out;
  shim::MeetWarp({"vote.ballot", &in, 1, &out, 1}, [](shim::LaneWords& words) {
    uint32_t flags = 0;
    for (int lane = 0; lane < shim::kWarp; ++lane) {
      flags |= words.in[lane][0] << lane;
    }
    for (auto& lane : words.out) {
      lane[0] = flags;
    }
  });
  return out;
}

inline uint32_t MaxInWarp(uint32_t value) {
  uint32_t out;
  shim::MeetWarp({"redux.max", &value, 1, &out, 1}, [](shim::LaneWords& words) {
    uint32_t max_value = 0;
    for (const auto& lane : words.in) {
      max_value = std::max(max_value, lane[0]);
    }
    for (auto& lane : words.out) {
      lane[0] = max_value;
    }
  });
  return out;
}
inline int SumInWarp(int value) {
  const auto in = static_cast<uint32_t>(value);
  uint32_t out;
  shim::MeetWarp({"redux.add", &in, 1, &out, 1}, [](shim::LaneWords& words) {
    uint32_t sum = 0;
    for (const auto& lane : words.in) {
      sum += lane[0];
    }
    for (auto& lane : words.out) {
      lane[0] = sum;
    }
  });
  return static_cast<int>(out);
}

inline int CountInWarp(bool flag) {
  const uint32_t in = flag;
  uint32_t out;
  shim::MeetWarp({"vote.ballot", &in, 1, &out, 1}, [](shim::LaneWords& words) {
    uint32_t count = 0;
    for (const auto& lane : words.in) {
      count += lane[0];
    }
    for (auto& lane : words.out) {
      lane[0] = count;
    }
  });
  return static_cast<int>(out);
}

template <bool kBFloat>
float HalfOfPair(uint32_t pair, int which) {
  const auto bits = static_cast<uint16_t>(pair >> (16 * which));
  return kBFloat ? BFloat16ToFloat(bits) : HalfToFloat(bits);
}

// Row and column of register r of lane `lane`: PTX manual, "Matrix Fragments for mma.m16n8k16".
template <bool kBFloat>
void RunMma(shim::LaneWords& words) {
  float a[16][16];
  float b[16][8];
  for (int lane = 0; lane < shim::kWarp; ++lane) {
    const int group = lane / 4;
    const int column = lane % 4 * 2;
    for (int i = 0; i < 2; ++i) {
      for (int r = 0; r < 4; ++r) {
        a[group + r % 2 * 8][column + r / 2 * 8 + i] = HalfOfPair<kBFloat>(words.in[lane][r], i);
      }
      for (int r = 0; r < 2; ++r) {
        b[column + r * 8 + i][group] = HalfOfPair<kBFloat>(words.in[lane][4 + r], i);
      }
    }
  }
  for (int lane = 0; lane < shim::kWarp; ++lane) {
    for (int r = 0; r < 4; ++r) {
      float sum = BitsFloat(words.in[lane][6 + r]);
      for (int k = 0; k < 16; ++k) {
        sum += a[lane / 4 + r / 2 * 8][k] * b[k][lane % 4 * 2 + r % 2];
      }
      words.out[lane][r] = FloatBits(sum);
    }
  }
}

template <bool kBFloat>
void Mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  uint32_t in[10] = {a[0], a[1], a[2], a[3], b0, b1};
  std::memcpy(in + 6, c, sizeof(c));
  uint32_t out[4];
  shim::MeetWarp({kBFloat ? "mma.bf16" : "mma.f16", in, 10, out, 4}, RunMma<kBFloat>);
  std::memcpy(c, out, sizeof(c));
}
inline void MmaHalf(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Mma<false>(c, a, b0, b1);
}
inline void MmaBFloat(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Mma<true>(c, a, b0, b1);
}

// PTX manual, "Matrix Fragments for mma.m16n8k8", with factors of TF32: the lower 13 bits are not
// used.
inline void MmaTf32(float (&c)[4], const float (&a)[4], float b0, float b1) {
  uint32_t in[10];
  std::memcpy(in, a, sizeof(a));
  in[4] = FloatBits(b0);
  in[5] = FloatBits(b1);
  std::memcpy(in + 6, c, sizeof(c));
  uint32_t out[4];
  shim::MeetWarp({"mma.tf32", in, 10, out, 4}, [](shim::LaneWords& words) {
    const auto factor = [&](int lane, int word) {
      return BitsFloat(words.in[lane][word] & 0xffffe000u);
    };
    for (int lane = 0; lane < shim::kWarp; ++lane) {
      for (int r = 0; r < 4; ++r) {
        float sum = BitsFloat(words.in[lane][6 + r]);
        for (int k = 0; k < 8; ++k) {
          const int row = lane / 4 * 4 + k % 4;                   // of a: its lane
          const int column = (lane % 4 * 2 + r % 2) * 4 + k % 4;  // of b: its lane
          sum += factor(row, k / 4 * 2 + r / 2) * factor(column, 4 + k / 4);
        }
        words.out[lane][r] = FloatBits(sum);
      }
    }
  });
  std::memcpy(c, out, sizeof(c));
}

// PTX manual, "Register Fragments for wgmma.mma_async.m64nNk16", with the tile of b in the layout
// of the 128-byte swizzle.
inline constexpr bool kHasWarpGroups = true;
inline void FenceSharedForProducts() { shim::FenceShared(); }
inline void FenceRegisters() {
  shim::MeetWarp({"wgmma.fence", nullptr, 0, nullptr, 0}, [](shim::LaneWords&) {});
  shim::FenceRegisters();
}
inline void CommitProducts() {
  shim::MeetWarp({"wgmma.commit", nullptr, 0, nullptr, 0}, [](shim::LaneWords&) {});
  shim::CommitProducts();
}
template <int kNewest>
void WaitForProducts() {
  shim::MeetWarp({"wgmma.wait", nullptr, 0, nullptr, 0}, [](shim::LaneWords&) {});
  shim::WaitForProducts(kNewest);
}
template <int kCount>
void KeepSums(float (&)[kCount]) {}

// Start a product whose other members are set. All lanes use the addresses of the first one.
inline void StartProduct(shim::Product product, const uint32_t* a) {
  const auto address_of_b = reinterpret_cast<uintptr_t>(product.b);
  const auto address_of_a = reinterpret_cast<uintptr_t>(product.a);
  uint32_t in[8] = {0,
                    0,
                    0,
                    0,
                    static_cast<uint32_t>(address_of_b),
                    static_cast<uint32_t>(address_of_b >> 32),
                    static_cast<uint32_t>(address_of_a),
                    static_cast<uint32_t>(address_of_a >> 32)};
  if (a != nullptr) {
    std::copy(a, a + 4, in);
  }
  uint32_t out[20];
  shim::MeetWarp({"wgmma", in, 8, out, 20}, [](shim::LaneWords& words) {
    for (int lane = 0; lane < shim::kWarp; ++lane) {
      for (int pair = 0; pair < 8; ++pair) {  // columns 2 pair and the next, of two rows
        const uint32_t(&from)[shim::kMaxWords] = words.in[lane / 4 * 4 + pair % 4];
        words.out[lane][pair] = from[pair / 4 * 2];
        words.out[lane][8 + pair] = from[pair / 4 * 2 + 1];
      }
      std::copy(words.in[0] + 4, words.in[0] + 8, words.out[lane] + 16);
    }
  });
  product.own_factors = a;
  product.b = reinterpret_cast<const char*>(uintptr_t{out[17]} << 32 | out[16]);
  product.a = reinterpret_cast<const char*>(uintptr_t{out[19]} << 32 | out[18]);
  std::memcpy(product.factors, out, sizeof(product.factors));
  shim::StartProduct(product);
}
template <int kRows>
void MultiplyGroup(float (&sums)[kRows / 2], const uint32_t (&a)[4], const void* b) {
  static_assert(kRows == 32 || kRows == 64 || kRows == 128);
  StartProduct({.sums = sums, .b = static_cast<const char*>(b), .num_columns = kRows}, a);
}
struct SharedTile {
  const void* base;
  uint32_t offset;
  const char* begin() const { return static_cast<const char*>(base) + offset; }
};
template <bool kBFloat, int kRows, int kRowBytes>
void MultiplySharedRows(float* sums, const SharedTile& a, const SharedTile& b, bool adds) {
  static_assert(kRows == 64 || kRows == 128);
  StartProduct({.sums = sums,
                .a = a.begin(),
                .b = b.begin(),
                .num_columns = kRows,
                .row_bytes = kRowBytes,
                .is_bfloat = kBFloat,
                .adds = adds},
               nullptr);
}
template <bool kBFloat, int kColumns, int kRowBytes>
void MultiplyColumns(float* sums, const uint32_t (&a)[4], const SharedTile& b, int slab_bytes) {
  static_assert(kColumns == 64 || kColumns == 96 || kColumns == 128);
  static_assert(kColumns * 2 % kRowBytes == 0);
  StartProduct({.sums = sums,
                .b = b.begin(),
                .num_columns = kColumns,
                .row_bytes = kRowBytes,
                .is_transposed = true,
                .slab_bytes = slab_bytes,
                .is_bfloat = kBFloat},
               a);
}

inline uint32_t TransposeMatrix(uint32_t a) {
  uint32_t out;
  shim::MeetWarp({"movmatrix", &a, 1, &out, 1}, [](shim::LaneWords& words) {
    const auto at = [&](int row, int column) {
      return words.in[row * 4 + column / 2][0] >> (16 * (column % 2)) & 0xffffu;
    };
    for (int lane = 0; lane < shim::kWarp; ++lane) {
      const int row = lane / 4;
      const int column = lane % 4 * 2;
      words.out[lane][0] = at(column, row) | at(column + 1, row) << 16;
    }
  });
  return out;
}

inline char* KeepShared(char* p) { return p; }
template <class T>
const T* KeepGlobal(const T* p) {
  return p;
}
inline const char* AddProduct(const char* base, int32_t count, int32_t bytes) {
  return base + int64_t{count} * bytes;
}
// Rows are read when the warp meets, so stores of the last lane are visible, as on a GPU.
template <bool kTransposed>
void LoadFourMatrices(uint32_t (&out)[4], const void* row) {
  shim::CheckAccess(shim::Space::kShared, row, 16, 16);
  const auto address = reinterpret_cast<uintptr_t>(row);
  const uint32_t in[2] = {static_cast<uint32_t>(address), static_cast<uint32_t>(address >> 32)};
  shim::MeetWarp({kTransposed ? "ldmatrix.trans" : "ldmatrix", in, 2, out, 4},
                 [](shim::LaneWords& words) {
                   for (int i = 0; i < 4; ++i) {
                     uint16_t matrix[8][8];
                     for (int r = 0; r < 8; ++r) {
                       const uint32_t(&from)[shim::kMaxWords] = words.in[8 * i + r];
                       const uintptr_t at = uintptr_t{from[1]} << 32 | from[0];
                       std::memcpy(matrix[r], reinterpret_cast<const void*>(at), 16);
                     }
                     for (int lane = 0; lane < shim::kWarp; ++lane) {
                       const int a = lane / 4;
                       const int b = lane % 4 * 2;
                       const uint32_t low = kTransposed ? matrix[b][a] : matrix[a][b];
                       const uint32_t high = kTransposed ? matrix[b + 1][a] : matrix[a][b + 1];
                       words.out[lane][i] = low | high << 16;
                     }
                   }
                 });
}
inline void LoadMatrices(uint32_t (&out)[4], const void* row) { LoadFourMatrices<false>(out, row); }
inline void LoadMatricesTransposed(uint32_t (&out)[4], const void* row) {
  LoadFourMatrices<true>(out, row);
}

inline int CountZeros(int x) { return __builtin_ctz(static_cast<unsigned>(x)); }
inline int CountOnes(uint32_t x) { return __builtin_popcount(x); }

inline uint32_t SelectBytes(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t from = selector >> (4 * i) & 7;
    out |= static_cast<uint32_t>(bytes >> (8 * from) & 0xff) << (8 * i);
  }
  return out;
}
inline uint32_t AndOr(uint32_t a, uint32_t mask, uint32_t b) { return (a & mask) | b; }

template <class F>
uint32_t EachHalf(F fn) {
  return uint32_t{FloatToHalf(fn(0))} | uint32_t{FloatToHalf(fn(1))} << 16;
}
inline uint32_t MulHalf2(uint32_t a, uint32_t b) {
  return EachHalf([&](int i) { return HalfOfPair<false>(a, i) * HalfOfPair<false>(b, i); });
}
inline uint32_t LowTwice(uint32_t pair) { return (pair & 0xffffu) * 0x10001u; }
inline uint32_t HighTwice(uint32_t pair) { return (pair >> 16) * 0x10001u; }
// The product of two FP16 values is exact in FP32, and so is its sum with a third in double.
inline uint32_t FmaHalf2(uint32_t a, uint32_t b, uint32_t c) {
  return EachHalf([&](int i) {
    const double sum =
        double{HalfOfPair<false>(a, i)} * HalfOfPair<false>(b, i) + HalfOfPair<false>(c, i);
    const float near = static_cast<float>(sum);
    // Round to odd, so that the second rounding to FP16 does not round twice.
    if (near != sum && (FloatBits(near) & 1) == 0) {
      return BitsFloat(FloatBits(near) + (std::fabs(sum) > std::fabs(double{near}) ? 1u : ~0u));
    }
    return near;
  });
}
inline uint32_t PackHalf2(float low, float high) {
  return EachHalf([&](int i) { return i == 0 ? low : high; });
}
inline uint32_t PackBFloat2(float low, float high) {
  return uint32_t{FloatToBFloat16(low)} | uint32_t{FloatToBFloat16(high)} << 16;
}
// The product of two BF16 values is exact in FP32. For the values used here, its sum with a third
// is exact as well.
inline uint32_t FmaBFloat2(uint32_t a, uint32_t b, uint32_t c) {
  const auto one = [&](int i) {
    return HalfOfPair<true>(a, i) * HalfOfPair<true>(b, i) + HalfOfPair<true>(c, i);
  };
  return PackBFloat2(one(0), one(1));
}
inline float ConvertHalf(uint32_t bits) { return HalfToFloat(static_cast<uint16_t>(bits)); }
inline uint32_t E4m3PairToHalf2(uint32_t codes) {
  return EachHalf([&](int i) { return E4M3ToFloat(static_cast<uint8_t>(codes >> (8 * i))); });
}
inline constexpr bool kHasE2m1 = false;  // tests then cover the code that most GPUs run
inline void E2m1ToHalf2(uint32_t codes, uint32_t (&out)[4]) {
  for (int byte = 0; byte < 4; ++byte) {
    out[byte] = EachHalf(
        [&](int i) { return E2M1ToFloat(static_cast<uint8_t>(codes >> (8 * byte + 4 * i) & 15)); });
  }
}
inline float MulRounded(float a, float b) { return a * b; }
inline float LowHalf(uint32_t pair) { return HalfOfPair<false>(pair, 0); }
inline float HighHalf(uint32_t pair) { return HalfOfPair<false>(pair, 1); }
inline uint32_t PackE4m3(float low, float high) {
  return static_cast<uint32_t>(FloatToE4M3(low) | FloatToE4M3(high) << 8);
}
inline uint32_t PackE5m2(float low, float high) {
  return static_cast<uint32_t>(FloatToE5M2(low) | FloatToE5M2(high) << 8);
}
inline uint32_t PackE2m1(float low, float high) {
  return static_cast<uint32_t>(FloatToE2M1(low) | FloatToE2M1(high) << 4);
}
inline float Exp2Approx(float x) { return std::exp2(x); }
inline float InverseApprox(float x) { return 1.f / x; }

}  // namespace turbomind::cuda
