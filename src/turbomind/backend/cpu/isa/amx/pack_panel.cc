// ⑥⑦ Packs activations for tiles. The codes are those of isa/linear/quantize_activations.h. For
// 4-bit weights, they are stored in the order in which the weight codes are widened.

#include <immintrin.h>

#include <cstdint>

#include "turbomind/backend/cpu/isa/amx/linear.h"
#include "turbomind/backend/cpu/isa/linear/arrange_shorts.h"
#include "turbomind/backend/cpu/isa/linear/quantize_activations.h"

namespace turbomind::avx512 {
void PackPanel(const PackPanelArgs& args);
void PackInt8Panel(const PackPanelArgs& args);
}  // namespace turbomind::avx512

namespace turbomind::TM_ISA {
namespace {

// The permutation of two registers of FP32 numbers, columns 0 to 15 and 16 to 31. It selects the
// upper halves, which are BF16 values because the lower halves are zero. A 16-bit lane of packed
// weights holds the columns c, 16 + c, c + 1 and 17 + c of an output; its neighbor holds those of c
// + 2. Shifted by 4, 8 and 12 bits, they give the other lines of a tile.
struct ColumnOrder {
  alignas(64) uint16_t from[kQuantBlock];
};

constexpr ColumnOrder MakeColumnOrder() {
  ColumnOrder order = {};
  for (int i = 0; i < kQuantBlock; ++i) {
    const int group = i / 8;       // four columns in each half
    const int nibble = i % 8 / 2;  // within a lane
    const int column = nibble % 2 * 16 + 4 * group + i % 2 * 2 + nibble / 2;
    order.from[i] = static_cast<uint16_t>(2 * column + 1);
  }
  return order;
}

constexpr ColumnOrder kColumnOrder = MakeColumnOrder();

// Selects 16 columns of the first register, then those of the second, each in ArrangeShorts' order.
constexpr ColumnOrder MakePairOrder() {
  ColumnOrder order = {};
  for (int i = 0; i < kQuantBlock; ++i) {
    order.from[i] = static_cast<uint16_t>(2 * ShortColumn(i) + 1);
  }
  return order;
}

constexpr ColumnOrder kPairOrder = MakePairOrder();

// 32 quantized activations: code = 256 * high + low, an activation divided by the scale. Codes of 8
// bits are in `high`.
struct Codes {
  __m512i high[2];
  __m512i low[2];
  float scale = 0.f;
  int32_t sum = 0;  // of the codes
};

// Quantizes 32 values like QuantizeBlock of isa/linear/quantize_activations.h, or
// QuantizeInt8Block.
template <bool kInt8>
TM_HD Codes Quantize(__m512 first, __m512 second) {
  const __m512i magnitudes = _mm512_set1_epi32(0x7fffffff);
  const auto amax_bits = static_cast<uint32_t>(_mm512_reduce_max_epi32(
      _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(first), magnitudes),
                       _mm512_and_si512(_mm512_castps_si512(second), magnitudes))));
  const float amax = BitsFloat(amax_bits);
  const bool finite = amax_bits < kInfinityBits;
  Codes codes;
  if (!finite || amax < kMinAmax) {
    codes.high[0] = codes.high[1] = codes.low[0] = codes.low[1] = _mm512_setzero_si512();
    codes.scale = finite ? 0.f : __builtin_nanf("");
    return codes;
  }
  constexpr float kMax = kInt8 ? kMaxInt8Code : kMaxCode;
  const __m512 inverse = _mm512_set1_ps(kMax / amax);
  const __m512 x[2] = {first, second};
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m512i code = _mm512_maskz_cvtps_epi32(0xffff, _mm512_mul_ps(x[i], inverse));
    if constexpr (kInt8) {
      codes.high[i] = code;
      codes.low[i] = _mm512_setzero_si512();
      continue;
    }
    codes.high[i] = _mm512_srai_epi32(_mm512_add_epi32(code, _mm512_set1_epi32(128)), 8);
    codes.low[i] = _mm512_max_epi32(_mm512_sub_epi32(code, _mm512_slli_epi32(codes.high[i], 8)),
                                    _mm512_set1_epi32(-127));
  }
  const __m512i high = _mm512_add_epi32(codes.high[0], codes.high[1]);
  const __m512i low = _mm512_add_epi32(codes.low[0], codes.low[1]);
  codes.sum =
      _mm512_reduce_add_epi32(_mm512_add_epi32(kInt8 ? high : _mm512_slli_epi32(high, 8), low));
  codes.scale = amax / kMax;
  return codes;
}

TM_HD void StoreBytes(const __m512i (&codes)[2], uint8_t* to) {
  for (int i = 0; i < 2; ++i) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16 * i),
                     _mm512_maskz_cvtepi32_epi8(0xffff, codes[i]));
  }
}

TM_HD void StoreBf16(__m512i first, __m512i second, uint8_t* to) {
  const __m512i order = _mm512_load_si512(kColumnOrder.from);
  const auto bits = [](__m512i codes) __attribute__((always_inline)) {
    return _mm512_castps_si512(_mm512_maskz_cvtepi32_ps(0xffff, codes));
  };
  _mm512_store_si512(to, _mm512_permutex2var_epi16(bits(first), order, bits(second)));
}

// Stores the codes of 16 columns in the order of ArrangeShorts: 256 * high, then low.
TM_HD void StoreHalf(__m512i high, __m512i low, uint8_t* to) {
  const __m512i order = _mm512_load_si512(kPairOrder.from);
  const __m512 first = _mm512_maskz_cvtepi32_ps(0xffff, _mm512_slli_epi32(high, 8));
  const __m512 second = _mm512_maskz_cvtepi32_ps(0xffff, low);
  _mm512_store_si512(to, _mm512_permutex2var_epi16(_mm512_castps_si512(first), order,
                                                   _mm512_castps_si512(second)));
}

// Stores the codes of row `row` in a step.
template <bool kInt8>
TM_HD void StoreCodes(const Codes& codes, MatrixFormat format, int row, uint8_t* step) {
  if (InBytes(format)) {
    uint8_t* to = step + row * (kInt8 ? kQuantBlock : kQuantRowBytes);
    StoreBytes(codes.high, to);
    if constexpr (!kInt8) {
      StoreBytes(codes.low, to + kQuantBlock);
    }
    return;
  }
  uint8_t* to = step + row * kQuantRowBytes;
  if constexpr (kInt8) {
    StoreBf16(codes.high[0], codes.high[1], to);
  } else if (HasHalfScales(format)) {
    StoreHalf(codes.high[0], codes.low[0], to);
    StoreHalf(codes.high[1], codes.low[1], to + kPanelRows * kQuantRowBytes);
  } else {
    StoreBf16(_mm512_slli_epi32(codes.high[0], 8), _mm512_slli_epi32(codes.high[1], 8), to);
    StoreBf16(codes.low[0], codes.low[1], to + kPanelRows * kQuantRowBytes);
  }
}

// Loads the values of a block: first those multiplied by the low nibbles, then those for the high
// ones.
TM_HD void LoadBlock(const float* x, MatrixFormat format, __m512& first, __m512& second) {
  const __m512 low = _mm512_loadu_ps(x);
  const __m512 high = _mm512_loadu_ps(x + 16);
  first = low;
  second = high;
  if (format == MatrixFormat::kMxfp4Split) {  // two adjacent values share a byte
    const __m512i even =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    first = _mm512_permutex2var_ps(low, even, high);
    second = _mm512_permutex2var_ps(low, _mm512_add_epi32(even, _mm512_set1_epi32(1)), high);
  }
}

// Packs one block of row `row` into its place in a step.
template <bool kInt8>
TM_HD void PackBlock(const float* x, MatrixFormat format, int row, uint8_t* step) {
  __m512 first;
  __m512 second;
  LoadBlock(x, format, first, second);
  const Codes codes = Quantize<kInt8>(first, second);
  StoreCodes<kInt8>(codes, format, row, step);
  uint8_t* meta = step + TileStepCodes(format, kInt8) + 4 * row;
  // MXFP4 codes are looked up doubled.
  StoreFloat(IsMxfp4(format) ? 0.5f * codes.scale : codes.scale, meta);
  if (HasMinimum(format)) {
    StoreFloat(codes.scale * static_cast<float>(codes.sum), meta + kTileStepMeta / 2);
  }
}

template <bool kInt8>
void PackTilePanel(const PackPanelArgs& args) {
  const float* x[kPanelRows];
  for (int row = 0; row < args.num_rows; ++row) {
    x[row] = args.x + (args.x_rows == nullptr ? row : args.x_rows[row]) * args.x_stride;
  }
  const int64_t step_bytes = TilePanelStep(args.format, kInt8);
  uint8_t* step = args.panel;
  for (int64_t c = 0; c < args.cols; c += kQuantBlock, step += step_bytes) {
    if (args.num_rows < kPanelRows) {
      __builtin_memset(step, 0, static_cast<size_t>(step_bytes));
    }
    for (int row = 0; row < args.num_rows; ++row) {
      PackBlock<kInt8>(x[row] + c, args.format, row, step);
    }
  }
}

}  // namespace

void PackPanel(const PackPanelArgs& args) {
  if (OnTiles(args.format, args.num_rows, args.all_rows)) {
    PackTilePanel<false>(args);
  } else {
    avx512::PackPanel(args);
  }
}

void PackInt8Panel(const PackPanelArgs& args) {
  if (OnInt8Tiles(args.format, args.num_rows, args.all_rows)) {
    PackTilePanel<true>(args);
  } else {
    avx512::PackInt8Panel(args);
  }
}

}  // namespace turbomind::TM_ISA
