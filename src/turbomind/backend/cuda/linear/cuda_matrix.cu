#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "turbomind/backend/cuda/linear/cuda_matrix.h"
#include "turbomind/core/ceil_div.h"
#include "turbomind/core/check.h"

namespace turbomind::cuda {
namespace {

constexpr size_t kChunkBytes = size_t{16} << 20;
constexpr size_t kAlignment = 256;  // the alignment of AllocateGpu

// Read the 32 4-bit codes of a stored block in the order of the columns.
void ReadNibbles(const uint8_t* codes, bool split, uint8_t (&out)[kQuantBlock]) {
  for (int j = 0; j < kQuantBlock / 2; ++j) {
    out[split ? 2 * j : j] = codes[j] & 0x0f;
    out[split ? 2 * j + 1 : 16 + j] = codes[j] >> 4;
  }
}

// Pack the lower four bits of eight codes in the order that ExpandInt of weight_fragments.cuh
// expects.
uint32_t PackInt4(const uint8_t* codes) {
  uint32_t word = 0;
  for (int i = 0; i < 8; ++i) {
    word |= (uint32_t{codes[i]} & 15) << (16 * (i % 2) + 4 * (i / 2));
  }
  return word;
}

// Pack eight codes in the order that ExpandE2m1 expects. The tables give the positions of the
// three low bits and of the sign of pair p's codes in their half of the word.
uint32_t PackE2m1(const uint8_t* codes) {
  constexpr int kLow[4] = {6, 3, 0, 9};
  constexpr int kSign[4] = {15, 12, 13, 14};
  uint32_t word = 0;
  for (int i = 0; i < 8; ++i) {
    const uint32_t code = codes[i];
    word |= ((code & 7) << kLow[i / 2] | (code >> 3) << kSign[i / 2]) << (16 * (i % 2));
  }
  return word;
}

uint32_t PackInt8(const uint8_t* codes) {
  return uint32_t{codes[0]} | uint32_t{codes[2]} << 8 | uint32_t{codes[1]} << 16 |
         uint32_t{codes[3]} << 24;
}

// Location of a block of one output in its unit.
struct Place {
  uint8_t* unit;
  int g;
  int half;
  int block;  // index in the unit
};

void StoreWord(const Place& at, int t, int word, uint32_t value) {
  std::memcpy(at.unit + (4 * at.g + t) * 16 + 4 * word, &value, sizeof(value));
}

uint8_t* ScaleOf(const Place& at, MatrixFormat format) {
  const int scale_bytes = IsMxfp4(format) ? 1 : 2;
  return at.unit + kUnitCodeBytes + at.g * 2 * UnitScaleBytes(format) +
         (2 * at.block + at.half) * scale_bytes;
}

void PackInt4Block(const Place& at, MatrixFormat format, const uint8_t* block) {
  const bool has_min = format == MatrixFormat::kQ4_1;
  uint8_t* scale = ScaleOf(at, format);
  std::memcpy(scale, block, 2);
  if (has_min) {
    std::memcpy(scale + UnitScaleBytes(format), block + 2, 2);
  }
  uint8_t codes[kQuantBlock];
  ReadNibbles(block + (has_min ? 4 : 2), false, codes);
  for (int t = 0; t < 4; ++t) {
    StoreWord(at, t, 2 * at.block + at.half, PackInt4(codes + 8 * t));
  }
}

void PackInt8Block(const Place& at, const uint8_t* block) {
  std::memcpy(ScaleOf(at, MatrixFormat::kQ8_0), block, 2);
  for (int t = 0; t < 4; ++t) {
    StoreWord(at, t, 2 * at.half, PackInt8(block + 2 + 8 * t));
    StoreWord(at, t, 2 * at.half + 1, PackInt8(block + 2 + 8 * t + 4));
  }
}

void PackMxfp4Block(const Place& at, const uint8_t* bytes, bool split, uint8_t exponent) {
  *ScaleOf(at, MatrixFormat::kMxfp4) = exponent;
  uint8_t codes[kQuantBlock];
  ReadNibbles(bytes, split, codes);
  for (int t = 0; t < 4; ++t) {
    StoreWord(at, t, 2 * at.block + at.half, PackE2m1(codes + 8 * t));
  }
}

// Pack a block of NVFP4 as the part of an output in a unit.
void PackNvfp4Block(const Place& first, const uint8_t* block) {
  uint8_t* scales =
      first.unit + kUnitCodeBytes + first.g * 2 * UnitScaleBytes(MatrixFormat::kNvfp4);
  for (int group = 0; group < kNvBlock / kNvGroup; ++group) {
    scales[group % 2 * 4 + first.half * 2 + group / 2] = block[group];
  }
  for (int i = 0; i < kNvBlock / 8; ++i) {
    uint8_t codes[8];
    for (int c = 0; c < 8; ++c) {
      codes[c] = NvCode(block, 8 * i + c);
    }
    StoreWord(first, i % 4, 2 * (i / 4) + first.half, PackE2m1(codes));
  }
}

void PackBlocks(const MatrixSource& source, int64_t row, uint8_t* tile) {
  const MatrixFormat stored = StoredFormat(source.format);
  const int per_unit = UnitCols(stored) / SourceBlockCols(stored);
  const int64_t blocks = source.cols / SourceBlockCols(stored);
  const bool split = source.format == MatrixFormat::kMxfp4Split;
  const auto* exponents = static_cast<const uint8_t*>(source.scales);
  const uint8_t* block = SourceRow(source, row);
  const int r = static_cast<int>(row % kTileOutputs);
  for (int64_t b = 0; b < blocks; ++b, block += SourceBlockBytes(source.format)) {
    const Place at = {tile + b / per_unit * UnitBytes(stored), r % 8, r / 8,
                      static_cast<int>(b % per_unit)};
    if (split) {
      PackMxfp4Block(at, block, true, exponents[row * blocks + b]);
    } else if (stored == MatrixFormat::kMxfp4) {
      PackMxfp4Block(at, block + 1, false, block[0]);
    } else if (stored == MatrixFormat::kNvfp4) {
      PackNvfp4Block(at, block);
    } else if (stored == MatrixFormat::kQ8_0) {
      PackInt8Block(at, block);
    } else {
      PackInt4Block(at, stored, block);
    }
  }
}

// Pack the upper `bits` bits of eight codes for ExpandInt.
uint32_t PackUpperBits(const uint8_t* codes, int bits, int first) {
  uint32_t word = 0;
  for (int i = 0; i < 8; ++i) {
    word |= uint32_t{codes[i]} >> 4 << (16 * (i % 2) + first + bits * (i / 2));
  }
  return word;
}

// Pack a block of 32 codes of a K-quant.
void PackKQuantCodes(const Place& at, MatrixFormat format, const uint8_t* codes) {
  const int bits = InfoOf(format).bits - 4;
  const int first = bits * 4 * (2 * at.block + at.half);
  for (int t = 0; t < 4; ++t) {
    uint8_t of_lane[8];
    for (int i = 0; i < 8; ++i) {
      of_lane[i] = codes[SplitsColumns(format) ? i / 4 * 16 + 4 * t + i % 4 : 8 * t + i];
    }
    StoreWord(at, t, 2 * at.block + at.half, PackInt4(of_lane));
    if (bits > 0) {
      uint8_t* to = at.unit + kUnitCodeBytes + (4 * at.g + t) * UpperBytes(format) + first / 16 * 4;
      uint32_t word;
      std::memcpy(&word, to, sizeof(word));
      word |= PackUpperBits(of_lane, bits, first % 16);
      std::memcpy(to, &word, sizeof(word));
    }
  }
}

// Pack a super-block of an output.
void PackSuperBlock(const SuperBlock& block, MatrixFormat format, int r, uint8_t* units) {
  const int g = r % 8;
  const int half = r / 8;
  for (int b = 0; b < kSuperBlock / kQuantBlock; ++b) {
    const Place at = {units + b / 2 * UnitBytes(format), g, half, b % 2};
    PackKQuantCodes(at, format, block.codes + b * kQuantBlock);
    uint8_t* scales = at.unit + kUnitCodeBytes + 32 * UpperBytes(format) +
                      g * 2 * UnitScaleBytes(format) + 2 * at.block + half;
    const bool halves = HasHalfScales(format);
    scales[0] = static_cast<uint8_t>(halves ? block.scales[2 * b] + 128 : block.scales[b]);
    scales[4] = static_cast<uint8_t>(halves ? block.scales[2 * b + 1] + 128 : block.minima[b]);
  }
  const int factor_bytes = SuperBlockBytes(format) / 8;
  uint8_t* factors = units + kUnitsOfSuperBlock * UnitBytes(format) + g * factor_bytes + 2 * half;
  std::memcpy(factors, &block.d, 2);
  if (HasMinimum(format)) {
    std::memcpy(factors + 4, &block.min, 2);
  }
}

void PackKQuantRow(const MatrixSource& source, int64_t row, uint8_t* tile) {
  const uint8_t* bytes = SourceRow(source, row);
  for (int64_t c = 0; c < source.cols; c += kSuperBlock, bytes += SourceBlockBytes(source.format)) {
    PackSuperBlock(UnpackSuperBlock(source.format, bytes), source.format,
                   static_cast<int>(row % kTileOutputs),
                   tile + UnitOffset(source.format, NumUnits(source.format, c)));
  }
}

// Pack a row of FP8: its codes, then its scales from the end of the row on.
void PackFp8Row(const MatrixSource& source, int64_t row, int64_t row_bytes, uint8_t* to) {
  std::memcpy(to, SourceRow(source, row), static_cast<size_t>(source.cols));
  const int64_t count = NumFp8Scales(source.format, source.cols);
  const float* scales = static_cast<const float*>(source.scales) + row * count;
  std::reverse_copy(scales, scales + count, reinterpret_cast<float*>(to + row_bytes) - count);
}

void PackTile(const MatrixSource& source, MatrixFormat stored, int64_t index, uint8_t* tile) {
  const int64_t row_bytes = RowBytes(stored, source.cols);
  std::memset(tile, 0, static_cast<size_t>(TileBytes(stored, source.cols)));
  std::vector<float> values(stored == MatrixFormat::kF32 ? static_cast<size_t>(source.cols) : 0);
  const int64_t first = index * kTileOutputs;
  const int64_t end = std::min(source.rows, first + kTileOutputs);
  for (int64_t row = first; row < end; ++row) {
    uint8_t* to = tile + (row - first) * row_bytes;
    if (IsKQuant(stored)) {
      PackKQuantRow(source, row, tile);
    } else if (HasBlocks(stored)) {
      PackBlocks(source, row, tile);
    } else if (stored == MatrixFormat::kBF16) {
      std::memcpy(to, SourceRow(source, row), static_cast<size_t>(source.cols) * 2);
    } else if (IsFp8(stored)) {
      PackFp8Row(source, row, row_bytes, to);
    } else {
      DequantizeMatrixRow(source, row, values.data());
      std::memcpy(to, values.data(), values.size() * sizeof(float));
    }
  }
}

std::shared_ptr<char> AllocateShared(size_t num_bytes) {
  const int gpu = CurrentGpu();
  return {static_cast<char*>(AllocateGpu(num_bytes)), [gpu](char* memory) {
            UseGpuToFree(gpu);
            FreeGpu(memory);
          }};
}

}  // namespace

Uploader::Uploader(Stream stream, ThreadPool& pool) : stream_(stream), pool_(pool) {}

Uploader::~Uploader() {
  for (uint8_t* pinned : pinned_) {
    if (pinned != nullptr) {
      FreePinned(pinned);
    }
  }
}

void Uploader::Grow(size_t num_bytes) {
  if (num_bytes <= pinned_bytes_) {
    return;
  }
  pinned_bytes_ = 0;
  for (uint8_t*& pinned : pinned_) {
    if (pinned != nullptr) {
      FreePinned(pinned);
      pinned = nullptr;
    }
    pinned = static_cast<uint8_t*>(AllocatePinned(num_bytes));
  }
  pinned_bytes_ = num_bytes;
}

void Uploader::Upload(void* to, int64_t num_items, int64_t item_bytes,
                      FunctionRef<void(int64_t item, uint8_t* out)> fill) {
  Grow(std::max(kChunkBytes, static_cast<size_t>(item_bytes)));
  const int64_t per_chunk = static_cast<int64_t>(pinned_bytes_) / item_bytes;
  int which = 0;
  for (int64_t first = 0; first < num_items; first += per_chunk, which ^= 1) {
    const int64_t count = std::min(per_chunk, num_items - first);
    uint8_t* chunk = pinned_[which];
    pool_.ParallelFor(count, [&](int64_t i, int) { fill(first + i, chunk + i * item_bytes); });
    Synchronize(stream_);  // after this the other chunk is free
    CopyBytes(static_cast<uint8_t*>(to) + first * item_bytes, chunk,
              static_cast<size_t>(count * item_bytes), stream_);
  }
  Synchronize(stream_);
}

bool MatrixMemory::HasOwn(size_t num_bytes) const {
  const size_t page_bytes = piece_bytes_ / kPagesOfPiece;
  if (page_bytes == 0 || num_bytes > piece_bytes_ / 4) {
    return true;
  }
  return num_bytes * 10 >= CeilDiv(num_bytes, page_bytes) * page_bytes * 9;
}

std::shared_ptr<char> MatrixMemory::Allocate(size_t num_bytes) {
  if (HasOwn(num_bytes)) {
    return AllocateShared(num_bytes);
  }
  const size_t aligned = CeilDiv(num_bytes, kAlignment) * kAlignment;
  if (piece_ == nullptr || aligned > piece_bytes_ - used_bytes_) {
    try {
      piece_ = AllocateShared(piece_bytes_);
    } catch (const OutOfMemory&) {
      return AllocateShared(num_bytes);  // a single matrix may still fit
    }
    used_bytes_ = 0;
  }
  std::shared_ptr<char> part(piece_, piece_.get() + used_bytes_);
  used_bytes_ += aligned;
  return part;
}

CudaMatrix::CudaMatrix(MatrixMemory& memory, MatrixFormat stored, int64_t num_rows,
                       int64_t num_cols) {
  rows = num_rows;
  cols = num_cols;
  format = stored;
  data_ = memory.Allocate(static_cast<size_t>(num_bytes()));
}

std::unique_ptr<PackedMatrix> CudaPackMatrix(MatrixMemory& memory, Uploader& uploader,
                                             const MatrixSource& source, bool exact) {
  CheckMatrixSource(source);
  if (source.packed) {
    throw InvalidArgument(
        "The matrix is packed for another device. Pass it in the checkpoint's format.");
  }
  const MatrixFormat stored = exact ? MatrixFormat::kF32 : StoredFormat(source.format);
  auto matrix = std::make_unique<CudaMatrix>(memory, stored, source.rows, source.cols);
  if (HasFactor(stored)) {
    matrix->factor = 0x1p8f * source.factor;
  }
  uploader.Upload(matrix->data(), NumTiles(source.rows), TileBytes(stored, source.cols),
                  [&](int64_t tile, uint8_t* out) { PackTile(source, stored, tile, out); });
  return matrix;
}

}  // namespace turbomind::cuda
